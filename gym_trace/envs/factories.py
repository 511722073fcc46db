"""Describe how a PettingZoo environment was made, as plain data, and rebuild it.

It is made by its id in PettingZoo's registry (since PettingZoo 1.27), or by a function or class of a module. Its
arguments come from gymnasium.utils.EzPickle, which PettingZoo's environments use.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any

from gymnasium.envs.registration import EnvSpec

from gym_trace.envs.agents import AEC, JointEnv, is_of_agents, kind_of
from gym_trace.envs.consent import asked_of_arguments, import_named, named
from gym_trace.envs.recipe import Arguments, argument
from gym_trace.errors import EnvironmentUnavailable, MissingExtra, TraceError
from gym_trace.printable import printable

ENTRY_POINT = f"{__name__}:make_joint"
# Factories of PettingZoo itself, which only make an environment.
_OWN = re.compile(r"pettingzoo\.(atari|butterfly|classic|mpe|sisl)(\.\w+)+:(env|parallel_env|raw_env)", re.ASCII)
_ID = re.compile(r"([\w.-]+/)?[\w:.-]+", re.ASCII)
_FACTORIES = {AEC: ("env", "raw_env"), "parallel": ("parallel_env",)}
_MOST_WRAPPERS = 100


def spec_of(env: JointEnv) -> EnvSpec | None:
    """Return the spec that rebuilds this environment; None if its factory or arguments are unknown."""
    layers = _layers(env.inner)
    kwargs = _arguments_of(layers[-1])
    factory = _factory_of(env.inner, layers)
    if kwargs is None or factory is None:
        return None
    description = {"kind": env.kind, "env": factory, "layers": [type(layer).__qualname__ for layer in layers]}
    identifier = factory
    if ":" in factory:
        name = str(env.metadata.get("name") or type(layers[-1]).__qualname__)
        label = re.sub(r"[^\w:.-]+", "_", re.sub(r"_v(\d+)$", r"-v\1", name))
        identifier = f"{re.split('[.:]', factory)[0]}/{label}"
    return EnvSpec(
        identifier,
        entry_point=ENTRY_POINT,
        order_enforce=False,
        disable_env_checker=True,
        kwargs={"pettingzoo": {**description, **({"state": True} if env.has_state else {})}, **kwargs},
    )


def make_joint(pettingzoo: Mapping[str, Any], **kwargs: Any) -> JointEnv:
    """Make a PettingZoo environment as a Gymnasium environment.

    Args:
        pettingzoo: map from spec_of(): kind, env, layers, and optionally state.
        kwargs: arguments of the factory.

    Raises:
        EnvironmentUnavailable, MissingExtra.
    """
    description = _checked(pettingzoo)
    factory, kind = description["env"], description["kind"]
    if ":" not in factory:
        if not hasattr(library := _library(), "make"):
            raise EnvironmentUnavailable(f"{factory}: needs PettingZoo 1.27 or newer, which makes environments by id")
        env = library.make(kind, factory, **kwargs)
    else:
        env = import_named(factory)(**kwargs)
    if not is_of_agents(env) or kind_of(env) != kind:
        raise EnvironmentUnavailable(f"{printable(factory)}: did not make a PettingZoo environment of kind {kind}")
    layers = [type(layer).__qualname__ for layer in _layers(env)]
    if layers != description["layers"]:
        env.close()
        recorded = printable(", ".join(description["layers"]))
        raise EnvironmentUnavailable(
            f"{printable(factory)}: is wrapped in {', '.join(layers)} here, but recorded in {recorded}; "
            "name a function that makes it: --make MODULE:FUNCTION on the command line, make_env= in Python"
        )
    return JointEnv(env, state=description["state"])


def asked_of_factory(kwargs: Arguments, may_register: bool) -> list[str]:
    """Describe the actions for making the environment that need the user's consent.

    may_register: True if modules to import may register its id. Raises EnvironmentUnavailable.
    """
    description = _description_in(kwargs)
    asked = asked_of_arguments({name: stored for name, stored in kwargs.items() if name != "pettingzoo"}, {})
    if _is_known(description):
        return asked
    if ":" in description["env"]:
        module, _, call = description["env"].partition(":")
        return [f"import {named(module)} and call its {named(call)}, which is not a factory of PettingZoo", *asked]
    if may_register:
        return asked
    raise EnvironmentUnavailable(
        f"{named(description['env'])} is not registered with pettingzoo; import the package that registers it "
        "(--import MODULE), or name what makes it: --make MODULE:FUNCTION on the command line, make_env= in Python"
    )


def is_known_factory(kwargs: Arguments) -> bool:
    """Return True if the environment is PettingZoo's, or its id is registered there. Raises EnvironmentUnavailable."""
    return _is_known(_description_in(kwargs))


def _is_known(description: Mapping[str, Any]) -> bool:
    if ":" in description["env"]:
        return _OWN.fullmatch(description["env"]) is not None
    return description["env"] in _registry(description["kind"])


def _description_in(kwargs: Arguments) -> dict[str, Any]:
    try:
        stored = argument(kwargs["pettingzoo"])
    except (LookupError, TraceError):
        stored = None
    return _checked(stored)


def _checked(description: Any) -> dict[str, Any]:
    """Return the checked description of a factory. Raises EnvironmentUnavailable."""
    if isinstance(description, Mapping):
        kind, factory, layers = description.get("kind"), description.get("env"), description.get("layers")
        names = layers if isinstance(layers, list) else [None]
        are_texts = all(isinstance(text, str) for text in (kind, factory, *names))
        if are_texts and kind in _FACTORIES and len(names) <= _MOST_WRAPPERS:
            return {"kind": kind, "env": factory, "layers": names, "state": description.get("state") is True}
    raise EnvironmentUnavailable("the recorded environment of PettingZoo is malformed")


def _library() -> Any:
    try:
        return importlib.import_module("pettingzoo")
    except ImportError as error:
        raise MissingExtra("PettingZoo is not installed; pip install 'gym-trace[pettingzoo]'") from error


def _registry(kind: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(_library(), f"{kind}_registry", {})  # since PettingZoo 1.27
    return found


def _layers(env: Any) -> list[Any]:
    """Return an environment and the environments that it wraps, outermost first."""
    layers, base = [env], env.unwrapped
    while layers[-1] is not base and len(layers) < _MOST_WRAPPERS:
        inner = vars(layers[-1]).get("env", vars(layers[-1]).get("aec_env"))
        if inner is None:
            break
        layers.append(inner)
    return layers


def _factory_of(env: Any, layers: list[Any]) -> str | None:
    """Return an id in PettingZoo's registry, or "module:function" of a factory or class; None if it has no name."""
    base, kind = type(layers[-1]), kind_of(env)
    module = base.__module__
    if len(layers) > 1 or kind != AEC or base.__qualname__ != "raw_env":
        for identifier, spec in _registry(kind).items():
            entry = spec.entry_point
            if isinstance(entry, str) and entry.partition(":")[0] == module and _ID.fullmatch(identifier):
                return str(identifier)
    if module == "__main__" or "<locals>" in base.__qualname__:
        return None
    versioned = f"{module.partition('.')[0]}.{(getattr(env, 'metadata', None) or {}).get('name')}"
    functions = _FACTORIES[kind] if len(layers) > 1 else _FACTORIES[kind][::-1]
    for factory_module in (versioned, module):
        for function in functions:
            if callable(getattr(sys.modules.get(factory_module), function, None)):
                return f"{factory_module}:{function}"
    return f"{module}:{base.__qualname__}" if len(layers) == 1 else None


def _arguments_of(env: Any) -> dict[str, Any] | None:
    """Return the arguments of an environment; None if it does not store them and takes others than a render mode."""
    parameters = list(inspect.signature(type(env).__init__).parameters.values())[1:]
    args, kwargs = getattr(env, "_ezpickle_args", None), getattr(env, "_ezpickle_kwargs", None)
    if isinstance(args, tuple) and isinstance(kwargs, dict):
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        return {**dict(zip(names, args)), **kwargs} if len(args) <= len(names) else None
    known = {"render_mode": getattr(env, "render_mode", None)}
    needed = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if type(env).__init__ is object.__init__ or not needed:
        return {}
    return {name: known[name] for name in needed} if set(needed) <= known.keys() else None
