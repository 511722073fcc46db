"""Proofs of training: what was learned, from which steps, by which policy.

UpdateLog and verify need PyTorch and safetensors, which are imported when such a name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gym_trace.errors import MissingExtra
from gym_trace.proof.result import Proof

if TYPE_CHECKING:
    from gym_trace.proof.steps import Steps
    from gym_trace.proof.update_log import UpdateLog
    from gym_trace.proof.verifying import verify

_HOMES = {
    "Steps": "gym_trace.proof.steps",
    "UpdateLog": "gym_trace.proof.update_log",
    "verify": "gym_trace.proof.verifying",
}

__all__ = ["Proof", "Steps", "UpdateLog", "verify"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as missing:
        if str(missing.name).partition(".")[0] not in ("torch", "safetensors"):
            raise
        raise MissingExtra(f"proofs need PyTorch ({missing}): pip install 'gym-trace[train]'") from missing
    globals()[name] = value
    return value
