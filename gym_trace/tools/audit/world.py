"""The world that the environments of a process share: global random generators, and the clock."""

from __future__ import annotations

import random
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np

_SECONDS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_BASES = ("gymnasium", "gym_trace", "numpy", "abc", "typing", "builtins")  # no module of these reads a clock in step()
_BEGIN, _TICK = 1_700_000_000.0, 1e-3  # a held clock: seconds at a reset, and seconds that each reading adds
_LATER, _LEAP = 12_345.678, 1.7  # the same of another clock


class Mode(Enum):
    """The world as it is; held equal in each episode; or equal except for one of its parts."""

    NATURAL = "natural"
    HELD = "held"
    OTHER_RANDOM = "other random"
    OTHER_CLOCK = "other clock"


class World:
    """Global random generators, and the clock that modules of an environment see."""

    def __init__(self) -> None:
        self._mode, self._reads, self._seeds = Mode.HELD, 0, 0

    def begin(self, mode: Mode) -> None:
        """Prepare for a reset."""
        self._mode, self._reads = mode, 0
        self._seeds += 1
        _seed_globals(0 if mode in (Mode.HELD, Mode.OTHER_CLOCK) else self._seeds)

    def proceed(self) -> None:
        """Prepare for a step."""
        if self._mode is Mode.OTHER_RANDOM:
            self._seeds += 1
            _seed_globals(self._seeds)

    def _seconds(self, name: str) -> float:
        if self._mode is Mode.NATURAL:
            return float(getattr(time, name)())
        self._reads += 1
        return _BEGIN + (_LATER + _LEAP * self._reads if self._mode is Mode.OTHER_CLOCK else _TICK * self._reads)

    @contextmanager
    def around(self, env: Any) -> Iterator[None]:
        """Show this clock to the modules of an environment; restore them and the global generators at the end."""
        replaced = list(self._replaced(env))
        try:
            with self.aside():
                yield
        finally:
            for names, name, value in replaced:
                names[name] = value

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Restore the global generators and the clock at the end of the block."""
        states = self._reads, random.getstate(), np.random.get_state()
        torch = sys.modules.get("torch")
        torch_state = None if torch is None else torch.get_rng_state()
        try:
            yield
        finally:
            self._reads = states[0]
            random.setstate(states[1])
            np.random.set_state(states[2])
            if torch is not None:
                torch.set_rng_state(torch_state)

    def _replaced(self, env: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
        functions = {name: self._reading(name) for name in _SECONDS}
        functions |= {f"{name}_ns": self._reading(name, 10**9) for name in _SECONDS}
        shown = types.ModuleType("time")
        vars(shown).update({**vars(time), **functions})
        stand_ins = {id(time): shown} | {id(getattr(time, name)): function for name, function in functions.items()}
        for module in _all_modules_of(env):
            names = vars(module)
            for name, value in list(names.items()):
                if id(value) in stand_ins:
                    names[name] = stand_ins[id(value)]
                    yield names, name, value

    def _reading(self, name: str, units: int = 0) -> Any:
        return lambda: int(self._seconds(name) * units) if units else self._seconds(name)


def _seed_globals(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def modules_of(env: Any) -> list[str]:
    """Return the names of the modules that define an environment and its wrappers, without those of Gymnasium."""
    layers = [env]
    for layer in layers:
        inner = (vars(layer).get(name) for name in ("env", "viewed", "inner"))
        layers += [each for each in inner if each is not None]
    homes = dict.fromkeys(kind.__module__ for layer in layers for kind in type(layer).__mro__)
    ours = ("gymnasium.envs.",)
    return [name for name in homes if name.partition(".")[0] not in _BASES or name.startswith(ours)]


def _all_modules_of(env: Any) -> list[types.ModuleType]:
    """Return the loaded modules that may read a clock for an environment: those of its packages."""
    homes = modules_of(env)
    roots = {name.partition(".")[0] for name in homes} - {*_BASES}
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType) and (name.partition(".")[0] in roots or name in homes)
    ]
