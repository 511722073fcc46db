"""Episodes from front to back, each chunk read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gym_trace.errors import CorruptTrace
from gym_trace.format.batch_reader import Chunk, Damage
from gym_trace.model.episode import Episode
from gym_trace.model.layout import put_together
from gym_trace.model.schema import Layouts
from gym_trace.model.values import Array
from gym_trace.reading.assembly import Piece, assemble
from gym_trace.reading.content import Content
from gym_trace.reading.episode_table import Parts, parts_of, step_offsets
from gym_trace.reading.opened import Scanned
from gym_trace.reading.writer_reader import WriterReader

_CALLBACK_ROOTS = frozenset(("observations", "actions", "rewards"))


def scan_content(
    content: Content, roots: frozenset[str], wanted: Array, on_damage: Callable[[Damage], None] | None
) -> Iterator[Episode]:
    """The episodes at some places, which ascend in the whole trace, with their columns under roots.

    on_damage: as of scan_episodes. Raises CorruptTrace.
    """
    whole = wanted if content.chosen is None else content.chosen[wanted]
    everything = content.chosen is None and len(wanted) == len(content.table)
    skip = on_damage is not None
    for number, writer in enumerate(content.writers):
        begin, end = content.bounds[number : number + 2].tolist()
        mine = np.zeros(end - begin, bool)
        first, last = np.searchsorted(whole, (begin, end))
        mine[whole[first:last] - begin] = True
        if not mine.any() and not everything:
            continue
        if writer.damage and not skip:
            raise writer.damage[0].error()
        for parts, row, pieces in scan_episodes(writer, roots, mine, on_damage):
            index = begin + row
            if parts is not writer.parts:  # what is left of one that was there whole
                index = begin + int(writer.parts.of_fragment[parts.fragments[parts.first[row]]])
            record = parts.table[row].copy()
            record["index"] = index if content.chosen is None else wanted[np.searchsorted(whole, index)]
            yield Episode(record, writer.writer, writer.split, Scanned(writer, parts, row, pieces, roots, skip))


def scan_episodes(
    writer: WriterReader, roots: frozenset[str], wanted: Array, on_damage: Callable[[Damage], None] | None
) -> Iterator[tuple[Parts, int, list[Piece]]]:
    """Each wanted episode of a writer as (parts, row, pieces), each chunk read once.

    on_damage: told of damaged chunks, which are then left out as if they were not there; None: CorruptTrace.
    """
    parts, is_bad = writer.parts, np.zeros(writer.chunk_count, bool)
    pending: dict[int, list[tuple[int, Piece]]] = {}
    needed = roots if on_damage is None else roots | {"starts"}
    # How its episodes began is read too: to leave out a chunk is plainer than to forget a seed.
    for number in range(writer.chunk_count):
        begin, end = writer.chunk_bounds[number : number + 2].tolist()
        rows = parts.of_fragment[begin:end]
        mine = (rows >= 0) & wanted[rows] if len(wanted) else np.zeros(len(rows), bool)
        if is_bad[number] or not mine.any():
            continue
        try:
            chunk = writer.chunk(number, needed)
            if on_damage is not None:
                chunk.decode_all()
        except CorruptTrace as error:
            if on_damage is None:
                raise
            # All that are damaged are looked for now: what is left is put together once, not after each of them.
            wanted_fragments = wanted[parts.of_fragment] & (parts.of_fragment >= 0)
            is_bad = _damaged_chunks(writer, number, error, wanted_fragments, needed, on_damage)
            parts, wanted = _without(writer, np.repeat(is_bad, np.diff(writer.chunk_bounds)), wanted_fragments)
            pieces = [item for items in pending.values() for item in items]
            pending = {}
            for f, piece in pieces:
                pending.setdefault(int(parts.of_fragment[f]), []).append((f, piece))
            for row in [row for row, items in pending.items() if parts.is_whole(row, len(items))]:
                yield parts, row, [piece for _, piece in pending.pop(row)]
            continue
        flags = writer.fragments["flags"][begin:end].tolist()
        o, s = (offsets.tolist() for offsets in step_offsets(writer.fragments[begin:end]))
        row_list = rows.tolist()
        for i in np.flatnonzero(mine).tolist():
            row = row_list[i]
            piece = Piece(chunk, number, slice(o[i], o[i + 1]), slice(s[i], s[i + 1]), flags[i])
            items = pending.setdefault(row, [])
            items.append((begin + i, piece))
            if parts.is_whole(row, len(items)):
                yield parts, row, [piece for _, piece in pending.pop(row)]


def without_damage(
    writer: WriterReader, roots: frozenset[str], wanted: Array, on_damage: Callable[[Damage], None]
) -> Parts:
    """What is left of the episodes of a writer: chunks that wanted ones lie in are read, and damaged ones left out."""
    wanted_fragments = wanted[writer.parts.of_fragment] & (writer.parts.of_fragment >= 0)
    is_bad = _damaged_chunks(writer, 0, None, wanted_fragments, roots | {"starts"}, on_damage)
    if not is_bad.any():
        return writer.parts
    return _without(writer, np.repeat(is_bad, np.diff(writer.chunk_bounds)), wanted_fragments)[0]


def _damaged_chunks(
    writer: WriterReader,
    first: int,
    error: CorruptTrace | None,
    wanted_fragments: Array,
    roots: frozenset[str],
    on_damage: Callable[[Damage], None],
) -> Array:
    """Which chunks cannot be read, from the first one on, which has brought about error, if any; of those wanted."""
    is_bad = np.zeros(writer.chunk_count, bool)
    for number in range(first, writer.chunk_count):
        problem = None if error is None else error.problem
        if number > first or error is None:
            if not wanted_fragments[writer.chunk_bounds[number] : writer.chunk_bounds[number + 1]].any():
                continue
            problem = _problem_of(writer, number, roots)
        if problem is not None:
            is_bad[number] = True
            batch, i = writer.chunk_places[number]
            start, length = (int(batch.chunks[name][i]) for name in ("offset", "length"))
            on_damage(Damage(str(batch.path), start, start + length, problem))
    return is_bad


def _problem_of(writer: WriterReader, number: int, roots: frozenset[str]) -> str | None:
    try:
        writer.chunk(number, roots).decode_all()
    except CorruptTrace as error:
        return error.problem
    return None


def _without(writer: WriterReader, bad: Array, wanted_fragments: Array) -> tuple[Parts, Array]:
    """The parts that are left without bad fragments, numbered as if these had no rows, and which are wanted."""
    left = np.flatnonzero(~bad)
    parts = parts_of(writer.fragments[left], writer.alive)
    of_fragment = np.full(len(writer.fragments), -1)
    of_fragment[left] = parts.of_fragment
    wanted = np.zeros(len(parts.table), bool)
    wanted[of_fragment[wanted_fragments & (of_fragment >= 0)]] = True
    starts = np.where(parts.starts < 0, -1, left[parts.starts]) if len(left) else parts.starts
    return parts._replace(of_fragment=of_fragment, fragments=left[parts.fragments], starts=starts), wanted


def arrays_of(writer: WriterReader) -> Iterator[tuple[Any, Any, Array]]:
    """(observations, actions, rewards) of each episode: the quick way through a whole trace."""
    parts = writer.parts
    alone = (np.diff(parts.first) == 1) & (parts.table["steps"] > 0)  # no steps have no dtype of their own
    alone[parts.trimmed] = False
    pending: dict[int, list[tuple[int, Piece]]] = {}
    bounds = writer.chunk_bounds
    for number in range(writer.chunk_count):
        begin, end = bounds[number : number + 2].tolist()
        rows = parts.of_fragment[begin:end]
        if not (rows >= 0).any():
            continue
        chunk = writer.chunk(number, _CALLBACK_ROOTS)
        chunk.decode()
        o, s = (offsets.tolist() for offsets in step_offsets(writer.fragments[begin:end]))
        sliced = _slicer(writer.layouts, chunk)
        whole = (alone[rows] & (rows >= 0)).tolist()
        for i, row in enumerate(rows.tolist()):
            if sliced is not None and whole[i]:
                yield sliced(o[i], o[i + 1], s[i], s[i + 1])
            elif row >= 0:
                piece = Piece(chunk, number, slice(o[i], o[i + 1]), slice(s[i], s[i + 1]), 0)
                items = pending.setdefault(row, [])
                items.append((begin + i, piece))
                if parts.is_whole(row, len(items)):
                    pieces, trimmed = [piece for _, piece in pending.pop(row)], bool(parts.trimmed[row])
                    yield (
                        assemble("observations", pieces, writer.layouts, trimmed, copy=False),
                        assemble("actions", pieces, writer.layouts, trimmed, copy=False),
                        assemble("rewards", pieces, writer.layouts, trimmed, copy=False),
                    )
        del chunk, sliced  # before the next ones take memory


def _slicer(layouts: Layouts, chunk: Chunk) -> Callable[[int, int, int, int], tuple[Any, Any, Array]] | None:
    """A function that cuts an episode out of the columns of a chunk; None if they are not all typed."""
    seen_paths = [leaf.path for leaf in layouts.observations.leaves()]
    done_paths = [leaf.path for leaf in layouts.actions.leaves()]
    paths = [*seen_paths, *done_paths, ("rewards",)]
    if not all(path in chunk and not chunk.is_walked(path) and chunk.array(path).dtype != object for path in paths):
        return None
    seen, done = [chunk.array(path) for path in seen_paths], [chunk.array(path) for path in done_paths]
    rewards = chunk.array(("rewards",))
    if layouts.is_flat:
        (observations,), (actions,) = seen, done
        return lambda o, p, s, t: (observations[o:p], actions[s:t], rewards[s:t])
    return lambda o, p, s, t: (
        put_together(layouts.observations, [array[o:p] for array in seen]),
        put_together(layouts.actions, [array[s:t] for array in done]),
        rewards[s:t],
    )
