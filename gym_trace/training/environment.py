"""The environment of a run, as its untrusted run.json describes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gym_trace.envs.consent import asked_of_argument, called, named, together, whole
from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.training import run

_TYPES: dict[str, Any] = {
    "id": (str, type(None)),
    "make": (str, type(None)),
    "kwargs": dict,
    "imports": list,
    "wrappers": list,
    "max_episode_steps": (int, type(None)),
}


def described_environment(directory: str | os.PathLike[str], trust: bool = False) -> dict[str, Any]:
    """Return how a run makes its environment, as train(describe=) was given it.

    Returns:
        id or make (MODULE:FUNCTION), kwargs, imports, wrappers (MODULE:CALLABLE) and max_episode_steps, where given.

    Raises:
        InvalidOption: it would import or call what only the run names, without trust; or the run was started from
            Python, without a description.
        TraceNotFound, CorruptTrace
    """
    about = run.runs_in(directory)[0].about.get("environment")
    if about is None:
        place = os.fspath(directory)
        raise InvalidOption(
            f"{place}: started from Python; resume it there: gym_trace.train(make_env, {place!r}, resume=True)"
        )
    found: dict[str, Any] = {"id": None, "make": None, "kwargs": {}, "imports": [], "wrappers": []}
    found |= {"max_episode_steps": None, **(about if isinstance(about, dict) else {"id": 0})}
    right = set(found) == set(_TYPES) and all(isinstance(found[name], kind) for name, kind in _TYPES.items())
    if not right or not all(isinstance(name, str) for name in (*found["imports"], *found["wrappers"])):
        raise CorruptTrace(f"{os.fspath(directory)}: invalid environment in run.json")
    would = together(_asked_of(found))
    if would and not trust:
        raise InvalidOption(f"{os.fspath(directory)}: the run would {would}; pass --trust if you trust it")
    return dict(about)


def needs_trust(described: Mapping[str, Any]) -> bool:
    """Return True if a run in this environment can be resumed only with trust."""
    return bool(_asked_of({"id": None, "make": None, "kwargs": {}, "imports": (), "wrappers": (), **described}))


def _asked_of(found: Mapping[str, Any]) -> list[str]:
    """Describe what only a trusted run may execute."""
    asked = [f"import {named(module)}" for module in found["imports"]]
    if found["id"] and ":" in found["id"]:
        asked.append(f"import {named(found['id'].partition(':')[0])}")
    kwargs = found["kwargs"]
    if found["make"]:
        asked.append(f"call {called(found['make'], {name: ['value', value] for name, value in kwargs.items()})}")
    asked += [f"call {named(name)}" for name in found["wrappers"] if name]
    acting = {name: asked_of_argument(name, value) for name, value in kwargs.items()}
    return asked + [f"pass {named(name)}={whole(kwargs[name])}, which {why}" for name, why in acting.items() if why]
