"""Objects of other libraries, made from a trace. Each module imports the library it is named for.

gym_trace.adapters.sb3.replay_buffer(trace) needs no import of its own.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = ("d3rlpy", "imitation", "rllib", "sample_factory", "sb3", "torch", "torchrl")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"gym_trace.adapters.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(_MODULES)
