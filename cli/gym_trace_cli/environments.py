"""Environments of a command line: an id with arguments, or a function that makes them."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from typing import Any

import click

from gym_trace.errors import EnvironmentUnavailable, InvalidOption
from gym_trace_cli.options import NamedCallable, find_here, import_here, look_in_current_directory

_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")
_REGISTERED_BY = {"ALE/": "ale_py", "MiniGrid-": "minigrid", "BabyAI-": "minigrid"}


def import_modules(modules: Sequence[str]) -> None:
    """Import the modules of --import. Raises EnvironmentUnavailable."""
    for module in modules:
        try:
            import_here(module)
        except ImportError as error:
            raise EnvironmentUnavailable(f"--import {module}: {error}") from error


@dataclass(frozen=True)
class NamedEnvironment:
    """An environment of a command line. Call it to make one, in any process."""

    env_id: str | None
    factory: str | None
    env_args: dict[str, Any]
    imports: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()  # MODULE:CALLABLE, innermost first
    max_episode_steps: int | None = None

    def __call__(self, *vectorized: Any) -> Any:
        """vectorized: num_envs, vectorization and autoreset of make_env. Raises EnvironmentUnavailable."""
        import_modules(self.imports)
        return make_env(
            self.env_id,
            self.env_args,
            self.factory,
            *vectorized,
            wrappers=self.wrappers,
            max_episode_steps=self.max_episode_steps,
        )

    @property
    def imported(self) -> tuple[str, ...]:
        """Modules imported by name, stored in the trace."""
        module, colon, _ = (self.env_id or "").partition(":")
        return (*self.imports, module) if colon else self.imports

    def command_line(self) -> str:
        """Command-line arguments for this environment."""
        steps = self.max_episode_steps
        words = ["--make", self.factory] if self.factory is not None else [str(self.env_id)]
        arguments = [f"{name}={json.dumps(value)}" for name, value in self.env_args.items()]
        named = ("--import", self.imports), ("--env-arg", arguments), ("--wrapper", self.wrappers)
        words += [word for option, values in named for value in values for word in (option, value)]
        return shlex.join([*words, *([] if steps is None else ["--max-episode-steps", f"{steps}"])])

    def described(self) -> dict[str, Any]:
        """Return the settings a run must be resumed with."""
        more = {"make": self.factory, "wrappers": list(self.wrappers), "max_episode_steps": self.max_episode_steps}
        return {"id": self.env_id, "kwargs": self.env_args, **{name: value for name, value in more.items() if value}}


def making_arguments(
    env_id: str | None,
    factory: str | None,
    env_args: Sequence[tuple[str, Any]],
    imports: Sequence[str],
    trust: bool,
) -> dict[str, Any]:
    """Return the library's arguments for --env, --make, --env-arg and --import.

    trust: allow modules of the current directory that only the trace names.
    """
    import_modules(imports)
    if trust:
        look_in_current_directory()
    if env_id is not None and factory is not None:
        raise click.UsageError("--env and --make exclude each other")
    if factory is not None:
        return {"make_env": partial(make_with, factory, dict(env_args))}
    if env_id is not None:
        return {"make_env": partial(_shown, env_id, dict(env_args))}
    return {"env_kwargs": dict(env_args)}


def _shown(env_id: str, env_args: dict[str, Any], **render_mode: Any) -> Any:
    return make_env(env_id, {**env_args, **render_mode})


def without_display() -> None:
    """Make SDL draw without a display, and hide its message."""
    if not any(map(os.environ.get, _DISPLAYS)):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def make_with(factory: str, env_args: dict[str, Any], **render_mode: Any) -> Any:
    """Build the environment with the user's factory. Raises EnvironmentUnavailable."""
    import gymnasium

    make = NamedCallable().convert(factory, None, None)
    try:
        parameters = signature(make).parameters.values()
        if not any(p.name == "render_mode" or p.kind == Parameter.VAR_KEYWORD for p in parameters):
            render_mode = {}
        env = make(**env_args, **render_mode)
    except Exception as error:  # the user's code
        raise EnvironmentUnavailable(f"--make {factory}: {type(error).__name__}: {_one_line(error)}") from error
    if not isinstance(env, gymnasium.Env):
        raise EnvironmentUnavailable(f"--make {factory}: returned {type(env).__name__}; return a gymnasium.Env")
    return env


def make_env(
    env_id: str | None,
    env_args: dict[str, Any],
    factory: str | None = None,
    num_envs: int | None = None,
    vectorization: str | None = None,
    autoreset: str | None = None,
    *,
    wrappers: Sequence[str] = (),
    max_episode_steps: int | None = None,
) -> Any:
    """Make an environment, or a vector environment of num_envs. Raises EnvironmentUnavailable.

    wrappers: MODULE:CALLABLE, innermost first, for each environment.
    """
    import gymnasium

    vector_kwargs = {}
    if num_envs is not None and not hasattr(gymnasium.vector, "AutoresetMode"):
        raise InvalidOption("--num-envs needs gymnasium 1.1 or newer: pip install -U gymnasium")
    if autoreset is not None:
        vector_kwargs["autoreset_mode"] = gymnasium.vector.AutoresetMode["_".join(autoreset.upper().split("-"))]
    if factory is not None:
        make = partial(_made_and_wrapped, factory, env_args, wrappers, max_episode_steps)
        if num_envs is None:
            return make()
        kinds = {"sync": gymnasium.vector.SyncVectorEnv, "async": gymnasium.vector.AsyncVectorEnv}
        if vectorization not in (None, *kinds):
            raise InvalidOption("--make: builds single environments; pass --vectorization-mode sync or async")
        return kinds[vectorization or "sync"]([make] * num_envs, **vector_kwargs)
    if wrappers and vectorization == "vector_entry_point":
        raise InvalidOption("--wrapper: wraps single environments; pass --vectorization-mode sync or async")
    env_id = str(env_id)
    if ":" in env_id:  # MODULE:ENV_ID
        find_here(env_id.partition(":")[0])
    if max_episode_steps is not None:
        env_args = {**env_args, "max_episode_steps": max_episode_steps}
    try:
        if num_envs is None:
            return _wrapped(gymnasium.make(env_id, **env_args), wrappers)
        around = {"wrappers": [NamedCallable().convert(name, None, None) for name in wrappers]} if wrappers else {}
        return gymnasium.make_vec(
            env_id,
            num_envs,
            vectorization_mode=vectorization or "sync",
            vector_kwargs=vector_kwargs,
            **around,
            **env_args,
        )
    except gymnasium.error.UnregisteredEnv as error:
        module = next((known for start, known in _REGISTERED_BY.items() if env_id.startswith(start)), "MODULE")
        raise EnvironmentUnavailable(f"{_one_line(error)} Pass --import {module}") from error
    except EnvironmentUnavailable:
        raise
    except Exception as error:  # any constructor
        raise EnvironmentUnavailable(f"{env_id} cannot be made: {_one_line(error)}") from error


def _made_and_wrapped(
    factory: str, env_args: dict[str, Any], wrappers: Sequence[str], max_episode_steps: int | None
) -> Any:
    import gymnasium

    env = make_with(factory, env_args)
    if max_episode_steps is not None:
        env = gymnasium.wrappers.TimeLimit(env, max_episode_steps)
    return _wrapped(env, wrappers)


def _wrapped(env: Any, wrappers: Sequence[str]) -> Any:
    for name in wrappers:
        env = _wrap(name, env)
    return env


def _wrap(name: str, env: Any) -> Any:
    """Wrap env; close it on failure. Raises EnvironmentUnavailable."""
    import gymnasium

    wrapper = NamedCallable().convert(name, None, None)
    try:
        wrapped = wrapper(env)
        if not isinstance(wrapped, gymnasium.Env):
            raise TypeError(f"returned {type(wrapped).__name__}; return a gymnasium.Env")
    except Exception as error:  # the user's code
        env.close()
        raise EnvironmentUnavailable(f"--wrapper {name}: {type(error).__name__}: {_one_line(error)}") from error
    return wrapped


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
