"""The recording wrappers, TraceRecordingWrapper and TraceRecordingVectorWrapper (which needs gymnasium 1.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gym_trace.recording.single.wrapper import TraceRecordingWrapper

if TYPE_CHECKING:
    from gym_trace.recording.vector.wrapper import TraceRecordingVectorWrapper

__all__ = ["TraceRecordingVectorWrapper", "TraceRecordingWrapper"]


def __getattr__(name: str) -> Any:
    if name == "TraceRecordingVectorWrapper":
        import gym_trace.recording.vector.wrapper

        return gym_trace.recording.vector.wrapper.TraceRecordingVectorWrapper
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
