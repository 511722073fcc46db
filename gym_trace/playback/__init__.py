"""Reading traces: open_trace, Trace, and scan_recorded_traces as in gym_recording; conditions on episodes."""

from __future__ import annotations

from gym_trace.data.episode import Episode
from gym_trace.data.selecting.columns import NoSuchKey
from gym_trace.data.selecting.language import check_condition, check_order
from gym_trace.playback.episode_columns import COLUMNS as EPISODE_COLUMNS
from gym_trace.playback.trace import Trace, open_trace, scan_recorded_traces

__all__ = [
    "EPISODE_COLUMNS",
    "Episode",
    "NoSuchKey",
    "Trace",
    "check_condition",
    "check_order",
    "open_trace",
    "scan_recorded_traces",
]
