"""Training with asynchronous PPO. The trace has all experience, so the weights can be reproduced from it.

Needs PyTorch and safetensors, except Run; they are imported when a name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gym_trace.errors import MissingExtra

if TYPE_CHECKING:
    from gym_trace.training.api import train
    from gym_trace.training.driver import Trained
    from gym_trace.training.learnt import RunPolicies
    from gym_trace.training.population import Exchange
    from gym_trace.training.proving import verify_run
    from gym_trace.training.run import Run
    from gym_trace.training.settings import Settings

_HOMES = {
    "Exchange": "gym_trace.training.population",
    "Run": "gym_trace.training.run",
    "RunPolicies": "gym_trace.training.learnt",
    "Settings": "gym_trace.training.settings",
    "Trained": "gym_trace.training.driver",
    "train": "gym_trace.training.api",
    "verify_run": "gym_trace.training.proving",
}
_TAKEN = ("torch", "safetensors")

__all__ = ["Exchange", "Run", "RunPolicies", "Settings", "Trained", "train", "verify_run"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as missing:
        if str(missing.name).partition(".")[0] not in _TAKEN:
            raise
        raise MissingExtra(f"training needs PyTorch ({missing}): pip install 'gym-trace[train]'") from missing
    globals()[name] = value
    return value
