"""Record the environments that Sample Factory makes in its workers: record(directory)."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.recording.options import opened_directory
from gym_trace.recording.single.wrapper import TraceRecordingWrapper
from gym_trace.storage.remote.address import local_path, url_of

try:
    from sample_factory.algo.utils.context import global_env_registry
except ImportError as missing:
    raise MissingExtra(f"recording in it needs Sample Factory ({missing}): pip install sample-factory") from missing

__all__ = ["record"]

_PER_ENVIRONMENT = {"uid", "video", "on_exist"}
_MakeEnv = Callable[..., Any]  # (name, cfg, env_config, render_mode)


def record(
    directory: str | os.PathLike[str],
    environments: Collection[str] | None = None,
    *,
    on_exist: str = "error",
    **recording: Any,
) -> None:
    """Record all environments that Sample Factory makes from now on, also in its spawned workers.

    Call it after register_env() and before run_rl(). Each environment of each worker is a writer of one trace, with
    what the environment itself returned: rewards before Sample Factory scales or clips them, observations before its
    own wrappers, final observations, infos. The environment that it makes only to read the spaces is not recorded.
    A second call replaces the directory and the options.

    Args:
        directory: of the trace.
        environments: names in the registry; None: all.
        on_exist: if the directory has a trace: "error", "append" or "replace". Workers that Sample Factory restarts
            append.
        recording: other arguments of TraceRecordingWrapper, except uid and video. record_infos is True by default.

    Raises:
        InvalidOption: unknown environment, or invalid option. In a worker: an environment with several agents.
        TraceExists

    Examples:
        >>> gym_trace.exchange.sample_factory.record("traces/doom")  # doctest: +SKIP
        >>> run_rl(cfg)  # doctest: +SKIP
    """
    if unsupported := sorted(_PER_ENVIRONMENT & set(recording)):
        raise InvalidOption(f"{unsupported[0]}: not supported here; omit it")
    registry = global_env_registry()
    names = list(registry if environments is None else environments)
    if unknown := [name for name in names if name not in registry]:
        known = f"registered are {', '.join(registry)}" if registry else "call register_env() first"
        raise InvalidOption(f"{unknown[0]}: not registered; {known}")
    if not names:
        raise InvalidOption("no environments are registered; call register_env() first")
    with opened_directory(directory, on_exist) as local:
        target = url_of(directory) if local_path(directory) is None else os.fspath(local)
        options = {"record_infos": True, **recording, "directory": target, "on_exist": "append"}
    for name in names:
        maker = registry[name]
        registry[name] = (
            replace(maker, options=options) if isinstance(maker, _RecordedMaker) else _RecordedMaker(maker, options)
        )


@dataclass(frozen=True)
class _RecordedMaker:
    """Makes a recorded environment. Spawned workers get it pickled, so make_env must be picklable."""

    make_env: _MakeEnv
    options: dict[str, Any]

    def __call__(self, name: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None) -> Any:
        """Make an environment. env_config: None where Sample Factory only reads the spaces."""
        env = self.make_env(name, cfg, env_config, render_mode)
        if env_config is None:
            return env
        if getattr(env, "num_agents", 1) > 1:
            env.close()
            raise InvalidOption(f"{name}: has {env.num_agents} agents; environments with several are not recorded")
        return TraceRecordingWrapper(env, **self.options)
