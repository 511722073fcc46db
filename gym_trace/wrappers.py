"""The recording wrappers, TraceRecordingWrapper and TraceRecordingVectorWrapper (which needs gymnasium 1.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_trace.on_first_use import on_first_use
from gym_trace.recording.single.wrapper import TraceRecordingWrapper

if TYPE_CHECKING:
    from gym_trace.recording.vector.wrapper import TraceRecordingVectorWrapper

__all__ = ["TraceRecordingVectorWrapper", "TraceRecordingWrapper"]

if not TYPE_CHECKING:
    __getattr__ = on_first_use(__name__, {"TraceRecordingVectorWrapper": "gym_trace.recording.vector.wrapper"})
