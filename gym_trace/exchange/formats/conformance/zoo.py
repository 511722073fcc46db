"""Small traces of every kind, recorded from scripted environments."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from gym_trace.format.facts import write_facts
from gym_trace.recording.single.wrapper import TraceRecordingWrapper
from gym_trace.storage.local import LocalStorage


class Script(NamedTuple):
    """A planned episode. end: "terminated", "truncated", "both", or "" for an incomplete one."""

    steps: int
    end: str
    seed: int | None = None
    options: dict[str, Any] | None = None


_SCRIPTS = (
    Script(9, "terminated", 0),
    Script(12, "truncated", 1),
    Script(1, "terminated"),
    Script(7, "", 3),
    Script(20, "terminated", 4),
    Script(5, ""),
)
_BOX32 = spaces.Box(-np.inf, np.inf, (4,), np.float32)
_DISCRETE = spaces.Discrete(3)
_DICT = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (16, 12, 3), np.uint8),
        "arm": spaces.Dict({"angles": _BOX32, "grip": spaces.MultiBinary(3)}),
        "rest": spaces.Tuple((spaces.Box(-1, 1, (2, 2), np.float64), spaces.Discrete(4))),
    }
)
_TEXT = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (7, 7, 3), np.uint8),
        "direction": spaces.Discrete(4),
        "mission": spaces.Text(12, charset="aé €\U0001f600,'\"\n"),
    }
)


class _Scripted(gymnasium.Env[Any, Any]):
    """An environment of random observations and rewards. flags: (terminated, truncated) of the next step."""

    def __init__(self, observation_space: Any, action_space: Any, rewards: tuple[int, ...] = ()):
        self.observation_space, self.action_space = observation_space, action_space
        self.flags = (False, False)
        self._random = np.random.default_rng(0)
        self._rewards = rewards
        observation_space.seed(1)
        action_space.seed(2)

    def _reward(self) -> Any:
        return self._random.normal(size=self._rewards) if self._rewards else float(self._random.normal())

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {"at": "reset", "level": 3}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        info = {"speed": float(self._random.normal()), "place": self._random.normal(size=2), "lives": 3}
        return self.observation_space.sample(), self._reward(), *self.flags, info


def _record(
    env: _Scripted,
    directory: Path,
    scripts: tuple[Script, ...] = _SCRIPTS,
    annotates: bool = False,
    flags_within: bool = False,
    killed: Path | None = None,
    **options: Any,
) -> None:
    """Record scripted episodes. killed: directory for the trace of a process that was killed in the last episode."""
    recorder = TraceRecordingWrapper(env, directory, **options)
    for script in scripts:
        recorder.reset(seed=script.seed, options=script.options)
        for step in range(script.steps):
            is_last = step == script.steps - 1
            terminated, truncated = (is_last and script.end in (end, "both") for end in ("terminated", "truncated"))
            env.flags = (True, False) if flags_within and step == 1 else (terminated, truncated)
            if annotates:
                recorder.annotate(value=np.float32(step) / 3, logits=np.arange(2.0) + step)
            recorder.step(env.action_space.sample())
    if killed is not None:
        shutil.copytree(directory, killed)
    recorder.close()


def _recorded(observation_space: Any, action_space: Any = _DISCRETE, **options: Any) -> Callable[[Path], None]:
    return lambda directory: _record(_Scripted(observation_space, action_space), directory, **options)


def _record_ends(directory: Path) -> None:
    """Record incomplete episodes, one without steps, and one whose recorder was killed."""
    scripts = (Script(4, "terminated"), Script(3, ""), Script(0, ""), Script(3, "both"), Script(6, "", 5))
    with tempfile.TemporaryDirectory() as temporary:
        env = _Scripted(_BOX32, spaces.Box(-1, 1, (2,), np.float32))
        _record(env, Path(temporary) / "whole", scripts, killed=directory)


def _record_seeds(directory: Path) -> None:
    seeds = (0, 2**31, 2**63 - 1, 2**63, 2**64 + 5, None)
    scripts = tuple(Script(3, "terminated", s, {"level": i, "of": [i, "x"]}) for i, s in enumerate(seeds))
    _record(_Scripted(_BOX32, _DISCRETE), directory, scripts)


def _record_infos(directory: Path) -> None:
    _record(_Scripted(_BOX32, _DISCRETE), directory, annotates=True, record_infos=True, metadata={"policy": "random"})
    facts = {"author": "A. Person", "description": "a trace of the conformance tests", "tags": ["a", "b"]}
    write_facts(LocalStorage(directory), facts)


def _record_odd_numbers(directory: Path) -> None:
    """Record observations of float64 in a float32 space, with NaN, infinities and -0.0."""

    class Odd(_Scripted):
        def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
            _, reward, terminated, truncated, info = super().step(action)
            numbers = self._random.normal(size=4)
            numbers[self._random.integers(4)] = self._random.choice([np.nan, np.inf, -np.inf, -0.0, 1e300])
            return numbers, reward, terminated, truncated, info

        def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
            return super().reset(**options)[0].astype(np.float64), {}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _record(Odd(_BOX32, _DISCRETE), directory)


_ZOO: dict[str, Callable[[Path], None]] = {
    "vectors": _recorded(_BOX32),
    "float64": _recorded(spaces.Box(-np.inf, np.inf, (3,), np.float64), spaces.Box(-1, 1, (2,), np.float32)),
    "pixels": _recorded(spaces.Box(0, 255, (24, 20, 3), np.uint8)),
    "dict": _recorded(_DICT, spaces.Dict({"turn": spaces.Box(-1, 1, (1,), np.float32), "press": spaces.Discrete(2)})),
    "tuple": _recorded(spaces.Tuple((spaces.Discrete(32), spaces.Discrete(11), spaces.Discrete(2)))),
    "text": _recorded(_TEXT),
    "integers": _recorded(spaces.Discrete(500), spaces.Discrete(5, start=-2)),
    "several-integers": _recorded(spaces.MultiDiscrete([5, 9]), spaces.MultiDiscrete([3, 4])),
    "one-episode": _recorded(_BOX32, scripts=(Script(6, "terminated"),)),
    "long": _recorded(
        spaces.Box(-1, 1, (2,), np.float32), scripts=(Script(40_000, "truncated", 0), Script(5, "terminated"))
    ),
    "ends": _record_ends,
    "flags-within": _recorded(_BOX32, flags_within=True),
    "parts": _recorded(_BOX32, frame_filter=lambda step: step % 6 > 1),
    "seeds": _record_seeds,
    "infos": _record_infos,
    "several-rewards": lambda directory: _record(_Scripted(_BOX32, _DISCRETE, (2,)), directory),
    "odd-numbers": _record_odd_numbers,
}


def make_zoo(directory: Path, only: Collection[str] = ()) -> dict[str, Path]:
    """Record one trace of each kind into a subdirectory, and return these by name. only: names; empty: all."""
    for name in only or _ZOO:
        _ZOO[name](directory / name)
    return {name: directory / name for name in only or _ZOO}
