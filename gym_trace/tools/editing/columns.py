"""Drop, rename, add or compute columns of a trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from gym_trace.data.episode import Episode
from gym_trace.data.origins import changed_schema
from gym_trace.data.packing import pack, pack_lenient, unpack
from gym_trace.data.schema import as_map
from gym_trace.data.tensors import is_masked, plain_array
from gym_trace.data.values import Array
from gym_trace.data.vocabulary import COLUMNS, STATES
from gym_trace.errors import InvalidOption, TraceError, UnstorableValue
from gym_trace.format.columns import Path as ColumnPath
from gym_trace.format.rewrite import ColumnEdits, SourceChunk
from gym_trace.format.ring.chunk_builder import add_reward_sums
from gym_trace.format.ring.segment import ColumnRows
from gym_trace.playback.episode_index import index_of, whole_of
from gym_trace.playback.trace import Trace
from gym_trace.printable import error_text, shown
from gym_trace.recording.provenance import policy_name
from gym_trace.tools.editing.compact import check_editable, check_same
from gym_trace.tools.editing.in_place import edited, report_for
from gym_trace.tools.editing.rewrite import EditReport, Progress, Source, rewrite
from gym_trace.tools.editing.sources import TraceOrPath, opened, outputs_of, selections_of

DROPPABLE = ("infos", "annotations")
EpisodeFunction = Callable[[Episode], Any]
Episodes = slice | Sequence[int] | Array | None
_REWARDS: ColumnPath = ("rewards",)
_INFOS: ColumnPath = ("infos",)


def drop_columns(
    trace: TraceOrPath,
    columns: str | Iterable[str],
    destination: str | os.PathLike[str] | None = None,
    *,
    in_place: bool = False,
    on_progress: Progress | None = None,
) -> EditReport:
    """Write a trace without some columns; all others are copied as stored, without being decoded.

    Args:
        trace: a trace, or a directory; not a view. No writer may be recording it.
        columns: "infos" (also those of resets), "annotations", or "annotations.NAME". No other column can be dropped.
        destination: a new or empty directory. It appears when it is complete.
        in_place: replace the trace instead, atomically, and keep all other files in its directory.
        on_progress: called periodically with the steps done and the total.

    Raises:
        InvalidOption: unknown column, or one that cannot be dropped; or no destination; or the trace is a view.
        TraceError: a writer is still recording, or another process edits the trace.
        TraceNotFound, TraceExists, CorruptTrace, UnsupportedTrace
        RecordingError: the new trace could not be written.

    Examples:
        >>> _ = gym_trace.edit.add("traces/cartpole", {"w": lambda episode: np.zeros(len(episode))}, "traces/w")
        >>> _ = gym_trace.edit.drop("traces/w", "annotations.w", "traces/dropped")
        >>> gym_trace.open_trace("traces/dropped")[0].annotations
        {}
    """
    source = opened(trace)
    check_editable(source, "drop columns of")
    dropped = _paths_to_drop(source, [columns] if isinstance(columns, str) else list(columns))
    report = report_for(source, destination, in_place)

    def path_of(path: ColumnPath) -> ColumnPath | None:
        return None if {path[:1], path[:2]} & dropped else path

    edits = ColumnEdits(path_of, _start_without_info if ("infos",) in dropped else None)
    outputs = outputs_of(selections_of(source)[0], report)
    if ("infos",) in dropped:
        outputs = [output._replace(schema=changed_schema(output.schema, _schema_without_infos)) for output in outputs]
    with edited(report, [source], in_place) as storage:
        rewrite(outputs, storage, report, edits, counts_steps=True, copies_videos=not in_place, on_progress=on_progress)
        check_same(storage, source)
    report.writers = source.writers
    return report


def map_columns(
    trace: TraceOrPath,
    columns: Mapping[str, EpisodeFunction],
    destination: str | os.PathLike[str] | None = None,
    *,
    episodes: Episodes = None,
    in_place: bool = False,
    on_progress: Progress | None = None,
) -> EditReport:
    """Write a trace in which functions compute some columns; all others are copied as stored.

    The metadata of each writer names the columns and functions (provenance, "edits"). Where such a column differs,
    verify reports them.

    Args:
        trace: a trace, a view, or a directory. Running episodes are skipped.
        columns: functions by column: "rewards", "infos" or "annotations.NAME". Each is called once per episode of N
            steps with the Episode as it was recorded, and returns N rows: for rewards an array of real numbers, (N,) or
            (N, objectives); for annotations an array of numbers, (N, ...), or N values; for infos N dicts. Arrays have
            the same dtype and row shape in all episodes.
        destination: a new or empty directory. It appears when it is complete.
        episodes: the episodes of the new trace: a slice, indices, or a boolean array over the trace; None: all.
        in_place: replace the trace instead, atomically, and keep all other files in its directory.
        on_progress: called periodically with the bytes done and the total.

    Raises:
        InvalidOption: an unknown column, or one that cannot be mapped; a function returned another number of rows, or
            another type; no destination, or the trace cannot be edited in place here.
        TraceError: a function raised an error; in place: a writer is still recording, or another process edits the
            trace.
        TraceNotFound, TraceExists, CorruptTrace, UnsupportedTrace
        RecordingError: the new trace could not be written.

    Examples:
        >>> import numpy as np
        >>> def clipped(episode):
        ...     return np.clip(episode.rewards, -1, 1)
        >>> gym_trace.edit.map("traces/cartpole", {"rewards": clipped}, "traces/clipped").episodes
        20
    """
    source = _selected(trace, episodes)
    if not columns:
        raise InvalidOption(f"columns: name those to map; {_mappable_columns(source)}")
    return _compute("map", source, columns, _path_to_map, destination, in_place, on_progress)


def add_columns(
    trace: TraceOrPath,
    columns: Mapping[str, EpisodeFunction],
    destination: str | os.PathLike[str] | None = None,
    *,
    episodes: Episodes = None,
    in_place: bool = False,
    on_progress: Progress | None = None,
) -> EditReport:
    """Write a trace with new annotations, which functions compute; all other columns are copied as stored.

    Args:
        columns: functions by the name of the new annotation ("value", or "annotations.value"). Each is called once per
            episode of N steps with the Episode, and returns an array of numbers, (N, ...), or N values; arrays have the
            same dtype and row shape in all episodes.
        trace, destination, episodes, in_place, on_progress: as map_columns().

    Raises:
        InvalidOption: an annotation of this name exists; and as map_columns().
        TraceError, TraceNotFound, TraceExists, CorruptTrace, UnsupportedTrace, RecordingError: as map_columns().

    Examples:
        >>> def position(episode):
        ...     return episode.observations[:-1, 0]
        >>> _ = gym_trace.edit.add("traces/cartpole", {"position": position}, "traces/added")
        >>> gym_trace.open_trace("traces/added")[0].annotations["position"].shape
        (12,)
    """
    source = _selected(trace, episodes)
    if not columns:
        raise InvalidOption("columns: name those to add")
    return _compute("add", source, columns, _new_annotation, destination, in_place, on_progress)


def rename_columns(
    trace: TraceOrPath,
    names: Mapping[str, str],
    destination: str | os.PathLike[str] | None = None,
    *,
    episodes: Episodes = None,
    in_place: bool = False,
    on_progress: Progress | None = None,
) -> EditReport:
    """Write a trace with renamed annotations; all columns are copied as stored. Other columns have fixed names.

    Args:
        names: old to new name of annotations, each with or without "annotations." in front.
        trace, destination, episodes, in_place, on_progress: as map_columns().

    Raises:
        InvalidOption: an annotation to rename is missing, or one of a new name exists; and as map_columns().
        TraceError, TraceNotFound, TraceExists, CorruptTrace, UnsupportedTrace, RecordingError: as map_columns().

    Examples:
        >>> _ = gym_trace.edit.add("traces/cartpole", {"v": lambda episode: np.zeros(len(episode))}, "traces/v")
        >>> _ = gym_trace.edit.rename("traces/v", {"annotations.v": "annotations.value"}, "traces/value")
        >>> list(gym_trace.open_trace("traces/value")[0].annotations)
        ['value']
    """
    source = _selected(trace, episodes)
    if not names:
        raise InvalidOption("names: name the annotations to rename")
    renamed: dict[ColumnPath, ColumnPath] = {}
    for name in names:
        root, _, rest = name.partition(".")
        old: ColumnPath = ("annotations", rest if root == "annotations" and rest else name)
        if name in COLUMNS:
            raise InvalidOption(f"{name}: has a fixed name; {_renamable_columns(source)}")
        if old not in _editable_paths(source):
            raise InvalidOption(f"{shown(name)}: this trace has no such annotation; {_renamable_columns(source)}")
        if old in renamed:
            raise InvalidOption(f"names: {'.'.join(map(str, old))} is renamed twice")
        renamed[old] = old
    for name, new in names.items():
        renamed["annotations", name.removeprefix("annotations.")] = _new_annotation(source, new, renamed)
    if len(set(renamed.values())) < len(renamed):
        raise InvalidOption("names: two annotations would get the same name")
    edits = [
        {"edit": "rename", "column": f"annotations.{old[1]}", "to": f"annotations.{new[1]}"}
        for old, new in renamed.items()
    ]
    columns = ColumnEdits(lambda path: renamed.get(path, path))
    return _write(source, destination, in_place, on_progress, columns, edits)


def _selected(trace: TraceOrPath, episodes: Episodes) -> Trace:
    source = opened(trace)
    return source if episodes is None else source[episodes]


def _compute(
    edit: str,
    source: Trace,
    functions: Mapping[str, EpisodeFunction],
    path_of: Callable[[Trace, str], ColumnPath],
    destination: str | os.PathLike[str] | None,
    in_place: bool,
    on_progress: Progress | None,
) -> EditReport:
    """Write a trace with columns that functions compute. path_of: returns the path of a column name."""
    columns = {path_of(source, name): function for name, function in functions.items()}
    if len(columns) < len(functions):
        raise InvalidOption("columns: two annotations would get the same name")
    computed = [_ComputedColumn(path, ".".join(map(str, path)), function) for path, function in columns.items()]
    edits = [{"edit": edit, "column": column.name, "by": column.function_name} for column in computed]
    return _write(source, destination, in_place, on_progress, ColumnEdits(), edits, _ComputedRows(computed))


def _write(
    source: Trace,
    destination: str | os.PathLike[str] | None,
    in_place: bool,
    on_progress: Progress | None,
    columns: ColumnEdits,
    edits: list[dict[str, str]],
    computed: _ComputedRows | None = None,
) -> EditReport:
    """Write the edited trace. edits: descriptions for the metadata of each writer."""
    report = report_for(source, destination, in_place)
    is_view = whole_of(source) is not source
    selections, report.running = selections_of(source, np.ones(len(source), np.bool_) if is_view else None)

    def with_edits(schema: dict[str, Any]) -> dict[str, Any]:
        provenance = as_map(schema.get("provenance"))
        earlier = provenance.get("edits")
        all_edits = [*(earlier if isinstance(earlier, list) else ()), *edits]
        return {**schema, "provenance": {**provenance, "edits": all_edits}}

    outputs = [
        output._replace(schema=changed_schema(output.schema, with_edits)) for output in outputs_of(selections, report)
    ]
    with edited(report, [source], in_place) as storage:
        rewrite(outputs, storage, report, columns, change=computed, copies_videos=not in_place, on_progress=on_progress)
    return report


def _path_to_map(trace: Trace, name: str) -> ColumnPath:
    """Return the path of a column to map. Raises InvalidOption."""
    root, dot, rest = name.partition(".")
    path: ColumnPath = (root, rest) if dot else (root,)
    if path == _REWARDS or path in _editable_paths(trace):
        return path
    if root in COLUMNS and root not in DROPPABLE:
        raise InvalidOption(f"{root}: cannot be mapped; {_mappable_columns(trace)}")
    raise InvalidOption(f"{shown(name)}: this trace has no such column; {_mappable_columns(trace)}")


def _new_annotation(trace: Trace, name: str, renamed: Collection[ColumnPath] = ()) -> ColumnPath:
    """Return the path of a new annotation. renamed: annotations that give up their names. Raises InvalidOption."""
    new = name.removeprefix("annotations.")
    if not new or new in COLUMNS or new.startswith(STATES):
        raise InvalidOption(f"{shown(name)}: invalid name of an annotation; pass another")
    path: ColumnPath = ("annotations", new)
    if path in _editable_paths(trace) and path not in renamed:
        raise InvalidOption(f"{shown(name)}: this trace has an annotation of this name; pass another")
    return path


# -- computed columns --------------------------------------------------------------------------------------------------


class _ComputedColumn:
    """A column that a function computes."""

    def __init__(self, path: ColumnPath, name: str, function: EpisodeFunction):
        self.path, self.name = path, name
        self.function_name = policy_name(function)
        self._function = function
        self._first: tuple[str, int] | None = None  # type of the rows of the first episode, and its index

    def rows(self, episode: Episode) -> ColumnRows:
        """Return the rows of an episode, checked. Raises InvalidOption, UnstorableValue, TraceError."""
        rows = self._call(episode)
        if isinstance(rows, (str, bytes, Mapping, Set)):
            raise self._error(episode, f"returned a {type(rows).__name__}", "an array, or a list of one row per step")
        if not hasattr(rows, "__len__") or (isinstance(rows, np.ndarray) and not rows.ndim):
            raise self._error(episode, "returned a single value", "one row per step")
        if len(rows) != len(episode):
            raise self._error(episode, f"returned {len(rows)} rows", f"one for each of the {len(episode)} steps")
        if is_masked(rows):
            raise self._error(episode, "returned a masked array", "a plain one, such as filled(np.nan)")
        is_typed = isinstance(rows, np.ndarray) and rows.dtype.kind in "biufc"
        kind = f"{rows.dtype} rows of shape {rows.shape[1:]}" if is_typed else "values of other types"
        is_real = is_typed and rows.dtype.kind != "c" and rows.ndim <= 2 and rows.shape[1:] != (0,)
        if self.path == _REWARDS and not is_real:
            raise self._error(episode, f"returned {kind}", "one real number per step")
        if self.path == _INFOS and not all(isinstance(info, dict) for info in rows):
            raise self._error(episode, f"returned {kind}", "one dict per step")
        first_kind, first_index = self._first = self._first or (kind, episode.index)
        if kind != first_kind:
            raise self._error(episode, f"returned {kind}", f"one type ({first_kind} for episode {first_index})")
        if is_typed:
            return np.ascontiguousarray(rows, rows.dtype.newbyteorder("<"))
        try:
            return [pack(value) for value in rows]
        except UnstorableValue as error:
            raise self._error(episode, f"returned a value that cannot be stored: {error}", "other values") from error

    def _call(self, episode: Episode) -> Any:
        try:
            rows = plain_array(self._function(episode))
        except TraceError:
            raise
        except Exception as error:
            problem = f"{self.function_name} raised {error_text(error)}, for episode {episode.index}"
            raise TraceError(f"{self.name}: {problem}") from error
        if self.path == _INFOS or isinstance(rows, np.ndarray):
            return rows
        try:
            array = np.asarray(rows)
        except (TypeError, ValueError):  # rows of several shapes
            return rows
        return array if array.dtype.kind in "biufc" else rows

    def _error(self, episode: Episode, problem: str, wanted: str) -> InvalidOption:
        return InvalidOption(
            f"{self.name}: {self.function_name} {problem} for episode {episode.index}; return {wanted}"
        )


class _ComputedRows:
    """Adds the rows of computed columns to chunks, episode by episode."""

    def __init__(self, columns: list[_ComputedColumn]):
        self._columns = columns
        # by open episode, that is, reader and row: its first stored step, and its rows from that step on
        self._open: dict[tuple[int, int], tuple[int, dict[ColumnPath, ColumnRows]]] = {}

    def __call__(self, source: Source, chunk: SourceChunk, owner: Array) -> SourceChunk:
        kept = np.ones(len(owner), np.bool_) if chunk.kept is None else chunk.kept
        computed: dict[ColumnPath, list[ColumnRows]] = {}
        for i in np.flatnonzero(kept & (chunk.table["steps"] > 0)).tolist():
            row, first, steps = int(owner[i]), int(chunk.table["first_step"][i]), int(chunk.table["steps"][i])
            key = id(source.reader), row
            if key not in self._open:
                self._open[key] = self._compute(source, row)
            start, columns = self._open[key]
            begin, end = first - start, first - start + steps
            for path, rows in columns.items():
                computed.setdefault(path, []).append(rows[begin:end])
            if all(end >= len(rows) for rows in columns.values()):
                del self._open[key]
        changed = {path: _joined(rows) for path, rows in computed.items()}
        table = chunk.table
        if _REWARDS in changed:
            sums = table[kept]
            add_reward_sums(changed[_REWARDS], sums)
            table = table.copy()
            table["reward_sum"][kept] = sums["reward_sum"]
        return chunk._replace(table=table, stored=None, changed=changed)

    def _compute(self, source: Source, row: int) -> tuple[int, dict[ColumnPath, ColumnRows]]:
        """Return the first stored step of an episode, and its rows from that step on."""
        first_step_lost, index = bool(source.reader.parts.first_step_lost[row]), int(source.indices[row])
        first_step = source.trace[index].first_step
        # Each function gets an Episode of its own, as it may change the arrays.
        rows = {column.path: column.rows(source.trace[index]) for column in self._columns}
        if first_step_lost:  # the step is stored, but readers skip it
            rows = {path: _joined([_unknown_row(known), known]) for path, known in rows.items()}
        return first_step - first_step_lost, rows


def _joined(runs: list[ColumnRows]) -> ColumnRows:
    arrays = [rows for rows in runs if isinstance(rows, np.ndarray)]
    if len(arrays) == len(runs):
        return np.concatenate(arrays)
    return [value for rows in runs if isinstance(rows, list) for value in rows]


def _unknown_row(rows: ColumnRows) -> ColumnRows:
    """Return a row for a step whose observation is lost: NaN, 0 or None."""
    if isinstance(rows, list):
        return [pack(None)]
    return np.full((1, *rows.shape[1:]), np.nan if rows.dtype.kind in "fc" else 0, rows.dtype)


# -- names of columns --------------------------------------------------------------------------------------------------


def _paths_to_drop(trace: Trace, names: list[str]) -> set[ColumnPath]:
    """Return the paths, or beginnings of paths, to drop. Raises InvalidOption."""
    if not names:
        raise InvalidOption(f"columns: name those to drop: {_droppable_columns(trace)}")
    existing = _editable_paths(trace)
    dropped: set[ColumnPath] = set()
    for name in names:
        root, dot, rest = str(name).partition(".")
        path: ColumnPath = (root, rest) if dot else (root,)
        if root in COLUMNS and root not in DROPPABLE:
            raise InvalidOption(f"columns: {root} cannot be dropped: every trace has them; {_droppable_columns(trace)}")
        exists = any(other[: len(path)] == path for other in existing)
        if root not in DROPPABLE or (dot and root == "infos") or not exists:
            raise InvalidOption(f"columns: this trace has no {shown(name)}; {_droppable_columns(trace)}")
        dropped.add(path)
    return dropped


def _droppable_columns(trace: Trace) -> str:
    existing = _editable_paths(trace)
    names = [root for root in DROPPABLE if any(path[0] == root for path in existing)] + _annotations(trace)
    return f"columns that can be dropped: {', '.join(names) or 'none'}"


def _mappable_columns(trace: Trace) -> str:
    infos = ["infos"] if _INFOS in _editable_paths(trace) else []
    return f"columns that can be mapped: {', '.join(['rewards', *infos, *_annotations(trace)])}"


def _renamable_columns(trace: Trace) -> str:
    return f"columns that can be renamed: {', '.join(_annotations(trace)) or 'none'}"


def _annotations(trace: Trace) -> list[str]:
    return sorted(f"annotations.{path[1]}" for path in _editable_paths(trace) if path[0] == "annotations")


def _editable_paths(trace: Trace) -> set[ColumnPath]:
    """Return the paths of info and annotation columns."""
    paths = {path for reader in index_of(trace).readers for batch in reader.read_batches for path in batch.totals}
    if any(reader.layouts.infos for reader in index_of(trace).readers if reader.chunk_count):
        paths.add(("infos",))
    return {path for path in paths if path == ("infos",) or (path[0] == "annotations" and len(path) == 2)}


def _start_without_info(start: bytes) -> bytes:
    """Return a reset record without the info of the reset, if it has one."""
    record = unpack(start)
    if not isinstance(record, dict) or "reset_info" not in record:
        return start
    return pack_lenient({key: value for key, value in record.items() if key != "reset_info"})[0]


def _schema_without_infos(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata that the writer would have without infos."""
    recorder = as_map(schema.get("recorder"))
    return {**schema, "recorder": {**recorder, "record_infos": False}} if recorder.get("record_infos") else schema
