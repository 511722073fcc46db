"""Vector environments are recorded as if each lane had been recorded alone, in every autoreset mode."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces, vector
from zoo import bits, row_bits

from gym_trace import TraceRecordingWrapper, check_trace, open_trace
from gym_trace.errors import RecordingError, TraceExists, UnstorableValue

if not hasattr(vector, "AutoresetMode"):
    pytest.skip("vector environments need gymnasium 1.1", allow_module_level=True)

from gymnasium.wrappers import vector as vector_wrappers

from gym_trace import TraceRecordingVectorWrapper

MODES = list(vector.AutoresetMode)
COUNT, STEPS = 3, 22
SPACES: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(-9, 9, (2,), np.float32),
    "scalar": spaces.Box(-9, 9, (), np.float64),
    "discrete": spaces.Discrete(9, start=-3),
    "multi-discrete": spaces.MultiDiscrete([[3, 4], [5, 6]]),
    "multi-binary": spaces.MultiBinary(5),
    "frames": spaces.Box(0, 255, (40, 41, 3), np.uint8),
    "dict": spaces.Dict(a=spaces.Box(0, 1, (3,)), b=spaces.Dict(c=spaces.Discrete(4), d=spaces.MultiBinary([2, 2]))),
    "tuple": spaces.Tuple([spaces.Discrete(5), spaces.Box(-1, 1, (2, 2), np.float64)]),
    "text": spaces.Text(8),
    "sequence": spaces.Sequence(spaces.Box(-1, 1, (2,))),
    "graph": spaces.Graph(spaces.Box(-1, 1, (3,)), spaces.Discrete(4)),
    "one-of": spaces.OneOf([spaces.Discrete(3), spaces.MultiBinary(4)]),
    "mixed": spaces.Dict(words=spaces.Text(5), numbers=spaces.Box(-1, 1, (2,))),
}


class TellingEnv(gymnasium.Env[Any, Any]):
    """Every value tells the lane, the episode and the step; lengths differ by lane and episode."""

    def __init__(self, lane: int, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]):
        self.lane, self.episode, self.t = lane, -1, 0
        self.observation_space, self.action_space = observation_space, action_space

    def _observation(self) -> Any:
        self.observation_space.seed(1000 * self.lane + 50 * self.episode + self.t)
        return self.observation_space.sample()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._observation(), {"began": self.episode, "seed": -1 if seed is None else seed}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        over = self.t >= 1 + (2 * self.lane + self.episode) % 4
        cut = self.episode % 3 == 2
        info: dict[str, Any] = {"t": self.t, "nested": {"lane": self.lane}}
        if self.t % 2:
            info["odd"] = np.full(2, self.t)
        return self._observation(), self.lane + self.t / 8, over and not cut, over and cut, info


def made(kind: str, mode: Any, copy: bool, space: spaces.Space[Any], action: spaces.Space[Any]) -> Any:
    makers: list[Callable[[], Any]] = [lambda lane=lane: TellingEnv(lane, space, action) for lane in range(COUNT)]  # type: ignore[misc]
    if kind == "sync":
        return vector.SyncVectorEnv(makers, autoreset_mode=mode, copy=copy)
    return vector.AsyncVectorEnv(makers, shared_memory=kind == "async", autoreset_mode=mode, copy=copy)


def batched_actions(env: Any, steps: int) -> list[Any]:
    env.action_space.seed(5)
    return [env.action_space.sample() for _ in range(steps)]


def record(env: Any, directory: Path, actions: list[Any], flush_every: int = 7, **options: Any) -> None:
    wrapped = TraceRecordingVectorWrapper(env, directory, record_infos=True, **options)
    wrapped.reset(seed=11, options={"level": 2})
    for t, action in enumerate(actions):
        *_, terminations, truncations, _ = wrapped.step(action)
        if t % flush_every == flush_every - 1:
            wrapped.flush()
        over = terminations | truncations
        if env.metadata["autoreset_mode"] == vector.AutoresetMode.DISABLED and over.any():
            wrapped.reset(options={"reset_mask": over, "level": 3})
    wrapped.close()


def expected(mode: Any, space: Any, action_space: Any, actions: list[Any], batch: Any) -> list[list[dict[str, Any]]]:
    """For each lane its episodes, as the environments would say them one by one."""
    lanes = []
    for lane in range(COUNT):
        env, episodes = TellingEnv(lane, space, action_space), []

        def begin(env: Any = env, episodes: Any = episodes, **options: Any) -> None:
            observation, info = env.reset(**options)
            episodes.append({"observations": [observation], "steps": [], "reset_info": info})

        begin(seed=11 + lane)
        over = False
        for action in actions:
            if over and mode == vector.AutoresetMode.NEXT_STEP:
                begin()
                over = False
                continue
            own = list(vector.utils.iterate(batch, action))[lane]
            observation, reward, terminated, truncated, info = env.step(own)
            episodes[-1]["observations"].append(observation)
            episodes[-1]["steps"].append((own, reward, terminated, truncated, info))
            over = terminated or truncated
            if over and mode != vector.AutoresetMode.NEXT_STEP:
                begin()
        lanes.append(episodes)
    return lanes


def check(directory: Path, lanes: list[list[dict[str, Any]]], space: Any, action_space: Any) -> None:
    trace = open_trace(directory)
    report = check_trace(directory)
    assert (report.damages, report.remarks) == ([], [])
    found: list[list[Any]] = [[] for _ in lanes]
    for episode in sorted(trace, key=lambda episode: episode.episode_id):
        found[episode.lane].append(episode)
    for lane, (episodes, told) in enumerate(zip(found, lanes)):
        assert len(episodes) == len(told)
        for number, (episode, real) in enumerate(zip(episodes, told)):
            assert len(episode) == len(real["steps"])
            rows = _rows(space, episode.observations, len(episode) + 1)
            assert [row_bits(row) for row in rows] == [row_bits(value) for value in real["observations"]]
            acted = _rows(action_space, episode.actions, len(episode))
            assert [_plain(row) for row in acted] == [_plain(step[0]) for step in real["steps"]]
            assert episode.rewards.tolist() == [step[1] for step in real["steps"]]
            assert episode.terminations.tolist() == [step[2] for step in real["steps"]]
            assert episode.truncations.tolist() == [step[3] for step in real["steps"]]
            assert [_plain(info) for info in episode.infos] == [_plain(step[4]) for step in real["steps"]]
            assert _plain(episode.reset_info) == _plain(real["reset_info"])
            assert episode.seed == (11 + lane if number == 0 else None)
            ends = real["steps"][-1][2:4] if real["steps"] else (False, False)
            assert episode.outcome == ("terminated" if ends[0] else "truncated" if ends[1] else "closed")


def _rows(space: Any, columns: Any, count: int) -> list[Any]:
    """One value a row from the columns of a space."""
    if isinstance(space, spaces.Dict):
        parts = {key: _rows(child, columns[key], count) for key, child in space.spaces.items()}
        return [{key: parts[key][i] for key in parts} for i in range(count)]
    if isinstance(space, spaces.Tuple):
        return list(zip(*[_rows(child, column, count) for child, column in zip(space.spaces, columns)]))
    return list(columns)


def _plain(value: Any) -> Any:
    """Values that compare by what they say, not by their types: batching makes arrays of numbers."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


@pytest.mark.parametrize("kind", ["sync", "async", "async-no-shared"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("copy", [True, False])
def test_episodes_are_exact(tmp_path: Path, kind: str, mode: Any, copy: bool) -> None:
    space, action_space = SPACES["dict"], SPACES["discrete"]
    env = made(kind, mode, copy, space, action_space)
    actions, batch = batched_actions(env, STEPS), env.action_space
    record(env, tmp_path / "t", actions)
    check(tmp_path / "t", expected(mode, space, action_space, actions, batch), space, action_space)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("name", SPACES)
def test_every_space_comes_back(tmp_path: Path, name: str, mode: Any) -> None:
    space = action_space = SPACES[name]
    env = made("sync", mode, True, space, action_space)
    actions, batch = batched_actions(env, STEPS), env.action_space
    record(env, tmp_path / "t", actions)
    check(tmp_path / "t", expected(mode, space, action_space, actions, batch), space, action_space)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("flush_every", [1, 5, 1000])
def test_episodes_do_not_depend_on_when_they_are_written(tmp_path: Path, mode: Any, flush_every: int) -> None:
    space, action_space = SPACES["frames"], SPACES["box"]
    env = made("sync", mode, True, space, action_space)
    actions, batch = batched_actions(env, STEPS), env.action_space
    record(env, tmp_path / "t", actions, flush_every)
    check(tmp_path / "t", expected(mode, space, action_space, actions, batch), space, action_space)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_a_vector_run_and_single_runs_give_the_same_episodes(tmp_path: Path, mode: Any) -> None:
    envs = gymnasium.make_vec(
        "CartPole-v1", num_envs=4, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}
    )
    wrapped = TraceRecordingVectorWrapper(envs, tmp_path / "vector")
    actions = batched_actions(envs, 150)
    wrapped.reset(seed=3)
    for action in actions:
        *_, terminations, truncations, _ = wrapped.step(action)
        over = terminations | truncations
        if mode == vector.AutoresetMode.DISABLED and over.any():
            wrapped.reset(options={"reset_mask": over})
    wrapped.close()
    for lane in range(4):
        env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / str(lane))
        env.reset(seed=3 + lane)
        over = False
        for action in actions:
            if over:
                env.reset()
                over = False
                if mode == vector.AutoresetMode.NEXT_STEP:
                    continue
            *_, terminated, truncated, _ = env.step(action[lane])
            over = terminated or truncated
            if over and mode == vector.AutoresetMode.NEXT_STEP:
                continue
        env.close()
        alone = list(open_trace(tmp_path / str(lane)))
        together = [episode for episode in open_trace(tmp_path / "vector") if episode.lane == lane]
        together = [episode for episode in together if len(episode)]
        assert len(alone) == len(together) > 5
        for one, other in zip(alone, together):
            for name in ("observations", "actions", "rewards", "terminations", "truncations"):
                assert bits(getattr(one, name)) == bits(getattr(other, name))
            assert (one.seed, one.outcome) == (other.seed, other.outcome)


def doubled(env: Any) -> Any:
    return vector_wrappers.TransformReward(env, lambda rewards: 2 * rewards)


@pytest.mark.parametrize(
    ("mode", "wrapper"),
    [
        (vector.AutoresetMode.NEXT_STEP, vector_wrappers.RecordEpisodeStatistics),
        (vector.AutoresetMode.NEXT_STEP, vector_wrappers.NormalizeObservation),
        (vector.AutoresetMode.SAME_STEP, doubled),
    ],
)
def test_other_vector_wrappers_work_around_and_under_it(tmp_path: Path, mode: Any, wrapper: Any) -> None:
    def envs() -> Any:
        kwargs = {"autoreset_mode": mode}
        return gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync", vector_kwargs=kwargs)

    def run(env: Any) -> list[Any]:
        values = [bits(env.reset(seed=1)[0])]
        env.action_space.seed(0)
        for _ in range(60):
            observations, rewards, terminations, truncations, infos = env.step(env.action_space.sample())
            values.append(bits((observations, rewards, terminations, truncations, sorted(infos))))
        env.close()
        return values

    plain = run(wrapper(envs()))
    assert run(wrapper(TraceRecordingVectorWrapper(envs(), tmp_path / "inside"))) == plain
    assert run(TraceRecordingVectorWrapper(wrapper(envs()), tmp_path / "outside")) == plain
    for place in ("inside", "outside"):
        assert (open_trace(tmp_path / place).episodes["outcome"] == "terminated").sum() > 3
        assert check_trace(tmp_path / place).damages == []


def test_a_full_reset_cuts_what_is_open_and_closing_closes_it(tmp_path: Path) -> None:
    envs = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    env = TraceRecordingVectorWrapper(envs, tmp_path)
    for length in (3, 4):
        env.reset(seed=[7, None])
        for _ in range(length):
            env.step(np.zeros(2, np.int64))
    env.close()
    env.close()
    outcomes = [(e.lane, e.episode_id, len(e), e.outcome, e.seed) for e in open_trace(tmp_path)]
    assert sorted(outcomes) == [
        (0, 0, 3, "cut", 7), (0, 2, 4, "closed", 7), (1, 1, 3, "cut", None), (1, 3, 4, "closed", None)
    ]  # fmt: skip


def test_annotations_have_one_row_a_lane(tmp_path: Path) -> None:
    envs = gymnasium.make_vec("CartPole-v1", num_envs=2)
    env = TraceRecordingVectorWrapper(envs, tmp_path)
    env.reset(seed=0)
    for t in range(5):
        env.annotate(value=np.array([t, 10.0 + t]), word=[f"a{t}", f"b{t}"])
        env.step(np.array([t % 2, t % 2]))
    with pytest.raises(ValueError, match="3 rows for 2 lanes"):
        env.annotate(value=[1, 2, 3])
    with pytest.raises(UnstorableValue):
        env.annotate(value=[object(), 1])
    env.close()
    one, other = open_trace(tmp_path)
    assert (one.annotations["value"].tolist(), other.annotations["value"][-1]) == ([0, 1, 2, 3, 4], 14.0)
    assert other.annotations["word"].tolist() == [f"b{t}" for t in range(5)]


def test_actions_that_are_not_as_the_space_says_are_kept_exactly(tmp_path: Path) -> None:
    envs = made("sync", vector.AutoresetMode.NEXT_STEP, True, SPACES["box"], spaces.Box(-1, 1, (2,), np.float32))
    env = TraceRecordingVectorWrapper(envs, tmp_path)
    env.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env.step(np.full((COUNT, 2), 0.1))
        env.step(np.full((COUNT, 2), 0.5, np.float32))
        env.close()
    assert [str(warning.message) for warning in caught if "actions" in str(warning.message)] != []
    (actions,) = {bits(e.actions[0]) for e in open_trace(tmp_path) if e.episode_id < COUNT}
    assert actions == bits(np.full(2, 0.1))


def test_a_trace_that_exists_is_refused_and_a_full_disk_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs = gymnasium.make_vec("CartPole-v1", num_envs=2)
    env = TraceRecordingVectorWrapper(envs, tmp_path)
    with pytest.raises(TraceExists):
        TraceRecordingVectorWrapper(envs, tmp_path)
    env.reset(seed=0)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gym_trace.format.batch_writer.os.write", full)
    env.step(np.zeros(2, np.int64))
    with pytest.raises(RecordingError, match="No space left"):
        env.flush()
    env.step(np.zeros(2, np.int64))
    env.close()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_killed_vector_run_is_an_exact_prefix(tmp_path: Path, kind: str) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import numpy as np
from test_vector import *
env = made({kind!r}, vector.AutoresetMode.NEXT_STEP, True, SPACES["box"], SPACES["discrete"])
env = TraceRecordingVectorWrapper(env, {str(tmp_path / "t")!r}, record_infos=True, flush_seconds=0.05)
actions = batched_actions(env, 100000)
env.reset(seed=11)
print("ready", flush=True)
for action in actions:
    env.step(action)
    time.sleep(0.002)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.6)
        process.send_signal(signal.SIGKILL)
    space, action_space = SPACES["box"], SPACES["discrete"]
    env = made("sync", vector.AutoresetMode.NEXT_STEP, True, space, action_space)
    trace = open_trace(tmp_path / "t")
    episodes = sorted(trace, key=lambda episode: episode.episode_id)
    assert len(episodes) > COUNT
    actions = batched_actions(env, 2 * sum(map(len, episodes)) // COUNT)
    lanes = expected(vector.AutoresetMode.NEXT_STEP, space, action_space, actions, env.action_space)
    for lane, told in enumerate(lanes):
        for episode, real in zip((e for e in episodes if e.lane == lane), told):
            assert episode.rewards.tolist() == [step[1] for step in real["steps"][: len(episode)]]
            assert bits(episode.observations) == bits(np.array(real["observations"][: len(episode) + 1]))
            assert len(episode) == len(real["steps"]) or episode.outcome == "lost"
