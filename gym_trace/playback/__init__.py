"""Reading traces: open_trace, Trace, and scan_recorded_traces as in gym_recording."""

from __future__ import annotations

from gym_trace.data.episode import Episode
from gym_trace.playback.trace import Trace, open_trace, scan_recorded_traces

__all__ = ["Episode", "Trace", "open_trace", "scan_recorded_traces"]
