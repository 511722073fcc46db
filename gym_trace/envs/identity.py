"""Identity of the recorded environment as plain data: id, spec, wrappers, versions of packages."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import math
import platform
import sys
from collections.abc import Collection, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from gym_trace.data.packing import pack, unpack
from gym_trace.data.values import shown, without_addresses
from gym_trace.envs.agents import JointEnv
from gym_trace.envs.dm_env import DmEnvView
from gym_trace.envs.names import names_of
from gym_trace.envs.recipe import (
    OF_ALL_LANES,
    recipe_of,
    recipe_of_spec,
    recipes_of_lanes,
    recorded_recipe,
    wrappers_around,
)
from gym_trace.errors import InvalidOption, TraceError

# Simulators and libraries whose version may change the results of an environment.
_RELEVANT_PACKAGES = (
    "ale_py", "Box2D", "brax", "chess", "dm_control", "isaaclab", "jax", "mani_skill", "minigrid", "mjlab", "mujoco",
    "mujoco_warp", "newton", "pygame", "pymunk", "rlcard", "sapien", "torch", "warp",
)  # fmt: skip


def describe_environment(env: Any) -> dict[str, Any]:
    """Describe a single or vector environment and its wrappers as plain data (docs/FORMAT.md, section 4).

    env: the environment; without a Gymnasium environment, an EnvSpec, an id, a map of facts, or None.
    """
    if not hasattr(env, "unwrapped"):
        return _from_user(env)
    spec = _spec_of(env)
    plain, note = _spec_json(spec)
    unwrapped = env.unwrapped
    render_mode = getattr(unwrapped, "render_mode", None)  # the innermost one may not be Gymnasium's
    is_vector = isinstance(unwrapped, gymnasium.vector.VectorEnv)
    made = recipes_of_lanes(unwrapped) if is_vector else [recipe_of(env)]
    agents: dict[str, Any] = {}
    if isinstance(unwrapped, JointEnv):
        agents = {"agents": {"kind": unwrapped.kind, "names": unwrapped.names, "state": unwrapped.has_state}}
    unwrapped, names = _innermost(unwrapped), names_of(env)
    return {
        "id": spec.id if isinstance(spec, EnvSpec) else None,
        "spec": plain,
        "note": note,
        "wrappers": [f"{type(one).__module__}.{type(one).__qualname__}" for one in wrappers_around(env)],
        "class": f"{type(unwrapped).__module__}.{type(unwrapped).__qualname__}",
        "render_mode": render_mode if isinstance(render_mode, str) else None,
        **_render_fps(env),
        "made": made[0],
        **agents,
        **({"names": names} if names else {}),
        **({"lanes": made} if len(made) > 1 else {}),
    }


def _render_fps(env: Any) -> dict[str, float]:
    """Return the steps per second of an environment, if its metadata has them."""
    metadata = getattr(env, "metadata", None)
    fps = metadata.get("render_fps") if isinstance(metadata, Mapping) else None
    if isinstance(fps, (int, float, np.integer, np.floating)) and 0 < fps < math.inf:
        return {"render_fps": float(fps)}
    return {}


def _from_user(environment: Any) -> dict[str, Any]:
    """Describe an environment that only the user knows. Raises InvalidOption, UnstorableValue."""
    description: dict[str, Any] = {
        "id": None,
        "spec": None,
        "note": "",
        "wrappers": [],
        "class": None,
        "render_mode": None,
    }
    note = "recorded with TraceWriter, which knows no environment"
    if isinstance(environment, EnvSpec):
        plain, note = _spec_json(environment)
        mode = environment.kwargs.get("render_mode")
        description |= {"id": environment.id, "spec": plain, "render_mode": mode if isinstance(mode, str) else None}
    elif isinstance(environment, str):
        description |= {"id": environment}
        note = "recorded with TraceWriter, which was given the name of its environment alone"
    elif isinstance(environment, Mapping) and all(isinstance(name, str) for name in environment):
        name = environment.get("id")
        description |= {"id": name if isinstance(name, str) else None, "facts": unpack(pack(dict(environment)))}
        note = "recorded with TraceWriter, which was given facts about its environment alone"
    elif environment is not None:
        kind = type(environment).__name__
        raise InvalidOption(f"environment: got a {kind}; pass an EnvSpec, an id, or a dict of facts with text keys")
    return {**description, "note": note, "made": recipe_of_spec(environment)}


def _spec_of(env: Any) -> Any:
    """Return the spec of an environment, or of one lane of a vector environment."""
    if not isinstance(env.unwrapped, gymnasium.vector.VectorEnv):
        return getattr(env, "spec", None)
    lanes = getattr(env.unwrapped, "envs", None)
    first = getattr(lanes[0], "spec", None) if isinstance(lanes, list) and lanes else None
    spec = first or getattr(env, "spec", None)
    if not isinstance(spec, EnvSpec):
        return spec
    kwargs = {name: value for name, value in spec.kwargs.items() if name not in OF_ALL_LANES}
    return dataclasses.replace(spec, kwargs=kwargs)  # no deep copy: some arguments cannot be copied


def _spec_json(spec: Any) -> tuple[str | None, str]:
    if spec is None:
        return None, "the environment has no spec"
    if not isinstance(spec, EnvSpec):
        kind = f"{type(spec).__module__}.{type(spec).__name__}"
        return None, f"the environment has a spec that is not Gymnasium's: {kind}"
    try:
        return spec.to_json(), ""
    except (TypeError, ValueError) as error:
        note = without_addresses(str(error))
    fields: dict[str, Any] = {name: getattr(spec, name, None) for name in ("id", "max_episode_steps", "kwargs")}
    if isinstance(spec.entry_point, str):
        fields["entry_point"] = spec.entry_point
    try:
        return json.dumps(fields), f"the spec could not be stored whole: {note}"
    except (TypeError, ValueError):
        fields["kwargs"] = {name: shown(value)[:200] for name, value in (fields["kwargs"] or {}).items()}
        return json.dumps(fields, default=shown), f"the spec could not be stored whole: {note}"


def _innermost(unwrapped: Any) -> Any:
    """Return the dm_env or PettingZoo environment behind a Gymnasium environment, or the environment itself."""
    if isinstance(unwrapped, DmEnvView):
        return unwrapped.viewed
    return unwrapped.inner.unwrapped if isinstance(unwrapped, JointEnv) else unwrapped


def versions_of(env: Any) -> dict[str, str]:
    """Return versions of Python, gym-trace, gymnasium, NumPy, and the packages of the environment."""
    base = getattr(env, "unwrapped", None)
    kinds = dict.fromkeys((type(base), type(_innermost(base))))
    own = [cls.__module__.partition(".")[0] for kind in kinds for cls in kind.__mro__]
    found = {"python": platform.python_version()}
    for name in dict.fromkeys(["gym_trace", "gymnasium", "numpy", *own, *_RELEVANT_PACKAGES]):
        if name in sys.modules and name not in ("builtins", "typing", "__main__"):
            version = _version(name)
            if version is not None:
                found[name] = version
    return found


def installed_versions(recorded: Mapping[str, Collection[str]]) -> dict[str, str | None]:
    """Return the installed versions of these packages, as versions_of() does; None for missing ones.

    If several distributions provide a package, such as pygame and pygame-ce, a recorded version of any of them matches:
    only an import shows which one is used.
    """
    own = {"python": platform.python_version()}
    found = {name: own.get(name) or _version(name) for name in recorded}
    unsure = [name for name, version in found.items() if version not in recorded[name] and name not in sys.modules]
    if unsure:
        packages = importlib.metadata.packages_distributions()  # pygame may come with pygame-ce, Box2D with box2d-py
        for name in unsure:
            versions = [importlib.metadata.version(each) for each in packages.get(name, ())]
            same = (version for version in versions if version in recorded[name])
            found[name] = next(same, found[name] or next(iter(versions), None))
    return found


def _version(name: str) -> str | None:
    """Return the version of a package, the same whether it is imported or not."""
    loaded, known = getattr(sys.modules.get(name), "__version__", None), _distributed(name)
    # PyTorch's local version, such as 2.14.1+cu130, is known only after an import.
    return loaded if isinstance(loaded, str) and loaded.partition("+")[0] != known else known


@functools.lru_cache(maxsize=256)  # all recorders need the same packages
def _distributed(name: str) -> str | None:
    try:
        # Older Pythons reject an empty name.
        return importlib.metadata.version(name.replace("_", "-")) if name else None
    except (importlib.metadata.PackageNotFoundError, ValueError):  # a trace may name anything
        return None


def packages_of(description: Mapping[str, Any]) -> set[str]:
    """Return names of the packages of a recorded environment and its wrappers."""
    try:
        recipe = recorded_recipe(description)
    except TraceError:
        recipe = None
    if recipe is None:
        return set()
    names = [recipe.entry_point or "", *(name for name, _ in recipe.wrappers)]
    return {name.partition(":")[0].partition(".")[0] for name in names} - {""}
