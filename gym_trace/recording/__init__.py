"""Recording: the wrappers, TraceWriter and runs, and what their options take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_trace.on_first_use import on_first_use

if TYPE_CHECKING:
    from gym_trace.envs.make import call_factory
    from gym_trace.envs.states import States
    from gym_trace.recording.collecting.resuming import run_settings
    from gym_trace.recording.compiled import why_pure
    from gym_trace.recording.dead_rings import take_in_rings
    from gym_trace.recording.filters import RewardClasses
    from gym_trace.recording.options import RecordingOptions
    from gym_trace.recording.processes.ray import RayActors
    from gym_trace.recording.processes.safe_start import started_safely
    from gym_trace.recording.publishing.spool import PublishedSpool, publish_spools
    from gym_trace.recording.video_schedules import schedule_of

_HOMES = {
    "PublishedSpool": "gym_trace.recording.publishing.spool",
    "RayActors": "gym_trace.recording.processes.ray",
    "RecordingOptions": "gym_trace.recording.options",
    "RewardClasses": "gym_trace.recording.filters",
    "States": "gym_trace.envs.states",
    "call_factory": "gym_trace.envs.make",
    "publish_spools": "gym_trace.recording.publishing.spool",
    "run_settings": "gym_trace.recording.collecting.resuming",
    "schedule_of": "gym_trace.recording.video_schedules",
    "started_safely": "gym_trace.recording.processes.safe_start",
    "take_in_rings": "gym_trace.recording.dead_rings",
    "why_pure": "gym_trace.recording.compiled",
}

__all__ = [
    "PublishedSpool",
    "RayActors",
    "RecordingOptions",
    "RewardClasses",
    "States",
    "call_factory",
    "publish_spools",
    "run_settings",
    "schedule_of",
    "started_safely",
    "take_in_rings",
    "why_pure",
]

if not TYPE_CHECKING:
    __getattr__ = on_first_use(__name__, _HOMES)
