"""gym-trace ls: the traces of a directory, and the episodes of one."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gym_trace_cli import ls, show
from gym_trace_cli.options import distinct
from runs import manifest_entries, recorded
from scripted_env import CountingEnv
from shell import ok, run, strict_json

from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.format import wire
from gym_trace.storage.local import LocalStorage
from gym_trace.tools.statistics.describe import find_traces, list_trace

SAMPLES = Path(__file__).parents[2] / "sample_traces" / "format-1.1"
ESCAPE = "\x1b[31mred"


def lines(*args: object) -> list[dict[str, Any]]:
    return list(map(strict_json, run("ls", *args, "--json").stdout.splitlines()))


def states(directory: Path) -> dict[str, str]:
    return {Path(row["directory"]).name: row["state"] for row in lines(directory)}


def test_a_directory_of_traces_is_a_line_a_trace() -> None:
    table = ok("ls", SAMPLES).stdout.splitlines()
    assert len(table) == 1 + len(list(SAMPLES.iterdir()))
    assert table[0].split() == [
        "trace",
        "environment",
        "episodes",
        "steps",
        "return",
        "bytes",
        "state",
        "start_time",
        "(UTC)",
    ]
    (pong,) = (line for line in table if line.startswith("pong "))
    *told, _, unit, state = pong.split()[1:8]
    assert told == ["ALE/Pong-v5", "1", "48", "-"]
    assert (unit, state) == ("kB", "closed")


def test_ls_shows_the_content_of_a_trace() -> None:
    (row,) = (row for row in lines(SAMPLES) if row["directory"].endswith("two-writers"))
    episodes = open_trace(SAMPLES / "two-writers").episodes
    assert row["environments"] == ["CartPole-v1"]
    assert (row["episodes"], row["steps"]) == (len(episodes), episodes["steps"].sum())
    assert row["return"] == pytest.approx(episodes["return"].mean())
    assert row["bytes"] == LocalStorage(SAMPLES / "two-writers").allocated()
    assert (row["state"], row["writers"], row["problem"]) == ("closed", {"closed": 2}, None)
    assert row["start_time"] == f"{episodes['start_time'].min().astype('M8[us]')}Z"


def test_a_trace_that_is_written_in_several_ways_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(SAMPLES / "two-writers", "t")
    os.symlink("t", "link")
    ways = ("t", "./t/", "t", "link", tmp_path / "t", (tmp_path / "t").as_uri())
    assert len(ok("ls", *ways).stdout.splitlines()) == 2
    count = len(open_trace("t"))
    runs, episodes, *_ = ok("compare", *(f"same={way}" for way in ways)).stdout.splitlines()[1:]
    assert (runs.split()[-1], episodes.split()[-1]) == ("1", str(count))
    pytest.importorskip("duckdb")
    assert ok("sql", *ways, "SELECT count(*) AS n FROM episodes", "--json").stdout == f'{{"n": {count}}}\n'
    assert distinct(["s3://b/t", "s3://b/t/", "s3://b/u"]) == ["s3://b/t", "s3://b/u"]


def test_ls_shows_the_return_of_each_objective() -> None:
    (row,) = (row for row in lines(SAMPLES) if row["directory"].endswith("mismatch"))
    assert row["return"] == [21.0, -6.0]
    assert {tuple(episode["return"]) for episode in lines(SAMPLES / "mismatch")} == {(21.0, -6.0)}


def test_ls_distinguishes_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("killed", "cartpole", "empty"):
        shutil.copytree(SAMPLES / name, tmp_path / name)
    for name in ("torn", "gone", "unknown", "shorter"):
        shutil.copytree(SAMPLES / "cartpole", tmp_path / name)
    batches = {name: next((tmp_path / name).glob("*.gtb")) for name in ("torn", "gone", "unknown", "shorter")}
    content = batches["gone"].read_bytes()
    batches["torn"].write_bytes(content[:-20] + bytes(20))
    batches["shorter"].write_bytes(content[:-64])
    monkeypatch.setattr(wire, "MAJOR", wire.MAJOR + 1)
    batches["unknown"].write_bytes(wire.pack_file_header(bytes(16), 0) + content[wire.HEADER_SIZE :])
    monkeypatch.undo()
    batches["gone"].unlink()
    told = states(tmp_path)
    expected = dict.fromkeys(("torn", "gone", "shorter"), "damaged") | {"cartpole": "closed", "empty": "closed"}
    assert told == expected | {"killed": "killed", "unknown": "unreadable"}
    result = run("ls", tmp_path)
    assert result.exit_code == 1
    assert f"{tmp_path}/unknown is unreadable: " in result.stderr
    assert f"{tmp_path}/gone is damaged: " in result.stderr


def test_ls_and_diff_warn_of_episodes_lost_by_damage(tmp_path: Path) -> None:
    for name in ("whole", "cut"):
        shutil.copytree(SAMPLES / "batches", tmp_path / name)
    (batch, *_) = sorted((tmp_path / "cut").glob("*.gtb"))
    batch.write_bytes(batch.read_bytes()[:-64])
    warning = f"warning: {tmp_path}/cut: 1 damaged place skipped; see 'gym-trace check {tmp_path}/cut'\n"
    assert warning in run("ls", tmp_path / "cut").stderr
    assert run("ls", tmp_path / "whole").stderr == ""
    same = run("diff", tmp_path / "whole", tmp_path / "cut")
    assert (same.exit_code, same.stdout, same.stderr) == (5, "4 episodes, identical\n", warning)


def test_a_trace_that_is_being_recorded_says_so(tmp_path: Path) -> None:
    with TraceRecordingWrapper(CountingEnv(), tmp_path / "a" / "live") as env:
        env.reset(seed=0)
        env.step(0)
        (row,) = lines(tmp_path)
        assert (row["state"], row["writers"], row["episodes"], row["steps"]) == ("recording", {"recording": 1}, 1, 1)
        assert row["return"] is None
    assert states(tmp_path) == {"live": "closed"}


def test_traces_are_found_below_but_not_behind_links_or_hidden(tmp_path: Path) -> None:
    for place in ("a", "b/c/d", "b/c/e", ".hidden/x", "1/2/3/4"):
        recorded(tmp_path / place)
    recorded(tmp_path / "a" / "inside")
    os.symlink(tmp_path / "a", tmp_path / "link")
    assert list(find_traces(tmp_path)) == [str(tmp_path / place) for place in ("a", "a/inside", "b/c/d", "b/c/e")]


def test_a_trace_above_others_does_not_hide_them(tmp_path: Path) -> None:
    recorded(tmp_path / "traces" / "a")
    recorded(tmp_path / "traces" / "b")
    recorded(tmp_path / "traces")
    above = ok("ls", tmp_path / "traces")
    assert above.stdout.startswith("index")
    assert above.stderr == "note: 2 more traces below this one: a, b\n"
    assert len(lines(tmp_path)) == 3
    assert ok("ls", tmp_path / "traces" / "a").stderr == ""


def test_without_a_directory_it_is_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path / "one")
    monkeypatch.chdir(tmp_path)
    assert [row["directory"] for row in lines()] == ["./one"]
    monkeypatch.chdir(tmp_path / "one")
    assert [row["index"] for row in lines()] == [0]


def test_several_directories_are_a_line_a_trace_each_of_them_once() -> None:
    found = lines(SAMPLES / "pong", SAMPLES / "cartpole", SAMPLES / "pong")
    assert [Path(row["directory"]).name for row in found] == ["pong", "cartpole"]


def test_a_selection_counts_in_every_trace() -> None:
    found = lines(SAMPLES / "pong", SAMPLES / "cartpole", "--where", "steps > 40")
    episodes = open_trace(SAMPLES / "cartpole").episodes
    long = episodes["steps"] > 40
    assert [row["episodes"] for row in found] == [1, long.sum()]
    assert found[1]["steps"] == episodes["steps"][long].sum()


def test_the_episodes_of_a_trace_are_a_line_each_as_they_are_selected() -> None:
    rows = lines(SAMPLES / "cartpole", "--where", "steps > 40", "--sort", "-return", "--limit", 2)
    assert [row["return"] for row in rows] == [60.0, 57.0]
    table = ok("ls", SAMPLES / "cartpole", "--where", "steps > 40", "--sort", "-return").stdout.splitlines()
    assert [line.split()[0] for line in table[1:3]] == ["5", "34"]


@pytest.mark.parametrize("condition", ["abs(observations[2]) > 0.1", "reward > 1", "infos.lives == 3"])
def test_a_where_condition_on_steps_names_steps_where(condition: str) -> None:
    result = run("ls", SAMPLES / "cartpole", "--where", condition)
    assert result.exit_code == 2
    assert "it is a column of steps; use gym-trace cat --steps-where, or find_steps()" in result.stderr


def test_an_outcome_without_quotes_is_not_taken_for_a_column() -> None:
    result = run("ls", SAMPLES / "cartpole", "--where", "outcome == terminated")
    assert result.exit_code == 2
    assert "no column 'terminated'; write \"terminated\" in quotes if you mean the outcome\n" in result.stderr


def test_ls_without_traces_is_an_error(tmp_path: Path) -> None:
    assert run("ls", tmp_path).stderr == (f"error: {tmp_path}: no trace here, or up to three levels below\n")
    assert "no such directory" in run("ls", tmp_path / "nowhere").stderr


@pytest.mark.parametrize("command", ["stats", "info", "check", "replay"])
def test_commands_of_one_trace_point_to_ls_where_there_are_several(command: str) -> None:
    result = run(command, SAMPLES)
    assert result.exit_code == 1
    assert f"'gym-trace ls {SAMPLES}' lists the traces below it" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_command_in_a_message_quotes_blanks(tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / "cartpole", tmp_path / "my traces" / "one")
    assert f"`gym-trace ls '{tmp_path}/my traces'` lists" in run("stats", tmp_path / "my traces").stderr
    assert (
        f"`gym-trace check '{tmp_path}/my traces/one'` compares" in run("info", tmp_path / "my traces" / "one").output
    )


def test_text_of_a_trace_does_not_control_the_terminal(tmp_path: Path) -> None:
    recorded(tmp_path / ESCAPE, uid="w")
    result = ok("ls", tmp_path)
    assert "\x1b" not in result.output
    assert json.loads(ok("ls", tmp_path, "--json").stdout)["directory"] == str(tmp_path / ESCAPE)


def test_on_a_terminal_lines_are_cut_to_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "80")
    table = ok("ls", *sorted(SAMPLES.iterdir())).stdout.splitlines()
    assert max(map(len, table)) <= 80
    assert any("…" in line for line in table)


def test_a_manifest_that_is_alone_is_a_trace_of_nothing(tmp_path: Path) -> None:
    recorded(tmp_path / "t")
    assert any(entry["type"] == "batch" for entry in manifest_entries(tmp_path / "t"))
    for batch in (tmp_path / "t").glob("*.gtb"):
        batch.unlink()
    row = list_trace(tmp_path / "t")
    assert (row["episodes"], row["state"]) == (0, "damaged")
    assert "this batch is missing" in row["problem"]


def test_start_times_of_another_year_show_the_date(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(gmtime=lambda: None, strftime=lambda form, now: "2026", monotonic=lambda: 0.0)
    monkeypatch.setattr(ls, "time", clock)
    assert ok("ls", SAMPLES).stdout.splitlines()[1].endswith("  01-01 00:00")
    clock.strftime = lambda form, now: "2027"
    assert ok("ls", SAMPLES).stdout.splitlines()[1].endswith("  2026-01-01")
