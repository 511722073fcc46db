"""gym-trace stats and gym-trace info: output and options."""

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click.testing
import forked_python
import gymnasium
import numpy as np
import pytest
import rings
from damage import flip
from forked_python import HELPERS
from gym_trace_cli import info, show
from gymnasium import spaces
from scripted_env import CountingEnv, OddSpace, Result, ScriptedEnv
from shell import ok, run, strict_json

from gym_trace.data.values import without_addresses
from gym_trace.envs.spaces import describe, inferred, restore
from gym_trace.recording.background import SlabWriter
from gym_trace.recording.single.wrapper import TraceRecordingWrapper
from gym_trace.storage.local import LocalStorage
from gym_trace.tools.statistics.describe import space_text

KILLED = """
import os, sys
from scripted_env import CountingEnv
from gym_trace import TraceRecordingWrapper
env = TraceRecordingWrapper(CountingEnv(), sys.argv[1])
env.reset(); env.step(0); env.step(1); env.flush(); os.kill(os.getpid(), 9)
"""
ESCAPE = "\x1b[31mred\x07"  # text of a trace that must not reach a terminal


def _output(*arguments: object) -> str:
    return ok(*arguments).stdout


def _json(*arguments: object) -> Any:
    return strict_json(_output(*arguments, "--json"))


def _record(directory: Path, env: Any, episodes: int, *, seed: int | None = 0, **options: Any) -> None:
    with TraceRecordingWrapper(env, directory, **options) as recorded:
        for number in range(episodes):
            recorded.reset(seed=None if seed is None else seed + number)
            while not any(recorded.step(0)[2:4]):
                pass


@pytest.fixture
def cartpole(tmp_path: Path) -> Path:
    _record(tmp_path / "cartpole", gymnasium.make("CartPole-v1"), 20, metadata={"algorithm": "random"})
    return tmp_path / "cartpole"


# -- stats ------------------------------------------------------------------------------------------------------------


def test_stats_prints_plain_lines_without_a_terminal(cartpole: Path) -> None:
    lines = _output("stats", cartpole, "--columns", "--by", "split").splitlines()
    assert "episodes     20" in lines
    assert "outcomes     terminated 20" in lines
    assert any(line.startswith("return ") for line in lines)
    assert any(line.startswith("observations[3] ") for line in lines)
    assert not any(character in "".join(lines) for character in "\x1b▁▂▃▄▅▆▇█▏▕")


def test_stats_draws_on_a_terminal(cartpole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "can_chart", lambda: True)
    monkeypatch.chdir(cartpole.parent)
    lines = _output("stats", cartpole.name, "--columns").splitlines()
    (curve,) = (line for line in lines if line.startswith("return over time"))
    assert set("▁█") <= set(curve)
    (counts,) = (line.split() for line in lines if line.startswith("actions") and "█" * 20 in line)
    assert len(counts[-1]) == 20  # its first row ends with a sparkline
    (moments,) = (line for line in lines if line.startswith("observations[3]"))
    assert set("▁█") <= set(moments)
    assert max(len(line) for line in lines if not line.startswith("trace ")) <= 80


def test_stats_as_json_is_one_document_without_nan(tmp_path: Path) -> None:
    space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    rows = np.array([[1, np.nan], [np.inf, 2]])
    script = [(rows[0], [Result(rows[1], float("nan"), True)])]
    _record(tmp_path, ScriptedEnv(space, spaces.Discrete(2), script), 1)
    summary = _json("stats", tmp_path, "--columns", "--by", "outcome")
    assert summary["return"]["nan"] == 1
    assert summary["groups"]["terminated"]["observations"][0]["dimensions"][1]["nan"] == 1


def test_stats_shows_nan_beside_the_moments(tmp_path: Path) -> None:
    space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    script = [(np.array([np.nan]), [Result(np.array([2.0]), float("nan"), True)])]
    _record(tmp_path, ScriptedEnv(space, spaces.Discrete(2), script), 1)
    output = _output("stats", tmp_path, "--columns")
    assert "return: skipped 1 episode with NaN" in output.splitlines()
    assert any(line.split() == ["count", "mean", "std", "min", "max", "nan"] for line in output.splitlines())


@pytest.mark.parametrize("by", ["split", "writer", "outcome"])
def test_stats_has_a_row_for_each_group(tmp_path: Path, by: str) -> None:
    _record(tmp_path, CountingEnv(length=3), 4, uid="first")
    env = TraceRecordingWrapper(CountingEnv(length=9), tmp_path, split="eval", uid="second", on_exist="append")
    env.reset()
    env.step(0)
    env.close()
    lines = _output("stats", tmp_path, "--by", by).splitlines()
    names = {"split": ["train", "eval"], "writer": ["first", "second"], "outcome": ["terminated", "closed"]}[by]
    table = lines[lines.index(f"by {by}") :]
    for name, episodes in zip(names, ("4", "1")):
        (row, *_) = (line.split() for line in table if line.startswith(name))
        assert row[1] == episodes


def test_stats_says_that_frames_were_filtered(tmp_path: Path) -> None:
    _record(tmp_path, CountingEnv(length=9), 2, frame_filter=lambda step: step % 2 == 0)
    output = _output("stats", tmp_path)
    assert "2 in 10 parts" in output
    assert "return and length count recorded ones" in output


@pytest.mark.parametrize("options", [[], ["--columns"], ["--by", "outcome", "--columns"]])
def test_stats_of_an_empty_trace(tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    TraceRecordingWrapper(CountingEnv(), tmp_path).close()
    monkeypatch.setattr(show, "can_chart", lambda: True)
    assert "episodes  0" in _output("stats", tmp_path, *options)


def test_stats_cuts_long_lists_short_and_says_so(tmp_path: Path) -> None:
    space = spaces.Dict({"state": spaces.Discrete(1000), "wide": spaces.Box(0, 1, (100,), np.float64)})
    steps = [Result({"state": i, "wide": np.zeros(100)}, terminated=i == 99) for i in range(100)]
    script = [({"state": 500, "wide": np.zeros(100)}, steps)]
    _record(tmp_path, ScriptedEnv(space, spaces.Discrete(2), script), 1)
    lines = _output("stats", tmp_path, "--columns").splitlines()
    (others,) = (line.split() for line in lines if " others " in line)
    assert others == ["observations/state", "81", "others", "81", "80.2%"]
    assert "observations/wide: 80 more dimensions, see --json" in lines


@pytest.mark.filterwarnings("ignore:observations")
def test_stats_tells_of_values_that_do_not_fit_their_space(tmp_path: Path) -> None:
    script = [(0, [Result("text", "reward", terminated=True)])]
    _record(tmp_path, ScriptedEnv(spaces.Discrete(2), spaces.Discrete(2), script), 1)
    output = _output("stats", tmp_path, "--columns")
    assert "observations: 1 of 2 rows do not fit the space" in output
    assert "rewards: 1 skipped, not numbers" in output


def test_nothing_that_a_trace_says_reaches_the_terminal_as_an_escape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = spaces.Dict({ESCAPE: spaces.Text(30)})
    script = [({ESCAPE: ESCAPE}, [Result({ESCAPE: "\ud800"}, terminated=True)])]
    env = ScriptedEnv(space, spaces.Discrete(2), script)
    env.render_mode = ESCAPE
    _record(tmp_path, env, 1, split=ESCAPE, metadata={ESCAPE: [ESCAPE]})
    monkeypatch.setattr(show, "can_chart", lambda: True)
    for arguments in (["stats", "--columns", "--by", "split"], ["info"]):
        output = _output(*arguments, tmp_path)
        assert "red" in output
        assert not set(output) & {"\x1b", "\x07", "\ud800"}


def test_stats_of_a_damaged_chunk_is_one_line_for_columns(cartpole: Path) -> None:
    (batch,) = cartpole.glob("*.gtb")
    flip(batch, batch.stat().st_size // 2)
    assert "episodes     20" in _output("stats", cartpole)
    result = run("stats", cartpole, "--columns")
    assert result.exit_code == 5
    assert result.stderr.startswith("error: ")
    assert "gym-trace edit repair" in result.stderr
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize("command", ["stats", "info"])
def test_a_directory_without_a_trace_is_one_line_and_exit_code_1(tmp_path: Path, command: str) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        result = run(command, directory)
        assert result.exit_code == 1
        assert result.output.count("\n") == 1
        assert str(directory) in result.output


# -- info -------------------------------------------------------------------------------------------------------------


def test_info_tells_environment_spaces_writers_and_files(cartpole: Path) -> None:
    output = _output("info", cartpole)
    for told in (
        "environment    CartPole-v1",
        "wrappers       TimeLimit, OrderEnforcing, PassiveEnvChecker",
        "actions        Discrete(2)",
        f"gymnasium {gymnasium.__version__}",
        'metadata       {"algorithm": "random"}',
        "seeds          0 unseeded, 20 seeded: 0, 1, 2, 3, 4, …",
        "000000.gtb  sealed",
        "no damage found",
    ):
        assert told in output
    described = _json("info", cartpole)
    assert described["environment"]["id"] == "CartPole-v1"
    assert described["observation_space"] == repr(gymnasium.make("CartPole-v1").observation_space)
    assert described["bytes"] == LocalStorage(cartpole).allocated()
    assert [writer["state"] for writer in described["writers"]] == ["closed"]
    assert [writer["pid"] for writer in described["writers"]] == [os.getpid()]


def test_info_names_all_environments_of_a_trace(cartpole: Path) -> None:
    assert "environments" not in _output("info", cartpole)
    _record(cartpole, gymnasium.make("MountainCar-v0", max_episode_steps=9), 1, on_exist="append")
    assert "environments   CartPole-v1, MountainCar-v0; the first:\nenvironment    CartPole-v1\n" in _output(
        "info", cartpole
    )


def test_info_counts_seeds_also_of_those_too_large_for_the_table(tmp_path: Path) -> None:
    _record(tmp_path, CountingEnv(), 2, seed=2**80)
    _record(tmp_path, CountingEnv(), 3, seed=None, on_exist="append")
    assert _json("info", tmp_path)["seeds"] == {"seeded": 2, "unseeded": 3, "first": [2**80, 2**80 + 1]}


def test_info_shows_a_space_that_cannot_be_rebuilt_as_it_was_recorded(tmp_path: Path) -> None:
    space = spaces.Dict({"a": spaces.Tuple([OddSpace(), spaces.Discrete(3)])})
    script = [(space.sample(), [Result(space.sample(), terminated=True)])]
    _record(tmp_path, ScriptedEnv(space, spaces.Discrete(2), script), 1)
    odd = without_addresses(repr(space["a"][0]))
    assert _json("info", tmp_path)["observation_space"] == f"Dict('a': Tuple({odd}, Discrete(3)))"


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-np.inf, np.inf, (), np.float64),
        spaces.Box(0, 255, (84, 84, 4), np.uint8),
        spaces.Box(np.float32([-4.8, -np.inf]), np.float32([4.8, np.inf])),
        spaces.Box(np.arange(2000.0).reshape(40, 50), 2000.0, dtype=np.float64),
        spaces.Box(-1, 1, (2, 0), np.float32),
        spaces.Discrete(3, start=-1),
        spaces.MultiDiscrete([3, 4]),
        spaces.Dict({"a": spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(4)]), "b": spaces.Dict()}),
    ],
    ids=repr,
)
def test_spaces_are_shown_as_gymnasium_prints_them(space: gymnasium.Space) -> None:
    assert space_text(describe(space)) == repr(space)


def test_the_space_of_an_empty_value_is_shown_as_gymnasium_prints_it() -> None:
    space = inferred(np.zeros((2, 0), np.float32))
    assert space_text(space) == repr(restore(space)) == "Box([], [], (2, 0), float32)"


def test_a_malformed_space_is_unknown() -> None:
    box = describe(spaces.Box(np.arange(3.0), 9.0, dtype=np.float64))
    assert (
        space_text(box | {"shape": [2]}) == space_text({"type": "Box"}) == space_text({"type": "Discrete"}) == "unknown"
    )


def test_info_shows_metadata_of_any_kind(tmp_path: Path) -> None:
    metadata = {"nan": float("nan"), "array": np.arange(3), "bytes": b"\x00", "tuple": (1, np.float32(0.5)), 5: None}
    TraceRecordingWrapper(CountingEnv(), tmp_path, metadata=metadata).close()
    _record(tmp_path, CountingEnv(), 1, metadata=metadata, on_exist="append")
    assert "metadata" in _output("info", tmp_path)
    shown = _json("info", tmp_path)["metadata"]
    assert shown["nan"] is None
    assert shown["5"] is None


def test_info_shows_the_function_that_made_the_environment(here: Path) -> None:
    (here / "robots.py").write_text("import gymnasium\n\n\ndef make(size):\n    return gymnasium.make('CartPole-v1')\n")
    ok("record", "--make", "robots:make", "--env-arg", "size=7", "-o", "t", "--episodes", 1)
    assert "function       robots:make(size=7)\n" in _output("info", "t")
    _record(here / "own", gymnasium.make("CartPole-v1"), 1)
    assert "\nfunction " not in _output("info", "own")


def test_info_reports_a_killed_writer_and_its_lost_episode(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": HELPERS}
    killed = forked_python.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environ, check=False)
    assert killed.returncode == -signal.SIGKILL
    with open(next(tmp_path.glob("*.part")), "ab") as file:
        file.write(b"\xf7GTREC\r\n torn")
    described = _json("info", tmp_path)
    (writer,) = described["writers"]
    assert (writer["state"], writer["steps"]) == ("killed", 2)
    assert (writer["batches"][0]["sealed"], writer["batches"][0]["torn"]) == (False, 13)
    output = _output("info", tmp_path)
    assert "1 writer died while recording" in output
    assert "gym-trace edit repair" in output
    assert _json("stats", tmp_path)["outcomes"] == {"lost": 1}


def test_info_has_one_line_for_the_rings_of_several_writers(tmp_path: Path) -> None:
    rings.killed(tmp_path, rings.Run().play(3))
    rings.killed(tmp_path, rings.Run().play(4), name="v")
    assert "2 writers did not close; 7 steps are in their rings\n" in _output("info", tmp_path)


def test_info_names_damage_and_what_to_do(cartpole: Path) -> None:
    (batch,) = cartpole.glob("*.gtb")
    batch.write_bytes(batch.read_bytes()[:-10])
    output = _output("info", cartpole)
    assert f"damaged: {batch}" in output
    assert "gym-trace check" in output


def _follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleep: Any, *options: str) -> click.testing.Result:
    monkeypatch.setattr(info, "time", SimpleNamespace(sleep=sleep))
    return run("info", tmp_path, "--follow", *options)


def test_info_follow_prints_a_line_a_change_until_the_last_writer_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=2), tmp_path)
    turns = iter(["episode", "nothing", "episode", "close"])

    def sleep(_: float) -> None:
        turn = next(turns)
        if turn == "episode":
            env.reset()
            env.step(0)
            env.step(0)
            env.flush()
        elif turn == "close":
            env.close()

    result = _follow(tmp_path, monkeypatch, sleep, "--json")
    assert result.exit_code == 0
    told = [json.loads(line) for line in result.stdout.splitlines()]
    counts = [(now["episodes"], now["steps"], now["recording"]) for now in told]
    assert counts == [(0, 0, 1), (1, 2, 1), (2, 4, 1), (2, 4, 0)]


def test_info_follow_of_a_finished_trace_ends_at_once(cartpole: Path) -> None:
    assert _output("info", cartpole, "--follow").splitlines()[-1].startswith("20 episodes, ")


def test_info_follow_ends_with_130_on_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = TraceRecordingWrapper(CountingEnv(), tmp_path)

    def sleep(_: float) -> None:
        raise KeyboardInterrupt

    result = _follow(tmp_path, monkeypatch, sleep)
    env.close()
    assert result.exit_code == 130


def test_an_episode_that_is_being_recorded_is_shown_as_running(tmp_path: Path) -> None:
    with TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path) as env:
        env.reset(seed=1)
        env.step(0)
        env.flush()
        assert "running 1" in _output("stats", tmp_path)
        assert "running" in _output("replay", tmp_path)
        assert "running" in _output("stats", tmp_path, "--by", "outcome")
        assert json.loads(_output("replay", tmp_path, "--json"))["outcome"] == "running"
    assert "closed 1" in _output("stats", tmp_path)


def test_info_reports_how_long_steps_waited_for_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = SlabWriter.wait

    def slow(self: SlabWriter, sequence: int | None = None) -> None:
        wait(self, sequence)
        self.waited = 2.0

    monkeypatch.setattr(SlabWriter, "wait", slow)
    env = TraceRecordingWrapper(CountingEnv(3), tmp_path)
    env.reset()
    env.step(0)
    env.flush()
    assert _json("info", tmp_path)["writers"][0]["waited"] == 0
    env.close()
    assert _json("info", tmp_path)["writers"][0]["waited"] == 2
    assert "steps waited 2 s for encoding" in _output("info", tmp_path)
