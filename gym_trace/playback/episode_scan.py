"""Scan episodes in file order, reading each chunk once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.episode import Episode
from gym_trace.data.layout import put_together
from gym_trace.data.schema import Layouts
from gym_trace.data.values import Array
from gym_trace.data.vocabulary import SCANNED
from gym_trace.format.batch_reader import Chunk
from gym_trace.playback.assembly import ChunkSlice, assemble
from gym_trace.playback.episode_index import EpisodeIndex
from gym_trace.playback.on_demand import Asked
from gym_trace.playback.opened import Scanned
from gym_trace.playback.scan import OnDamage, read_chunks
from gym_trace.playback.step_runs import raise_or_report
from gym_trace.playback.writer_reader import WriterReader

_Arrays = tuple[Any, Any, Array]  # observations, actions, rewards
_CALLBACK = "observations", "actions", "rewards"
_JOINED_BYTES = 1 << 20  # bytes of episodes joined together, which is what a user keeps in memory by keeping one array


def scan_content(
    content: EpisodeIndex, roots: frozenset[str] | None, wanted: Array, on_damage: OnDamage | None
) -> Iterator[Episode]:
    """Yield the episodes at these indices, which must ascend in the whole trace, with their columns under roots.

    roots: None: all columns; without on_damage, a column is read when it is first used.
    on_damage: see scan_episodes(). Raises CorruptTrace.
    """
    asked = Asked() if not roots and on_damage is None else None
    roots = frozenset(SCANNED) if roots is None else roots
    whole = wanted if content.chosen is None else content.chosen[wanted]
    everything = content.chosen is None and len(wanted) == len(content)
    skip = on_damage is not None
    for number, writer in enumerate(content.all_readers):
        begin, end = content.bounds[number : number + 2].tolist()
        mine = np.zeros(end - begin, bool)
        first, last = np.searchsorted(whole, (begin, end))
        mine[whole[first:last] - begin] = True
        if not mine.any() and not everything:
            continue
        raise_or_report(writer, on_damage)
        for reader, row, pieces in scan_episodes(writer, roots, mine, on_damage, asked):
            index = begin + row
            if reader is not writer:
                index = begin + int(writer.parts.of_fragment[reader.parts.first_of(slice(row, row + 1))[0]])
            record = content.record(index if content.chosen is None else int(wanted[np.searchsorted(whole, index)]))
            if reader is not writer:  # a part of a damaged episode
                (part,) = reader.parts.table(slice(row, row + 1))
                part["index"], part["writer"] = record["index"], record["writer"]
                record = part
            source = Scanned(reader, row, pieces, roots, skip, asked)
            yield Episode(record, writer.writer, writer.split, source, prefix=writer.about.prefix)


def scan_episodes(
    writer: WriterReader, roots: frozenset[str], wanted: Array, on_damage: OnDamage | None, asked: Asked | None = None
) -> Iterator[tuple[WriterReader, int, list[ChunkSlice]]]:
    """Yield each wanted episode of a writer as (reader, row, pieces), reading each chunk once.

    After damage, reader lacks the damaged chunks, and row is a part of an episode.

    on_damage: called with damaged chunks, which are then skipped as if they did not exist; None: raises CorruptTrace.
    asked: the columns that were used before; then chunks are ChunkOnDemand. None: chunks with all of roots.
    """
    reader, parts = writer, writer.parts
    pending: dict[int, list[tuple[int, ChunkSlice]]] = {}
    # Starts are read too: a chunk whose starts are damaged is skipped, which is simpler than an episode without a seed.
    columns = roots if on_damage is None else roots | {"starts"}
    chunks = read_chunks(writer, columns, wanted, on_damage, asked=asked)
    while (read := next(chunks, None)) is not None:
        block, chunk = read
        if chunk is None:
            # Look for all damage now, to compute the remaining parts once and not after each damaged chunk.
            bad = [block.number, *(later.number for later, found in chunks if found is None)]
            reader, wanted = _without(reader, bad, wanted)
            parts = reader.parts
            pieces = [item for items in pending.values() for item in items]
            pending = {}
            for f, piece in pieces:
                pending.setdefault(int(parts.of_fragment[f]), []).append((f, piece))
            for row in [row for row, items in pending.items() if parts.is_whole(row, len(items))]:
                yield reader, row, [piece for _, piece in pending.pop(row)]
            chunks = read_chunks(reader, columns, wanted, on_damage, first=block.number + 1)
            continue
        flags = block.table["flags"].tolist()
        o, s = (offsets.tolist() for offsets in block.offsets)
        lost = (parts.first_step_lost[block.rows] & parts.opens(block.rows, block.begin)).tolist()
        for i, row in enumerate(block.rows.tolist()):
            if row < 0:
                continue
            piece = ChunkSlice(chunk, block.number, slice(o[i], o[i + 1]), slice(s[i] + lost[i], s[i + 1]), flags[i])
            items = pending.setdefault(row, [])
            items.append((block.begin + i, piece))
            if parts.is_whole(row, len(items)):
                yield reader, row, [piece for _, piece in pending.pop(row)]


def readable_parts(content: EpisodeIndex, columns: frozenset[str], on_damage: OnDamage) -> tuple[EpisodeIndex, Array]:
    """Read all chunks. Return the readable parts of the episodes as episodes, in the order of content; and the index
    in content of the episode of each part."""
    writers, rows = content["writer"], content.rows
    readers, owners, found, count = [], [np.arange(0)], [np.arange(0)], 0
    for number, reader in enumerate(content.readers):
        mine = np.flatnonzero(writers == number)
        wanted = np.zeros(len(reader.parts), np.bool_)
        wanted[rows[mine]] = True
        chunks = read_chunks(reader, columns | {"starts"}, wanted, on_damage)
        bad = [block.number for block, chunk in chunks if chunk is None]
        readers.append(reader.without_chunks(bad) if bad else reader)
        parts = readers[-1].parts
        row = reader.parts.of_fragment[parts.first_of(slice(None))]  # the row of each part's episode
        order = np.argsort(row, kind="stable")
        low, high = (np.searchsorted(row[order], rows[mine], side=side) for side in ("left", "right"))
        counts = high - low
        chosen = order[np.arange(counts.sum()) + np.repeat(low - np.cumsum(counts) + counts, counts)]
        owners.append(np.repeat(mine, counts))
        found.append(count + chosen)
        count += len(parts)
    whole, owner, part = EpisodeIndex.whole(readers), np.concatenate(owners), np.concatenate(found)
    order = np.lexsort((whole["first_step"][part], owner))
    return whole.view(part[order]), owner[order]


def _without(reader: WriterReader, bad: list[int], wanted: Array) -> tuple[WriterReader, Array]:
    """Return a reader without bad chunks, and a mask of its episodes that are parts of wanted ones."""
    of_fragment = reader.parts.of_fragment
    wanted_fragments = wanted[of_fragment] & (of_fragment >= 0)
    reader = reader.without_chunks(bad)
    of_fragment = reader.parts.of_fragment
    wanted = np.zeros(len(reader.parts), bool)
    wanted[of_fragment[wanted_fragments & (of_fragment >= 0)]] = True
    return reader, wanted


class _Typed(NamedTuple):
    """Typed rows: one array per leaf.

    seen: arrays of observations. done: arrays of actions, then of rewards.
    """

    seen: list[Array]
    done: list[Array]

    @property
    def row_type(self) -> list[tuple[Any, ...]]:
        return [(array.dtype, array.shape[1:]) for array in (*self.seen, *self.done)]

    @property
    def row_bytes(self) -> int:
        return sum(array.itemsize * math.prod(array.shape[1:]) for array in (*self.seen, *self.done))

    def slicer(self, layouts: Layouts) -> Callable[[int, int, int, int], _Arrays]:
        """Return a function that cuts an episode out of these rows."""
        seen, (*done, rewards) = self.seen, self.done
        if layouts.is_flat:
            (observations,), (actions,) = seen, done
            return lambda o, p, s, t: (observations[o:p], actions[s:t], rewards[s:t])
        return lambda o, p, s, t: (
            put_together(layouts.observations, [array[o:p] for array in seen]),
            put_together(layouts.actions, [array[s:t] for array in done]),
            rewards[s:t],
        )


class _Read(NamedTuple):
    """A chunk, and its columns if they are all typed."""

    chunk: Chunk
    number: int
    typed: _Typed | None


_Part = tuple[_Read, int, int, int, int]  # a fragment: begin and end of its observations, begin and end of its steps


def arrays_of(writer: WriterReader) -> Iterator[_Arrays]:
    """Yield (observations, actions, rewards) of each episode: the fastest scan of a whole trace."""
    parts, layouts = writer.parts, writer.layouts
    plain = (parts["steps"] > 0) & ~parts.first_step_lost  # without steps, the dtype is that of the space
    alone, last = plain & (np.diff(parts.first) == 1), parts.last
    pending: dict[int, list[_Part]] = {}
    for block, chunk in read_chunks(writer, frozenset(_CALLBACK)):
        assert chunk is not None
        chunk.decode()
        read = _Read(chunk, block.number, _typed(layouts, chunk))
        o, s = (offsets.tolist() for offsets in block.offsets)
        present = block.rows >= 0
        ends = present & (last[block.rows] == block.begin + np.arange(len(present)))
        whole = ends & alone[block.rows] & (read.typed is not None)
        others = np.flatnonzero(present & ~whole)
        ended: list[tuple[int, list[_Part]]] = []
        for i, row, is_end in zip(*(column.tolist() for column in (others, block.rows[others], ends[others]))):
            pending.setdefault(row, []).append((read, o[i], o[i + 1], s[i], s[i + 1]))
            if is_end:
                ended.append((row, pending.pop(row)))
        joined = _joined_arrays(writer, ended, plain)
        sliced = None if read.typed is None else read.typed.slicer(layouts)
        for i, is_whole in zip(np.flatnonzero(ends).tolist(), whole[ends].tolist()):
            yield sliced(o[i], o[i + 1], s[i], s[i + 1]) if sliced is not None and is_whole else next(joined)

        del chunk, read, sliced, ended, joined  # free memory before the next chunk is read


def _typed(layouts: Layouts, chunk: Chunk) -> _Typed | None:
    """Return the columns of a chunk; None if they are not all typed."""
    seen = [leaf.path for leaf in layouts.observations.leaves()]
    done = [*(leaf.path for leaf in layouts.actions.leaves()), ("rewards",)]
    for path in (*seen, *done):
        if path not in chunk or chunk.is_delta_encoded(path) or chunk.array(path).dtype == object:
            return None
    return _Typed([chunk.array(path) for path in seen], [chunk.array(path) for path in done])


def _joined_arrays(writer: WriterReader, episodes: list[tuple[int, list[_Part]]], plain: Array) -> Iterator[_Arrays]:
    """Yield the arrays of episodes, (row, parts), that end in the same chunk. Small episodes are joined together."""
    rows = np.array([row for row, _ in episodes], np.int64)
    steps = writer.parts.column("steps", rows)
    typed = [part[-1][0].typed for _, part in episodes[:1]]
    row_bytes = sum(_JOINED_BYTES if it is None else it.row_bytes for it in typed)
    for begin, end in _batches((steps + 1) * row_bytes):
        some = episodes[begin:end]
        joined = _joined([part for _, parts in some for part in parts]) if plain[rows[begin:end]].all() else None
        if joined is None:
            for row, parts in some:
                pieces = [ChunkSlice(it.chunk, it.number, slice(o, p), slice(s, t), 0) for it, o, p, s, t in parts]
                if writer.parts.first_step_lost[row]:
                    steps_of = pieces[0].steps
                    pieces[0] = pieces[0]._replace(steps=slice(steps_of.start + 1, steps_of.stop))
                columns = (assemble(name, pieces, writer.layouts, copy=False) for name in _CALLBACK)
                observations, actions, rewards = columns
                yield observations, actions, rewards
            continue
        sliced, done = joined.slicer(writer.layouts), 0
        for number, count in enumerate(steps[begin:end].tolist()):
            yield sliced(done + number, done + number + count + 1, done, done + count)
            done += count


def _batches(sizes: Array) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of runs of items with at most _JOINED_BYTES; a larger item is a run of its own."""
    total = np.cumsum(sizes)
    begin = 0
    while begin < len(sizes):
        until = _JOINED_BYTES + (int(total[begin - 1]) if begin else 0)
        end = max(begin + 1, int(np.searchsorted(total, until, side="right")))
        yield begin, end
        begin = end


def _joined(parts: list[_Part]) -> _Typed | None:
    """Join the rows of all parts; None if they are untyped or their types differ."""
    typed = [read.typed for read, *_ in parts if read.typed is not None]
    distinct = list({id(it): it for it in typed}.values())
    if len(typed) < len(parts) or any(it.row_type != distinct[0].row_type for it in distinct[1:]):
        return None
    seen, done = range(len(typed[0].seen)), range(len(typed[0].done))
    return _Typed(
        [np.concatenate([it.seen[leaf][o:p] for it, (_, o, p, _, _) in zip(typed, parts)]) for leaf in seen],
        [np.concatenate([it.done[leaf][s:t] for it, (_, _, _, s, t) in zip(typed, parts)]) for leaf in done],
    )
