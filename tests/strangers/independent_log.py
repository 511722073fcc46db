"""An independent log, kept by wrappers around the recorder, to compare with its trace.

The wrappers deep-copy the results of reset and step and split them by lane and episode in the simplest way. Each value
must match the trace bit for bit, with its dtype and shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import vector

from gym_trace import TraceRecordingVectorWrapper, TraceRecordingWrapper, check_trace, open_trace, verify_trace
from gym_trace.data.values import Unstored

FINALS = ("final_obs", "final_info")


# -- the log ----------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """An episode of a lane, as its caller saw it."""

    lane: int
    observations: list[Any]
    reset_info: Any
    seed: int | None
    steps: list[tuple[Any, Any, Any, Any, Any]] = field(default_factory=list)  # action, reward, two flags, info

    @property
    def over(self) -> bool:
        return bool(self.steps) and bool(self.steps[-1][2] or self.steps[-1][3])


class Log:
    """Episodes of all lanes, in order per lane."""

    def __init__(self) -> None:
        self.told: list[Result] = []
        self._current: dict[int, Result] = {}
        self.broken: set[int] = set()  # ids of episodes in which reset or step raised

    def began(self, lane: int, observation: Any, info: Any, seed: int | None) -> None:
        self._current[lane] = episode = Result(lane, [observation], info, seed)
        self.told.append(episode)

    def stepped(self, lane: int, action: Any, observation: Any, reward: Any, ends: tuple[Any, Any], info: Any) -> None:
        episode = self._current.get(lane)
        if episode is not None and episode.over:  # steps after the end are not compared
            self.broken.add(id(episode))
        elif episode is not None:
            episode.observations.append(observation)
            episode.steps.append((action, reward, *ends, info))

    def is_over(self, lane: int) -> bool:
        return lane in self._current and self._current[lane].over

    def lose(self) -> None:
        """Mark open episodes as broken: reset or step raised, so the state of the lanes is unknown."""
        self.broken |= {id(episode) for episode in self._current.values()}
        self._current.clear()

    @property
    def steps(self) -> int:
        return sum(len(episode.steps) for episode in self.told)


def of_lane(infos: Any, lane: int, count: int) -> Any:
    """Return the info of one lane, as Gymnasium documents it: a masked key belongs to the lanes in its mask."""
    if isinstance(infos, (list, tuple)):
        return {key: value for key, value in infos[lane].items() if key not in FINALS}
    own = {}
    for key, value in infos.items():
        mask_of = key[1:] if isinstance(key, str) and key.startswith("_") else None
        if mask_of in infos or key in FINALS:
            continue
        mask = infos.get(f"_{key}")
        if mask is not None and not mask[lane]:
            continue
        if isinstance(value, Mapping):
            own[key] = of_lane(value, lane, count)
        else:
            own[key] = value[lane] if hasattr(value, "__getitem__") and has_rows(value, count) else value
    return own


def has_rows(value: Any, count: int) -> bool:
    try:
        return not isinstance(value, (str, bytes)) and len(value) == count
    except TypeError:
        return False


class LoggingWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Keep the log of a single environment."""

    def __init__(self, env: gymnasium.Env[Any, Any]):
        super().__init__(env)
        self.log = Log()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result = self.env.reset(seed=seed, options=options)
        self.log.began(0, *deepcopy(result), seed)
        return result

    def step(self, action: Any) -> Any:
        given = deepcopy(action)
        result = self.env.step(action)
        observation, reward, terminated, truncated, info = deepcopy(result)
        self.log.stepped(0, given, observation, reward, (terminated, truncated), info)
        return result


class VectorLog(Log):
    """The log of a vector environment, filled from whole batches."""

    def __init__(self, envs: Any):
        super().__init__()
        self.count = envs.num_envs
        names = ("observation_space", "action_space")  # SuperSuit uses these names for the spaces of a lane
        self.spaces = tuple(getattr(envs, f"single_{name}", getattr(envs, name, None)) for name in names)
        mode = (getattr(envs, "metadata", None) or {}).get("autoreset_mode", "NextStep")
        self.mode = str(getattr(mode, "value", mode))
        kinds = (vector.SyncVectorEnv, vector.AsyncVectorEnv)
        self.seed_step = int(isinstance(getattr(envs, "unwrapped", None), kinds))  # others use one seed for all lanes

    def _lanes(self, space: Any, batch: Any) -> list[Any]:
        return rows_of_batch(space, batch, self.count)

    def reset(self, result: Any, seed: Any, options: Any) -> None:
        observations, infos = deepcopy(result)
        mask = None if options is None else options.get("reset_mask")
        if seed is None or isinstance(seed, int):
            seed = [None if seed is None else seed + lane * self.seed_step for lane in range(self.count)]
        told = infos.get("env_id") if isinstance(infos, Mapping) else None  # EnvPool: the lane of each row
        lanes = list(range(self.count)) if told is None else told.tolist()
        rows = rows_of_batch(self.spaces[0], observations, len(lanes))
        for lane in range(self.count) if mask is None else np.flatnonzero(mask).tolist():
            place = lanes.index(lane)
            self.began(lane, rows[place], of_lane(infos, place, len(lanes)), seed[lane])

    def step(self, actions: Any, result: Any) -> None:
        observations, rewards, terminations, truncations, infos = deepcopy(result)
        rows, acted = self._lanes(self.spaces[0], observations), self._lanes(self.spaces[1], actions)
        for lane in range(self.count):
            info = of_lane(infos, lane, self.count)
            if self.mode == "NextStep" and self.is_over(lane):
                self.began(lane, rows[lane], info, None)
                continue
            ends = bool(terminations[lane]), bool(truncations[lane])
            if self.mode == "SameStep" and any(ends):
                final, final_info = self._final(infos, lane)
                self.stepped(lane, acted[lane], final, rewards[lane], ends, final_info)
                self.began(lane, rows[lane], info, None)
            else:
                self.stepped(lane, acted[lane], rows[lane], rewards[lane], ends, info)

    def _final(self, infos: Any, lane: int) -> tuple[Any, Any]:
        """Return the last observation and info of a lane reset in the same step; ALE has one info for both."""
        if isinstance(infos, (list, tuple)):
            return infos[lane]["final_obs"], infos[lane].get("final_info", {})
        finals, info = infos["final_obs"], of_lane(infos.get("final_info", infos), lane, self.count)
        is_array = isinstance(finals, np.ndarray) and finals.dtype == object
        return (finals if is_array else self._lanes(self.spaces[0], finals))[lane], info


class LoggingVectorWrapper(vector.VectorWrapper):
    """Keep the log of a vector environment."""

    def __init__(self, envs: Any):
        super().__init__(envs)
        self.log = VectorLog(envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        given = deepcopy(options)
        result = self.env.reset(seed=seed, options=options)
        self.log.reset(result, seed, given)
        return result

    def step(self, actions: Any) -> Any:
        given = deepcopy(actions)
        result = self.env.step(actions)
        self.log.step(given, result)
        return result


def rows_of_batch(space: Any, batch: Any, count: int) -> list[Any]:
    """Split a batch into one value per lane. space: of one lane."""
    if isinstance(space, gymnasium.spaces.Dict) and isinstance(batch, Mapping):
        columns = {key: rows_of_batch(space.spaces.get(key), part, count) for key, part in batch.items()}
        return [{key: column[lane] for key, column in columns.items()} for lane in range(count)]
    if isinstance(space, gymnasium.spaces.Tuple) and isinstance(batch, tuple) and len(batch) == len(space.spaces):
        parts = [rows_of_batch(child, part, count) for child, part in zip(space.spaces, batch)]
        return [tuple(part[lane] for part in parts) for lane in range(count)]
    return [batch[lane] for lane in range(count)]


# -- comparing --------------------------------------------------------------------------------------------------------


def exact(value: Any) -> Any:
    """Convert a value to a form that is equal only for the same structure, dtypes, shapes and bits.

    Tensors and lazy frames become arrays, IntEnum members integers, plain numbers NumPy scalars. Lists equal
    tuples, and all kinds of mappings are equal.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, Mapping):
        return "map", frozenset((exact(key), exact(item)) for key, item in value.items())
    if hasattr(value, "_fields") or type(value) in (list, tuple):
        return "list", tuple(map(exact, value))
    if isinstance(value, int) and not isinstance(value, bool):
        value = int(value)
        value = np.asarray(value) if -(1 << 63) <= value < 1 << 63 else value
    elif isinstance(value, (bool, float)) or (hasattr(value, "__array__") and not isinstance(value, np.generic)):
        value = np.asarray(value)
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype == object:
            return "objects", value.shape, tuple(map(exact, np.asarray(value).ravel()))
        little = value.astype(value.dtype.newbyteorder("<"))
        return "array", little.dtype.str, little.shape, little.tobytes()
    return type(value).__name__, value if isinstance(value, (str, bytes, int, type(None))) else repr(value)


def first_difference(said: Any, kept: Any, place: str, kept_by_repr: list[str]) -> str | None:
    """Describe where a logged and a recorded value differ, or return None. Values kept by repr count as equal."""
    if isinstance(kept, Unstored):
        kept_by_repr.append(kept.class_name)
        plain = (bool, int, float, str, bytes, type(None), np.generic)
        return f"{place}: {said!r:.200} was kept by its repr" if isinstance(said, plain) else None
    if isinstance(said, Mapping) and isinstance(kept, Mapping):
        if {exact(key) for key in said} != {exact(key) for key in kept}:
            return f"{place}: keys {sorted(map(str, said))} came back as {sorted(map(str, kept))}"
        found = (first_difference(said[key], kept[key], f"{place}[{key!r}]", kept_by_repr) for key in said)
        return next(filter(None, found), None)
    if type(said) in (list, tuple) and type(kept) in (list, tuple) and len(said) == len(kept):
        parts = enumerate(zip(said, kept))
        found = (first_difference(one, other, f"{place}[{i}]", kept_by_repr) for i, (one, other) in parts)
        return next(filter(None, found), None)
    if exact(said) == exact(kept):
        return None
    return f"{place}: {said!r:.200} ({kind(said)}) came back as {kept!r:.200} ({kind(kept)})"


def kind(value: Any) -> str:
    return f"{type(value).__name__} {getattr(value, 'dtype', '')}".strip()


def row(columns: Any, i: int) -> Any:
    """Return row i of an episode's observations or actions."""
    if isinstance(columns, Mapping):
        return {key: row(column, i) for key, column in columns.items()}
    return tuple(row(column, i) for column in columns) if isinstance(columns, tuple) else columns[i]


def reward_matches(said: Any, kept: Any) -> bool:
    """Return True if rewards match; floats and integers may be stored as float64 if that is exact."""
    if exact(said) == exact(kept):
        return True
    said = np.asarray(said.detach().cpu() if hasattr(said, "detach") else said)
    kept = np.asarray(kept)
    return said.shape == kept.shape and kept.dtype == np.float64 and said.astype(np.float64).tobytes() == kept.tobytes()


@dataclass
class Comparison:
    """Result of comparing a log with a trace."""

    episodes: int = 0
    steps: int = 0
    kept_by_repr: list[str] = field(default_factory=list)


def compare(log: Log, directory: Path, infos: bool = True) -> Comparison:
    """Compare a log with a trace. Raises AssertionError at the first difference."""
    trace, result = open_trace(directory), Comparison()
    report = check_trace(directory)
    assert (report.damages, report.remarks) == ([], [])
    lanes: dict[int, list[Any]] = {}
    for episode in sorted(trace, key=lambda one: (one.episode_id, one.first_step)):
        lanes.setdefault(episode.lane, []).append(episode)
    told: dict[int, list[Result]] = {}
    for episode in log.told:
        told.setdefault(episode.lane, []).append(episode)
    for lane, said in told.items():
        kept = lanes.pop(lane, [])
        if log.broken:  # compare only up to the first error
            end = next((i for i, episode in enumerate(said) if id(episode) in log.broken), len(said))
            said, kept = said[:end], kept[:end]
        assert len(kept) == len(said), f"lane {lane}: {len(said)} episodes, recorded {len(kept)}"
        for number, (one, other) in enumerate(zip(said, kept)):
            place = f"lane {lane}, episode {number}"
            assert len(other) == len(one.steps), f"{place}: {len(one.steps)} steps, recorded {len(other)}"
            difference = next(filter(None, _differences(one, other, infos, result.kept_by_repr)), None)
            assert difference is None, f"{place}, {difference}"
            result.episodes += 1
            result.steps += len(one.steps)
    assert not lanes, f"recorded lanes without a log: {sorted(lanes)}"
    return result


def _differences(told: Result, episode: Any, infos: bool, kept_by_repr: list[str]) -> Any:
    observations, actions = episode.observations, episode.actions
    for i, said in enumerate(told.observations):
        yield first_difference(said, row(observations, i), f"observation {i}", kept_by_repr)
    for i, (action, reward, terminated, truncated, info) in enumerate(told.steps):
        yield first_difference(action, row(actions, i), f"action {i}", kept_by_repr)
        if not reward_matches(reward, episode.rewards[i]):
            kept = episode.rewards[i]
            yield f"reward {i}: {reward!r} ({kind(reward)}) came back as {kept!r} ({kind(kept)})"
        flags = bool(episode.terminations[i]), bool(episode.truncations[i])
        if flags != (bool(terminated), bool(truncated)):
            yield f"flags {i}: {(terminated, truncated)} came back as {flags}"
        if infos:
            yield first_difference(info, episode.infos[i], f"info {i}", kept_by_repr)
    if infos:
        yield first_difference(told.reset_info, episode.reset_info, "info of the reset", kept_by_repr)
    if told.seed != episode.seed:
        yield f"seed {told.seed} came back as {episode.seed}"
    outcome = "terminated" if told.over and told.steps[-1][2] else "truncated"
    if told.over and episode.outcome != outcome:
        yield f"outcome {outcome} came back as {episode.outcome}"


# -- helpers of tests -------------------------------------------------------------------------------------------------

Make = Callable[[], Any]


def verify(directory: Path, make: Make | None, **options: Any) -> None:
    """Assert that every replayed episode is identical."""
    verdicts = list(verify_trace(directory, make_env=make, **options))
    assert verdicts
    bad = [verdict for verdict in verdicts if verdict.verdict != "identical"]
    assert not bad, f"{len(bad)} of {len(verdicts)}: {bad[0]}"


def record_single(
    make: Make, directory: Path, steps: int = 120, act: Callable[[Any, Any], Any] | None = None
) -> Comparison:
    """Record an environment: two seeded episodes, then unseeded ones, with one reset within an episode."""
    env = LoggingWrapper(TraceRecordingWrapper(make(), directory, record_infos=True))
    env.action_space.seed(7)
    observation, over, episodes = None, True, 0
    for step in range(steps):
        if over or step == steps // 2:
            observation, _ = env.reset(seed=episodes + 10 if episodes < 2 else None)
            episodes += 1
        action = env.action_space.sample() if act is None else act(env, observation)
        observation, _, terminated, truncated, _ = env.step(action)
        over = terminated or truncated
    env.close()
    return compare(env.log, directory)


def record_vector(make: Make, directory: Path, steps: int = 120, act: Callable[[Any], Any] | None = None) -> Comparison:
    """Record a vector environment; without autoreset, lanes are reset by mask."""
    env = LoggingVectorWrapper(TraceRecordingVectorWrapper(make(), directory, record_infos=True))
    env.action_space.seed(7)
    env.reset(seed=11)
    for _ in range(steps):
        _, _, terminations, truncations, _ = env.step(env.action_space.sample() if act is None else act(env))
        over = np.asarray(terminations) | np.asarray(truncations)
        if env.log.mode == "Disabled" and over.any():
            env.reset(options={"reset_mask": over})
    env.close()
    return compare(env.log, directory)
