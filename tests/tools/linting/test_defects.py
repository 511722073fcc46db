"""Each planted defect is found once, at its place, and nothing else is."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
from click.testing import CliRunner
from damage import flip, strip_parity
from gym_trace_cli.main import cli
from gymnasium import spaces
from planted import EPISODES, STEPS, Script
from scripted_env import Result, ToyEnv
from vector_wrapper import TraceRecordingVectorWrapper

from gym_trace import TraceRecordingWrapper, lint_trace, open_trace
from gym_trace.playback.episode_index import index_of
from gym_trace.tools.linting.findings import Finding


class Stuck(ToyEnv):
    """Observes random numbers; in lane 3 the second one stops at step 100 for 250 steps."""

    observation_space = spaces.Box(-10, 10, (3,), np.float64)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, lane: int):
        self._lane = lane

    def result(self, action: Any) -> Result:
        seen = self.np_random.uniform(-9, 9, 3)
        if self._lane == 3 and 100 <= self.t < 350:
            seen[1] = 0.5
        return Result(seen, float(self.np_random.uniform(1, 2)))


Plant = Callable[[Script], object]


class Expected(NamedTuple):
    code: str
    column: str | None
    episode: int | None
    step: int | None
    count: int


def _set(name: str, episode: int, rows: Any, value: Any) -> Plant:
    """Return a plant that overwrites rows of a column."""

    def plant(script: Script) -> None:
        getattr(script, name)[episode][rows] = value

    return plant


def _frozen(name: str, begin: int, end: int) -> Plant:
    def plant(script: Script) -> None:
        rows = getattr(script, name)[2]
        rows[begin:end] = rows[begin]

    return plant


def _each(name: str, change: Callable[[Any], Any]) -> Plant:
    """Return a plant that changes a column in all episodes."""

    def plant(script: Script) -> None:
        setattr(script, name, [change(rows) for rows in getattr(script, name)])

    return plant


def _copies_of_the_last(script: Script) -> None:
    for rows in script.observations:
        rows[:] = rows[-1]


def _half_rate_images(script: Script) -> None:
    script.images()
    for rows in script.observations:
        rows[1::2] = rows[:-1:2]


def _frozen_images(script: Script) -> None:
    script.images()
    script.observations[1][10:50] = script.observations[1][10]


def _discrete_out_of_range(script: Script) -> None:
    script.action_space = spaces.Discrete(3)
    script.actions = [np.arange(len(rows)) % 3 for rows in script.actions]
    script.actions[4][7] = 3


def _constant_discrete(script: Script) -> None:
    script.action_space = spaces.Discrete(3)
    script.actions = [np.ones(len(rows), int) for rows in script.actions]


def _time_limit(script: Script) -> None:
    script.max_episode_steps = STEPS


def _cut(script: Script) -> None:
    script.cut[3] = True


def _cut_at_the_end(script: Script) -> None:
    script.cut[-1] = True


def _no_generator(script: Script) -> None:
    script.has_generator = False
    script.seeds = [None] * EPISODES


def _again(of: int, at: int) -> Plant:
    def plant(script: Script) -> None:
        for columns in (script.observations, script.actions, script.rewards, script.infos, script.notes):
            columns[at] = columns[of]
        script.seeds[at] = script.seeds[of]

    return plant


def _other_results(script: Script) -> None:
    _again(1, 4)(script)
    script.observations[4] = script.observations[4] + np.float32(0.5)


def _other_start(script: Script) -> None:
    script.seeds[4] = script.seeds[1]


def _gappy_notes(script: Script) -> None:
    script.notes = [rows.tolist() for rows in script.notes]
    script.notes[0][0] = None
    script.notes[2][8] = np.nan


def _missing_info(script: Script) -> None:
    for step in (11, 12):
        del script.infos[3][step]["speed"]


DEFECTS: dict[str, tuple[Plant, Expected]] = {
    "NaN in an observation": (
        _set("observations", 3, (21, 1), np.nan),
        Expected("T101", "observations[1]", 3, 20, 1),
    ),
    "NaN in the first observation": (
        _set("observations", 2, 0, np.nan),
        Expected("T101", "observations", 2, -1, 1),
    ),
    "NaN in an action": (_set("actions", 1, 5, np.nan), Expected("T101", "actions", 1, 5, 1)),
    "NaN in rewards": (_set("rewards", 4, slice(9, 12), np.nan), Expected("T101", "rewards", 4, 9, 3)),
    "NaN in an annotation that some steps lack": (_gappy_notes, Expected("T103", "annotations/value", 2, 8, 1)),
    "an infinite observation": (
        _set("observations", 5, (60, 2), np.inf),
        Expected("T102", "observations[2]", 5, 59, 1),
    ),
    "an infinite reward": (_set("rewards", 0, 30, -np.inf), Expected("T102", "rewards", 0, 30, 1)),
    "NaN in an annotation": (_set("notes", 2, 8, np.nan), Expected("T103", "annotations/value", 2, 8, 1)),
    "an observation above its space": (
        _set("observations", 1, (31, 0), 10.5),
        Expected("T104", "observations[0]", 1, 30, 1),
    ),
    "observations below their space": (
        _set("observations", 3, slice(1, 4), -11),
        Expected("T104", "observations", 3, 0, 3),
    ),
    "an action outside its Box": (_set("actions", 2, (44, 1), 1.01), Expected("T105", "actions[1]", 2, 44, 1)),
    "an action outside Discrete": (_discrete_out_of_range, Expected("T105", "actions", 4, 7, 1)),
    "observations of another dtype": (
        _each("observations", lambda rows: rows.astype(np.float64)),
        Expected("T106", "observations", 0, -1, EPISODES * (STEPS + 1)),
    ),
    "actions of another shape": (
        _each("actions", lambda rows: rows[:, :1]),
        Expected("T106", "actions", 0, 0, EPISODES * STEPS),
    ),
    "a frozen observation": (_frozen("observations", 20, 50), Expected("T201", "observations", 2, 19, 1)),
    "a frozen sensor": (
        _set("observations", 4, (slice(12, 60), 1), 3.5),
        Expected("T201", "observations[1]", 4, 11, 1),
    ),
    "a frozen camera": (_frozen_images, Expected("T201", "observations", 1, 9, 1)),
    "copies of a reused buffer": (_copies_of_the_last, Expected("T202", "observations", 0, -1, EPISODES * STEPS)),
    "a camera of half the rate": (_half_rate_images, Expected("T203", "observations", 0, 0, EPISODES * STEPS // 2)),
    "a constant observation": (
        _each("observations", lambda rows: np.full_like(rows, 2)),
        Expected("T204", "observations", 0, -1, EPISODES * (STEPS + 1)),
    ),
    "frozen actions": (_frozen("actions", 10, 45), Expected("T211", "actions", 2, 10, 1)),
    "clipped actions": (
        _each("actions", lambda rows: np.clip(rows * 2, -1, 1)),
        Expected("T212", "actions", 0, 0, 0),
    ),
    "constant actions": (_constant_discrete, Expected("T213", "actions", 0, 0, EPISODES * STEPS)),
    "a lone reward": (_set("rewards", 3, 17, 1e6), Expected("T303", "rewards", 3, 17, 1)),
    "an episode that ends at once": (lambda script: script.shorten(2, 1), Expected("T401", None, 2, None, 1)),
    "an episode that was cut": (_cut, Expected("T402", None, 3, None, 1)),
    "the last episode was cut": (_cut_at_the_end, Expected("T402", None, 5, None, 1)),
    "terminated at the time limit": (_time_limit, Expected("T404", None, 0, None, EPISODES)),
    "episodes without a known start": (_no_generator, Expected("T501", None, 0, None, EPISODES)),
    "an episode recorded twice": (_again(1, 4), Expected("T601", None, 4, None, 1)),
    "other results of the same seed": (_other_results, Expected("T604", None, 4, None, 1)),
    "another start of the same seed": (_other_start, Expected("T604", None, 4, None, 1)),
    "a missing info": (_missing_info, Expected("T701", "infos/'speed'", 3, 11, 2)),
}


def found_in(directory: Path, **options: Any) -> list[Finding]:
    return list(lint_trace(directory, **options))


def told(finding: Finding) -> Expected:
    return Expected(finding.code, finding.column, finding.episode, finding.step, finding.count)


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found_once_at_its_place(name: str, tmp_path: Path) -> None:
    plant, expected = DEFECTS[name]
    script = Script()
    plant(script)
    found = found_in(script.record(tmp_path / "trace"))
    if name == "clipped actions":
        expected = expected._replace(count=found[0].count, step=found[0].step)
        assert found[0].count > 100
    assert [told(finding) for finding in found] == [expected]


def test_a_sound_recording_has_no_findings(tmp_path: Path) -> None:
    assert not found_in(Script().record(tmp_path / "trace"), notes=True)


def test_a_defect_across_blocks_is_found_once(tmp_path: Path) -> None:
    script = Script(episodes=2, steps=400)
    script.observations[1][50:350, 2] = 1.25
    script.options["flush_seconds"] = 0.001
    recorded = script.record(tmp_path / "trace")
    found = [told(it) for it in lint_trace(recorded)]
    assert found == [Expected("T201", "observations[2]", 1, 49, 1)]


def test_rewards_of_another_scale_name_the_writer(tmp_path: Path) -> None:
    Script(0).record(tmp_path / "trace")
    other = Script(1)
    other.rewards = [rewards * 1000 for rewards in other.rewards]
    other.seeds = [seed + 100 for seed in range(EPISODES)]
    other.record(tmp_path / "trace")
    (finding,) = found_in(tmp_path / "trace")
    assert told(finding) == Expected("T302", "rewards", EPISODES, None, EPISODES * STEPS)


def test_starts_that_come_in_turn_are_not_those_of_the_seeds(tmp_path: Path) -> None:
    script = Script(episodes=16, steps=8)
    for episode, rows in enumerate(script.observations):
        rows[0] = script.observations[episode % 4][0]
    (finding,) = found_in(script.record(tmp_path / "trace"))
    assert told(finding) == Expected("T504", "observations", 0, None, 16)
    assert "a count of the episodes or the seed modulo 4 decides the start" in finding.message
    assert finding.command.endswith("--episodes 0,4 --steps 0:1 --columns observations")


def test_shuffled_seeds_show_that_they_are_taken_modulo_a_number(tmp_path: Path) -> None:
    script = Script(episodes=16, steps=8)
    script.seeds = np.random.default_rng(1).permutation(1000)[:16].tolist()
    for rows, seed in zip(script.observations, script.seeds):
        rows[0] = (seed or 0) % 3
    (finding,) = found_in(script.record(tmp_path / "trace"))
    assert "16 seeds begin with 3 first observations in turn: the seed modulo 3 decides the start" in finding.message


@pytest.mark.parametrize(("starts", "reason"), [(1, "the start is fixed"), (5, "there are few starts")])
def test_equal_starts_of_other_seeds_are_a_note_with_both_readings(starts: int, reason: str, tmp_path: Path) -> None:
    script = Script()
    for episode, rows in enumerate(script.observations):
        rows[0] = min(episode, starts - 1)
    recorded = script.record(tmp_path / "trace")
    assert not found_in(recorded)
    (finding,) = found_in(recorded, notes=True)
    assert (finding.code, finding.severity) == ("T505", "note")
    assert finding.message.endswith(f"the seed does not decide the start, or {reason}")


def test_starts_that_options_choose_are_not_those_of_the_seeds(tmp_path: Path) -> None:
    with TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path) as env:
        for width in range(6):
            env.reset(seed=3, options={"low": -0.01 * width, "high": 0.01})
            env.step(0)
    assert not found_in(tmp_path, select=["T5", "T604"])


def _smooth(steps_of_7: int = 55) -> Script:
    """Movements of a robot: 24 episodes of 50 to 60 steps to nearly the same pose."""
    random = np.random.default_rng(5)
    script = Script(episodes=24, steps=120)
    for episode in range(24):
        script.shorten(episode, steps_of_7 if episode == 7 else int(random.integers(50, 61)))
        rows, actions = script.observations[episode], script.actions[episode]
        way = np.linspace(0, 1, len(rows))[:, None] ** random.uniform(0.9, 1.1, 3)
        rows[:] = 3 * way + random.normal(0, 0.01, rows.shape)
        actions[:] = way[1:, :2] / 2 + random.normal(0, 0.002, actions.shape)
    return script


def _tremble(script: Script) -> None:
    script.actions[7] += np.float32(np.random.default_rng(0).normal(0, 0.05, script.actions[7].shape))


def _pause(script: Script) -> None:
    """Stand still from step 10 to step 30, and hurry to the end."""
    for rows in (script.observations[7], script.actions[7]):
        steps = np.arange(len(rows))
        at = np.interp(steps, [0, 10, 30, len(rows) - 1], [0, 10, 10, len(rows) - 1])
        rows[:] = np.stack([np.interp(at, steps, column) for column in rows.T], axis=1)


@pytest.mark.parametrize(
    ("code", "steps", "plant"),
    [
        ("T405", 120, lambda script: None),
        ("T405", 10, lambda script: None),
        ("T406", 55, _tremble),
        ("T407", 55, _pause),
        ("T408", 55, _set("observations", 7, slice(40, None), 0)),
        (None, 55, lambda script: None),
    ],
)
def test_an_episode_far_from_the_others_is_a_note(code: str | None, steps: int, plant: Plant, tmp_path: Path) -> None:
    script = _smooth(steps)
    plant(script)
    recorded = script.record(tmp_path / "trace")
    found = found_in(recorded, select=["T4"])
    assert [told(finding) for finding in found] == [Expected(code, None, 7, None, 1)] * (code is not None)
    assert all(finding.command == f"gym-trace ls {recorded} --episodes 7" for finding in found)
    assert not found_in(recorded)


def test_splits_that_share_episodes_are_an_error(tmp_path: Path) -> None:
    Script(0).record(tmp_path / "trace")
    shared = Script(0)
    shared.options["split"] = "eval"
    shared.record(tmp_path / "trace")
    (finding,) = found_in(tmp_path / "trace")
    assert (finding.code, finding.severity, finding.count) == ("T602", "error", EPISODES)
    assert finding.command.endswith("--episodes 0,6")


def test_a_tiny_split_is_named(tmp_path: Path) -> None:
    Script(0, episodes=150, steps=12).record(tmp_path / "trace")
    tiny = Script(1, episodes=1, steps=12)
    tiny.seeds, tiny.options["split"] = [1000], "eval"
    tiny.record(tmp_path / "trace")
    (finding,) = found_in(tmp_path / "trace")
    assert (finding.code, finding.count) == ("T603", 1)
    assert "'eval' has 1 of 151" in finding.message


def test_a_clock_jump_names_the_episode(tmp_path: Path) -> None:
    """In a process without the C core, which reads the clock itself."""
    script = """
import sys, time
from planted import Script
real, jumped = time.time_ns, [0]
time.time_ns = lambda: real() + jumped[0]
script = Script()
def jump(episode):
    jumped[0] = 3_600_000_000_000 if episode >= 3 else 0
script.before_reset = jump
script.record(sys.argv[1])
"""
    places = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"GYM_TRACE_PURE": "1", "PYTHONPATH": places}
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "trace")], check=True, timeout=60, env=environment)
    (finding,) = found_in(tmp_path / "trace")
    assert told(finding) == Expected("T503", None, 3, None, 1)
    assert "+3.6e+03 s" in finding.message


def test_damage_is_reported_and_the_rest_is_linted(tmp_path: Path) -> None:
    script = Script(episodes=40, steps=2000)
    script.observations[0][11, 0] = np.nan
    directory = script.record(tmp_path / "trace")
    batch = next(directory.glob("*.gtb"))
    strip_parity(batch)
    flip(batch, batch.stat().st_size // 2)
    found = found_in(directory)
    assert [finding.code for finding in found] == ["T001", "T101"]
    assert (found[1].episode, found[1].step) == (0, 10)


def test_damage_in_repeated_episodes_is_reported_alone(tmp_path: Path) -> None:
    script = Script(episodes=2, steps=20_000)
    _again(0, 1)(script)
    directory = script.record(tmp_path / "trace")
    batch = next(directory.glob("*.gtb"))
    strip_parity(batch)
    size = batch.stat().st_size
    flip(batch, *range(size // 3, size * 2 // 3, size // 50))
    assert {finding.code for finding in lint_trace(directory)} == {"T001"}


def test_lanes_that_freeze_across_many_blocks_are_found_once(tmp_path: Path) -> None:
    envs = TraceRecordingVectorWrapper(
        gymnasium.vector.SyncVectorEnv([partial(Stuck, lane) for lane in range(40)]), tmp_path, flush_seconds=0.001
    )
    envs.reset(seed=0)
    for step in range(400):
        envs.step(envs.action_space.sample())
        if step % 50 == 0:
            envs.flush()
    envs.close()
    trace = open_trace(tmp_path)
    assert index_of(trace).readers[0].chunk_count > 4
    (finding,) = lint_trace(trace)
    lane = trace.episodes["lane"][finding.episode]
    assert told(finding)[:2] == ("T201", "observations[1]")
    assert (lane, finding.step, finding.count) == (3, 99, 1)


def test_every_command_of_a_finding_runs(tmp_path: Path) -> None:
    script = Script()
    script.observations[3][21, 1] = np.nan
    script.rewards[3][17] = 1e6
    _again(1, 4)(script)
    script.cut[-1] = True
    commands = [finding.command for finding in lint_trace(script.record(tmp_path / "trace"))]
    assert len(commands) == 4
    for command in commands:
        done = CliRunner().invoke(cli, shlex.split(command)[1:])
        assert done.exit_code == 0, (command, done.output)
    assert "nan" in CliRunner().invoke(cli, shlex.split(commands[0])[1:]).output


def test_an_unverifiable_episode_of_a_view_has_its_whole_index(tmp_path: Path) -> None:
    script = Script()
    _no_generator(script)
    (finding,) = lint_trace(open_trace(script.record(tmp_path / "trace"))[4:])
    assert told(finding) == Expected("T501", None, 4, None, 2)
    assert finding.command.endswith("--episodes 4")


def test_a_view_is_linted_alone_with_indices_of_the_whole_trace(tmp_path: Path) -> None:
    script = Script()
    script.rewards[1][3] = script.rewards[4][8] = np.nan
    trace = open_trace(script.record(tmp_path / "trace"))
    (finding,) = lint_trace(trace[2:])
    assert told(finding) == Expected("T101", "rewards", 4, 8, 1)
