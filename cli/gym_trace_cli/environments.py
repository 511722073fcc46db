"""Environments as the command line names them: by id and arguments, or by a function that makes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from inspect import Parameter, signature
from typing import Any

import click

from gym_trace.errors import EnvironmentUnavailable, InvalidOption
from gym_trace_cli.named import NamedCallable, import_here, look_in_current_directory

_REGISTERED_BY = {"ALE/": "ale_py", "MiniGrid-": "minigrid", "BabyAI-": "minigrid"}


class EnvArg(click.ParamType):  # type: ignore[type-arg]
    """KEY=VALUE, the value as JSON if it is JSON, and as text if not."""

    name = "key=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]
        key, equals, text = value.partition("=")
        if not (key.isidentifier() and equals):
            self.fail(f"{value!r} is not of the form KEY=VALUE, such as render_mode=rgb_array", param, ctx)
        try:
            return key, json.loads(text)
        except ValueError:
            return key, text


env_args = click.option(
    "--env-arg",
    "env_args",
    type=EnvArg(),
    multiple=True,
    metavar="K=V",
    help="Pass K=V to the environment; V is JSON, or else text.",
)
imports = click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="MODULE",
    help="Import the module that registers the environment, such as ale_py.",
)


class FactoryName(NamedCallable):
    """MODULE:FUNCTION that can be called. It stays text, which every process can look up for itself."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        super().convert(value, param, ctx)
        return value


make = click.option(
    "--make",
    "factory",
    type=FactoryName(),
    metavar="M:F",
    help="MODULE:FUNCTION that makes the environment; it is given what --env-arg says, and render_mode if it takes it.",
)
trust = click.option(
    "--trust",
    is_flag=True,
    help="Trust the trace: import, call and open what only it names. Without this you are told what that would be.",
)


def recorded_env(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options for the environment that a trace is played in."""
    env = click.option("--env", "env_id", metavar="ID", help="Play in this environment. Default: what the trace says.")
    for option in (trust, imports, env_args, make, env):
        command = option(command)
    return command


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


def maker(
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
