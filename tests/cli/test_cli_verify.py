"""gym-trace verify: exit codes, and environments named by options."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from damage import flip
from shell import ok, process, run
from terminals import console

import gym_trace
from gym_trace import TraceRecordingWrapper
from gym_trace.errors import EnvironmentUnavailable
from gym_trace.playback.episode_index import index_of

FACTORY = """
import gymnasium
from clicks import Clock

def clock(length=10):
    return Clock(length)

def painted(render_mode=None):
    import rendered_env
    return rendered_env.make_rendered(length=4, render_mode=render_mode)

def halved(env):
    return gymnasium.wrappers.TransformReward(env, lambda reward: reward / 2)

class Whimsical(gymnasium.Wrapper):
    def step(self, action):
        import os
        return *self.env.step(action)[:4], {"whim": os.urandom(8)}

def whimsical():
    return Whimsical(gymnasium.make("CartPole-v1"))

def nothing():
    return 3

def broken():
    raise RuntimeError("out of coffee")
"""


@pytest.fixture(autouse=True)
def factories(here: Path) -> None:
    (here / "factories.py").write_text(FACTORY)


def record(name: str, episodes: int = 3, steps: int = 5, **options: Any) -> None:
    env = TraceRecordingWrapper(gymnasium.make("Pendulum-v1"), "t", uid=name, on_exist="append", **options)
    env.action_space.seed(1)
    for episode in range(episodes):
        env.reset(seed=episode)
        for _ in range(steps):
            env.step(env.action_space.sample())
        env.flush()
    env.close()


def damage(name: str, offset: int) -> None:
    """Flip the byte at this offset in the last chunk but one."""
    (path,) = Path("t").glob(f"{name}.*.gtb")
    trace = gym_trace.open_trace("t")
    batch = next(writer for writer in index_of(trace).readers if writer.writer == name).batches[0]
    flip(path, int(batch.chunks["offset"][-2]) + offset, mask=255)


def code(*args: object) -> int:
    return run("verify", "t", *args).exit_code


def test_exit_codes_report_the_result() -> None:
    record("fine")
    assert code() == 0
    record("parts", frame_filter=lambda step: step != 2)
    assert code() == 4
    assert "3 that cannot be verified" in run("verify", "t").stdout
    record("harmed")
    damage("harmed", 200)
    result = run("verify", "t")
    assert (result.exit_code, "--skip-damaged" in result.stderr) == (5, True)
    result = run("verify", "t", "--skip-damaged")
    assert result.exit_code == 5
    assert "1 damaged" in result.stdout
    assert "8 identical" in result.stdout
    assert code("--skip-damaged", "--env-arg", "g=3") == 3
    assert code("--episodes", "0") == 0
    assert "4 unverifiable" in run("verify", "--help").output


def test_a_damaged_trace_is_said_to_be_so_also_by_workers_and_as_json() -> None:
    record("harmed")
    damage("harmed", 200)
    assert code("--workers", 2) == 5
    result = run("verify", "t", "--skip-damaged", "--workers", 2, "--json")
    assert result.exit_code == 5
    assert [json.loads(line)["verdict"] for line in result.stdout.splitlines()].count("damaged") == 1


def test_the_trace_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    record("fine")
    opened: list[Any] = []
    make = gym_trace.Trace.__init__

    def counted(trace: Any, directory: Any) -> None:
        opened.append(directory)
        make(trace, directory)

    monkeypatch.setattr(gym_trace.Trace, "__init__", counted)
    assert code() == 0
    assert len(opened) == 1


def test_a_function_that_makes_the_environment_can_be_named_everywhere(tmp_path: Path) -> None:
    ok("record", "--make", "factories:clock", "--episodes", 2, "--env-arg", "length=7")
    assert [len(episode) for episode in gym_trace.open_trace("traces/factories-clock")] == [7, 7]
    trace = "traces/factories-clock"
    assert "--make MODULE:FUNCTION" in run("verify", trace).stderr
    ok("verify", trace, "--make", "factories:clock", "--env-arg", "length=7")
    ok("verify", trace, "--make", "factories:clock", "--env-arg", "length=7", "--workers", 2)
    assert run("verify", trace, "--make", "factories:clock").exit_code == 3
    ok("record", "--make", "factories:painted", "-o", "painted", "--episodes", 1)
    ok("record", "--make", "factories:painted", "-o", "many", "-j", 1, "--episodes", 2, "--quiet")
    ok("replay", "painted", "--human", "--speed", 1000, "--make", "factories:painted")
    pytest.importorskip("PIL")
    ok("render", "painted", "-o", "film.gif", "--make", "factories:painted")
    ok("render", "painted", "-o", "again.gif", "--env", "rendered_env:Rendered-v0", "--env-arg", "length=4")
    assert "render_mode='rgb_array'" in run("render", trace, "-o", "none", "--make", "factories:clock").stderr


def test_verify_says_that_all_but_the_infos_can_be_compared() -> None:
    ok("record", "--make", "factories:whimsical", "-o", "t", "--episodes", 2, "--infos")
    verify = ("verify", "t", "--make", "factories:whimsical")
    hint = "each differs first in infos: --ignore infos compares the rest\n"
    differs = run(*verify)
    assert (differs.exit_code, hint in differs.stdout) == (3, True)
    assert ok(*verify, "--ignore", "infos").stdout == "2 episodes replayed: 2 identical, bit for bit\n"
    record("fine")
    assert hint not in run("verify", "t", "--env", "CartPole-v1").stdout


def test_a_factory_and_its_arguments_are_stored_and_need_trust() -> None:
    arguments = ("--make", "factories:clock", "--env-arg", "length=7", "--max-episode-steps", 5)
    told = ok("record", *arguments, "-o", "own", "--episodes", 2).stdout
    (verify,) = (line for line in told.splitlines() if "gym-trace verify" in line)
    ok(*shlex.split(verify)[1:])
    assert [len(episode) for episode in gym_trace.open_trace("own")] == [5, 5]
    refused = run("verify", "own")
    assert refused.exit_code == 4
    assert (
        "would import factories and call factories:clock(length=7). If you trust this trace, pass --trust"
        in refused.stderr
    )
    assert "2 identical" in ok("verify", "own", "--trust").stdout
    assert "2 identical" in ok("verify", "own", "--trust", "--workers", 2).stdout
    assert run("verify", "own", "--trust", "--env-arg", "length=3").exit_code == 3
    ok("branch", "own", "--trust", "--step", 3, "--episodes", 1, "-o", "if", "--quiet")
    ok("verify", "if", "--trust")
    ok("record", *arguments, "-o", "many", "-j", 1, "--episodes", 2, "--quiet")
    ok("verify", "many", "--trust")


def test_a_factory_inside_wrappers_is_made_again_with_them() -> None:
    told = ok(
        "record", "--make", "factories:clock", "--wrapper", "factories:halved", "-o", "own", "--episodes", 2
    ).stdout
    assert "gym-trace verify own --trust\n" in told
    assert "import and call the wrapper factories:halved()" in run("verify", "own").stderr
    assert "2 identical" in ok("verify", "own", "--trust").stdout
    assert gym_trace.open_trace("own")[0].rewards[0] == 0.5


def test_lanes_are_made_by_a_function_too() -> None:
    if not hasattr(gymnasium.vector, "AutoresetMode"):
        pytest.skip("needs gymnasium 1.1")
    ok("record", "--make", "factories:clock", "-o", "lanes", "--num-envs", 2, "--episodes", 4)
    ok("verify", "lanes", "--make", "factories:clock")


@pytest.mark.parametrize(
    ("name", "exit_code", "told"),
    [
        ("factories:nothing", 4, "return a gymnasium.Env"),
        ("factories:broken", 4, "RuntimeError: out of coffee"),
        ("factories:missing", 2, "no attribute"),
        ("factories", 2, "MODULE:NAME"),
    ],
)
def test_a_function_that_makes_no_environment_is_an_error_in_a_line(name: str, exit_code: int, told: str) -> None:
    record("fine")
    result = run("verify", "t", "--make", name)
    assert result.exit_code == exit_code
    assert told in result.stderr


def test_an_environment_is_named_once() -> None:
    record("fine")
    assert run("record").exit_code == 2
    assert run("record", "CartPole-v1", "--make", "factories:clock").exit_code == 2
    assert run("verify", "t", "--env", "CartPole-v1", "--make", "factories:clock").exit_code == 2
    assert "--make needs a terminal or --human" in run("replay", "t", "--make", "factories:clock").stderr
    ok("verify", "t", "--env", "Pendulum-v1")


def test_the_window_shows_the_environment_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    record("fine", 1)
    result = run("replay", "t", "--human", "--speed", 1000, "--env", "Nothing-v0")
    assert result.exit_code == 1
    assert "Nothing" in result.stderr


def test_many_unverifiable_episodes_with_one_reason_are_listed_briefly() -> None:
    record("parts", episodes=5, frame_filter=lambda step: step != 2)
    result = run("verify", "t")
    assert (result.exit_code, result.stderr) == (4, "")
    told = result.stdout.splitlines()
    assert [line.startswith("episode") for line in told] == [True, True, True, False, False]
    assert told[3].startswith("2 more episodes cannot be verified: earlier steps")
    assert told[4].endswith("5 that cannot be verified")
    assert '"reason": "earlier steps' in run("verify", "t", "--json").stdout.splitlines()[9]


@pytest.fixture
def imported(here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Record t in an environment that --import registers. Return a function that forgets this import."""

    def forget() -> None:
        gymnasium.registry.pop("CliClock-v0", None)
        sys.modules.pop("clicks", None)

    ok("record", "CliClock-v0", "--import", "clicks", "-o", "t", "--episodes", 1, "--seed", 1)
    monkeypatch.setattr(sys, "argv", ["gym-trace", "verify", "t", "--json"])
    forget()
    return forget


def test_an_error_shows_the_command_with_the_imports_of_the_recording(imported: Callable[[], None]) -> None:
    result = run("verify", "t")
    assert result.exit_code == 4
    assert "It would import clicks, as was done for the recording (--import clicks)" in result.output
    assert result.output.endswith("\nimport what the recording imported: gym-trace verify t --json --import "
                                  "clicks\n")  # fmt: skip
    assert "clicks" not in sys.modules
    ok("verify", "t", "--import", "clicks")


def test_an_unavailable_environment_exits_with_4_also_among_others(imported: Callable[[], None]) -> None:
    record("fine")
    result = run("verify", "t")
    assert (result.exit_code, "3 identical, bit for bit, 1 that cannot be verified" in result.stdout) == (4, True)


def test_trust_imports_what_the_recording_imported(imported: Callable[[], None]) -> None:
    ok("verify", "t", "--trust")
    imported()
    ok("verify", "t", "--trust", "--workers", 2)


def test_a_missing_module_is_not_suggested_for_import(
    imported: Callable[[], None], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(here)])
    result = run("verify", "t")
    assert "clicks is not installed here" in result.output
    assert "gym-trace verify" not in result.output


@pytest.mark.parametrize("imports", [3, ["os; x"], [["os"]], ["../os"], [".os"]], ids=str)
def test_invalid_imports_of_a_recording_are_ignored(
    imported: Callable[[], None], monkeypatch: pytest.MonkeyPatch, imports: Any
) -> None:
    trace = gym_trace.open_trace("t")
    monkeypatch.setitem(index_of(trace).readers[0].schema["environment"], "imports", imports)
    with pytest.raises(EnvironmentUnavailable, match="not described in the trace"):
        trace.make_env(trust=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["CliClock-v0", "--import", "clicks"], ["clicks"]),
        (["clicks:CliClock-v0"], ["clicks"]),
        (["clicks:CliClock-v0", "-j", 1], ["clicks"]),
        (["CartPole-v1"], None),
    ],
    ids=str,
)
def test_a_trace_says_what_was_imported_for_it(here: Path, words: list[object], expected: Any) -> None:
    ok("record", *words, "-o", "t", "--episodes", 1)
    reader = index_of(gym_trace.open_trace("t")).readers[0]
    assert reader.schema["environment"].get("imports") == expected
    assert "imports" not in reader.schema["provenance"]


def test_the_last_lines_lead_to_the_first_difference(tmp_path: Path) -> None:
    record("w")
    options = ["--env-arg", "g=9.0"]
    done = run("verify", "t", "--episodes", "1:", *options)
    place = [str(Path("t").absolute()), "--episode", "1", "--step", "0"]
    *_, told, shell, view = done.stdout.splitlines()
    assert told == "before the first difference:"
    assert shlex.split(shell) == ["gym-trace", "shell", *place, *options]
    assert shlex.split(view) == ["gym-trace", "view", *place]
    stood = process(*shlex.split(shell)[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out, _ = stood.communicate("print(env.unwrapped.g)\n")
    assert stood.returncode == 0, out
    assert "9.0" in out


def test_where_the_reset_differs_only_the_viewer_stands() -> None:
    record("w", episodes=1)
    Path("other.py").write_text("import gymnasium\ndef make(): return gymnasium.make('MountainCarContinuous-v0')\n")
    done = run("verify", "t", "--make", "other:make")
    assert "episode 0 differs at the reset" in done.stdout
    assert "gym-trace shell" not in done.stdout
    assert done.stdout.splitlines()[-1].endswith(" --episode 0 --step 0")


def test_json_has_no_such_lines() -> None:
    record("w", episodes=1)
    assert "before the first" not in run("verify", "t", "--env-arg", "g=9.0", "--json").stdout


def test_results_are_lines_of_their_own_beside_the_progress_of_a_terminal(tmp_path: Path) -> None:
    ok("record", "CartPole-v1", "-o", tmp_path / "t", "--episodes", 6, "--seed", 1)
    with console("verify", tmp_path / "t", "--env-arg", "sutton_barto_reward=true") as terminal:
        assert terminal.ended() == 3
    lines = [re.split(rb"\x1b\[2K", line)[-1].decode() for line in terminal.raw.split(b"\r\n")]
    told = "differs at step 0, rewards: recorded 1.0, seen 0.0"
    assert [line for line in lines if told in line] == [f"episode {number} {told}" for number in range(6)]
    assert b"of 6 episodes" in terminal.raw
    assert not any("of 6 episodes" in line and told in line for line in terminal.raw.decode().split("\n"))
