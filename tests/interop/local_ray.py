"""Ray on this machine, for all files that need it: a process has one, which ends with it."""

from __future__ import annotations

import os
from typing import Any

import pytest

_ATTEMPTS = 4  # each of half a minute, which is all that Ray waits for its own processes, however busy the machine is


def start() -> Any:
    """The module ray, running with as few processes as it can do with."""
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # or it kills its workers for the memory of others
    ray = pytest.importorskip("ray")
    for attempt in range(_ATTEMPTS):
        if ray.is_initialized():
            break
        try:
            options = {"num_cpus": 2, "object_store_memory": 200 << 20, "include_dashboard": False}
            ray.init(log_to_driver=False, logging_level="ERROR", **options)
        except Exception as error:
            ray.shutdown()
            if attempt + 1 == _ATTEMPTS or "timed out" not in str(error):
                raise
    pytest.importorskip("ray.data").DataContext.get_current().enable_progress_bars = False
    return ray
