"""Proofs of training: what was learned, from which steps, by which policy.

UpdateLog and verify need PyTorch and safetensors, imported on first use of either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_trace.on_first_use import on_first_use
from gym_trace.training.proof.result import Proof

if TYPE_CHECKING:
    from gym_trace.training.proof.anchors import write_anchor
    from gym_trace.training.proof.steps import Steps
    from gym_trace.training.proof.update_log import UpdateLog
    from gym_trace.training.proof.verifying import verify

_HOMES = {
    "Steps": "gym_trace.training.proof.steps",
    "UpdateLog": "gym_trace.training.proof.update_log",
    "verify": "gym_trace.training.proof.verifying",
    "write_anchor": "gym_trace.training.proof.anchors",
}

__all__ = ["Proof", "Steps", "UpdateLog", "verify", "write_anchor"]

if not TYPE_CHECKING:
    __getattr__ = on_first_use(__name__, _HOMES)
