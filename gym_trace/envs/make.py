"""Rebuild the recorded environment."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium

from gym_trace.envs.agents import is_of_agents, jointly
from gym_trace.envs.autoreset import SPEC_WITHOUT
from gym_trace.envs.consent import (
    asked_of_arguments,
    asked_of_sizes,
    asked_of_width,
    called,
    checked_arguments,
    harmless_wrapper,
    import_named,
    is_left_out,
    is_of_gymnasium,
    named,
    shown,
    together,
    trusted_wrapper,
)
from gym_trace.envs.dm_env import gymnasium_view
from gym_trace.envs.factories import ENTRY_POINT, asked_of_factory, is_known_factory
from gym_trace.envs.monitor import REPLACED, Monitor
from gym_trace.envs.opengl import log_mujoco_warnings, opengl_hint
from gym_trace.envs.recipe import (
    Arguments,
    Recipe,
    Wrappers,
    argument,
    is_whole,
    recorded_factory,
    recorded_recipe,
    recorded_wrappers,
    wrappers_around,
)
from gym_trace.errors import EnvironmentUnavailable, TraceError, warn

_NOTHING: Mapping[str, Any] = {}
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_WAYS = (
    "name another environment (--env ID), or a function that makes it: --make MODULE:FUNCTION on the command line, "
    "make_env= in Python"
)
_MADE_BY_GYMNASIUM = ("HumanRendering", "RenderCollection")  # wrappers that make() adds for a render mode


def make_environment(
    description: Mapping[str, Any], trust: bool = False, kwargs: Mapping[str, Any] | None = None, lane: int = 0
) -> gymnasium.Env[Any, Any]:
    """Rebuild the environment of a trace, or of one lane. kwargs override the recorded arguments.

    Without trust, nothing is imported or called on behalf of the trace; see consent.

    Raises:
        EnvironmentUnavailable: the message names the missing package, or the requests that need trust.
    """
    recipe, factory = _recipes(description, lane)
    if factory is not None:
        return completed(_made_by(factory, dict(kwargs or {}), trust), description, lane)
    if recipe is None:
        reason = description.get("note") or "made by unknown functions"
        kind = description.get("class") or description.get("id")
        name = f", {shown(kind, plain=True)}" if kind else ""
        raise EnvironmentUnavailable(
            f"the trace does not describe how to make its environment{name}: {shown(reason, plain=True)}; {_WAYS}"
        )
    recipe, overriding = _overridden(recipe, dict(kwargs or {}))
    wrappers = _to_make(recipe.wrappers)
    is_registered = is_known_factory(recipe.kwargs) if _is_of_agents(recipe) else recipe.id in gymnasium.registry
    imports = [] if is_registered else _imports(description)
    asked = _asked_of_base(recipe, imports)
    would = together(asked + _asked_of_wrappers(wrappers))
    if asked and not trust:
        raise _untrusted(recipe, would, imports)
    try:
        env = _wrapped(recipe, _base(recipe, overriding, imports), wrappers, trust)
    except TraceError:
        raise
    except Exception as error:  # foreign code may raise anything
        raise EnvironmentUnavailable(
            f"{shown(recipe.id, plain=True)} cannot be made here: {type(error).__name__}: {error}; "
            f"{_WAYS}{opengl_hint(error)}"
        ) from error
    if others := _differing_class(recipe, env):
        warn(others)
    return env


def headless_arguments(description: Mapping[str, Any], lane: int = 0) -> dict[str, Any]:
    """Return arguments that rebuild the environment without a window or a list of frames.

    Other render modes stay, because observations may be rendered.
    """
    recipe, factory = _recipes(description, lane)
    recipe = factory or recipe
    if recipe is None or "render_mode" not in recipe.kwargs:  # not all environments accept it
        return {}
    try:
        modes = {str(description.get("render_mode")), str(argument(recipe.kwargs["render_mode"]))}
    except LookupError:  # it could not be stored
        return {"render_mode": None}
    return {"render_mode": None} if any(mode == "human" or mode.endswith("_list") for mode in modes) else {}


def completed(env: Any, description: Mapping[str, Any], lane: int = 0) -> gymnasium.Env[Any, Any]:
    """Return the user's environment (also of dm_env or PettingZoo) with the recorded wrappers that it lacks.

    Others may have added these, such as the ClipAction of training or the TimeLimit of an option. Only Gymnasium's own
    wrappers that compute are added, and only if the environment already has the recorded wrappers inside them. Raises
    EnvironmentUnavailable for another object.
    """
    made: gymnasium.Env[Any, Any] = jointly(gymnasium_view(env), description)
    if not isinstance(made, gymnasium.Env):
        raise EnvironmentUnavailable(f"make_env: returned {type(env).__name__}; return a gymnasium.Env")
    wrappers, there = _to_make(recorded_wrappers(description, lane)), _classes_around(made)
    more = wrappers[len(there) :]
    if there != [_last(name) for name, _ in wrappers[: len(there)]] or asked_of_sizes(more):
        return made
    if not all(arguments is not None and _is_harmless(name) for name, arguments in more):
        return made
    own = made
    for name, arguments in more:
        if asked_of_width(made, name, arguments):
            return own
        made = _around(made, name, arguments)
    return made


def call_factory(make: Callable[..., Any], arguments: Mapping[str, Any], render_mode: str | None = None) -> Any:
    """Call a function that makes an environment, such as gymnasium.make, with the warnings of MuJoCo logged.

    Args:
        render_mode: also passed, if the function accepts it.

    Returns:
        A Gymnasium environment (also for a dm_env environment), a vector environment, or a PettingZoo environment.

    Raises:
        EnvironmentUnavailable: the function returned another object.
        Exception: any exception of the function.

    Examples:
        >>> env = gym_trace.recording.call_factory(gymnasium.make, {"id": "CartPole-v1"}, render_mode="rgb_array")
        >>> env.render_mode
        'rgb_array'
    """
    wanted = {} if render_mode is None or not takes_render_mode(make) else {"render_mode": render_mode}
    log_mujoco_warnings()
    env = gymnasium_view(make(**arguments, **wanted))
    if not (isinstance(env, (gymnasium.Env, gymnasium.vector.VectorEnv)) or is_of_agents(env)):
        raise EnvironmentUnavailable(f"returned {type(env).__name__}; return a gymnasium.Env")
    return env


def takes_render_mode(make: Callable[..., Any]) -> bool:
    """Return True if a function that makes an environment accepts render_mode=."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == "render_mode" or p.kind == p.VAR_KEYWORD for p in parameters)


def _recipes(description: Mapping[str, Any], lane: int) -> tuple[Recipe | None, Recipe | None]:
    """Return the recipe of an environment, and, if it is incomplete, the function that made the environment."""
    recipe = recorded_recipe(description, lane)
    others = None if recipe is None else [wrapper for wrapper in recipe.wrappers if not is_left_out(wrapper[0])]
    if recipe is not None and is_whole(recipe._replace(wrappers=others or [])):
        return recipe, None
    return recipe, recorded_factory(description)


def _made_by(factory: Recipe, kwargs: dict[str, Any], trust: bool) -> Any:
    """Call the function that made the recorded environment. Raises EnvironmentUnavailable."""
    factory = factory._replace(kwargs={name: stored for name, stored in factory.kwargs.items() if name not in kwargs})
    wrappers = [wrapper for wrapper in factory.wrappers if not is_left_out(wrapper[0])]
    call = str(factory.entry_point)
    if not trust:
        own = f"import {named(call.partition(':')[0])} and call {called(call, factory.kwargs)}"
        raise _untrusted(factory, together([own, *_asked_of_wrappers(wrappers)]))
    make = import_named(call)
    arguments = {**_made(factory.kwargs, call), **kwargs}
    if "render_mode" in kwargs and not takes_render_mode(make):
        del arguments["render_mode"]
    log_mujoco_warnings()
    try:
        env = gymnasium_view(make(**arguments))
        for name, given in wrappers:
            env = (harmless_wrapper(name) or import_named(name))(env, **_made(_known(name, given), name))
    except TraceError:
        raise
    except Exception as error:  # foreign code may raise anything
        problem = f"{shown(call, plain=True)}: {type(error).__name__}: {error}"
        raise EnvironmentUnavailable(f"{problem}; {_WAYS}{opengl_hint(error)}") from error
    return env


def _imports(description: Mapping[str, Any]) -> list[str]:
    """Return the modules that were imported for the recording, such as those that register environments."""
    imports = description.get("imports")
    names = imports if isinstance(imports, list) else []
    return [name for name in names if isinstance(name, str) and _MODULE.fullmatch(name) and not _is_of_python(name)]


def _is_of_python(module: str) -> bool:
    """Return True for a module of Python itself or a script: none registers environments, and importing may act."""
    top, *inner = module.split(".")
    return top in sys.stdlib_module_names or "__main__" in (top, *inner)


def _differing_class(recipe: Recipe, env: gymnasium.Env[Any, Any]) -> str:
    """Describe a difference from the recorded class, or return ""."""
    recorded, made = recipe.class_name, type(env.unwrapped)
    if recorded is None or recorded.rpartition(".")[2] == made.__qualname__.rpartition(".")[2]:
        return ""
    here = f"{made.__module__}.{made.__qualname__}"
    return f"{shown(recipe.id, plain=True)}: recorded was {shown(recorded, plain=True)}, made here is {here}"


def _overridden(recipe: Recipe, kwargs: dict[str, Any]) -> tuple[Recipe, dict[str, Any]]:
    """Return the recipe without the parts that kwargs override, and the kwargs of the environment itself."""
    wrappers = recipe.wrappers
    if kwargs.pop("disable_env_checker", False):
        wrappers = [wrapper for wrapper in wrappers if _last(wrapper[0]) != "PassiveEnvChecker"]
    if "max_episode_steps" in kwargs:
        steps = kwargs.pop("max_episode_steps")
        wrappers = [wrapper for wrapper in wrappers if _last(wrapper[0]) != "TimeLimit"]
        if steps not in (None, -1):
            wrappers = [*wrappers, ("gymnasium.wrappers:TimeLimit", {"max_episode_steps": ["value", steps]})]
    left = {name: stored for name, stored in recipe.kwargs.items() if name not in kwargs}
    return recipe._replace(kwargs=left, wrappers=wrappers), kwargs


def _to_make(wrappers: Wrappers) -> Wrappers:
    """Return the wrappers to rebuild: no recorders, file writers or windows, and a stand-in for SB3's Monitor."""
    for name, _ in wrappers:
        if _last(name) == "RecordVideo" and is_left_out(name):
            warn("the recorded environment had a RecordVideo, which writes files: not rebuilt")
    own: tuple[str, Arguments] = (f"{Monitor.__module__}:{Monitor.__qualname__}", {})
    return [own if wrapper[0] == REPLACED else wrapper for wrapper in wrappers if not is_left_out(wrapper[0])]


# -- requests that need trust -----------------------------------------------------------------------------------------


def _asked_of_base(recipe: Recipe, imports: list[str]) -> list[str]:
    if recipe.id in gymnasium.registry and not _is_of_agents(recipe):
        return asked_of_arguments(recipe.kwargs, gymnasium.registry[recipe.id].kwargs)
    asked = [f"import {module}, as was done for the recording (--import {module})" for module in imports]
    if _is_of_agents(recipe):
        return [*asked, *asked_of_factory(recipe.kwargs, bool(asked))]
    if recipe.entry_point is None and asked:
        return [*asked, *asked_of_arguments(recipe.kwargs, {})]
    if recipe.entry_point is None:
        raise EnvironmentUnavailable(
            f"{shown(recipe.id, plain=True)} not registered with gymnasium, and not described in the trace; "
            f"import the package that registers it (--import MODULE), or {_WAYS}"
        )
    module, call = recipe.entry_point.partition(":")[0], called(recipe.entry_point, recipe.kwargs)
    package = module.partition(".")[0]
    registers = (
        "MODULE imports the package that registers it" if package == "__main__" else f"{named(package)} may do so"
    )
    return [
        *asked,
        f"import {named(module)} and call {call}, because {named(recipe.id)} is not registered with gymnasium "
        f"(--import {registers})",
        *asked_of_arguments(recipe.kwargs, {}),
    ]


def _asked_of_wrappers(wrappers: Wrappers) -> list[str]:
    others = [wrapper for wrapper in wrappers if not _is_harmless(wrapper[0])]
    asked = [f"import and call the wrapper {called(*wrapper)}" for wrapper in others]
    return asked + asked_of_sizes(wrapper for wrapper in wrappers if _is_harmless(wrapper[0]))


def _is_harmless(name: str) -> bool:
    try:
        return harmless_wrapper(name) is not None
    except LookupError:  # harmless, but missing here
        return True


def _is_of_agents(recipe: Recipe) -> bool:
    return recipe.entry_point == ENTRY_POINT


def _untrusted(recipe: Recipe, would: str, imports: Sequence[str] = ()) -> EnvironmentUnavailable:
    missing = [module for module in imports if importlib.util.find_spec(module.partition(".")[0]) is None]
    hint = f" {', '.join(missing)} is not installed here." if missing else ""
    return EnvironmentUnavailable(
        f"{named(recipe.id)}: needs trust. It would {would}.{hint} If you "
        f"trust this trace, pass --trust (trust=True in Python); or {_WAYS}",
        imports=() if missing else tuple(imports),
    )


# -- making -----------------------------------------------------------------------------------------------------------


def _base(recipe: Recipe, kwargs: Mapping[str, Any], imports: list[str]) -> gymnasium.Env[Any, Any]:
    """Build the environment without wrappers, by its entry point."""
    registered = None if _is_of_agents(recipe) else gymnasium.registry.get(recipe.id)
    if registered is None:
        _import_for(recipe, imports)
        registered = (
            None if _is_of_agents(recipe) else gymnasium.registry.get(recipe.id)
        )  # the import may have registered it
    spec = registered or gymnasium.envs.registration.EnvSpec(id=recipe.id, entry_point=recipe.entry_point)
    arguments = {**_made(recipe.kwargs, recipe.id, spec.kwargs), **kwargs}
    alone: dict[str, Any] = {"order_enforce": False, "disable_env_checker": True, "max_episode_steps": None}
    kwargs = {**spec.kwargs, **arguments}
    spec = dataclasses.replace(spec, kwargs=kwargs, additional_wrappers=(), **alone, **SPEC_WITHOUT)
    log_mujoco_warnings()
    return gymnasium.make(spec)


def _wrapped(
    recipe: Recipe, env: gymnasium.Env[Any, Any], wrappers: Wrappers, trust: bool
) -> gymnasium.Env[Any, Any]:  # fmt: skip
    try:
        shows = type(env) if type(env).__name__ in _MADE_BY_GYMNASIUM and isinstance(env, gymnasium.Wrapper) else None
        inner: Any = env.env if shows is not None and isinstance(env, gymnasium.Wrapper) else env
        there = _classes_around(inner)
        if there != [_last(name) for name, _ in wrappers[: len(there)]]:
            raise EnvironmentUnavailable(
                f"{shown(recipe.id, plain=True)} is in {', '.join(there)} here, unlike the recorded one; {_WAYS}"
            )
        wrappers = wrappers[len(there) :]
        asked = _asked_of_wrappers(wrappers)
        if asked and not trust:
            _check_possible(wrappers)
            raise _untrusted(recipe, together(asked))
        for name, arguments in wrappers:
            if not trust and (wide := asked_of_width(inner, name, arguments)):
                raise _untrusted(recipe, wide)
            inner = _around(inner, name, arguments)
        return inner if shows is None else shows(inner)
    except BaseException:
        env.close()
        raise


def _check_possible(wrappers: Wrappers) -> None:
    """Raise EnvironmentUnavailable for wrappers that cannot be rebuilt even with trust."""
    for name, arguments in wrappers:
        known = _known(name, arguments)
        if is_of_gymnasium(name.partition(":")[0]):  # others may be recorders, which are skipped
            _made(known, name)


def _known(name: str, arguments: Arguments | None) -> Arguments:
    if arguments is None:
        raise EnvironmentUnavailable(
            f"the wrapper {shown(name, plain=True)} did not store its arguments (see "
            f"gymnasium.utils.RecordConstructorArgs); {_WAYS}"
        )
    return arguments


def _around(env: Any, name: str, arguments: Arguments | None) -> Any:
    arguments = _known(name, arguments)
    try:
        kind = harmless_wrapper(name) or trusted_wrapper(name)
    except LookupError as error:
        raise EnvironmentUnavailable(f"{error}; {_WAYS}") from error
    if kind is None:
        warn(f"the wrapper {shown(name, plain=True)} records or opens a window: not rebuilt")
        return env
    return kind(env, **checked_arguments(kind, _made(arguments, name)))


def _made(arguments: Arguments, owner: str, registered: Mapping[str, Any] = _NOTHING) -> dict[str, Any]:
    made = {}
    for name, stored in arguments.items():
        try:
            made[name] = argument(stored, registered.get(name))
        except LookupError as error:
            raise EnvironmentUnavailable(
                f"{shown(owner, plain=True)}: argument {shown(name, plain=True)} could not be stored: "
                f"{shown(error, plain=True)}; {_WAYS}"
            ) from error
    return made


def _import_for(recipe: Recipe, imports: list[str]) -> None:
    """Import the modules of the recording, or the top-level package and the module of the entry point."""
    module = (recipe.entry_point or "").partition(":")[0]
    own = [module.partition(".")[0], module] if module else []
    try:
        for wanted in dict.fromkeys([*imports, *own]):
            module = wanted
            importlib.import_module(wanted)
            if recipe.id in gymnasium.registry:
                return
    except ImportError as error:
        raise EnvironmentUnavailable(
            f"{shown(recipe.id, plain=True)} needs the module {shown(module)}, which is not installed: {error}"
        ) from error
    if recipe.entry_point is None:
        raise EnvironmentUnavailable(f"{named(recipe.id)} is not registered by {', '.join(imports)} here; {_WAYS}")


def _classes_around(env: Any) -> list[str]:
    """Return the classes of the wrappers around an environment, innermost first."""
    return [type(one).__qualname__ for one in wrappers_around(env)][::-1]


def _last(name: str) -> str:
    return name.partition(":")[2]
