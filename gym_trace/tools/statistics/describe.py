"""Describe a trace as plain data: environment, spaces, writers and their files, damage; and list many traces."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gym_trace.data.layout import PlainSpace, from_array_map, layout_of
from gym_trace.data.values import Array, distinct, dtype_from
from gym_trace.errors import CorruptTrace, EnvironmentUnavailable, RemoteError, TraceError, TraceNotFound
from gym_trace.format import wire
from gym_trace.format.directory import find_writers
from gym_trace.format.manifest import FAILED
from gym_trace.playback.episode_columns import objective_returns
from gym_trace.playback.episode_index import index_of, whole_of
from gym_trace.playback.trace import Trace, TraceLike, as_trace, storage_of
from gym_trace.playback.writer_reader import WriterReader
from gym_trace.printable import integer, shown
from gym_trace.storage.opening import folders_at, storage_at
from gym_trace.storage.remote.address import is_url, local_path, redacted
from gym_trace.tools.statistics.summary import by_episode, summarize

DEEPEST = 3  # levels of directories searched for traces
STATES = ("recording", "killed", "failed", "closed")  # the first of these that a writer has is the trace's state
_SEARCH_SECONDS = 600.0  # time limit below a URL, because a server may list any number of directories
_FIRST_SEEDS = 5
_DEEPEST = 32  # levels of nested metadata
_BLOCK = 1000  # episodes listed together
_STORED = ("index", "episode_id", "writer", "lane", "first_step", "steps", "return", "outcome", "seed", "duration")
_NO_SEED = -1  # in the table of episodes
_MOST_BITS = 4096  # integers with more bits become text
_MOST_ELEMENTS = 1000  # arrays in metadata with more elements are shown by dtype and shape


def describe(trace: TraceLike, brief: bool = False) -> dict[str, Any]:
    """Describe a trace as plain data for JSON. Reads no steps.

    Args:
        trace: a trace, a view, or a directory.
        brief: only count episodes, steps, bytes and recording (writers that record): fast enough for polling.

    Returns:
        From the first writer with episodes: environment (as recorded: id, class, wrappers, render_mode, spec, note),
        function (the call that made it, as text; None if unknown), observation_space and action_space (as text),
        versions, platform, recorder, metadata, provenance, branch (writer, episode_id and step that its episodes branch
        from, and the seed; or None).

        facts: see Trace.facts. seeds: numbers of seeded and unseeded episodes, and the first seeds. episodes, steps:
        including running episodes. bytes: size of the directory on disk, like du.

        writers: for each writer, split, host, pid, created (UTC ns), environment (id), state, episodes, steps, bytes,
        and batches (file, sealed, bytes, chunks, steps, torn: bytes of an incomplete record at its end). After a
        compaction several writers share batches, and bytes is the writer's share. state: "recording" (its process
        lives), "closed", "failed" (its files could not be written; problem has the reason) or "killed". ring_steps:
        number of steps that are only in its ring. waited: seconds that its steps waited for encoding and writing, once
        it is closed; 0 if less than one. pending: actions that it was executing when it died: episode (id),
        lane, step, and action as text.

        damage: (path, start, end, problem) of damage found while opening; only gym-trace check reads everything.

    Examples:
        >>> about = gym_trace.describe("traces/cartpole")
        >>> about["environment"]["id"], about["episodes"], about["seeds"]["seeded"]
        ('CartPole-v1', 20, 20)
    """
    trace = as_trace(trace)
    if brief:
        return _progress_of(trace)
    with_episodes_first = sorted(index_of(trace).readers, key=lambda writer: not len(writer.parts))
    first = next((raw for writer in with_episodes_first if (raw := writer.about_or_empty.raw)), {})
    writers = [_describe_writer(trace, writer) for writer in index_of(trace).readers]
    return {
        "directory": str(trace.directory),
        "environment": plain(first.get("environment")),
        "function": _function_of(first.get("environment")),
        "observation_space": space_text(first.get("observation_space")),
        "action_space": space_text(first.get("action_space")),
        **{
            name: plain(first.get(name))
            for name in ("versions", "platform", "recorder", "metadata", "provenance", "branch")
        },
        "facts": plain(trace.facts),
        "seeds": _seeds(trace),
        "episodes": sum(writer["episodes"] for writer in writers),
        "steps": sum(writer["steps"] for writer in writers),
        "bytes": storage_of(trace).allocated(),
        "writers": writers,
        "damage": [list(damage) for damage in trace.damage],
    }


def _function_of(environment: Any) -> str | None:
    """Return the call that made an environment; None if no function did, or its description is malformed."""
    if not isinstance(environment, dict) or environment.get("factory") is None:
        return None
    from gym_trace.envs.consent import called  # lazy, as below
    from gym_trace.envs.recipe import recorded_factory

    try:
        made = recorded_factory(environment)
    except EnvironmentUnavailable:
        return None
    return None if made is None else called(str(made.entry_point), made.kwargs)


def _progress_of(trace: Trace) -> dict[str, Any]:
    return {
        "episodes": sum(_episodes_of(writer) for writer in index_of(trace).readers),
        "steps": sum(writer.steps for writer in index_of(trace).readers),
        "bytes": storage_of(trace).allocated(),
        "recording": sum(writer.alive for writer in index_of(trace).readers),
    }


def _describe_writer(trace: Trace, writer: WriterReader) -> dict[str, Any]:
    about = writer.about_or_empty
    return {
        "writer": writer.writer,
        **{name: plain(about.raw.get(name)) for name in ("split", "host", "pid", "created")},
        "environment": plain(about.environment.get("id")),
        "state": state_of(writer),
        "problem": writer.files.failure(),
        "waited": writer.files.waited(),
        "episodes": _episodes_of(writer),
        "steps": writer.steps,
        "bytes": writer.size,
        "batches": [
            {
                "file": batch.name,
                "sealed": batch.sealed,
                "bytes": batch.size,
                "chunks": len(batch.chunks),
                "steps": int(batch.fragments["steps"].sum()),
                "torn": batch.torn,
            }
            for batch in writer.batches
        ],
        "ring_steps": 0 if writer.tail.batch is None else int(writer.tail.batch.fragments["steps"].sum()),
        "pending": _pending(writer),
    }


def _pending(writer: WriterReader) -> list[dict[str, Any]]:
    try:
        layout = writer.layouts.actions
    except CorruptTrace:
        return []
    return [
        {"episode": each.episode, "lane": each.lane, "step": each.step, "action": shown(each.action(layout), 200)}
        for each in writer.pending
    ]


def state_of(writer: WriterReader) -> str:
    """Return "recording" (the process lives), "closed", "failed" (it could not write) or "killed"."""
    if writer.alive:
        return "recording"
    kinds = {entry.get("type") for entry in writer.files.entries()}
    return next((state for state in ("closed", FAILED) if state in kinds), "killed")


def _episodes_of(writer: WriterReader) -> int:
    return len(distinct(writer.parts["episode_id"]))


def _seeds(trace: Trace) -> dict[str, Any]:
    table = index_of(trace)
    order, begin = by_episode(table)
    seeded = table["seed"][order[begin]] != wire.NO_SEED
    first = np.sort(order[begin][seeded])[:_FIRST_SEEDS].tolist()
    return {
        "seeded": int(np.count_nonzero(seeded)),
        "unseeded": int(np.count_nonzero(~seeded)),
        "first": [plain(trace[i].seed) for i in first],
    }


def space_text(space: PlainSpace | None) -> str:
    """Return a space as gymnasium prints it. A space that cannot be rebuilt here is shown as printed when recorded."""
    if space is None:
        return "unknown"
    try:
        layout_of(space, ())  # rejects spaces that are nested too deep
        return _text_of(space)
    except (CorruptTrace, LookupError, TypeError, ValueError, ArithmeticError):
        return "unknown"


def _text_of(space: PlainSpace) -> str:
    kind = space["type"]
    if kind == "Dict":
        return f"Dict({', '.join(f'{key!r}: {_text_of(child)}' for key, child in space['spaces'])})"
    if kind == "Tuple":
        return f"Tuple({', '.join(map(_text_of, space['spaces']))})"
    if kind == "Box":
        shape = tuple(map(int, space["shape"]))
        low, high = (_bound_text(space[name], shape) for name in ("low", "high"))
        return f"Box({low}, {high}, {shape}, {dtype_from(space['dtype'])})"
    if kind == "Discrete" and space["start"] == 0 and dtype_from(space["dtype"]) == np.int64:
        return f"Discrete({int(space['n'])})"
    from gym_trace.envs.spaces import restore  # lazy: gymnasium takes a third of the time of a small summary

    try:
        return repr(restore(space))
    except EnvironmentUnavailable:
        return str(space.get("repr") or space.get("class") or kind)


def _bound_text(bound: PlainSpace, shape: tuple[int, ...]) -> str:
    stored = from_array_map(bound, tuple(bound["shape"]))
    is_uniform = stored.size > 0 and 0 not in shape and stored.min() == stored.max()
    return str(stored.min() if is_uniform else np.broadcast_to(stored, shape))


def plain(value: Any, depth: int = 0) -> Any:
    """Approximate a value in JSON: arrays as lists, NaN as None, unsupported types as text."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > _MOST_BITS:
        return integer(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.generic):
        return plain(value.item(), depth + 1)
    if depth < _DEEPEST:
        if isinstance(value, dict):
            return {str(plain(key, depth + 1)): plain(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item, depth + 1) for item in value]
        if isinstance(value, np.ndarray):
            small = value.size <= _MOST_ELEMENTS
            return plain(value.tolist(), depth + 1) if small else f"array of {value.dtype}, shape {value.shape}"
    return shown(value, 1000)


# -- many traces ------------------------------------------------------------------------------------------------------


def _is_trace(directory: str | os.PathLike[str]) -> bool:
    """Return True if the directory holds a trace, even an unreadable one. Raises TraceNotFound if it is missing."""
    try:
        return bool(find_writers(storage_at(directory)))
    except TraceNotFound:
        if local_path(directory) is None and folders_at(directory):
            return False
        raise


def find_traces(directory: str | os.PathLike[str], deepest: int = DEEPEST) -> Iterator[str]:
    """Yield the directories of traces at or below a directory, by name.

    Skips links, hidden directories and, to save requests, directories below a trace at a URL. deepest: levels to search
    below the directory. Raises TraceNotFound for a missing directory, and RemoteError if the search below a URL takes
    ten minutes.

    Examples:
        >>> "traces/cartpole" in gym_trace.find_traces("traces")
        True
    """
    return _traces_in(os.fspath(directory), deepest, time.monotonic() + _SEARCH_SECONDS)


def _traces_in(path: str, deepest: int, until: float) -> Iterator[str]:
    if is_url(path) and time.monotonic() > until:
        raise RemoteError(f"{redacted(path)}: searching for traces takes too long; pass a URL further below")
    if found := _is_trace(path):
        yield path
    if deepest and not (found and is_url(path)):
        for name in folders_at(path):
            try:
                yield from _traces_in(os.path.join(path, name), deepest - 1, until)
            except (TraceNotFound, PermissionError):  # removed since, or not readable
                continue


def list_trace(directory: str | os.PathLike[str], select: Callable[[Trace], Trace] | None = None) -> dict[str, Any]:
    """Summarize a trace as plain data for JSON. Reads the index; if rewards are several numbers each, also the rewards.

    Args:
        directory: directory of the trace.
        select: returns a view of the episodes that episodes, steps, return and times describe; None: all.

    Returns:
        directory; environments: ids, or None for an environment without; episodes; steps; return: mean of complete
        episodes, None without any, a list of means if rewards are several numbers each; bytes: size of the directory on
        disk, like du; state: "recording" (a writer lives), "killed" (a writer died), "failed" (a writer could not
        write), "closed" (all writers closed), "damaged" (opening found damage), or "unreadable"; writers: numbers of
        recording, killed, failed and closed writers; start_time, end_time: start of the first and end of the last
        episode, UTC, in ISO 8601, None if unknown; problem: the reading error or the first damage, otherwise None.

    Examples:
        >>> row = gym_trace.list_trace("traces/cartpole")
        >>> row["environments"], row["episodes"], row["state"]
        (['CartPole-v1'], 20, 'closed')
    """
    root = storage_at(directory).root if is_url(directory) else os.fspath(directory)
    row: dict[str, Any] = {"directory": root, "environments": []}
    names = ("episodes", "steps", "return", "bytes", "state", "writers", "start_time", "end_time", "problem")
    row |= dict.fromkeys(names)
    try:
        trace = Trace(directory)
    except (TraceError, OSError) as error:
        return row | {"state": "unreadable", "problem": shown(str(error), 1000)[1:-1]}
    chosen = trace if select is None else select(trace)
    summary = summarize(chosen)
    means = [objective["mean"] for objective in summary["objectives"]]
    writers = Counter(state_of(writer) for writer in index_of(trace).readers)
    problems = [f"{damage.path}: {damage.problem}" for damage in trace.damage]
    problems += (problem for writer in index_of(trace).readers for problem in _manifest_mismatches(writer))
    ids = dict.fromkeys(_id_of(writer.about_or_empty.environment) for writer in index_of(chosen).readers)
    return row | {
        "environments": list(ids),
        "episodes": summary["episodes"],
        "steps": summary["steps"],
        "return": means if means and summary["return"]["mean"] is None else summary["return"]["mean"],
        "bytes": storage_of(trace).allocated(),
        "state": "damaged" if problems else next(state for state in STATES if writers[state]),
        "writers": {state: writers[state] for state in STATES if writers[state]},
        "start_time": _time(index_of(chosen)["start_time"], np.min),
        "end_time": _time(index_of(chosen)["end_time"], np.max),
        "problem": problems[0] if problems else None,
    }


def _manifest_mismatches(writer: WriterReader) -> Iterator[str]:
    """Yield a problem for each batch that is missing or whose size differs from the manifest."""
    for name, entry in writer.files.listed()[0].items():
        try:
            size = writer.files.storage.size(name)
        except FileNotFoundError:
            yield f"{writer.files.storage.path(name)}: missing, but listed in the manifest"
        else:
            if size != (listed := entry.get("bytes")):
                yield f"{writer.files.storage.path(name)}: {size} bytes, but {listed} in the manifest"


def _id_of(environment: dict[str, Any]) -> str | None:
    env_id = environment.get("id")
    return env_id if isinstance(env_id, str) else None


def _time(times: Array, which: Callable[[Array], Any]) -> str | None:
    known = times[~np.isnat(times)]
    return f"{np.datetime_as_string(which(known), 'us')}Z" if len(known) else None


# -- episodes ---------------------------------------------------------------------------------------------------------


def list_episodes(trace: TraceLike) -> Iterator[dict[str, Any]]:
    """Yield a row of plain data for each episode of a trace or a view, as `gym-trace ls DIR --json` prints it.

    Reads the index; if rewards are several numbers each, also the rewards.

    Args:
        trace: a trace, a view, or a directory.

    Yields:
        index, episode_id, writer, split, lane, first_step, steps, return, outcome, seed, duration in seconds,
        start_time and end_time (UTC, ISO 8601). Unknown values are None. return is a list if rewards are several
        numbers each.

    Examples:
        >>> first = next(gym_trace.list_episodes("traces/cartpole"))
        >>> first["index"], first["steps"], first["return"], first["outcome"]
        (0, 12, 12.0, 'terminated')
    """
    trace = as_trace(trace)
    whole, chosen = whole_of(trace), index_of(trace).whole_indices
    for begin in range(0, len(chosen), _BLOCK):
        indices = chosen[begin : begin + _BLOCK]
        table = whole.episodes[indices]
        columns = {name: table[name].tolist() for name in _STORED}
        for name in ("start_time", "end_time"):
            columns[name] = np.datetime_as_string(table[name], "us").tolist()
        columns["return"] = _returns(whole, indices, columns["return"])
        for values in zip(*columns.values()):
            yield _episode_row(whole, dict(zip(columns, values)))


def _returns(trace: Trace, indices: Array, indexed: list[float]) -> list[Any]:
    """Return returns for JSON: None if unknown or infinite, a list for several objectives. indexed: from the index."""
    if not any(map(math.isnan, indexed)):
        return [value if math.isfinite(value) else None for value in indexed]
    view = trace[indices]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of damage, which is reported elsewhere
        objectives = objective_returns(view.episodes, view.scan)
    rows = [None] * len(indexed) if objectives is None else objectives.tolist()
    return [
        value if math.isfinite(value) else row if row is not None and all(map(math.isfinite, row)) else None
        for value, row in zip(indexed, rows)
    ]


def _episode_row(trace: Trace, row: dict[str, Any]) -> dict[str, Any]:
    writer = index_of(trace).readers[row["writer"]]
    row["writer"], row["split"] = writer.writer, writer.split
    if row["seed"] < 0:  # missing, or too large for the table
        row["seed"] = None if row["seed"] == _NO_SEED else trace[row["index"]].seed
    row["duration"] = None if row["end_time"] == "NaT" else row["duration"] / 1e9
    for name in ("start_time", "end_time"):
        row[name] = None if row[name] == "NaT" else row[name] + "Z"
    return row
