"""JSON and JUnit reports of gym-trace verify, complete however it ends."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from gym_trace_cli.exit_codes import TABLE
from gym_trace_cli.reports import Outcome, Reports
from shell import ok, process, run, strict_json, wait_for
from test_cli_verify import damage, record

FILES = ("--report", "r.json", "--junit", "j.xml")


pytestmark = pytest.mark.usefixtures("here")


def report() -> dict[str, Any]:
    found: dict[str, Any] = strict_json(Path("r.json").read_text(encoding="utf-8"))
    assert sum(found["verdicts"].values()) == len(found["episodes"])
    return found


def suite() -> ElementTree.Element:
    """Return the one suite, and check its counts."""
    suites = ElementTree.parse("j.xml").getroot()
    (found,) = suites
    assert suites.tag == "testsuites"
    assert found.tag == "testsuite"
    for counted, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert int(found.attrib[counted]) == len(found.findall(f"testcase/{tag}"))
    assert int(found.attrib["tests"]) == len(found.findall("testcase"))
    assert [suites.attrib[name] for name in ("tests", "failures")] == [
        found.attrib[name] for name in ("tests", "failures")
    ]
    return found


def kinds() -> list[str]:
    return [case[0].tag if len(case) else "passed" for case in suite()]


def test_reports_say_what_came_of_each_episode() -> None:
    record("fine")
    record("parts", frame_filter=lambda step: step != 2)
    record("harmed")
    damage("harmed", 200)
    result = run("verify", "t", "--skip-damaged", *FILES)
    found = report()
    assert (found["ended"], found["exit_code"], found["chosen"]) == ("complete", result.exit_code, 12)
    assert found["verdicts"] == {"damaged": 1, "identical": 8, "unverifiable": 3}
    assert found["trace"] == str(Path("t").absolute())
    assert sorted(kinds()) == ["error", *["passed"] * 8, *["skipped"] * 3]
    cases = [case.attrib for case in suite()]
    assert {case["classname"] for case in cases} == {"Pendulum-v1"}
    assert len({case["name"] for case in cases}) == len(cases)


def test_a_difference_is_a_failure_that_says_where() -> None:
    record("fine", 1)
    assert run("verify", "t", "--env-arg", "g=3", *FILES).exit_code == 3
    assert report()["episodes"][0]["difference"]["column"] == "observations"
    (case,) = suite()
    assert case[0].tag == "failure"
    assert "differs at step 0, observations[" in case[0].attrib["message"]


def test_damage_that_ends_it_is_an_error_beside_what_was_verified() -> None:
    record("a-fine")
    record("harmed")
    damage("harmed", 200)
    assert run("verify", "t", *FILES).exit_code == 5
    found = report()
    assert (found["ended"], found["exit_code"], found["verdicts"]) == ("damaged", 5, {"identical": 5})
    assert kinds() == ["passed"] * 5 + ["error"]
    assert "after 5 of 6 episodes" in suite()[-1][0].attrib["message"]


def test_an_environment_that_cannot_be_had_is_in_the_reports_too() -> None:
    record("fine")
    assert run("verify", "t", "--env", "Nothing-v0", *FILES).exit_code == 4
    assert (report()["ended"], report()["exit_code"]) == ("error", 4)
    assert kinds() == ["error"]
    assert "Nothing" in suite()[0][0].attrib["message"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_report_after_a_signal_has_the_results_so_far(number: signal.Signals) -> None:
    ok("record", "clicks:CliClock-v0", "-o", "t", "--episodes", 50, "--policy", "clicks:ones")
    slow = ["--import", "clicks", "--env-arg", "delay=0.05"]
    with process("verify", "t", "--json", *slow, *FILES) as running:
        assert running.stdout is not None
        lines = [running.stdout.readline() for _ in range(2)]
        running.send_signal(number)
        rest = running.stdout.read()  # communicate() would miss lines read with the first one
        errors = running.communicate(timeout=60)[1]
    assert running.returncode == 128 + number
    found = report()
    assert found["ended"] == {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}[number]
    assert found["exit_code"] == 128 + number
    assert [json.dumps(row) for row in found["episodes"]] == "".join([*lines, rest]).splitlines()
    assert 2 <= len(found["episodes"]) < 50
    assert kinds() == ["passed"] * len(found["episodes"]) + ["error"]
    assert f"{len(found['episodes'])} episodes replayed, of 50, until" in errors


def test_ctrl_c_ends_the_workers_too_and_soon() -> None:
    ok("record", "clicks:CliClock-v0", "-o", "t", "--episodes", 100, "--policy", "clicks:ones", "--infos")
    slow = ["--import", "hanging", "--env-arg", "delay=0.2", "--workers", 2]  # 2 s per episode
    Path("hanging.py").write_text("import clicks, os, pathlib\npathlib.Path(f'begun{os.getpid()}').touch()\n")
    with process("verify", "t", *slow, *FILES, start_new_session=True) as running:
        wait_for(lambda: len(list(Path().glob("begun*"))) > 1)  # both processes have begun
        time.sleep(0.5)
        begin = time.monotonic()
        os.killpg(running.pid, signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    assert time.monotonic() - begin < 50  # a worker has 100 seconds of episodes
    assert running.returncode == 130
    assert "Traceback" not in errors
    assert report()["ended"] == "interrupted"


def test_characters_that_xml_forbids_are_escaped() -> None:
    hostile = "".join(map(chr, range(32))) + "<&>\"']]>\x7f\x9b\u2028\ud800\ufffe\U0001f600"
    reports = Reports(Path("r.json"), Path("j.xml"))
    verdict = {"index": 0, "writer": hostile, "episode_id": 0, "verdict": "differs", "reason": hostile}
    reports.add(verdict, hostile, hostile)
    reports.close(Outcome(hostile, 2, {"differs": 1}, "error", hostile, 3))
    assert report()["episodes"][0]["writer"] == hostile
    first, second = suite()
    assert first.attrib["classname"].isprintable()
    assert first[0].attrib["message"].endswith("<&>\"']]>\\x7f\\x9b\\u2028\\ud800\\ufffe\U0001f600")
    assert "\\x1b" in second[0].attrib["message"]


def test_a_report_that_cannot_be_written_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    record("fine", 1)
    ok("verify", "t", *FILES)
    before = Path("r.json").read_text()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    result = run("verify", "t", *FILES)
    assert (result.exit_code, result.stderr) == (1, "error: No space left on device\n")
    assert Path("r.json").read_text() == before
    assert not list(Path().glob("*.part"))


@pytest.mark.parametrize("place", ["t", "missing/r.json", "/dev/null"])
def test_invalid_report_paths_are_refused_before_anything_is_played(place: str) -> None:
    record("fine", 1)
    for option in ("--report", "--junit"):
        result = run("verify", "t", option, place)
        assert result.exit_code == 2
        assert place in result.stderr or "not a writable directory" in result.stderr


def test_reports_are_two_files_and_none_of_them_is_the_traces() -> None:
    record("fine", 1)
    (manifest,) = Path("t").glob("*.manifest.jsonl")
    before = manifest.read_bytes()
    Path("link").symlink_to("t")
    for place in (manifest, "t/new.json", f"link/{manifest.name}"):
        assert "the trace's own directory" in run("verify", "link", "--report", place).stderr
    assert "the same file" in run("verify", "t", "--report", "r", "--junit", "r").stderr
    assert manifest.read_bytes() == before
    assert not Path("r").exists()


def test_a_link_to_a_report_stays_a_link() -> None:
    record("fine", 1)
    Path("reports").mkdir()
    Path("r.json").symlink_to("reports/r.json")
    ok("verify", "t", *FILES)
    assert Path("r.json").is_symlink()
    assert report()["verdicts"] == {"identical": 1}


def test_the_help_ends_with_the_table_of_exit_codes() -> None:
    told = ok("--help-all").stdout.partition("Exit codes:")[2]
    assert [line.split()[0] for line in told.splitlines() if line[:3].strip() or line[2:3].isdigit()] == list(TABLE)
