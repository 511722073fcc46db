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
from gym_trace.reading.episode_table import Parts, parts_of
from gym_trace.reading.opened import Scanned
from gym_trace.reading.writer_reader import WriterReader

OnDamage = Callable[[Damage], None]
_CALLBACK = "observations", "actions", "rewards"


def scan_content(
    content: Content, roots: frozenset[str], wanted: Array, on_damage: OnDamage | None
) -> Iterator[Episode]:
    """Yield the episodes at these indices, which ascend in the whole trace, with their columns under roots.

    on_damage: see scan_episodes(). Raises CorruptTrace.
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
            if parts is not writer.parts:  # a part of a damaged episode
                index = begin + int(writer.parts.of_fragment[parts.fragments[parts.first[row]]])
            record = parts.table[row].copy()
            record["index"] = index if content.chosen is None else wanted[np.searchsorted(whole, index)]
            yield Episode(record, writer.writer, writer.split, Scanned(writer, parts, row, pieces, roots, skip))


def scan_episodes(
    writer: WriterReader, roots: frozenset[str], wanted: Array, on_damage: OnDamage | None
) -> Iterator[tuple[Parts, int, list[Piece]]]:
    """Yield each wanted episode of a writer as (parts, row, pieces), reading each chunk once.

    on_damage: called with damaged chunks, which are then skipped as if they did not exist; None: raises CorruptTrace.
    """
    parts = writer.parts
    pending: dict[int, list[tuple[int, Piece]]] = {}
    # Starts are read too: a chunk whose starts are damaged is skipped, which is simpler than an episode without a seed.
    needed = roots if on_damage is None else roots | {"starts"}
    walk = writer.blocks(wanted, parts=parts)
    while (block := next(walk, None)) is not None:
        try:
            chunk = writer.chunk(block.number, needed)
            if on_damage is not None:
                chunk.decode_all()
        except CorruptTrace as error:
            if on_damage is None:
                raise
            # Look for all damage now, to compute the remaining parts once and not after each damaged chunk.
            on_damage(damage_at(writer, block.number, error.problem))
            bad = [block.number, *_damaged_chunks(writer, parts, wanted, block.number + 1, needed, on_damage)]
            parts, wanted = _without(writer, bad, parts, wanted)
            pieces = [item for items in pending.values() for item in items]
            pending = {}
            for f, piece in pieces:
                pending.setdefault(int(parts.of_fragment[f]), []).append((f, piece))
            for row in [row for row, items in pending.items() if parts.is_whole(row, len(items))]:
                yield parts, row, [piece for _, piece in pending.pop(row)]
            walk = writer.blocks(wanted, block.number + 1, parts)
            continue
        flags = block.table["flags"].tolist()
        o, s = (offsets.tolist() for offsets in block.offsets)
        for i, row in enumerate(block.rows.tolist()):
            if row < 0:
                continue
            piece = Piece(chunk, block.number, slice(o[i], o[i + 1]), slice(s[i], s[i + 1]), flags[i])
            items = pending.setdefault(row, [])
            items.append((block.begin + i, piece))
            if parts.is_whole(row, len(items)):
                yield parts, row, [piece for _, piece in pending.pop(row)]


def without_damage(writer: WriterReader, roots: frozenset[str], wanted: Array, on_damage: OnDamage) -> Parts:
    """Read the chunks of wanted episodes, and return the episodes without the damaged chunks."""
    bad = list(_damaged_chunks(writer, writer.parts, wanted, 0, roots | {"starts"}, on_damage))
    return _without(writer, bad, writer.parts, wanted)[0] if bad else writer.parts


def _damaged_chunks(
    writer: WriterReader, parts: Parts, wanted: Array, first: int, roots: frozenset[str], on_damage: OnDamage
) -> Iterator[int]:
    """Yield the unreadable chunks with wanted episodes, from the first one on."""
    for block in writer.blocks(wanted, first, parts):
        try:
            writer.chunk(block.number, roots).decode_all()
        except CorruptTrace as error:
            on_damage(damage_at(writer, block.number, error.problem))
            yield block.number


def damage_at(writer: WriterReader, number: int, problem: str) -> Damage:
    batch, i = writer.chunk_places[number]
    start, length = (int(batch.chunks[name][i]) for name in ("offset", "length"))
    return Damage(str(batch.path), start, start + length, problem)


def _without(writer: WriterReader, bad: list[int], parts: Parts, wanted: Array) -> tuple[Parts, Array]:
    """Return the parts without bad chunks, whose fragments belong to no episode, and which of them are wanted."""
    wanted_fragments = wanted[parts.of_fragment] & (parts.of_fragment >= 0)
    is_bad = np.zeros(writer.chunk_count, bool)
    is_bad[bad] = True
    left = np.flatnonzero(~np.repeat(is_bad, np.diff(writer.chunk_bounds)))
    parts = parts_of(writer.fragments[left], writer.alive)
    of_fragment = np.full(len(writer.fragments), -1)
    of_fragment[left] = parts.of_fragment
    wanted = np.zeros(len(parts.table), bool)
    wanted[of_fragment[wanted_fragments & (of_fragment >= 0)]] = True
    starts = np.where(parts.starts < 0, -1, left[parts.starts]) if len(left) else parts.starts
    return parts._replace(of_fragment=of_fragment, fragments=left[parts.fragments], starts=starts), wanted


def arrays_of(writer: WriterReader) -> Iterator[tuple[Any, Any, Array]]:
    """Yield (observations, actions, rewards) of each episode: the fast way through a whole trace."""
    parts = writer.parts
    alone = (np.diff(parts.first) == 1) & (parts.table["steps"] > 0)  # no steps have no dtype of their own
    alone[parts.trimmed] = False
    pending: dict[int, list[Piece]] = {}
    for block in writer.blocks():
        chunk = writer.chunk(block.number, frozenset(_CALLBACK))
        chunk.decode()
        o, s = (offsets.tolist() for offsets in block.offsets)
        sliced = _slicer(writer.layouts, chunk)
        whole = (alone[block.rows] & (block.rows >= 0)).tolist()
        for i, row in enumerate(block.rows.tolist()):
            if sliced is not None and whole[i]:
                yield sliced(o[i], o[i + 1], s[i], s[i + 1])
            elif row >= 0:
                pieces = pending.setdefault(row, [])
                pieces.append(Piece(chunk, block.number, slice(o[i], o[i + 1]), slice(s[i], s[i + 1]), 0))
                if parts.is_whole(row, len(pieces)):
                    pieces, trimmed = pending.pop(row), bool(parts.trimmed[row])
                    columns = (assemble(name, pieces, writer.layouts, trimmed, copy=False) for name in _CALLBACK)
                    observations, actions, rewards = columns
                    yield observations, actions, rewards
        del chunk, sliced  # before the next ones take memory


def _slicer(layouts: Layouts, chunk: Chunk) -> Callable[[int, int, int, int], tuple[Any, Any, Array]] | None:
    """Return a function that cuts an episode out of the columns of a chunk; None if they are not all typed."""
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
