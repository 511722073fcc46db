"""Environments as the command line names them: by id and arguments, with the modules that register them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from gym_trace.errors import EnvironmentUnavailable
from gym_trace_cli.named import import_here, look_in_current_directory

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


def import_modules(modules: Sequence[str]) -> None:
    """Imports what --import names. Raises EnvironmentUnavailable."""
    look_in_current_directory()  # also for ids of the form MODULE:ENV_ID
    for module in modules:
        try:
            import_here(module)
        except ImportError as error:
            raise EnvironmentUnavailable(f"--import {module}: {error}") from error


def import_and_make(modules: Sequence[str], env_id: str, env_args: dict[str, Any]) -> Any:
    """The environment, in a process that has not imported anything yet."""
    import_modules(modules)
    return make_env(env_id, env_args)


def make_env(
    env_id: str,
    env_args: dict[str, Any],
    num_envs: int | None = None,
    vectorization: str | None = None,
    autoreset: str | None = None,
) -> Any:
    """The environment, or that many of them as a vector environment. Raises EnvironmentUnavailable."""
    import gymnasium

    try:
        if num_envs is None:
            return gymnasium.make(env_id, **env_args)
        vector_kwargs = {}
        if autoreset is not None:
            vector_kwargs["autoreset_mode"] = gymnasium.vector.AutoresetMode["_".join(autoreset.upper().split("-"))]
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
