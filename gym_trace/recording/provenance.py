"""Where a trace comes from: which command, policy and commit, and nothing that its user would not publish unasked."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import gym_trace

_LONGEST = 1 << 20  # bytes of what git says, such as the uncommitted changes, that are kept
_GIT_SECONDS = 2.0  # that recording waits for git, of a large repository on a slow disk, say
_DIFF_SECONDS = 20.0  # where somebody asked for the diff
# The settings of a repository, or of what poses as one, may name programs that git runs: none of them is.
_SETTINGS = ("core.fsmonitor=", f"core.hooksPath={os.devnull}", "safe.bareRepository=explicit")
_INERT = ("--no-pager", *(word for setting in _SETTINGS for word in ("-c", setting)))
_WITHOUT_FETCH = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": ""}
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


def provenance_of(
    command: str, policy: str | None = None, argv: bool = False, diff: bool = False, make_env: Any = None
) -> dict[str, Any]:
    """command (its name), policy (its name, if known), gym_trace (version), and of the git repository that the current
    directory is in, if it is in one, commit and dirty: whether files that it knows were changed since, if git can say
    so without the filters of the repository.

    make_env: what makes the environment; its attribute imported, if it has one, names the modules that it imports.
    argv: as it is, on demand. diff: likewise the uncommitted changes, and diff_is_whole: whether these are all.
    """
    found: dict[str, Any] = {"command": command, "policy": policy, "gym_trace": gym_trace.__version__}
    if policy is None:
        del found["policy"]
    if imports := list(getattr(make_env, "imported", ())):
        found["imports"] = imports
    found |= _of_repository(diff)
    if argv:
        found["argv"] = list(map(str, sys.argv))
    return found


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


def _of_repository(diff: bool) -> dict[str, Any]:
    """The commit, whether it is dirty, and the diff on demand; of these what git can say without running a program.

    A repository may be a stranger's, and its configuration may name programs that filter files, which git runs before
    it compares them. They are turned off; of a changed file that has such a filter nothing can be said then.
    """
    deadline = time.monotonic() + (_DIFF_SECONDS if diff else _GIT_SECONDS)
    commit, settings = _Git("rev-parse", "HEAD"), _Git("config", "--list", "--name-only", "--null", most=_LONGEST)
    name, known = commit.answer(deadline), settings.answer(deadline)  # both: what hangs is ended there
    if not name:
        return {}
    found: dict[str, Any] = {"commit": name.decode(errors="replace").strip()}
    off = None if known is None or len(known) > _LONGEST else _filters_off(known)
    if off is None:
        return found
    unfiltered = ("--", ":(top,attr:!filter)", ":(top,attr:-filter)") if off else ()
    status = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty")
    asked = [_Git(*off, *status, *paths, most=_LONGEST) for paths in dict.fromkeys(((), unfiltered))]
    changes = [git.answer(deadline) for git in asked]
    if None in changes:
        return found
    filtered_too = changes[0] != changes[-1] or len(changes[0] or b"") > _LONGEST
    if changes[-1] or not filtered_too:
        found["dirty"] = bool(changes[-1])
    if not diff:
        return found
    inert = ("--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty", "--submodule=short")
    text = _Git(*off, "diff", *inert, "HEAD", *unfiltered, most=_LONGEST).answer(deadline)
    if text is not None:
        found["diff"] = text[:_LONGEST].decode(errors="replace")
        found["diff_is_whole"] = len(text) <= _LONGEST and not filtered_too
    return found


def _filters_off(settings: bytes) -> tuple[str, ...] | None:
    """Options of git that turn all filters off, given the names of its settings; None where they cannot be."""
    names = [os.fsdecode(name) for name in settings.split(b"\0")]
    filters = {match[1] for name in names if (match := re.fullmatch(r"filter\.(.*)\.[^.]*", name, re.DOTALL))}
    if any("=" in name for name in filters):  # which -c would take for the end of the name
        return None
    values = ("clean=", "process=", "required=false")
    return tuple(word for name in sorted(filters) for value in values for word in ("-c", f"filter.{name}.{value}"))


class _Git:
    """A git that runs beside this process, which waits for it no longer than it likes to: not for a disk that hangs.

    most: bytes of what it prints, after which one more is read and it is ended.
    """

    def __init__(self, *words: str, most: int = 1 << 10):
        self._most = most
        self._said: bytes | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._command = ["git", *_INERT, *words]
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
        settings = {**os.environ, **_WITHOUT_FETCH}
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
