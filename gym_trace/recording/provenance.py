"""Provenance of a trace: command, policy and commit; private data, such as arguments, only on request."""

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
from gym_trace.envs.recipe import factory_recipe, recipe_of_function

_LONGEST = 1 << 20  # bytes stored of the output of git, such as the diff
_GIT_SECONDS = 2.0  # timeout of git, for large repositories on slow disks
_DIFF_SECONDS = 20.0  # timeout if the user asked for the diff
# The settings of an untrusted repository may name programs for git to run; these options disable them.
_SETTINGS = ("core.fsmonitor=", f"core.hooksPath={os.devnull}", "safe.bareRepository=explicit")
_INERT = ("--no-pager", *(word for setting in _SETTINGS for word in ("-c", setting)))
_WITHOUT_FETCH = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": ""}
_known: ContextVar[dict[str, Any] | None] = ContextVar("provenance", default=None)


def current() -> dict[str, Any]:
    """Return the provenance for new traces: set by recorded_by(), otherwise the provenance of this process."""
    known = _known.get()
    return dict(_of_this_process() if known is None else known)


@lru_cache(maxsize=1)
def _of_this_process() -> dict[str, Any]:
    """Return the provenance of this process, determined once: later commits do not change the loaded code."""
    return provenance_of(script_name())


@contextlib.contextmanager
def recorded_by(provenance: dict[str, Any] | None) -> Iterator[None]:
    """Use this provenance for traces begun inside the block."""
    token = _known.set(provenance)
    try:
        yield
    finally:
        _known.reset(token)


def provenance_of(
    command: str, policy: str | None = None, argv: bool = False, diff: bool = False, make_env: Any = None
) -> dict[str, Any]:
    """Return command, policy (if known), gym_trace (version), and commit and dirty of the current git repository.

    dirty is True if tracked files have changed; it is missing if git cannot tell without the repository's filters.

    Args:
        argv: also store the full command line.
        diff: also store the uncommitted changes, and diff_is_whole: False if they are truncated or incomplete.
        make_env: the environment factory; its attribute `imported`, if any, lists the modules that it imports, and
            `as_recorded` the arguments of factory_recipe(). A function of a module has a recipe without these.
    """
    found: dict[str, Any] = {"command": command, "policy": policy, "gym_trace": gym_trace.__version__}
    if policy is None:
        del found["policy"]
    if imports := list(getattr(make_env, "imported", ())):
        found["imports"] = imports
    named = getattr(make_env, "as_recorded", None)
    if (factory := factory_recipe(*named) if named else recipe_of_function(make_env)) is not None:
        found["factory"] = factory
    found |= _of_repository(diff)
    if argv:
        found["argv"] = list(map(str, sys.argv))
    return found


def script_name() -> str:
    """Return the script without its directory, such as train.py, or the name of a module run with -m."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    module = getattr(spec, "name", None)
    if isinstance(module, str):
        return module.removesuffix(".__main__")
    path = str(next(iter(getattr(sys, "argv", ())), ""))
    return "python" if path in ("", "-", "-c") else os.path.basename(path)


def policy_name(policy: Any) -> str:
    """Return MODULE:NAME of a function or class, a name unchanged, or "random" for None."""
    if policy is None or isinstance(policy, str):
        return policy or "random"
    kind = policy if hasattr(policy, "__qualname__") else type(policy)
    return f"{kind.__module__}:{kind.__qualname__}"


def inert_git(*words: str) -> dict[str, Any]:
    """Return the arguments of subprocess.run() that run git, and no program that an untrusted repository names."""
    env = {**os.environ, **_WITHOUT_FETCH, "LC_ALL": "C"}
    return {"args": ["git", *_INERT, *words], "env": env, "stdin": subprocess.DEVNULL}


def _of_repository(diff: bool) -> dict[str, Any]:
    """Return commit, dirty and, on request, diff, as far as git can tell without running other programs.

    The repository is untrusted. Its settings may name filter programs that git runs before it compares files. They are
    disabled, so a changed file with such a filter cannot be compared.
    """
    deadline = time.monotonic() + (_DIFF_SECONDS if diff else _GIT_SECONDS)
    commit, settings = _Git("rev-parse", "HEAD"), _Git("config", "--list", "--name-only", "--null", most=_LONGEST)
    name, known = commit.output(deadline), settings.output(deadline)  # call both: output() kills git if it hangs
    if not name:
        return {}
    found: dict[str, Any] = {"commit": name.decode(errors="replace").strip()}
    off = None if known is None or len(known) > _LONGEST else _filters_off(known)
    if off is None:
        return found
    unfiltered = ("--", ":(top,attr:!filter)", ":(top,attr:-filter)") if off else ()
    status = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty")
    asked = [_Git(*off, *status, *paths, most=_LONGEST) for paths in dict.fromkeys(((), unfiltered))]
    changes = [git.output(deadline) for git in asked]
    if None in changes:
        return found
    has_filtered_changes = changes[0] != changes[-1] or len(changes[0] or b"") > _LONGEST
    if changes[-1] or not has_filtered_changes:
        found["dirty"] = bool(changes[-1])
    if not diff:
        return found
    inert = ("--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty", "--submodule=short")
    text = _Git(*off, "diff", *inert, "HEAD", *unfiltered, most=_LONGEST).output(deadline)
    if text is not None:
        found["diff"] = text[:_LONGEST].decode(errors="replace")
        found["diff_is_whole"] = len(text) <= _LONGEST and not has_filtered_changes
    return found


def _filters_off(settings: bytes) -> tuple[str, ...] | None:
    """Return git options that disable all filters in these settings; None if a filter cannot be disabled."""
    names = [os.fsdecode(name) for name in settings.split(b"\0")]
    filters = {match[1] for name in names if (match := re.fullmatch(r"filter\.(.*)\.[^.]*", name, re.DOTALL))}
    if any("=" in name for name in filters):  # -c would end the name there
        return None
    values = ("clean=", "process=", "required=false")
    return tuple(word for name in sorted(filters) for value in values for word in ("-c", f"filter.{name}.{value}"))


class _Git:
    """A git command in a thread, so that the caller can stop waiting even if the disk hangs.

    most: maximum bytes of output; git is killed when it prints more.
    """

    def __init__(self, *words: str, most: int = 1 << 10):
        self._most = most
        self._output: bytes | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_late = False
        self._command = inert_git(*words)
        self._thread = threading.Thread(target=self._run, name="gym-trace git", daemon=True)
        with contextlib.suppress(RuntimeError):  # without a thread, only the commit is unknown
            self._thread.start()

    def output(self, deadline: float) -> bytes | None:
        """Return its output; None without git, without a repository, or past the deadline (of time.monotonic())."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._is_late = True
            if self._process is not None:
                self._process.kill()
            return None
        return self._output

    def _run(self) -> None:
        try:
            with subprocess.Popen(**self._command, stderr=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
                self._process = process
                if self._is_late:
                    process.kill()
                assert process.stdout is not None
                output: bytes = process.stdout.read(self._most + 1)
                if len(output) > self._most:
                    process.kill()
            if process.returncode == 0 or len(output) > self._most:
                self._output = output
        except (OSError, ValueError):
            return
