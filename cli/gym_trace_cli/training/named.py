"""The environment in the run.json of a training run, which is untrusted."""

from __future__ import annotations

from typing import Any

from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace_cli.environments import NamedEnvironment

_TYPES: dict[str, Any] = {
    "id": (str, type(None)),
    "make": (str, type(None)),
    "kwargs": dict,
    "imports": list,
    "wrappers": list,
    "max_episode_steps": (int, type(None)),
}


def described(named: NamedEnvironment) -> dict[str, Any]:
    """Return the environment for run.json."""
    return {**named.described(), **({"imports": list(named.imports)} if named.imports else {})}


def environment_of(directory: str, trust: bool) -> tuple[NamedEnvironment, dict[str, Any]]:
    """Return the environment of a run, and its entry in run.json.

    Raises InvalidOption if it would import or call what only the run names, without trust; TraceNotFound; CorruptTrace.
    """
    from gym_trace.training.run import runs_in

    about = runs_in(directory)[0].about.get("environment")
    if about is None:
        raise InvalidOption(
            f"{directory}: started from Python; resume it there: gym_trace.train(make_env, {directory!r}, resume=True)"
        )
    found: dict[str, Any] = {"id": None, "make": None, "kwargs": {}, "imports": [], "wrappers": []}
    found |= {"max_episode_steps": None, **(about if isinstance(about, dict) else {"id": 0})}
    right = set(found) == set(_TYPES) and all(isinstance(found[name], kind) for name, kind in _TYPES.items())
    if not right or not all(isinstance(name, str) for name in (*found["imports"], *found["wrappers"])):
        raise CorruptTrace(f"{directory}: invalid environment in run.json")
    from gym_trace.envs.consent import together

    would = together(_asked(found))
    if would and not trust:
        raise InvalidOption(f"{directory}: the run would {would}; pass --trust if you trust it")
    imports, wrappers = tuple(found["imports"]), tuple(found["wrappers"])
    named = NamedEnvironment(found["id"], found["make"], found["kwargs"], imports, wrappers, found["max_episode_steps"])
    return named, about


def trust_of(named: NamedEnvironment) -> str:
    """Return " --trust" if resuming a run in it needs that, or ""."""
    found = {"make": None, "wrappers": (), **named.described(), "imports": named.imports}
    return " --trust" if _asked(found) else ""


def _asked(found: dict[str, Any]) -> list[str]:
    """Describe what only a trusted run may execute."""
    from gym_trace.envs.consent import asked_of_argument, called, named, whole

    asked = [f"import {named(module)}" for module in found["imports"]]
    if found["id"] and ":" in found["id"]:
        asked.append(f"import {named(found['id'].partition(':')[0])}")
    kwargs = found["kwargs"]
    if found["make"]:
        asked.append(f"call {called(found['make'], {name: ['value', value] for name, value in kwargs.items()})}")
    asked += [f"call {named(name)}" for name in found["wrappers"] if name]
    acting = {name: asked_of_argument(name, value) for name, value in kwargs.items()}
    return asked + [f"pass {named(name)}={whole(kwargs[name])}, which {why}" for name, why in acting.items() if why]
