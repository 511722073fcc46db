"""MuJoCo on this machine: OpenGL without a display, and its warnings."""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
from functools import cache, lru_cache
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any

_log = logging.getLogger("gym_trace")
_VARIABLE = "MUJOCO_GL"
_BACKENDS = ("egl", "osmesa")
_OPENGL = re.compile(r"\bgl[A-Z]\w+|OpenGL|\bE?GL\b|OSMesa|GLFW|glfw")  # in the text of an error
# Never imports modules from the current directory.
_PROBE = """
import sys
sys.path = [path for path in sys.path if path]
from importlib import import_module
import_module(f"mujoco.{sys.argv[1]}").GLContext(8, 8).make_current()
"""
_PROBE_TIMEOUT = 60.0  # seconds


def choose_opengl() -> None:
    """Set MUJOCO_GL to a backend that works here, unless it is set or there is a display. Call before rendering."""
    if is_headless() and not os.environ.get(_VARIABLE) and find_spec("mujoco") is not None:
        backend = next(filter(_works, _BACKENDS), None)
        if backend is not None:
            os.environ[_VARIABLE] = backend


def free_contexts() -> None:
    """Free the contexts of environments that are gone. Call before making an environment that may render.

    When Python collects a context, MuJoCo deletes its objects by their numbers, in the context that is current then.
    Frames of an environment that renders at this moment are black from then on.
    """
    if any(f"mujoco.{backend}" in sys.modules for backend in (*_BACKENDS, "glfw")):
        gc.collect()


def log_mujoco_warnings() -> None:
    """Log MuJoCo's warnings, from its import on, unless it has another handler. Call before making an environment.

    By default MuJoCo prints them to stdout and appends them to MUJOCO_LOG.TXT in the current directory.
    """
    mujoco: Any = sys.modules.get("mujoco")
    if mujoco is None:
        if _on_import not in sys.meta_path:
            sys.meta_path.insert(0, _on_import)
    elif hasattr(mujoco, "set_mju_user_warning") and mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(_log_warning)


class _OnImport(MetaPathFinder):
    """Calls log_mujoco_warnings() when MuJoCo is imported: making an environment may import it and cause warnings."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        spec = PathFinder.find_spec(fullname) if fullname == "mujoco" else None
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                log_mujoco_warnings()

            loader.exec_module = exec_module
        return spec


_on_import = _OnImport()


@lru_cache(1000)  # each text once: all environments of a kind give the same warnings
def _log_warning(text: str | bytes) -> None:
    _log.warning("MuJoCo: %s", text.decode(errors="replace") if isinstance(text, bytes) else text)


def opengl_hint(error: Exception) -> str:
    """Return a hint how to make MuJoCo render here, to append to an error; "" if the error has another cause."""
    if not is_headless() or not _OPENGL.search(str(error)):
        return ""
    chosen = os.environ.get(_VARIABLE)
    now = f"{_VARIABLE}={chosen} does not work here" if chosen else "there is neither a display nor EGL nor OSMesa"
    return f"; {now}: install libegl1 and set {_VARIABLE}=egl, or install libosmesa6 and set {_VARIABLE}=osmesa"


def is_headless() -> bool:
    """Return True on Linux without a display."""
    return sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


@cache
def _works(backend: str) -> bool:
    """Try a backend in a new process: a failure could not be undone in this one."""
    command = [sys.executable, "-c", _PROBE, backend]
    try:
        tried = subprocess.run(
            command,
            env={**os.environ, _VARIABLE: backend},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0
