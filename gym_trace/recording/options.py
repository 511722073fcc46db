"""The options of all recorders, the directory of a trace, and the schema record of a writer."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import platform
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from gymnasium import Space

from gym_trace.data.layout import PlainSpace
from gym_trace.data.packing import pack, unpack
from gym_trace.envs import identity as environment
from gym_trace.envs import spaces
from gym_trace.errors import InvalidOption
from gym_trace.format import directory as trace_directory
from gym_trace.format import wire
from gym_trace.recording import provenance
from gym_trace.recording.filters import EpisodeFilter, Filters, FrameFilter
from gym_trace.recording.newest import NAN, KeepIf
from gym_trace.recording.process_safety import is_joined
from gym_trace.storage.local import LocalStorage, alone
from gym_trace.storage.remote.address import is_url, local_path, url_of

_log = logging.getLogger("gym_trace")
_Recorder = TypeVar("_Recorder", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class RecordingOptions:
    """The options of all recorders, checked and copied.

    Args:
        directory: output directory; created if missing. For a URL, a local spool is recorded and published
            (docs/guides/ remote.md). None: a new temporary directory; its path is logged and available as
        ``.directory``. episode_filter: called with the episode id (0, 1, 2 …) when an episode starts; in vector
            environments, lane by lane. Return False to skip the episode.
        frame_filter: called with the index of each step in its episode. Return False to skip the step. Each run of
            kept steps becomes a part of the episode, with the observation before it.
        reward_classes: reward values, one per class; steps of rare classes are kept more often (see
            gym_trace.recording.RewardClasses). Not together with frame_filter.
        record_infos: False, True for all infos, or the keys to record.
        split: split of the episodes, such as "train" or "eval".
        uid: the writer's id in file names; None generates a unique one.
        on_exist: if the directory holds a trace: "error", "append" (adds a writer), or "replace". It applies to earlier
            recordings only. The wrappers of one SyncVectorEnv, AsyncVectorEnv, DummyVecEnv or SubprocVecEnv always
            share a directory. So do wrappers of one process that are made before any of them is stepped, and wrappers
            of multiprocessing workers that record at the same time.
        flush_seconds: interval after which steps are written to a batch, checked at each step. Readers see steps
            before that. A kill does not lose them; a power loss may.
        level: zstd level, -7 to 22. At 1, columns that compress about as well at -1 use -1.
        fsync: wait for the disk at each flush, so that a power loss loses no more than a kill.
        metadata: any value that MessagePack can hold, stored with the trace.
        on_error: on a full disk, "raise" a RecordingError at the next step, or "warn". Either happens once; afterwards
            the environment can be stepped unrecorded.
        keep_bytes: drop the oldest episodes, so that the files of this recorder hold about this many bytes, the newest.
            None: keep everything. An open episode is never dropped.
        keep_if: episodes that keep_bytes neither drops nor counts. "nan": episodes with a NaN or an infinity in numeric
            observations, actions or rewards. Or a function, called with a dict for each episode that has ended:
            episode_id, lane, steps, return, outcome (such as "cut"), has_nan; a truthy result keeps the episode. It
            runs in a background thread; if it raises, the recording stops with a RecordingError.

    Raises:
        InvalidOption: an argument is invalid.
        UnstorableValue: metadata cannot be stored.

    Examples:
        >>> options = gym_trace.recording.RecordingOptions(directory="traces/x", record_infos=["lives"])
        >>> options.info_keys
        ('lives',)
    """

    directory: str | os.PathLike[str] | None = None
    episode_filter: EpisodeFilter | None = None
    frame_filter: FrameFilter | None = None
    reward_classes: Sequence[float] | None = None
    record_infos: bool | Sequence[str] = False
    split: str = "train"
    uid: str | None = None
    on_exist: str = "error"
    flush_seconds: float = 10.0
    level: int = 1
    fsync: bool = False
    metadata: Any = None
    on_error: str = "raise"
    keep_bytes: int | None = None
    keep_if: KeepIf | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.record_infos, str):
            raise InvalidOption(f"record_infos={self.record_infos!r}: pass True, False or a list of keys")
        if not self.flush_seconds >= 0:
            raise InvalidOption(f"flush_seconds={self.flush_seconds!r}: pass a number of seconds, 0 or more")
        if not -7 <= self.level <= 22:
            raise InvalidOption(f"level={self.level!r}: pass a zstd level from -7 to 22")
        if self.on_error not in ("raise", "warn"):
            raise InvalidOption(f'on_error={self.on_error!r}: pass "raise" or "warn"')
        if self.keep_bytes is not None:
            if not self.keep_bytes >= 0:
                raise InvalidOption(f"keep_bytes={self.keep_bytes!r}: pass a number of bytes, 0 or more")
            if self.directory is not None and local_path(self.directory) is None:
                raise InvalidOption(f"keep_bytes: nothing can be dropped from {self.directory}; record to a directory")
        if self.keep_if is not None:
            if not (self.keep_if == NAN or callable(self.keep_if)):
                raise InvalidOption(f'keep_if={self.keep_if!r}: pass "nan" or a function of an episode')
            if self.keep_bytes is None:
                raise InvalidOption(
                    "keep_if: all episodes are kept without keep_bytes; pass it, too (0: keep no others)"
                )
        for name in ("reward_classes", "record_infos"):
            if (given := getattr(self, name)) is not None and not isinstance(given, bool):
                object.__setattr__(self, name, list(given))
        object.__setattr__(self, "metadata", unpack(pack(self.metadata)))

    @property
    def info_keys(self) -> tuple[str, ...] | None:
        """The keys of infos to record; None for all or no infos."""
        return None if isinstance(self.record_infos, bool) else tuple(self.record_infos)

    def filters(self) -> Filters:
        """Create the filters. Raises InvalidOption."""
        return Filters(self.episode_filter, self.frame_filter, self.reward_classes)

    def constructor_args(self) -> dict[str, Any]:
        """Return the arguments to rebuild the wrapper from its spec, as another writer of the same trace."""
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "uid"}
        directory = None if self.directory is None else str(self.directory)
        if directory is not None and not is_url(directory):
            directory = os.path.abspath(directory)
        return {**given, "directory": directory, "on_exist": "append"}


class RecordingKeywords(TypedDict, total=False):
    """The keyword arguments of recorders for type checkers: the fields of RecordingOptions without the directory."""

    episode_filter: EpisodeFilter | None
    frame_filter: FrameFilter | None
    reward_classes: Sequence[float] | None
    record_infos: bool | Sequence[str]
    split: str
    uid: str | None
    on_exist: str
    flush_seconds: float
    level: int
    fsync: bool
    metadata: Any
    on_error: str
    keep_bytes: int | None
    keep_if: KeepIf | str | None


def takes_recording_options(recorder: _Recorder) -> _Recorder:
    """Show the fields of RecordingOptions in the signature of a recorder, a class or a function, in place of **options.

    inspect.signature(), help() and completion then show every option with its default. The docstring gets the
    documentation of the options in place of its reference to RecordingOptions.
    """
    function: Any = recorder.__init__ if isinstance(recorder, type) else recorder  # type: ignore[misc]
    signature = inspect.signature(function)
    parameters = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    parameters += [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields(RecordingOptions)
        if field.name not in signature.parameters
    ]
    function.__signature__ = signature.replace(parameters=parameters)
    text = inspect.getdoc(RecordingOptions)
    if text and recorder.__doc__:  # python -OO removes docstrings
        arguments = text.partition("Args:\n")[2].partition("\n\n")[0]
        reference = "    directory … keep_if: see RecordingOptions."
        recorder.__doc__ = inspect.cleandoc(recorder.__doc__).replace(reference, arguments)
    return recorder


# Advice for environments of other interfaces, by the package of a base class.
_RECORDED_BY = {
    "stable_baselines3": "make_vec_env(…, wrapper_class=TraceRecordingWrapper, wrapper_kwargs={'directory': …}) "
    "records each environment",
    "pettingzoo": "use gym_trace.pettingzoo.record",
    "dm_env": "use gym_trace.dm_env.record",
}


def demand_gymnasium(env: Any, kind: type, called: str) -> None:
    """Raise InvalidOption unless env is an instance of kind. called: name of the kind, for the message."""
    if not isinstance(env, kind):
        packages = {base.__module__.partition(".")[0] for base in type(env).__mro__}
        make = "make_vec" if kind.__name__ == "VectorEnv" else "make"
        one = f"pass gymnasium.{make}({env!r})" if isinstance(env, str) else "pass one"
        way = next((way for package, way in _RECORDED_BY.items() if package in packages), one)
        raise InvalidOption(f"{type(env).__name__}: is not {called} of Gymnasium; {way}")


@contextlib.contextmanager
def opened_directory(directory: str | os.PathLike[str] | None, on_exist: str) -> Iterator[Path]:
    """Prepare the directory of a trace for writing; None creates a temporary one and logs its path.

    The path is absolute, so it stays valid if the process changes its working directory. Begin the writer inside the
    block, which holds the lock of the directory. For a URL, the directory is its spool.
    """
    if directory is None:
        path = Path(tempfile.mkdtemp(prefix="gym-trace-"))
        _log.warning("recording to %s", path)
        yield path
        return
    local: str | Path | None = local_path(directory)
    if local is None:
        from gym_trace.recording.publishing import spool

        spool.refuse_existing(directory, on_exist)
        local, on_exist = spool.spool_of(directory), "append"
    path = Path(local).absolute()
    storage = LocalStorage(path)
    trace_directory.make_directory(storage)
    with alone(path):
        trace_directory.prepare(storage, on_exist, is_joined)
        yield path


def storage_in(directory: Path, options: RecordingOptions) -> LocalStorage:
    """Return the storage that a recorder writes to; for a URL, one that also publishes."""
    if options.directory is None or local_path(options.directory) is not None:
        return LocalStorage(directory)
    from gym_trace.recording.publishing.spool import SpoolStorage

    return SpoolStorage(directory, url_of(options.directory))


def new_schema(
    options: RecordingOptions,
    env: Any,
    observation_space: Space[Any] | PlainSpace,
    action_space: Space[Any] | PlainSpace,
    recorder: dict[str, Any],
) -> dict[str, Any]:
    """Return the schema record (docs/FORMAT.md, section 4) of a new writer.

    Args:
        env: see describe_environment.
        observation_space, action_space: spaces of one lane.
        recorder: description of the recorder, in addition to record_infos.
    """
    origin = provenance.current()
    making = {name: origin.pop(name) for name in ("imports", "factory") if name in origin}  # rebuild the environment
    branch = {"branch": origin.pop("branch")} if "branch" in origin else {}
    return {
        "format": [wire.MAJOR, wire.MINOR],
        "writer": trace_directory.check_writer_id(options.uid or trace_directory.new_writer_id()),
        "created": time.time_ns(),
        "split": options.split,
        "observation_space": _described(observation_space),
        "action_space": _described(action_space),
        "environment": {**environment.describe_environment(env), **making},
        "versions": environment.versions_of(env),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "platform": platform.platform(),
        "recorder": {
            "record_infos": options.record_infos,
            **({} if options.keep_bytes is None else {"keep_bytes": options.keep_bytes}),
            **recorder,
        },
        "metadata": options.metadata,
        "provenance": origin,
        **branch,
    }


def _described(space: Space[Any] | PlainSpace) -> PlainSpace:
    return space if isinstance(space, dict) else spaces.describe(space)


def copied_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema record for the copy of a wrapper, from the original's record."""
    return {**schema, "writer": trace_directory.new_writer_id(), "pid": os.getpid(), "copied_from": schema["writer"]}
