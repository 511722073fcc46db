"""The environment that a training run names in its run.json, which anybody may have written."""

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
    """What run.json says of it."""
    return {**named.described(), **({"imports": list(named.imports)} if named.imports else {})}


def environment_of(directory: str, trust: bool) -> tuple[NamedEnvironment, dict[str, Any]]:
    """The environment of a run, and what its run.json says of it.

    Raises InvalidOption where it would import or call what only the run names, and is not trusted; TraceNotFound;
    CorruptTrace.
    """
    from gym_trace.training.run import runs_in

    about = runs_in(directory)[0].about.get("environment")
    if about is None:
        raise InvalidOption(
            f"{directory}: this run was started from Python, and so it is resumed: gym_trace.train(make_env, "
            f"{directory!r}, resume=True)"
        )
    found: dict[str, Any] = {"id": None, "make": None, "kwargs": {}, "imports": [], "wrappers": []}
    found |= {"max_episode_steps": None, **(about if isinstance(about, dict) else {"id": 0})}
    right = set(found) == set(_TYPES) and all(isinstance(found[name], kind) for name, kind in _TYPES.items())
    if not right or not all(isinstance(name, str) for name in (*found["imports"], *found["wrappers"])):
        raise CorruptTrace(f"{directory}: what the run says of its environment is not what gym-trace train writes")
    asked = _asked(found)
    if asked and not trust:
        raise InvalidOption(f"{directory}: the run would {'; '.join(asked)}; pass --trust if you trust it")
    imports, wrappers = tuple(found["imports"]), tuple(found["wrappers"])
    named = NamedEnvironment(found["id"], found["make"], found["kwargs"], imports, wrappers, found["max_episode_steps"])
    return named, about


def trust_of(named: NamedEnvironment) -> str:
    """What a run in it needs to be resumed: " --trust", or nothing."""
    found = {"make": None, "wrappers": (), **named.described(), "imports": named.imports}
    return " --trust" if _asked(found) else ""


def _asked(found: dict[str, Any]) -> list[str]:
    """What only a trusted run may bring about, in words."""
    from gym_trace.envs.consent import may_act

    asked = [f"import {module}" for module in found["imports"]]
    if found["id"] and ":" in found["id"]:
        asked.append(f"import {found['id'].partition(':')[0]}")
    asked += [f"call {name}" for name in (found["make"], *found["wrappers"]) if name]
    told = [name for name, value in found["kwargs"].items() if may_act(name, value)]
    return asked + [f"pass {name}={found['kwargs'][name]!r}, which may name a file or a module" for name in told]
