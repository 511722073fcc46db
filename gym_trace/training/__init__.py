"""Training with asynchronous PPO. The trace has all experience, so the weights can be reproduced from it.

Needs PyTorch and safetensors, except Run; they are imported when a name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_trace.on_first_use import on_first_use

if TYPE_CHECKING:
    from gym_trace.training.api import train
    from gym_trace.training.driver import Trained
    from gym_trace.training.population import Exchange
    from gym_trace.training.proving import verify_run
    from gym_trace.training.run import Run, described_environment, needs_trust, runs_in
    from gym_trace.training.settings import Settings, settings_from
    from gym_trace.training.versions import RunPolicies

_HOMES = {
    "Exchange": "gym_trace.training.population",
    "Run": "gym_trace.training.run",
    "RunPolicies": "gym_trace.training.versions",
    "Settings": "gym_trace.training.settings",
    "Trained": "gym_trace.training.driver",
    "described_environment": "gym_trace.training.run",
    "needs_trust": "gym_trace.training.run",
    "runs_in": "gym_trace.training.run",
    "settings_from": "gym_trace.training.settings",
    "train": "gym_trace.training.api",
    "verify_run": "gym_trace.training.proving",
}

__all__ = [
    "Exchange",
    "Run",
    "RunPolicies",
    "Settings",
    "Trained",
    "described_environment",
    "needs_trust",
    "runs_in",
    "settings_from",
    "train",
    "verify_run",
]

if not TYPE_CHECKING:
    __getattr__ = on_first_use(__name__, _HOMES)
