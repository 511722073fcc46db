"""Replay episodes in their environments, in a window or your own viewer; list versions that differ."""

from __future__ import annotations

from gym_trace.data.showing.pictures import as_picture
from gym_trace.tools.playing.continued import Continued
from gym_trace.tools.replay.making import Making
from gym_trace.tools.replay.verify import differing_versions, played_in_registered
from gym_trace.tools.video.frames import StepCaptions, Viewer, observes_pictures, view_observed, view_rendered
from gym_trace.tools.video.simulate import play_for_humans

__all__ = [
    "Continued",
    "Making",
    "StepCaptions",
    "Viewer",
    "as_picture",
    "differing_versions",
    "observes_pictures",
    "play_for_humans",
    "played_in_registered",
    "view_observed",
    "view_rendered",
]
