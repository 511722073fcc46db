"""Environments of a command line: an id with arguments, or a function that makes them."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from gym_trace.errors import EnvironmentUnavailable, InvalidOption
from gym_trace.storage import is_url
from gym_trace_cli.completion import environment_ids
from gym_trace_cli.help import bundle, option, section
from gym_trace_cli.options import (
    POSITIVE,
    EnvArg,
    callable_name,
    find_here,
    import_here,
    look_in_current_directory,
    named_callable,
)

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
    is_of_any_kind: bool = False  # a factory may also make a multi-agent or a vector environment

    @property
    def __name__(self) -> str:
        return self.env_id or self.factory or ""

    @property
    def file_name(self) -> str:
        return self.__name__.replace("/", "-").replace(":", "-")

    def __call__(
        self,
        num_envs: int | None = None,
        vectorization: str | None = None,
        render_mode: str | None = None,
    ) -> Any:
        """Make the environment, or a vector environment of num_envs. Raises EnvironmentUnavailable."""
        import gymnasium

        from gym_trace.recording import call_factory

        import_modules(self.imports)
        if num_envs is not None and not hasattr(gymnasium.vector, "AutoresetMode"):
            raise InvalidOption("--num-envs needs gymnasium 1.1 or newer: pip install -U gymnasium")
        if self.factory is not None:
            if num_envs is None:
                return self._made_by_factory(render_mode)
            kinds = {"sync": gymnasium.vector.SyncVectorEnv, "async": gymnasium.vector.AsyncVectorEnv}
            if vectorization not in (None, *kinds):
                raise InvalidOption("--make: builds single environments; pass --vectorization-mode sync or async")
            return kinds[vectorization or "sync"]([self._made_by_factory] * num_envs)
        if self.wrappers and vectorization == "vector_entry_point":
            raise InvalidOption("--wrapper: wraps single environments; pass --vectorization-mode sync or async")
        env_id, env_args = str(self.env_id), self.env_args
        if ":" in env_id:  # MODULE:ENV_ID
            find_here(env_id.partition(":")[0])
        if self.max_episode_steps is not None:
            env_args = {**env_args, "max_episode_steps": self.max_episode_steps}
        if render_mode is not None:
            env_args = {**env_args, "render_mode": render_mode}
        try:
            if num_envs is None:
                return _wrapped(call_factory(gymnasium.make, {"id": env_id, **env_args}), self.wrappers)
            if self.wrappers:
                env_args = {**env_args, "wrappers": [named_callable(name) for name in self.wrappers]}
            mode = vectorization or "sync"
            vector = {"num_envs": num_envs, "vectorization_mode": mode}
            return call_factory(gymnasium.make_vec, {"id": env_id, **vector, **env_args})
        except gymnasium.error.UnregisteredEnv as error:
            raise EnvironmentUnavailable(f"{env_id}: {_one_line(error)}{_hint(env_id, error)}") from error
        except EnvironmentUnavailable:
            raise
        except Exception as error:  # any constructor
            raise EnvironmentUnavailable(f"{env_id} cannot be made: {_one_line(error)}") from error

    def _made_by_factory(self, render_mode: str | None = None) -> Any:
        import gymnasium

        env = make_with(str(self.factory), self.env_args, render_mode)
        if self.is_of_any_kind and (isinstance(env, gymnasium.vector.VectorEnv) or not isinstance(env, gymnasium.Env)):
            return env
        if not isinstance(env, gymnasium.Env):
            env.close()
            raise EnvironmentUnavailable(
                f"--make {self.factory}: returned {type(env).__name__}, a multi-agent environment; record it in "
                "Python, with gym_trace.pettingzoo.record()"
            )
        if self.max_episode_steps is not None:
            env = gymnasium.wrappers.TimeLimit(env, self.max_episode_steps)
        return _wrapped(env, self.wrappers)

    @property
    def imported(self) -> tuple[str, ...]:
        """Modules imported by name, stored in the trace."""
        module, colon, _ = (self.env_id or "").partition(":")
        return (*self.imports, module) if colon else self.imports

    @property
    def as_recorded(self) -> tuple[str, dict[str, Any], list[tuple[str, dict[str, Any]]]] | None:
        """Factory, its arguments, and the wrappers around its environment, for the trace; None without a factory."""
        if self.factory is None:
            return None
        limit: dict[str, Any] = {"max_episode_steps": self.max_episode_steps}
        limits = [] if self.max_episode_steps is None else [("gymnasium.wrappers:TimeLimit", limit)]
        return self.factory, self.env_args, [*limits, *((name, {}) for name in self.wrappers)]

    def replaying(self) -> list[str]:
        """Return the options that rebuild it for a trace of it, as words of a command line."""
        if self.factory is not None and self.wrappers:  # commands that read a trace have no --wrapper
            return ["--trust"]
        options = RecordedEnvironment(None, self.factory, tuple(self.env_args.items()), self.imports, False)
        return options.words() if self.factory is not None else options._replace(env_args=()).words()

    def command_line(self) -> str:
        steps = self.max_episode_steps
        words = ["--make", self.factory] if self.factory is not None else [str(self.env_id)]
        arguments = [f"{name}={json.dumps(value)}" for name, value in self.env_args.items()]
        named = ("--import", self.imports), ("--env-arg", arguments), ("--wrapper", self.wrappers)
        words += [word for option, values in named for value in values for word in (option, value)]
        return shlex.join([*words, *([] if steps is None else ["--max-episode-steps", f"{steps}"])])

    def described(self) -> dict[str, Any]:
        """Return the settings with which a run must be resumed."""
        more = {"make": self.factory, "wrappers": list(self.wrappers), "max_episode_steps": self.max_episode_steps}
        return {"id": self.env_id, "kwargs": self.env_args, **{name: value for name, value in more.items() if value}}


def _named(env_id: str | None, factory: str | None, env_args: Any, **more: Any) -> NamedEnvironment:
    """Return the environment. The command line overrules --config."""
    if env_id is not None and factory is not None:
        source = click.get_current_context().get_parameter_source
        typed = [name for name in ("env_id", "factory") if source(name) is ParameterSource.COMMANDLINE]
        env_id = None if typed == ["factory"] else env_id
        factory = None if typed == ["env_id"] else factory
    return NamedEnvironment(env_id, factory, dict(env_args), **more)


_make_option = option("--make M:F", "Build it with MODULE:FUNCTION, not by an id.", callable_name, name="factory")
_args_option = option("--env-arg K=V", "Environment argument, JSON or text (repeatable).", EnvArg(), name="env_args")
_import_option = option(
    "--import MODULE", "Import the module that registers it, e.g. ale_py.", name="imports", multiple=True
)
environment_options = bundle(
    "named",
    _named,
    _make_option,
    _args_option,
    _import_option,
    option("--wrapper M:C", "Add a wrapper, innermost first (repeatable).", callable_name, name="wrappers"),
    option("--max-episode-steps N", "Truncate episodes after N steps.", POSITIVE),
    also=["env_id"],
)


def is_trace(name: str) -> bool:
    """Return True if ENV|DIR is a directory or a URL, not an id of an environment."""
    return os.path.isdir(name) or is_url(name)


class RecordedEnvironment(NamedTuple):
    """Options that rebuild the environment of a trace. trust: allow imports, calls and files that the trace names."""

    env_id: str | None
    factory: str | None
    env_args: Sequence[tuple[str, Any]]
    imports: Sequence[str]
    trust: bool

    def arguments(self) -> dict[str, Any]:
        """Return the library's arguments; do the imports. Raises EnvironmentUnavailable."""
        import_modules(self.imports)
        if self.trust:
            look_in_current_directory()
        if self.env_id is not None and self.factory is not None:
            raise click.UsageError("--env and --make exclude each other")
        if self.factory is not None:
            return {"trust": self.trust, "make_env": partial(make_with, self.factory, dict(self.env_args))}
        if self.env_id is not None:
            return {"trust": self.trust, "make_env": partial(_make_by_id, self.env_id, dict(self.env_args))}
        return {"trust": self.trust, "env_kwargs": dict(self.env_args)}

    def words(self) -> list[str]:
        """Return the options as words of a command line."""
        named = [("--env", self.env_id), ("--make", self.factory), *(("--import", module) for module in self.imports)]
        words = [word for option, value in named if value is not None for word in (option, value)]
        for name, value in self.env_args:
            words += ["--env-arg", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
        return [*words, "--trust"] if self.trust else words


recorded_environment_options = section(
    "Environment",
    bundle(
        "recorded",
        RecordedEnvironment,
        option("--env ID", "Environment. Default: the recorded one.", name="env_id", shell_complete=environment_ids),
        _make_option,
        _args_option,
        _import_option,
        option("--trust", "Allow imports, calls, files that the trace names."),
    ),
    topic="env",
)


def _make_by_id(env_id: str, env_args: dict[str, Any], **render_mode: Any) -> Any:
    return NamedEnvironment(env_id, None, {**env_args, **render_mode})()


def without_display() -> None:
    """Make SDL draw without a display, and hide the message of pygame: stdout belongs to the command."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    if not any(map(os.environ.get, _DISPLAYS)):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def make_with(factory: str, env_args: dict[str, Any], render_mode: str | None = None) -> Any:
    """Build an environment, or a multi-agent one, with the user's factory. Raises EnvironmentUnavailable."""
    from gym_trace.recording import call_factory

    try:
        return call_factory(named_callable(factory), env_args, render_mode)
    except EnvironmentUnavailable as error:
        raise EnvironmentUnavailable(f"--make {factory}: {error}") from error
    except Exception as error:  # the user's code
        raise EnvironmentUnavailable(f"--make {factory}: {type(error).__name__}: {_one_line(error)}") from error


def _wrapped(env: Any, wrappers: Sequence[str]) -> Any:
    """Wrap env; close it on failure. Raises EnvironmentUnavailable."""
    import gymnasium

    for name in wrappers:
        wrapper = named_callable(name)
        try:
            wrapped = wrapper(env)
            if not isinstance(wrapped, gymnasium.Env):
                raise TypeError(f"returned {type(wrapped).__name__}; return a gymnasium.Env")
        except Exception as error:  # the user's code
            env.close()
            raise EnvironmentUnavailable(f"--wrapper {name}: {type(error).__name__}: {_one_line(error)}") from error
        env = wrapped
    return env


def _hint(env_id: str, error: Exception) -> str:
    """Return a hint for an unregistered id, or "" if the error of Gymnasium has one."""
    import gymnasium

    module, colon, name = env_id.partition(":")
    if colon:
        if hasattr(sys.modules.get(module), name):
            return f" Pass --make {env_id}"
        return f" Pass an id that {module} registers, or --make {module}:FUNCTION"
    if registrar := next((registrar for start, registrar in _REGISTERED_BY.items() if env_id.startswith(start)), None):
        return f" Pass --import {registrar}"
    proposed = [word.lower() for word in re.findall(r"Did you mean: `(.+?)`", str(error))]
    if isinstance(error, gymnasium.error.VersionNotFound) or difflib.get_close_matches(env_id.lower(), proposed):
        return ""
    return " Pass --import MODULE, the module that registers it"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
