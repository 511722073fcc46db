"""Environments as the command line names them: by id and arguments, or by a function that makes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from inspect import Parameter, signature
from typing import Any

import click

from gym_trace.errors import EnvironmentUnavailable, InvalidOption
from gym_trace_cli.options import NamedCallable, import_here, look_in_current_directory

_REGISTERED_BY = {"ALE/": "ale_py", "MiniGrid-": "minigrid", "BabyAI-": "minigrid"}


def import_modules(modules: Sequence[str]) -> None:
    """Imports what --import names. Raises EnvironmentUnavailable."""
    look_in_current_directory()  # also for ids of the form MODULE:ENV_ID
    for module in modules:
        try:
            import_here(module)
        except ImportError as error:
            raise EnvironmentUnavailable(f"--import {module}: {error}") from error


def import_and_make(
    modules: Sequence[str], env_id: str | None, factory: str | None, env_args: dict[str, Any]
) -> Any:  # fmt: skip
    """The environment, in a process that has not imported anything yet."""
    import_modules(modules)
    return make_env(env_id, env_args, factory)


def making_arguments(
    env_id: str | None, factory: str | None, env_args: Sequence[tuple[str, Any]], imports: Sequence[str]
) -> dict[str, Any]:
    """What --env, --make, --env-arg and --import say, as arguments of the library's functions."""
    import_modules(imports)
    if env_id is not None and factory is not None:
        raise click.UsageError("--env and --make exclude each other")
    if factory is not None:
        return {"make_env": partial(make_with, factory, dict(env_args))}
    if env_id is not None:
        return {"make_env": partial(_shown, env_id, dict(env_args))}
    return {"env_kwargs": dict(env_args)}


def _shown(env_id: str, env_args: dict[str, Any], **render_mode: Any) -> Any:
    return make_env(env_id, {**env_args, **render_mode})


def make_with(factory: str, env_args: dict[str, Any], **render_mode: Any) -> Any:
    """What a function of somebody's own makes. Raises EnvironmentUnavailable."""
    import gymnasium

    make = NamedCallable().convert(factory, None, None)
    try:
        parameters = signature(make).parameters.values()
        if not any(p.name == "render_mode" or p.kind == Parameter.VAR_KEYWORD for p in parameters):
            render_mode = {}
        env = make(**env_args, **render_mode)
    except Exception as error:  # somebody's code
        raise EnvironmentUnavailable(f"--make {factory}: {type(error).__name__}: {_one_line(error)}") from error
    if not isinstance(env, gymnasium.Env):
        raise EnvironmentUnavailable(f"--make {factory} made a {type(env).__name__}, which is no gymnasium.Env")
    return env


def make_env(
    env_id: str | None,
    env_args: dict[str, Any],
    factory: str | None = None,
    num_envs: int | None = None,
    vectorization: str | None = None,
    autoreset: str | None = None,
) -> Any:
    """The environment, or that many of them as a vector environment. Raises EnvironmentUnavailable."""
    import gymnasium

    vector_kwargs = {}
    if autoreset is not None:
        vector_kwargs["autoreset_mode"] = gymnasium.vector.AutoresetMode["_".join(autoreset.upper().split("-"))]
    if factory is not None:
        if num_envs is None:
            return make_with(factory, env_args)
        kinds = {"sync": gymnasium.vector.SyncVectorEnv, "async": gymnasium.vector.AsyncVectorEnv}
        if vectorization not in (None, *kinds):
            raise InvalidOption("--make makes single environments: pass --vectorization-mode sync or async")
        return kinds[vectorization or "sync"]([partial(make_with, factory, env_args)] * num_envs, **vector_kwargs)
    env_id = str(env_id)
    try:
        if num_envs is None:
            return gymnasium.make(env_id, **env_args)
        return gymnasium.make_vec(
            env_id, num_envs, vectorization_mode=vectorization or "sync", vector_kwargs=vector_kwargs, **env_args
        )
    except gymnasium.error.UnregisteredEnv as error:
        module = next((known for start, known in _REGISTERED_BY.items() if env_id.startswith(start)), "MODULE")
        raise EnvironmentUnavailable(f"{_one_line(error)} If a package has it, say which: --import {module}") from error
    except Exception as error:  # whatever somebody's constructor raises
        raise EnvironmentUnavailable(f"{env_id} cannot be made: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
