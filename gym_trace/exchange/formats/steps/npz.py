"""Steps as one .npz file, which numpy.load reads: an array for each column, of all episodes one after the other."""

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
from gym_trace.playback.scan import EPISODE, Scan
from gym_trace.playback.trace import Trace
from gym_trace.printable import printable

_LEVEL = 1  # deflate level; compression takes most of the time
_VALUES = ".jsonl"  # how the name of a column ends that NumPy has no dtype for


def write_npz(
    trace: Trace,
    places: Sequence[int] | Array,
    selection: ColumnSelection,
    file: BinaryIO,
    steps: slice = slice(None),
    on_progress: Callable[[str, int, int], None] | None = None,
    beside: Mapping[str, Iterable[str]] | None = None,
) -> None:
    """Write the steps of these episodes, one column at a time, in bounded memory.

    The members: "episodes", the rows of trace.episodes, of which steps says how many rows are of each, first_step where
    they begin; the chosen columns by name, such as "rewards" or "observations/image", of all episodes one after the
    other, observations with a row more for each. A column of values of several forms, such as infos or
    texts, is a member whose name ends in .jsonl: bytes, a line of JSON for each row, as gym-trace cat --format jsonl
    writes values.

    Args:
        places: of the episodes in the trace.
        steps: which of each, as episode[steps].
        on_progress: called as on_progress(column, rows done, rows in all) as each of them is written.
        beside: further members, by name, of lines of text.

    Raises:
        CorruptTrace: something of it is damaged; a part would not fit the others.
    """
    table = trace.episodes[places].copy()
    for row in table:
        chosen = range(int(row["steps"]))[steps]
        row["has_final_observation"] |= chosen.stop < row["steps"]
        row["steps"], row["first_step"] = len(chosen), int(row["first_step"]) + chosen.start
    paths = columns_in(trace, places, selection)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as archive:
        with archive.open("episodes.npy", "w") as member:
            np.lib.format.write_array(member, table)
        for path in paths:
            rows = int(table["steps"].sum()) + len(table) * (path[0] == "observations")
            _write_column(archive, path, _column(trace, places, path, steps), rows, on_progress)
        for name, lines in (beside or {}).items():
            with archive.open(name, "w", force_zip64=True) as member:
                member.writelines(f"{line}\n".encode() for line in lines)


def columns_in(trace: Trace, places: Sequence[int] | Array, selection: ColumnSelection) -> list[Path]:
    """Return the selected columns of the writer of the first episode, and all annotations."""
    if not len(places):
        return []
    reader = trace.writer_of(int(places[0]))
    leaves = [leaf.path for layout in reader.layouts[:2] for leaf in layout.leaves()]
    has_infos = any(("infos",) in batch.totals for batch in reader.read_batches)
    paths: list[Path] = []
    for root in selection.roots:
        if root in ("observations", "actions"):
            paths += [path for path in leaves if path[0] == root and selection.takes(path)]
        elif root != "annotations" and (root != "infos" or has_infos):
            paths.append((root,))
    notes = [tuple(name.split("/", 1)) for name in names_in(trace) if name.startswith("annotations/")]
    return [*paths, *(path for path in notes if selection.takes(path))]


def _column(trace: Trace, places: Sequence[int] | Array, path: Path, steps: slice) -> Iterator[Array]:
    """The rows of one leaf, of all episodes."""
    for runs in Scan(trace.content, [path], np.asarray(places), order=EPISODE, steps=steps):
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
    held: list[Array] = []
    done = 0
    for block in blocks:
        held = [block]
        if len(block):
            break
    first = held[-1] if held else np.empty(0)
    typed = first.dtype != object
    with archive.open(_member(path) + (".npy" if typed else _VALUES), "w", force_zip64=True) as member:
        if typed:
            form = {"descr": first.dtype.str, "fortran_order": False, "shape": (rows, *first.shape[1:])}
            np.lib.format.write_array_header_2_0(member, form)
        for block in chain(held, blocks):
            if not typed:
                member.write("".join(f"{json_text(value)}\n" for value in rows_of(block, None)).encode())
            elif len(block) and (block.dtype != first.dtype or block.shape[1:] != first.shape[1:]):
                raise _misfit(path, f"it has rows of {first.dtype} {first.shape[1:]} and others")
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
    """The name of a leaf, which leads nowhere when the file is unpacked."""
    parts = name_of(path).replace("\\", "_").split("/")
    return "/".join(f"_{part}" if part in ("", ".", "..") else printable(part) for part in parts)
