"""--json of the commands that report, proposals of shells, and python -m gym_trace."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete
from gym_trace_cli.main import cli
from runs import record_lengths
from shell import process, run, strict_json

import gym_trace

pytestmark = pytest.mark.usefixtures("forked_workers")

SAMPLES = Path(__file__).parents[2] / "sample_traces"


def said(*args: object, code: int = 0) -> Any:
    result = run(*args, "--json")
    assert result.exit_code == code, result.output
    return strict_json(result.stdout)


def proposed(*words: str) -> list[str]:
    complete = ShellComplete(cli, {}, "gym-trace", "_GYM_TRACE_COMPLETE")
    return [item.value for item in complete.get_completions(list(words[:-1]), words[-1])]


# -- JSON -------------------------------------------------------------------------------------------------------------


def test_check_says_as_json_what_it_found() -> None:
    found = said("check", SAMPLES / "format-1.1" / "cartpole")
    assert (found["episodes"], found["steps"], found["damages"]) == (50, 1254, [])
    damaged = said("check", SAMPLES / "format-1.1" / "damaged", code=5)
    (place,) = damaged["damages"]
    assert place["path"].endswith(".gtb")
    assert place["start"] < place["end"]


def test_repair_says_as_json_what_it_kept_and_lost(tmp_path: Path) -> None:
    found = said("edit", "repair", SAMPLES / "format-1.1" / "damaged", "-o", tmp_path / "new")
    assert found["directory"] == str(tmp_path / "new")
    assert found["steps"] == sum(len(episode) for episode in gym_trace.open_trace(tmp_path / "new"))
    assert [loss["steps"][0]["steps"] for loss in found["losses"]]
    assert found["found"]["damages"] == [loss["damage"] for loss in found["losses"]]


def test_import_says_as_json_what_it_wrote(tmp_path: Path) -> None:
    found = said("import", SAMPLES / "legacy" / "gym_recording-npy" / "CartPole-v0", "-o", tmp_path / "new")
    trace = gym_trace.open_trace(tmp_path / "new")
    assert found["directory"] == str(tmp_path / "new")
    assert (found["kinds"], found["episodes"]) == (["gym_recording"], len(trace))
    assert found["writers"] == trace.writers


def test_render_says_as_json_which_files_it_made(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    words = ("--from", "observations", "--episodes", 0, "-o", tmp_path / "f.gif")
    found = said("render", SAMPLES / "format-1.1" / "pong", *words)
    assert found == {"episode": 0, "path": str(tmp_path / "f.gif"), "frames": 49}


def test_prints_of_an_environment_go_to_stderr_with_json(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "import ctypes, os, gymnasium\n"
        "def make():\n"
        "    print('Python')\n"
        "    ctypes.CDLL(None).puts(b'C')\n"
        "    os.system('echo process')\n"
        "    return gymnasium.make('CartPole-v1')\n"
    )
    words = ("record", "--make", "loud:make", "-o", "t", "--steps", 5, "--json")
    with process(*words, cwd=tmp_path) as running:
        out, err = running.communicate()
    assert strict_json(out)["steps"] == 5
    assert {"Python", "C", "process"} <= {*err.splitlines()}


@pytest.mark.parametrize("workers", [[], ["-j", 2]], ids=str)
def test_record_says_as_json_what_it_recorded(workers: list[Any], tmp_path: Path) -> None:
    found = said("record", "CartPole-v1", "-o", tmp_path / "t", "--episodes", 3, "--seed", 7, *workers)
    assert (found["episodes"], found["seed"], found["state"]) == (3, 7, "closed")
    assert found["steps"] == gym_trace.open_trace(tmp_path / "t").episodes["steps"].sum()


# -- completion -------------------------------------------------------------------------------------------------------


def test_traces_are_proposed_where_there_is_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "other"):
        record_lengths(tmp_path / "traces" / name, [1])
    assert proposed("stats", "traces/o") == ["traces/one", "traces/other"]
    assert proposed("ls", "traces/one", "traces/") == ["traces/one", "traces/other"]
    (tmp_path / "traces" / "olive").mkdir()
    assert proposed("stats", "traces/o") == ["traces/o"]  # the shell completes paths below it
    assert proposed("stats", "nowhere/") == ["nowhere/"]


def test_completion_of_environment_ids_ignores_case() -> None:
    assert "CartPole-v1" in proposed("record", "cartp")
    assert "CartPole-v1" in proposed("verify", "t", "--env", "Cart")


def test_policies_of_modules_here_are_proposed_without_importing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    defined = ("def greedy(o): pass", "class Learned: pass", "def _own(): pass")
    (tmp_path / "agents.py").write_text("\n".join(["raise SystemExit", *defined]))
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "binary.py").write_bytes(b"\x00\xff")
    assert proposed("record", "--policy", "") == ["random", "sb3:", "onnx:", "run:", "agents:greedy", "agents:Learned"]
    assert proposed("record", "--policy", "agents:g") == ["agents:greedy"]
    assert proposed("record", "--policy", "sb3:a") == []


def test_columns_are_proposed_one_after_the_other() -> None:
    minigrid = str(SAMPLES / "format-1.1" / "minigrid")
    assert proposed("cat", minigrid, "--columns", "rew") == ["rewards"]
    assert proposed("cat", minigrid, "--columns", "rewards,observations/i") == ["rewards,observations/image"]
    assert proposed("cat", "nowhere", "--columns", "rew") == []
    assert proposed("ls", "--sort", "split,-ret") == ["split,-return"]
    assert proposed("ls", "--where", "steps > 3 and out") == ["steps > 3 and outcome"]


def test_completion_runs_nothing_of_a_damaged_trace(tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / "format-1.1" / "damaged", tmp_path / "d")
    assert "actions" in proposed("cat", str(tmp_path / "d"), "--columns", "")


# -- python -m --------------------------------------------------------------------------------------------------------


def test_the_library_can_be_run_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "gym_trace", "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.startswith(f"gym-trace, version {gym_trace.__version__}")
    wrong = subprocess.run([sys.executable, "-m", "gym_trace", "lss"], capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2
    assert "did you mean 'ls'?" in wrong.stderr
