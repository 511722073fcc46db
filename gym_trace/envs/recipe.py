"""Recipe of an environment as plain data (docs/FORMAT.md, section 4): its id, its arguments, its wrappers."""

from __future__ import annotations

import enum
import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from gym_trace.data.packing import pack, pack_lenient
from gym_trace.data.values import class_name, copied, dtype_from, is_plain_dtype
from gym_trace.errors import CorruptTrace, EnvironmentUnavailable, UnstorableValue
from gym_trace.format.manifest import json_of

_NOT_IMPORTABLE = re.compile(r"[<]|^__main__:|^__mp_main__:")  # in another process
_LARGEST = 64 << 10  # bytes of an argument, which every batch repeats
_DEEPEST = 32  # levels of an argument
_MOST_WRAPPERS = 100
OF_ALL_LANES = ("num_envs", "vectorization_mode", "vector_kwargs", "wrappers")  # arguments of make_vec() itself
_OF_MAKE = ("max_episode_steps", "disable_env_checker")  # arguments of make() that never reach an environment
_BUILTIN_TYPES: dict[str, type] = {"bool": bool, "int": int, "float": float}

Arguments = dict[str, Any]
Wrappers = list[tuple[str, Arguments | None]]  # innermost first, class and arguments of each


class Recipe(NamedTuple):
    """Instructions for rebuilding an environment. argument() decodes stored arguments.

    class_name: class of the environment without its wrappers, or None. Arguments of a wrapper are None if unknown.
    """

    id: str
    entry_point: str | None
    kwargs: Arguments
    class_name: str | None
    wrappers: Wrappers


# -- of an environment ------------------------------------------------------------------------------------------------


def wrappers_around(env: Any) -> Iterator[Any]:
    """Yield the wrappers around an environment, outermost first; also those of other packages."""
    base = env.unwrapped
    for _ in range(_MOST_WRAPPERS):
        if env is base or not hasattr(env, "env"):
            return
        yield env
        env = env.env


def recipe_of(env: Any) -> dict[str, Any]:
    """Return the recipe of one environment as plain data."""
    wrappers = [[name_of(type(one)), _arguments_of(one)] for one in wrappers_around(env)]
    env = env.unwrapped
    kind = f"{type(env).__module__}.{type(env).__qualname__}"
    return {**_base(getattr(env, "spec", None)), "class": kind, "wrappers": wrappers[::-1]}


def recipes_of_lanes(envs: Any) -> list[dict[str, Any]]:
    """Return the recipes of the lanes of a vector environment; one if all are equal or hidden."""
    lanes = getattr(envs, "envs", None)
    if isinstance(lanes, (list, tuple)) and lanes and all(isinstance(lane, gymnasium.Env) for lane in lanes):
        recipes = [recipe_of(lane) for lane in lanes]
        first = pack(recipes[0])
        return recipes if any(pack(recipe) != first for recipe in recipes[1:]) else recipes[:1]
    return [recipe_of_spec(getattr(envs, "spec", None))]


def recipe_of_spec(spec: Any) -> dict[str, Any]:
    """Return the recipe of environments made from a spec, such as lanes of make_vec(); an empty one without a spec."""
    if not isinstance(spec, EnvSpec):
        return {**_base(None), "class": None, "wrappers": []}
    named = [[wrapper.entry_point, _stored(wrapper.kwargs)] for wrapper in spec.additional_wrappers]
    around = [_wrapping(function) for function in spec.kwargs.get("wrappers") or ()]
    base = _base(spec)
    for name in (*OF_ALL_LANES, *_OF_MAKE):
        base["kwargs"].pop(name, None)
    return {**base, "class": None, "wrappers": [*_wrappers_of_make(_as_applied(vars(spec))), *named, *around]}


def _base(spec: Any) -> dict[str, Any]:
    if not isinstance(spec, EnvSpec):
        return {"id": None, "entry_point": None, "kwargs": {}}
    entry_point = spec.entry_point if isinstance(spec.entry_point, str) else None
    registered = gymnasium.registry[spec.id].kwargs if spec.id in gymnasium.registry else {}
    stored = _stored(spec.kwargs or {})
    for name, (form, what) in stored.items():
        if form == "unknown" and name in registered and alike(registered[name], spec.kwargs[name]):
            stored[name] = ["registered", what]
    return {"id": spec.id, "entry_point": entry_point, "kwargs": stored}


def _as_applied(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec as make() applies it: make_vec() keeps arguments of make() among those of the environment."""
    kwargs = dict(spec.get("kwargs") or {})
    arguments = {name: kwargs.pop(name, None) for name in _OF_MAKE}
    settled = {**spec, **{name: value for name, value in arguments.items() if value is not None}, "kwargs": kwargs}
    return settled if settled.get("max_episode_steps") != -1 else {**settled, "max_episode_steps": None}


def _wrappers_of_make(spec: Mapping[str, Any]) -> list[list[Any]]:
    """Return the wrappers that gymnasium.make() adds by itself."""
    steps = spec.get("max_episode_steps")
    wrappers: list[list[Any]] = []
    if not spec.get("disable_env_checker"):
        wrappers.append(["gymnasium.wrappers:PassiveEnvChecker", {}])
    if spec.get("order_enforce", True):
        wrappers.append(["gymnasium.wrappers:OrderEnforcing", {}])
    if steps is not None:
        wrappers.append(["gymnasium.wrappers:TimeLimit", _stored({"max_episode_steps": steps})])
    return wrappers


def call_of(function: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the function and the keywords of a partial without other arguments; other functions as they are."""
    is_partial = isinstance(function, functools.partial) and not function.args
    return (function.func, function.keywords) if is_partial else (function, {})


def _wrapping(function: Any) -> list[Any]:
    """Return the wrapper that a make_vec() function adds to a lane, if it is a class or a partial of one."""
    kind, arguments = call_of(function)
    if isinstance(kind, type):
        return [name_of(kind), _stored(arguments)]
    return [name_of(function), None]


def name_of(thing: Any) -> str:
    """Return MODULE:NAME of a function or a class, or of the class of another object."""
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{kind.__module__}:{kind.__qualname__}"


def _arguments_of(wrapper: Any) -> Any:
    """Return the arguments of a wrapper; None if it takes some and does not store them."""
    kind: Any = type(wrapper)
    names = _parameters(kind)
    saved = getattr(wrapper, "_saved_kwargs", None)  # set by gymnasium.utils.RecordConstructorArgs
    if isinstance(saved, Mapping):
        if names is None or kind.__module__.startswith("gymnasium."):
            return _stored({name: value for name, value in saved.items() if name != "env"})
        if names <= saved.keys():  # otherwise a base class has stored its own arguments
            return _stored({name: saved[name] for name in sorted(names)})
    return {} if names == frozenset() else None


@functools.lru_cache(maxsize=1024)
def _parameters(kind: type) -> frozenset[str] | None:
    """Return the parameters of a wrapper except the environment; None if it takes any."""
    try:
        parameters = list(inspect.signature(kind).parameters.values())[1:]
    except (TypeError, ValueError):
        return None
    if any(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


# -- arguments as data ------------------------------------------------------------------------------------------------


def _stored(arguments: Mapping[str, Any] | None) -> Any:
    return None if arguments is None else {str(name): _as_data(value) for name, value in arguments.items()}


def _as_data(value: Any) -> list[Any]:
    """Return an argument as [form, value]."""
    if isinstance(value, np.dtype) and is_plain_dtype(value.str):
        return ["dtype", value.str]
    if isinstance(value, type) and issubclass(value, np.generic) and is_plain_dtype(np.dtype(value).str):
        return ["type", np.dtype(value).str]
    if isinstance(value, type) and _BUILTIN_TYPES.get(value.__name__) is value:
        return ["type", value.__name__]
    if isinstance(value, PurePath):
        return ["path", str(value)]
    if isinstance(value, enum.Enum) and not isinstance(value, (int, float, str, bytes)):
        return ["enum", [class_name(value), str(value.name)]]
    what = f"{type(value).__name__}, which is too large or not plain"
    if getattr(value, "nbytes", 0) > _LARGEST:
        return ["unknown", what]
    try:
        if len(pack(value)) <= _LARGEST and _is_plain(copy := copied(value)):
            return ["value", copy]
    except UnstorableValue:
        what = ", ".join(pack_lenient(value)[1][:1])
    return ["unknown", what]


def argument(stored: Any, registered: Any = None) -> Any:
    """Return a stored argument. registered: the value in the registry, if any.

    Raises:
        LookupError: the argument could not be stored; the message describes it.
        CorruptTrace: the stored argument is malformed.
    """
    if not (isinstance(stored, (list, tuple)) and len(stored) == 2):
        raise CorruptTrace("an argument of the environment is malformed")
    form, value = stored
    if form == "value" and _is_plain(value):
        is_member = isinstance(registered, enum.Enum) and type(value) in (int, str) and registered == value
        return registered if is_member else value  # the number of an IntEnum member was stored
    if form == "registered" and registered is not None:
        return registered
    if form == "enum" and isinstance(registered, enum.Enum) and isinstance(value, list) and len(value) == 2:
        members = type(registered).__members__ if value[0] == class_name(registered) else {}
        if isinstance(value[1], str) and value[1] in members:
            return members[value[1]]
    if form == "dtype":
        return dtype_from(value)
    if form == "type" and isinstance(value, str):
        return _BUILTIN_TYPES.get(value) or dtype_from(value).type
    if form == "path" and isinstance(value, str):
        return Path(value)
    raise LookupError(str(value)[:200])


def alike(one: Any, other: Any, depth: int = 0) -> bool:
    """Return True if two arguments are equal, such as a registered one and make()'s deep copy."""
    if one is other:
        return True
    if type(one) is not type(other) or depth > _DEEPEST:
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(alike(one[key], other[key], depth + 1) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other, [depth + 1] * len(one)))
    if isinstance(one, np.ndarray):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        if one.dtype.hasobject:
            return alike(one.ravel().tolist(), other.ravel().tolist(), depth + 1)
        return bool(one.tobytes() == other.tobytes())
    try:
        if bool(one.equals(other) if hasattr(one, "equals") else one == other):  # pandas tables have equals()
            return True
    except Exception:  # comparing user objects may raise anything
        return False
    plain = all(getattr(type(one), name) is getattr(object, name) for name in ("__reduce__", "__reduce_ex__"))
    slots = any("__slots__" in vars(kind) for kind in type(one).__mro__)
    return plain and not slots and hasattr(one, "__dict__") and alike(vars(one), vars(other), depth + 1)


def _is_plain(value: Any, depth: int = 0) -> bool:
    if depth > _DEEPEST:
        return False
    if isinstance(value, Mapping):
        return all(_is_plain(key, depth + 1) and _is_plain(item, depth + 1) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(_is_plain(item, depth + 1) for item in value)
    if isinstance(value, np.ndarray) and value.dtype == object:
        return all(_is_plain(item, depth + 1) for item in value.ravel().tolist())
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.ndarray, np.generic))


# -- of a trace -------------------------------------------------------------------------------------------------------


def recorded_recipe(description: Mapping[str, Any], lane: int = 0) -> Recipe | None:
    """Return the recipe of a lane's environment; None if the trace has none.

    Raises:
        EnvironmentUnavailable: the description is malformed.
    """
    made = _made(description, lane)
    if made is None or (isinstance(made, Mapping) and made.get("id") is None):
        return None
    return _recipe_from(made)


def factory_recipe(
    call: str, kwargs: Mapping[str, Any], wrappers: Iterable[tuple[str, Mapping[str, Any]]]
) -> dict[str, Any]:
    """Return the recipe of an environment made by a function, MODULE:FUNCTION; see recorded_factory()."""
    around = [[name, _stored(arguments)] for name, arguments in wrappers]
    return {"id": call, "entry_point": call, "kwargs": _stored(kwargs), "wrappers": around}


def changed_factory(
    factory: Mapping[str, Any], kwargs: Mapping[str, Any], wrappers: Iterable[Any]
) -> dict[str, Any] | None:
    """Return factory_recipe() with further arguments and wrappers; None if a wrapper cannot be imported by a name."""
    calls = [(name_of(kind), arguments) for kind, arguments in map(call_of, wrappers)]
    if any(_NOT_IMPORTABLE.search(name) for name, _ in calls):
        return None
    more = factory_recipe("", kwargs, calls)
    changed = {"kwargs": {**factory["kwargs"], **more["kwargs"]}, "wrappers": [*factory["wrappers"], *more["wrappers"]]}
    return {**factory, **changed}


def recipe_of_function(make: Any) -> dict[str, Any] | None:
    """Return factory_recipe() of a module-level function or a partial of one; None for others."""
    function, kwargs = call_of(make)
    name = "" if not inspect.isfunction(function) else f"{function.__module__}:{function.__qualname__}"
    return factory_recipe(name, kwargs, []) if name and not _NOT_IMPORTABLE.search(name) else None


def recorded_factory(description: Mapping[str, Any]) -> Recipe | None:
    """Return the recipe with the function that the user named to make the environment; None without one.

    Raises:
        EnvironmentUnavailable: the description is malformed.
    """
    factory = description.get("factory")
    return None if factory is None else _recipe_from(factory)


def is_whole(recipe: Recipe) -> bool:
    """Return True if every argument is stored or in the registry."""
    spec = gymnasium.registry.get(recipe.id)
    registered = {} if spec is None else spec.kwargs
    try:
        for name, stored in recipe.kwargs.items():
            argument(stored, registered.get(name))
        for _, arguments in recipe.wrappers:
            if arguments is None:
                return False
            for stored in arguments.values():
                argument(stored)
    except (LookupError, CorruptTrace):
        return False
    return True


def _recipe_from(made: Any) -> Recipe:
    try:
        name, entry_point, kwargs = made["id"], made["entry_point"], made["kwargs"]
        wrappers, class_name = _wrappers_in(made), made.get("class")
        if not all(isinstance(text, str) for text in (name, *kwargs, *([] if entry_point is None else [entry_point]))):
            raise TypeError
        return Recipe(name, entry_point, dict(kwargs), class_name if isinstance(class_name, str) else None, wrappers)
    except (LookupError, TypeError, ValueError) as error:
        raise EnvironmentUnavailable("the recorded environment is malformed") from error


def recorded_wrappers(description: Mapping[str, Any], lane: int = 0) -> Wrappers:
    """Return the wrappers of a lane, even if its environment is unknown; empty if they are malformed."""
    try:
        return _wrappers_in(_made(description, lane) or {"wrappers": ()})
    except (LookupError, TypeError, ValueError, EnvironmentUnavailable):
        return []


def _made(description: Mapping[str, Any], lane: int) -> Any:
    made, lanes = description.get("made"), description.get("lanes")
    if isinstance(lanes, list) and 0 <= lane < len(lanes):
        made = lanes[lane]
    return _made_by_spec(description) if made is None else made


def _wrappers_in(made: Any) -> Wrappers:
    wrappers = [(kind, arguments) for kind, arguments in made["wrappers"]]
    texts = [text for kind, arguments in wrappers for text in (kind, *(arguments or ()))]
    if len(wrappers) > _MOST_WRAPPERS or not all(isinstance(text, str) for text in texts):
        raise TypeError
    return wrappers


def _made_by_spec(description: Mapping[str, Any]) -> Any:
    """Return the recipe from the JSON of an EnvSpec, the only source in older traces."""
    try:
        spec = json_of(description.get("spec") or "null")
        if not isinstance(spec, dict) or description.get("note"):
            return None
        spec = _as_applied(spec)
        named = [[wrapper["entry_point"], _stored(wrapper["kwargs"])] for wrapper in spec["additional_wrappers"] or ()]
        entry_point = spec.get("entry_point")
        made = {"id": spec["id"], "entry_point": entry_point, "kwargs": _stored(spec.get("kwargs") or {})}
        return {**made, "wrappers": [*_wrappers_of_make(spec), *named]}
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise EnvironmentUnavailable(f"the recorded spec is malformed: {error!r:.100}") from error
