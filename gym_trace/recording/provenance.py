"""Where a trace comes from: which command, policy and commit, and nothing that its user would not publish unasked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import gym_trace

_DIFF_BYTES = 1 << 20  # of uncommitted changes that are kept
_GIT_SECONDS = 10
_known: ContextVar[dict[str, Any] | None] = ContextVar("provenance", default=None)


def current() -> dict[str, Any] | None:
    """What is to be written into the traces that are begun here; None if nobody said."""
    return _known.get()


@contextmanager
def recorded_by(provenance: dict[str, Any] | None) -> Iterator[None]:
    """Has traces that are begun within it say so."""
    token = _known.set(provenance)
    try:
        yield
    finally:
        _known.reset(token)


def provenance_of(command: str, policy: Any, argv: bool = False) -> dict[str, Any]:
    """command (its name), policy (its name), gym_trace (version), and of the git repository that the current directory
    is in, if it is in one, commit and dirty: whether files that it knows were changed since. argv: as it is, on demand.
    """
    found: dict[str, Any] = {"command": command, "policy": policy_name(policy), "gym_trace": gym_trace.__version__}
    commit = _git("rev-parse", "HEAD")
    if commit is not None:
        found |= {"commit": commit.decode(errors="replace").strip()}
        changes = _git("status", "--porcelain", "--untracked-files=no")
        found |= {} if changes is None else {"dirty": bool(changes)}
    return found | ({"argv": sys.argv[:]} if argv else {})


def policy_name(policy: Any) -> str:
    """MODULE:NAME of a function or class, and a name as it is; of None that of the random one."""
    if policy is None or isinstance(policy, str):
        return policy or "random"
    kind = policy if hasattr(policy, "__qualname__") else type(policy)
    return f"{kind.__module__}:{kind.__qualname__}"


def git_diff() -> dict[str, Any] | None:
    """diff: the uncommitted changes, whole: whether these are all. None where there is no repository."""
    changes = _git("diff", "--no-ext-diff", "--no-textconv", "HEAD")
    if changes is None:
        return None
    return {"diff": changes[:_DIFF_BYTES].decode(errors="replace"), "whole": len(changes) <= _DIFF_BYTES}


def _git(*words: str) -> bytes | None:
    """What git prints; None where there is no git, or no repository."""
    # A repository's own settings may name programs to run: these are the ones that such commands would.
    command = ["git", "-c", "core.fsmonitor=false", *words]
    settings = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_SECONDS, check=True, env=settings)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
