"""Reasons why the compiled modules are not used. Importing this does not load NumPy."""

from __future__ import annotations

import importlib.util
import os
import platform
import sysconfig

_MODULES = ("gym_trace.recording._core", "gym_trace.format._kernels")


def why_pure() -> str | None:
    """Return why this process records and reads in pure Python; None if it uses the C core.

    Examples:
        >>> reason = gym_trace.recording.why_pure()  # None: the compiled core is used
        >>> reason is None or isinstance(reason, str)
        True
    """
    if os.environ.get("GYM_TRACE_PURE", "0") not in ("", "0"):
        return "GYM_TRACE_PURE is set"
    if all(map(importlib.util.find_spec, _MODULES)):
        from gym_trace.format import kernels
        from gym_trace.recording import core

        is_used = kernels.COMPILED and core.CORE == "compiled"
        return None if is_used else "compiled for another version; install gym-trace again"
    if platform.python_implementation() != "CPython":
        return platform.python_implementation()
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "free-threaded CPython"
    return "not compiled at installation; pip install -v shows why"
