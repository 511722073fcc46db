"""The current directory may be untrusted: no module in it is imported unless the user names it."""

import functools
import json
import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import command_lines
import gymnasium
import pytest
from gym_trace_cli.main import COMMANDS
from shell import run
from test_cli_json_and_completion import proposed

from gym_trace import TraceRecordingWrapper, record_episodes
from gym_trace.errors import InvalidOption
from gym_trace.recording.processes import safe_start

# Packages imported if installed: a module of the same name must not be imported instead.
OPTIONAL = {"av", "h5py", "matplotlib", "mcap", "onnxruntime", "pandas", "PIL", "pyarrow", "pygame", "rerun", "rich"}
OPTIONAL |= {"safetensors", "stable_baselines3", "tensorboard", "torch", "ale_py", "minigrid", "numpy", "datasets"}
SCRIPT = """
import json, sys

def main():
    from gym_trace_cli.main import cli

    for words in json.loads(sys.argv[1]):
        try:
            cli(words, prog_name="gym-trace")
        except SystemExit as end:
            print("exit", end.code, *words, flush=True)

if __name__ == "__main__":
    main()
"""
MINE = """
import gymnasium
gymnasium.register("Mine-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv")
make = lambda: gymnasium.make("CartPole-v1")
act = lambda observation: 0
"""
SAFE = sys.version_info >= (3, 11)  # processes can start without the current directory on their path
EVERY_COMMAND = [
    *(one.words(".", ".", f"../new-{number}") for number, one in enumerate(command_lines.LINES)),
    ["--version"],
    ["record", "CartPole-v1", "-o", "../new", "--episodes", "2", "--infos", "--tensorboard", "../scalars"],
    ["record", "CartPole-v1", "-o", "../several", "--episodes", "2", "-j", "2", "--quiet"],
    ["record", "CartPole-v1", "-o", "../lanes", "--steps", "20", "--num-envs", "2", "--vectorization-mode", "async"],
    ["play", "CartPole-v1", "-o", "../played", "--keys", "no-such-file.toml"],
    ["verify", "."],
    ["replay", ".", "--human"],
    ["verify", ".", "--workers", "2", "--env-arg", "render_mode=rgb_array"],
    ["verify", ".", "--env", "CartPole-v1"],
    ["render", ".", "-o", "../film.mp4", "--episodes", "0"],
    ["render", ".", "-o", "../film.gif", "--episodes", "0", "--overlay"],
    ["cat", ".", "--format", "csv"],
    ["sql", ".", "SELECT count(*) FROM steps"],
    ["edit", "map", ".", "-o", "../mapped", "rewards=builtins:len"],
    *(
        ["export", ".", "--to", name, "-o", f"../as-{name}"]
        for name in ("parquet", "minari", "mcap", "rerun", "lerobot")
    ),
    ["import", "../as-parquet", "-o", "../again"],
]


@functools.cache
def known_modules() -> set[str]:
    return {*sys.stdlib_module_names, *packages_distributions()} - {"gym_trace", "gym_trace_cli"}


def filled_with_decoys(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Record a trace; add decoy modules of all names. Return the file to which imported decoys write their name."""
    with TraceRecordingWrapper(gymnasium.make("CartPole-v1", render_mode="rgb_array"), directory) as env:
        record_episodes(env, episodes=2, seed=1)
    ran = directory.parent / "ran"
    for name in sorted(known_modules() | OPTIONAL | {"decoy"}):
        if name.isidentifier():
            (directory / f"{name}.py").write_text(f"with open({str(ran)!r}, 'a') as f: f.write({name!r} + '\\n')\n")
    entries = ("gymnasium.envs", "gym_trace.exporters", "gym_trace.importers")
    (directory / "decoy-1.0.dist-info").mkdir()
    (directory / "decoy-1.0.dist-info" / "METADATA").write_text("Name: decoy\nVersion: 1.0\n")
    entry_points = "".join(f"[{group}]\nparquet = decoy:Decoy\n" for group in entries)
    (directory / "decoy-1.0.dist-info" / "entry_points.txt").write_text(entry_points)
    monkeypatch.chdir(directory)
    return ran


def imported(ran: Path) -> str:
    return ran.read_text() if ran.exists() else ""


def test_no_command_imports_a_module_of_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {words[0] for words in EVERY_COMMAND} >= set(COMMANDS)
    ran = filled_with_decoys(tmp_path / "data", monkeypatch)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "script.py").write_text(SCRIPT)
    settings = {**os.environ, "SDL_VIDEODRIVER": "dummy"}
    command = [sys.executable, str(tmp_path / "bin" / "script.py"), json.dumps(EVERY_COMMAND)]
    done = subprocess.run(command, capture_output=True, text=True, env=settings, timeout=300)
    said = done.stdout + done.stderr  # from the first --json on, what is printed goes to stderr
    assert len([line for line in said.splitlines() if line.startswith("exit ")]) == len(EVERY_COMMAND), said
    code = 0 if SAFE else 2  # rejected where decoys could replace modules of Python in worker processes
    assert f"exit {code} verify . --workers 2" in said, said
    assert not imported(ran)


@pytest.mark.skipif(not SAFE, reason="Python 3.10 has no way to start it safely")
def test_python_m_imports_nothing_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = filled_with_decoys(tmp_path / "data", monkeypatch)
    for path in (tmp_path / "data").glob("*.py"):
        if path.stem not in OPTIONAL | {"logging", "json", "multiprocessing"}:  # Python itself may import others first
            path.unlink()
    command = [sys.executable, "-m", "gym_trace", "verify", "."]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not imported(ran)


@pytest.mark.parametrize("value", ["decoy:act", "decoy:missing.act"])
def test_a_shell_that_completes_imports_no_module_that_was_typed(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = filled_with_decoys(tmp_path / "data", monkeypatch)
    assert proposed("record", "--policy", value, "--make", value, "CartPole-v")
    assert proposed("replay", ".", "--callback", value, "--env", "CartPole-v")
    assert not imported(ran)


@pytest.mark.parametrize(
    "words",
    [
        ["--import", "mine"],
        ["--make", "mine:make"],
        ["--policy", "mine:act", "CartPole-v1"],
        ["mine:Mine-v0", "-j", "1"],
    ],
    ids=lambda words: words[0],
)
def test_a_module_that_the_user_names_is_found_in_the_current_directory(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    if SAFE or "-j" not in words:
        (tmp_path / "json.py").write_text("raise SystemExit('not asked for')")
    monkeypatch.chdir(tmp_path)
    words = words if words[0] != "--import" else [*words, "Mine-v0"]
    command = [Path(sys.executable).with_name("gym-trace"), "record", *words, "--steps", "3", "-o", "trace"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_installed_module_comes_before_one_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("act = print\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    done = run("record", "CartPole-v1", "--policy", "json:act")
    assert done.exit_code == 2
    assert "json.py in the current directory is hidden by" in done.output
    assert str(tmp_path) not in sys.path


def test_workers_do_not_start_in_an_importable_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    with safe_start.started_safely():
        assert os.environ["PYTHONSAFEPATH"]
    (tmp_path / "socket.py").write_text("")
    with pytest.raises(InvalidOption, match="socket"), safe_start.started_safely():
        pass


def test_processes_of_an_environment_find_modules_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with safe_start.started_safely():
        safe_start.forget_safe_path()  # a worker does so, too
        assert "PYTHONSAFEPATH" not in os.environ
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    with safe_start.started_safely():
        safe_start.forget_safe_path()
    assert os.environ["PYTHONSAFEPATH"] == "1"
