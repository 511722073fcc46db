"""Steps as one .npz file for numpy.load: one array per column, of all episodes one after the other."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import BinaryIO

import numpy as np

from gym_trace.data.json_values import json_text, rows_of
from gym_trace.data.layout import Path
from gym_trace.data.values import Array
from gym_trace.errors import TraceError
from gym_trace.playback.column_selection import ColumnSelection, name_of, names_in
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.scan import EPISODE, Scan
from gym_trace.playback.trace import Trace
from gym_trace.printable import printable

_DEFLATE_LEVEL = 1  # compression takes most of the time
_JSON_SUFFIX = ".jsonl"  # file of the columns without a dtype


def write_npz(
    trace: Trace,
    episodes: Sequence[int] | Array,
    selection: ColumnSelection,
    file: BinaryIO,
    steps: slice = slice(None),
    on_progress: Callable[[str, int, int], None] | None = None,
    texts: Mapping[str, Iterable[str]] | None = None,
) -> None:
    """Write the steps of these episodes, one column at a time, in bounded memory.

    The member "episodes" has rows of trace.episodes; their steps and first_step are those of the written steps. The
    other members are the selected columns by name, such as "rewards" or "observations/image": the rows of all
    episodes one after the other, with one more row of observations per episode. A column of values of any type, such
    as infos or texts, is a member NAME.jsonl with one line of JSON per row, as from gym-trace cat --format jsonl.

    Args:
        episodes: their indices in the trace.
        steps: which steps of each, as episode[steps].
        on_progress: called as on_progress(column, rows done, rows of the column).
        texts: lines of additional members, by name.

    Raises:
        CorruptTrace: a chunk is damaged; the rows of a column would be incomplete.
        TraceError: rows of a column differ in dtype or shape, or an episode lacks the column.
    """
    table = trace.episodes[episodes].copy()
    for row in table:
        chosen = range(int(row["steps"]))[steps]
        row["has_final_observation"] |= chosen.stop < row["steps"]
        row["steps"], row["first_step"] = len(chosen), int(row["first_step"]) + chosen.start
    paths = columns_in(trace, episodes, selection)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=_DEFLATE_LEVEL) as archive:
        with archive.open("episodes.npy", "w") as member:
            np.lib.format.write_array(member, table)
        for path in paths:
            rows = int(table["steps"].sum()) + len(table) * (path[0] == "observations")
            _write_column(archive, path, _column(trace, episodes, path, steps), rows, on_progress)
        for name, lines in (texts or {}).items():
            with archive.open(name, "w", force_zip64=True) as member:
                member.writelines(f"{line}\n".encode() for line in lines)


def columns_in(trace: Trace, episodes: Sequence[int] | Array, selection: ColumnSelection) -> list[Path]:
    """Return the selected columns of the writer of the first episode, and all annotations."""
    if not len(episodes):
        return []
    reader = index_of(trace).locate(int(episodes[0]))[0]
    leaves = [leaf.path for layout in reader.layouts[:2] for leaf in layout.leaves()]
    has_infos = any(("infos",) in batch.totals for batch in reader.read_batches)
    paths: list[Path] = []
    for root in selection.roots:
        if root in ("observations", "actions"):
            paths += [path for path in leaves if path[0] == root and selection.takes(path)]
        elif root != "annotations" and (root != "infos" or has_infos):
            paths.append((root,))
    annotations = [tuple(name.split("/", 1)) for name in names_in(trace) if name.startswith("annotations/")]
    return [*paths, *(path for path in annotations if selection.takes(path))]


def _column(trace: Trace, episodes: Sequence[int] | Array, path: Path, steps: slice) -> Iterator[Array]:
    """Yield blocks of the rows of one leaf, of all episodes."""
    for runs in Scan(index_of(trace), [path], np.asarray(episodes), order=EPISODE, steps=steps):
        rows = runs.columns.get(path)
        if rows is not None:
            yield rows[1:] if path[0] == "observations" and not runs.opens[0] else rows
        elif runs.size:
            raise _misfit(path, f"episode {int(runs.episode[0])} does not have it for all steps")


def _write_column(
    archive: zipfile.ZipFile,
    path: Path,
    blocks: Iterator[Array],
    rows: int,
    on_progress: Callable[[str, int, int], None] | None,
) -> None:
    first: Array = np.empty(0)
    for first in blocks:
        if len(first):
            break
    is_typed, done = first.dtype != object, 0
    with archive.open(_member(path) + (".npy" if is_typed else _JSON_SUFFIX), "w", force_zip64=True) as member:
        if is_typed:
            header = {"descr": first.dtype.str, "fortran_order": False, "shape": (rows, *first.shape[1:])}
            np.lib.format.write_array_header_2_0(member, header)
        for block in chain([first], blocks):
            if not is_typed:
                member.write("".join(f"{json_text(value)}\n" for value in rows_of(block, None)).encode())
            elif len(block) and (block.dtype != first.dtype or block.shape[1:] != first.shape[1:]):
                raise _misfit(path, f"rows of {first.dtype} {first.shape[1:]} and others")
            else:
                member.write(block.tobytes())
            done += len(block)
            if on_progress is not None:
                on_progress(name_of(path), done, rows)


def _misfit(path: Path, problem: str) -> TraceError:
    return TraceError(
        f"{name_of(path)} cannot be one array: {problem}; omit it with --columns, choose other episodes, or write "
        "JSON lines"
    )


def _member(path: Path) -> str:
    """Return the name of a leaf, safe as a path when the file is unpacked."""
    parts = name_of(path).replace("\\", "_").split("/")
    return "/".join(f"_{part}" if part in ("", ".", "..") else printable(part) for part in parts)
