"""Where a trace comes from: which command, policy and commit, and nothing that its user would not publish unasked."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import gym_trace

_DIFF_BYTES = 1 << 20  # of uncommitted changes that are kept
_GIT_SECONDS = 2.0  # that recording waits for git, of a large repository on a slow disk, say
_DIFF_SECONDS = 20.0  # where somebody asked for the diff
_known: ContextVar[dict[str, Any] | None] = ContextVar("provenance", default=None)


def current() -> dict[str, Any]:
    """What is to be written into the traces that are begun here: if nobody said anything else, the script's name."""
    known = _known.get()
    return dict(_of_this_process() if known is None else known)


@lru_cache(maxsize=1)
def _of_this_process() -> dict[str, Any]:
    """Found out once: the code that a process runs is what it has loaded, and not what is committed later."""
    return provenance_of(script_name())


@contextlib.contextmanager
def recorded_by(provenance: dict[str, Any] | None) -> Iterator[None]:
    """Has traces that are begun within it say so."""
    token = _known.set(provenance)
    try:
        yield
    finally:
        _known.reset(token)


def provenance_of(command: str, policy: str | None = None, argv: bool = False, diff: bool = False) -> dict[str, Any]:
    """command (its name), policy (its name, if known), gym_trace (version), and of the git repository that the current
    directory is in, if it is in one, commit and dirty: whether files that it knows were changed since.

    argv: as it is, on demand. diff: likewise the uncommitted changes, and diff_is_whole: whether these are all.
    """
    found: dict[str, Any] = {"command": command, "policy": policy, "gym_trace": gym_trace.__version__, **_commit()}
    if policy is None:
        del found["policy"]
    if argv:
        found["argv"] = list(map(str, sys.argv))
    return found | (_diff() if diff else {})


def script_name() -> str:
    """What this process runs, without its directory: train.py, or the name of a module that was run with -m."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    module = getattr(spec, "name", None)
    if isinstance(module, str):
        return module.removesuffix(".__main__")
    path = str(next(iter(getattr(sys, "argv", ())), ""))
    return "python" if path in ("", "-", "-c") else os.path.basename(path)


def policy_name(policy: Any) -> str:
    """MODULE:NAME of a function or class, and a name as it is; of None that of the random one."""
    if policy is None or isinstance(policy, str):
        return policy or "random"
    kind = policy if hasattr(policy, "__qualname__") else type(policy)
    return f"{kind.__module__}:{kind.__qualname__}"


def _commit() -> dict[str, Any]:
    commit, changes = _Git("rev-parse", "HEAD"), _Git("status", "--porcelain", "--untracked-files=no", most=0)
    deadline = time.monotonic() + _GIT_SECONDS
    name = commit.answer(deadline)
    if not name:
        return {}
    found: dict[str, Any] = {"commit": name.decode(errors="replace").strip()}
    dirty = changes.answer(deadline)
    return found if dirty is None else found | {"dirty": bool(dirty)}


def _diff() -> dict[str, Any]:
    """The uncommitted changes; nothing where there is no repository."""
    git = _Git("diff", "--no-ext-diff", "--no-textconv", "HEAD", most=_DIFF_BYTES)
    changes = git.answer(time.monotonic() + _DIFF_SECONDS)
    if changes is None:
        return {}
    return {
        "diff": changes[:_DIFF_BYTES].decode(errors="replace"),
        "diff_is_whole": len(changes) <= _DIFF_BYTES,
    }


class _Git:
    """A git that runs beside this process, which waits for it no longer than it likes to: not for a disk that hangs.

    most: bytes of what it prints, after which one more is read and it is ended.
    """

    def __init__(self, *words: str, most: int = 1 << 10):
        self._most = most
        self._said: bytes | None = None
        self._process: subprocess.Popen[bytes] | None = None
        # The settings of a repository, or of what poses as one, may name programs that such commands run.
        safe = ("-c", "core.fsmonitor=false", "-c", "safe.bareRepository=explicit")
        self._command = ["git", *safe, *words]
        self._thread = threading.Thread(target=self._run, name="gym-trace git", daemon=True)
        with contextlib.suppress(RuntimeError):  # there may be no more threads, which costs the commit and nothing else
            self._thread.start()

    def answer(self, deadline: float) -> bytes | None:
        """What it prints; None where there is no git, no repository, or no answer in time (of time.monotonic())."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            if self._process is not None:
                self._process.kill()
            return None
        return self._said

    def _run(self) -> None:
        settings = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        try:
            with subprocess.Popen(self._command, env=settings, **pipes) as process:
                self._process = process
                assert process.stdout is not None
                said: bytes = process.stdout.read(self._most + 1)
                if len(said) > self._most:
                    process.kill()
            if process.returncode == 0 or len(said) > self._most:
                self._said = said
        except (OSError, ValueError):
            return
