"""The steps of action.yml, run as GitHub's runner runs them; and the hooks that pre-commit offers to users."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
from gym_trace_cli import pre_commit

ROOT = Path(__file__).parent.parent
ACTION = (ROOT / "action.yml").read_text(encoding="utf-8")
CARTPOLE = ROOT / "sample_traces" / "format-1.1" / "cartpole"
LONGER = """
import gymnasium


def make_env():
    env = gymnasium.make("CartPole-v1")
    env.unwrapped.length = {length}
    return env
"""
GOLDEN = """
from simulator import make_env


def test_cartpole(golden_trace):
    golden_trace("pole", make_env, episodes=1)
"""


class Step(NamedTuple):
    name: str
    condition: str
    env: dict[str, str]
    run: str


class Ran(NamedTuple):
    codes: dict[str, int]
    output: str
    summary: str


def steps() -> list[Step]:
    """Return the steps of action.yml, which has few forms of YAML."""
    found = []
    for text in ACTION.split("    - name: ")[1:]:
        (condition,) = re.findall(r"^ {6}if: (.*)$", text, re.M)
        env = dict(re.findall(r"^ {8}([A-Z]+): (\$\{\{ inputs\.\w+ \}\})$", text, re.M))
        run = text.partition("      run: ")[2].removeprefix("|\n")
        found.append(Step(text.splitlines()[0], condition, env, re.sub(r"^ {8}", "", run, flags=re.M)))
    return found


def inputs() -> dict[str, str]:
    """Return the inputs with their defaults."""
    declared = ACTION.partition("\ninputs:\n")[2].partition("\noutputs:")[0]
    return {
        name: default.strip('"') for name, default in re.findall(r"^  (\w+):\n.*\n    default: (.*)$", declared, re.M)
    }


def run_action(cwd: Path, path: str = "", **given: str) -> Ran:
    values, codes, output, summary = inputs() | given, {}, "", cwd / "summary.md"
    environ = {
        **os.environ,
        "PATH": f"{path}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_ACTION_PATH": str(ROOT),
        "GITHUB_STEP_SUMMARY": str(summary),
        "PYTHONDONTWRITEBYTECODE": "1",  # the simulator changes within a second
    }
    for step in steps():
        name = re.search(r"inputs\.(\w+) != ''", step.condition)
        if (name and not values[name[1]]) or (any(codes.values()) and "always()" not in step.condition):
            continue
        env = {
            variable: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda m: values[m[1]], text)
            for variable, text in step.env.items()
        }
        shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step.run]
        done = subprocess.run(
            shell, cwd=cwd, env=environ | env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        codes[step.name], output = done.returncode, output + done.stdout
    return Ran(codes, output, summary.read_text(encoding="utf-8") if summary.exists() else "")


def commands(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("::")]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of a user: a trace and a simulator that differs from it."""
    shutil.copytree(CARTPOLE, tmp_path / "golden" / "the pole")
    (tmp_path / "simulator.py").write_text(LONGER.format(length=1.0))
    return tmp_path


def test_a_trace_that_matches_passes_without_annotations(checkout: Path) -> None:
    ran = run_action(checkout, install="", traces="golden/*", options="--episodes :4")
    assert ran.codes == {"Verify traces": 0, "Report": 0}
    assert commands(ran.output) == []
    assert "| <code>golden/the pole</code> | 4 | 0 | 0 | 0 |" in ran.summary
    (junit,) = (checkout / "gym-trace-results").glob("*.xml")
    assert ElementTree.parse(junit).getroot().get("tests") == "4"


def test_a_trace_that_differs_fails_with_its_first_difference(checkout: Path) -> None:
    options = "--make simulator:make_env --episodes :3"
    ran = run_action(checkout, install="", traces="golden/the pole\n", options=options)
    assert ran.codes == {"Verify traces": 3, "Report": 0}
    (line,) = commands(ran.output)
    place = "::error file=golden/the pole/sample.manifest.jsonl,line=1,title=3 of 3 episodes do not match::"
    assert line.startswith(f"{place}episode 0 differs at step 0, observations[1]: recorded 0.172")
    assert "| <code>golden/the pole</code> | 0 | 3 | 0 | 0 |" in ran.summary
    assert "<pre>episode 0 differs at step 0, observations[1]: recorded 0.172" in ran.summary


def test_a_trace_that_is_not_there_fails_and_the_others_are_verified(checkout: Path) -> None:
    ran = run_action(checkout, install="", traces="nowhere/*\ngolden/*", options="--episodes 0")
    assert ran.codes["Verify traces"] == 1
    assert commands(ran.output) == ["::error title=gym-trace verify::nowhere/* cannot be read, see the log"]
    assert "| <code>golden/the pole</code> | 1 | 0 | 0 | 0 |" in ran.summary


def test_each_trace_has_a_result_of_its_own_and_no_name_is_a_command(checkout: Path) -> None:
    (checkout / "golden" / "the pole").rename(checkout / "a-b")
    shutil.copytree(checkout / "a-b", checkout / "a" / "b")
    (checkout / "--help").mkdir()
    (checkout / "x\n::add-mask::episode").mkdir()
    ran = run_action(checkout, install="", traces="a/b\na-b\n--help\nx*", options="--episodes 0")
    assert ran.codes["Verify traces"] != 0
    assert [line.partition("::")[2].partition("::")[2] for line in commands(ran.output)] == [
        "--help cannot be read, see the log",
        "x ::add-mask::episode cannot be read, see the log",
    ]
    assert "| <code>a-b</code> | 1 | 0 | 0 | 0 |" in ran.summary
    assert "| <code>a/b</code> | 1 | 0 | 0 | 0 |" in ran.summary


def test_golden_tests_that_differ_are_annotated_at_their_line(checkout: Path) -> None:
    (checkout / "test_golden.py").write_text(GOLDEN)
    assert run_action(checkout, install="", tests="-q --golden-update test_golden.py").codes == {
        "Test against golden traces": 0,
        "Report": 0,
    }
    (checkout / "simulator.py").write_text(LONGER.format(length=1.5))
    ran = run_action(checkout, install="", tests="-q test_golden.py")
    assert ran.codes == {"Test against golden traces": 1, "Report": 0}
    (line,) = commands(ran.output)
    assert line.startswith("::error file=test_golden.py,line=5,title=test_cartpole::Failed: ")
    assert "%0Aepisode 0 at step 0, observations" in line


def test_text_of_a_result_is_neither_a_command_nor_markup(tmp_path: Path) -> None:
    case = ElementTree.Element("testcase", name="a, b: c", classname="x")
    ElementTree.SubElement(case, "failure", message="one\n::stop-commands::x\n\n<script>|100%")
    suite = ElementTree.Element("testsuite", name="t|<b>")
    suite.append(case)
    (tmp_path / "gym-trace-results").mkdir()
    ElementTree.ElementTree(suite).write(tmp_path / "gym-trace-results" / "t.xml")
    ran = run_action(tmp_path, install="")
    (line,) = ran.output.splitlines()
    assert line.endswith("::one%0A::stop-commands::x%0A%0A<script>|100%25")
    assert "<script>" not in ran.summary
    assert "| <code>t&#124;&lt;b&gt;</code> | 0 | 1 | 0 | 0 |" in ran.summary


def test_the_install_step_passes_all_words_to_pip(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text('#!/bin/sh\ncase $1$2 in -mpip) echo "$*";; esac\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    ran = run_action(tmp_path, path=f"{tmp_path / 'bin'}{os.pathsep}", install="gym-trace[view] pytest")
    assert ran.codes["Install"] == 0
    assert ran.output.strip().endswith(" gym-trace[view] pytest")


def test_every_input_of_the_action_is_declared_and_used() -> None:
    assert set(re.findall(r"inputs\.(\w+)", ACTION)) == set(inputs())
    assert {step.name for step in steps()} == {"Install", "Verify traces", "Test against golden traces", "Report"}


def test_the_hook_checks_the_trace_of_each_file_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = ROOT / "sample_traces" / "format-1.1" / "damaged"
    checked: list[Any] = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda words: checked.append(words[-1]) or run(words))
    assert pre_commit.main([str(path) for path in sorted(CARTPOLE.iterdir())]) == 0
    assert checked == [str(CARTPOLE)]
    assert pre_commit.main([str(next(trace.glob("*.gtb"))) for trace in (damaged, CARTPOLE)]) == 5
    assert "checksum mismatch" in capfd.readouterr().out


def test_the_hooks_run_commands_that_exist() -> None:
    hooks = (ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
    assert re.findall(r"entry: (.*)", hooks) == [f"python -I -m {pre_commit.__name__}", "gym-trace verify"]
    (files,) = re.findall(r"files: (.*)", hooks)
    assert all(re.search(files, str(path)) for path in CARTPOLE.iterdir())
