"""What all tests share: hypothesis profiles, and a process that never opens a window."""

from __future__ import annotations

import os
import signal

import hypothesis

collect_ignore = ["strangers"]  # make strangers has environments of its own for these

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")

_QUIET = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
hypothesis.settings.register_profile(
    "ci", max_examples=40, derandomize=True, deadline=None, database=None, suppress_health_check=_QUIET
)
# HYPOTHESIS_PROFILE=hunt looks for new failures; the default tells the same story at every run.
hypothesis.settings.register_profile(
    "hunt", max_examples=400, deadline=None, suppress_health_check=_QUIET, print_blob=True
)
# Whoever runs us in the background may have had us ignore Ctrl-C, and so would all that we start.
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
