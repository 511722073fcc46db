"""Vector environments whose values identify lane, episode and step, and the expected contents of their traces."""

import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces, vector
from scripted_env import bits, row_bits

from gym_trace import check_trace, open_trace
from gym_trace.data.packing import pack
from gym_trace.data.trees import mapped
from gym_trace.errors import TraceError

if not hasattr(vector, "AutoresetMode"):
    pytest.skip("vector environments need gymnasium 1.1", allow_module_level=True)

from gym_trace import TraceRecordingVectorWrapper

MODES = list(vector.AutoresetMode)
NEXT_STEP, SAME_STEP, DISABLED = MODES
modes = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
COUNT, STEPS = 3, 22
SPACES: dict[str, spaces.Space[Any]] = {
    "hollow": spaces.Box(-1, 1, (0,), np.float32),
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


def observation_of(space: spaces.Space[Any], lane: int, episode: int, t: int) -> Any:
    """Return the observation of a NumberedLaneEnv after t steps."""
    space.seed(1000 * lane + 50 * episode + t)
    return space.sample()


class NumberedLaneEnv(gymnasium.Env[Any, Any]):
    """Values encode lane, episode and step; lengths differ by lane and episode."""

    def __init__(self, lane: int, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]):
        self.lane, self.episode, self.t = lane, -1, 0
        self.observation_space, self.action_space = observation_space, action_space

    def _observation(self) -> Any:
        return observation_of(self.observation_space, self.lane, self.episode, self.t)

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


def make_vector_env(kind: str, mode: Any, copy: bool, space: spaces.Space[Any], action: spaces.Space[Any]) -> Any:
    makers: list[Callable[[], Any]] = [lambda lane=lane: NumberedLaneEnv(lane, space, action) for lane in range(COUNT)]  # type: ignore[misc]
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
        step_lanes(wrapped, action, level=3)
        if t % flush_every == flush_every - 1:
            wrapped.flush()
    wrapped.close()


def step_lanes(env: Any, actions: Any = None, **options: Any) -> None:
    """Step all lanes, with zeros by default; reset the finished ones if the environment does not."""
    *_, terminations, truncations, _ = env.step(np.zeros(COUNT, np.int64) if actions is None else actions)
    over = np.asarray(terminations) | np.asarray(truncations)
    if env.metadata["autoreset_mode"] == DISABLED and over.any():
        env.reset(options={"reset_mask": over, **options})


def record_and_check(
    directory: Path,
    mode: Any,
    space: Any,
    action_space: Any,
    *,
    kind: str = "sync",
    copy: bool = True,
    flush_every: int = 7,
    around: Callable[[Any], Any] = lambda env: env,
) -> None:
    """Record NumberedLaneEnvs; compare the trace with the expected episodes. around: wraps the vector environment."""
    env = make_vector_env(kind, mode, copy, space, action_space)
    actions, batch = batched_actions(env, STEPS), env.action_space
    record(around(env), directory, actions, flush_every)
    check(directory, expected(mode, space, action_space, actions, batch), space, action_space)


def expected(mode: Any, space: Any, action_space: Any, actions: list[Any], batch: Any) -> list[list[dict[str, Any]]]:
    """Return the episodes of each lane, as single environments would produce them."""
    lanes = []
    for lane in range(COUNT):
        env, episodes = NumberedLaneEnv(lane, space, action_space), []

        def begin(env: Any = env, episodes: Any = episodes, **options: Any) -> None:
            observation, info = env.reset(**options)
            episodes.append({"observations": [observation], "steps": [], "reset_info": info})

        begin(seed=11 + lane)
        over = False
        for action in actions:
            if over and mode == NEXT_STEP:
                begin()
                over = False
                continue
            own = list(vector.utils.iterate(batch, action))[lane]
            observation, reward, terminated, truncated, info = env.step(own)
            episodes[-1]["observations"].append(observation)
            episodes[-1]["steps"].append((own, reward, terminated, truncated, info))
            over = terminated or truncated
            if over and mode != NEXT_STEP:
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
    for lane, (episodes, wanted) in enumerate(zip(found, lanes)):
        assert len(episodes) == len(wanted)
        for number, (episode, real) in enumerate(zip(episodes, wanted)):
            assert len(episode) == len(real["steps"])
            rows = rows_of(space, episode.observations, len(episode) + 1)
            assert [row_bits(row) for row in rows] == [row_bits(value) for value in real["observations"]]
            acted = rows_of(action_space, episode.actions, len(episode))
            assert [plain(row) for row in acted] == [plain(step[0]) for step in real["steps"]]
            assert episode.rewards.tolist() == [step[1] for step in real["steps"]]
            assert episode.terminations.tolist() == [step[2] for step in real["steps"]]
            assert episode.truncations.tolist() == [step[3] for step in real["steps"]]
            assert [plain(info) for info in episode.infos] == [plain(step[4]) for step in real["steps"]]
            assert plain(episode.reset_info) == plain(real["reset_info"])
            assert episode.seed == (11 + lane if number == 0 else None)
            ends = real["steps"][-1][2:4] if real["steps"] else (False, False)
            assert episode.outcome == ("terminated" if ends[0] else "truncated" if ends[1] else "closed")


def rows_of(space: Any, columns: Any, count: int) -> list[Any]:
    """Return one value per row from the columns of a space."""
    if isinstance(space, spaces.Dict):
        parts = {key: rows_of(child, columns[key], count) for key, child in space.spaces.items()}
        return [{key: parts[key][i] for key in parts} for i in range(count)]
    if isinstance(space, spaces.Tuple):
        return list(zip(*[rows_of(child, column, count) for child, column in zip(space.spaces, columns)]))
    return list(columns)


def plain(value: Any) -> Any:
    """Convert values to forms that compare by value, not by type, because batching turns numbers into arrays."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.size > 1000:
        return value.shape, value.tobytes()
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def as_arrays_of(tree: Any, convert: Callable[[Any], Any]) -> Any:
    """Convert the arrays of a tree that are not NumPy's."""
    return mapped(lambda leaf: leaf if isinstance(leaf, np.ndarray) else convert(leaf), tree)


def run_lanes(env: Any, convert: Callable[[Any], Any], on_host: Callable[[Any], Any]) -> Any:
    """Record batched actions with annotations; return the trace. convert, on_host: to tensors of the env, and back."""
    env.reset(seed=11)
    for time, actions in enumerate(batched_actions(env, STEPS)):
        env.annotate(value=convert(np.arange(COUNT) + time / 4), plain=np.arange(COUNT))
        *_, terminations, truncations, _ = env.step(convert(actions))
        over = on_host(terminations) | on_host(truncations)
        if env.metadata["autoreset_mode"] == DISABLED and over.any():
            env.reset(options={"reset_mask": over})
        if time == 9:
            env.flush()
    env.close()
    return open_trace(env.directory)


ARRAYS = ("observations", "actions", "rewards", "terminations", "truncations")


def parts_of(trace: Any, lane: int | None = None) -> list[dict[str, Any]]:
    """Return everything but the times of every part, sorted by episode. lane: None for all."""
    names = ("episode_id", "lane", "first_step", "seed", "options", "reset_info", "outcome")
    parts = []
    for part in trace:
        if lane in (None, part.lane):
            found = {name: plain(getattr(part, name)) for name in names} | {"annotations": pack(dict(part.annotations))}
            found |= {name: bits(getattr(part, name)) for name in ARRAYS}
            with contextlib.suppress(TraceError):  # no infos
                found["infos"] = plain(part.infos)
            parts.append(found)
    return sorted(parts, key=lambda part: (part["episode_id"], part["first_step"]))


def check_lanes(trace: Any, dead: bool = False) -> Counter[tuple[int, int, int]]:
    """Check a trace of NumberedLaneEnvs with Box spaces and infos; count its steps by (lane, episode, step).

    Args:
        dead: the writer may have died.
    """
    report = check_trace(trace.directory)
    assert (report.damages, [] if dead else report.remarks) == ([], [])
    steps: Counter[tuple[int, int, int]] = Counter()
    for part in trace:
        lane, number = part.lane, int(part.reset_info["began"])
        times = range(part.first_step, part.first_step + len(part) + 1)
        assert bits(part.observations) == bits(
            np.array([observation_of(trace.observation_space, lane, number, t) for t in times])
        )
        assert part.rewards.tolist() == [lane + t / 8 for t in times[1:]]
        assert [int(info["t"]) for info in (part.infos if len(part) else ())] == list(times[1:])
        over, cut = times[-1] == 1 + (2 * lane + number) % 4, number % 3 == 2
        assert part.terminations.tolist() == [False] * (len(part) - 1) + [over and not cut] * (len(part) > 0)
        assert part.truncations.tolist() == [False] * (len(part) - 1) + [over and cut] * (len(part) > 0)
        assert part.outcome in ("truncated" if cut else "terminated", *(() if over else ("cut", "closed", "lost")))
        steps.update((lane, number, t) for t in times[:-1])
    return steps


def record_result(directory: Path, record_infos: bool = False, **values: Any) -> list[Any]:
    """Record one step that returns these values; return the episodes of its lanes."""
    env = TraceRecordingVectorWrapper(FixedResultEnv(**values), directory, record_infos=record_infos)
    env.reset()
    env.step(np.zeros(3, np.int64))
    env.close()
    return list(open_trace(directory))


class FixedResultEnv(vector.VectorEnv):  # type: ignore[type-arg]
    """Return given values at each step, for three lanes."""

    metadata: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, **given: Any):
        self.num_envs = 3
        self.single_observation_space, self.single_action_space = SPACES["box"], spaces.Discrete(2)
        self.observation_space = vector.utils.batch_space(self.single_observation_space, 3)
        self.action_space = vector.utils.batch_space(self.single_action_space, 3)
        flags = np.zeros(3, np.bool_)
        self.result = {
            "obs": np.zeros((3, 2), np.float32),
            "rewards": np.zeros(3),
            "ends": flags,
            "infos": {},
            **given,
        }
        self.steps = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, Any]:
        return np.zeros((3, 2), np.float32), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Any]:
        self.steps += 1
        return (
            self.result["obs"],
            self.result["rewards"],
            self.result["ends"],
            np.zeros(3, np.bool_),
            self.result["infos"],
        )
