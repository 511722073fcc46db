"""Record Gymnasium environments to traces, bit for bit, and play them back."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gym_trace import errors
from gym_trace.registration import register_when_loaded

if TYPE_CHECKING:
    from gym_trace.collecting.api import collect
    from gym_trace.diff import diff_traces
    from gym_trace.episode import Episode
    from gym_trace.interop.results import load_results
    from gym_trace.playback import Trace, open_trace, scan_recorded_traces
    from gym_trace.recovery import check_trace, repair_trace
    from gym_trace.replay_env import ReplayEnv
    from gym_trace.rollout import record_episodes
    from gym_trace.statistics import summarize
    from gym_trace.vector_wrappers import TraceRecordingVectorWrapper
    from gym_trace.verification import verify_trace
    from gym_trace.wrappers import TraceRecordingWrapper

__version__ = "0.1.0"

# Loaded when first asked for, so that "gym-trace --help" does not wait for gymnasium.
_HOMES = {
    "Episode": "gym_trace.episode",
    "ReplayEnv": "gym_trace.replay_env",
    "Trace": "gym_trace.playback",
    "TraceRecordingVectorWrapper": "gym_trace.vector_wrappers",
    "TraceRecordingWrapper": "gym_trace.wrappers",
    "check_trace": "gym_trace.recovery",
    "collect": "gym_trace.collecting.api",
    "diff_traces": "gym_trace.diff",
    "load_results": "gym_trace.interop.results",
    "open_trace": "gym_trace.playback",
    "record_episodes": "gym_trace.rollout",
    "repair_trace": "gym_trace.recovery",
    "scan_recorded_traces": "gym_trace.playback",
    "summarize": "gym_trace.statistics",
    "verify_trace": "gym_trace.verification",
}

__all__ = [
    "Episode",
    "ReplayEnv",
    "Trace",
    "TraceRecordingVectorWrapper",
    "TraceRecordingWrapper",
    "check_trace",
    "collect",
    "diff_traces",
    "errors",
    "load_results",
    "open_trace",
    "record_episodes",
    "repair_trace",
    "scan_recorded_traces",
    "summarize",
    "verify_trace",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


register_when_loaded()
