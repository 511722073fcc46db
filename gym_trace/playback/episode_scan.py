"""Scan episodes in file order, reading each chunk once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import numpy as np

from gym_trace.data.episode import Episode
from gym_trace.data.values import Array
from gym_trace.data.vocabulary import SCANNED
from gym_trace.format.batch_reader import Chunk
from gym_trace.playback.episode_groups import EpisodeGroup, InOneChunk, Places, Scanned
from gym_trace.playback.episode_index import EpisodeIndex
from gym_trace.playback.episode_table import EpisodeRecord
from gym_trace.playback.on_demand import Asked
from gym_trace.playback.scan import OnDamage, read_chunks
from gym_trace.playback.step_runs import raise_or_report
from gym_trace.playback.stored_rows import StoredRows
from gym_trace.playback.writer_reader import ChunkRows, WriterReader

_Arrays = tuple[Any, Any, Array]  # observations, actions, rewards
_CALLBACK = "observations", "actions", "rewards"
_JOINED_BYTES = 1 << 20  # bytes of episodes joined together, which is what a user keeps in memory by keeping one array
_FEWEST = 4  # fewer episodes are not joined together
_VALUE_BYTES = 64  # estimate for a value without a dtype
_REWARD_BYTES = 8
_Item = TypeVar("_Item")


def scan_content(
    content: EpisodeIndex, roots: frozenset[str] | None, wanted: Array, on_damage: OnDamage | None
) -> Iterator[Episode]:
    """Yield the episodes at these indices, which must ascend in the whole trace, with their columns under roots.

    roots: None: all columns; without on_damage, a column is read when it is first used.
    on_damage: see scan_groups(). Raises CorruptTrace.
    """
    asked = Asked() if not roots and on_damage is None else None
    roots = frozenset(SCANNED) if roots is None else roots
    whole = wanted if content.chosen is None else content.chosen[wanted]
    everything = content.chosen is None and len(wanted) == len(content)
    for number, writer in enumerate(content.all_readers):
        begin, end = content.bounds[number : number + 2].tolist()
        mine = np.zeros(end - begin, bool)
        first, last = np.searchsorted(whole, (begin, end))
        mine[whole[first:last] - begin] = True
        if not mine.any() and not everything:
            continue
        raise_or_report(writer, on_damage)
        for ended in scan_groups(writer, roots, mine, on_damage, asked):
            rows = ended.rows
            if ended.reader is not writer:
                rows = writer.parts.of_fragment[ended.reader.parts.first_of(rows)]
            records = content.records(number, ended.reader, ended.rows, wanted[np.searchsorted(whole, begin + rows)])
            sources = ended.in_order(
                map(Scanned, repeat(group), range(len(group)), repeat(on_damage is not None)) for group in ended.groups
            )
            yield from map(
                Episode,
                map(EpisodeRecord, repeat(records), range(len(rows))),
                repeat(writer.writer),
                repeat(writer.split),
                sources,
                repeat(None),
                repeat(writer.about.prefix),
            )
            for group in ended.groups:
                group.release()
            del ended, sources, group  # free memory before the next chunk is read


class Ended(NamedTuple):
    """The n wanted episodes, or parts of episodes, that end in the same chunk.

    Attributes:
        reader: the reader of their writer; after damage, one without the damaged chunks.
        rows: (n,) their rows in reader.parts.
        groups: the groups that they are in, each in the order of rows. group_of: (n,) index of the group of each.
    """

    reader: WriterReader
    rows: Array
    groups: list[EpisodeGroup]
    group_of: Array

    def in_order(self, of_groups: Iterable[Iterable[_Item]]) -> Iterator[_Item]:
        """Return the items of several groups, one per episode, in the order of rows."""
        iterators = list(map(iter, of_groups))
        if len(iterators) == 1:
            yield from iterators[0]
            return
        for number in self.group_of.tolist():
            yield next(iterators[number])


def scan_groups(
    writer: WriterReader,
    roots: frozenset[str],
    wanted: Array,
    on_damage: OnDamage | None = None,
    asked: Asked | None = None,
) -> Iterator[Ended]:
    """Yield the wanted episodes of a writer, reading each chunk once.

    Args:
        wanted: mask over the rows of writer.parts.
        on_damage: called with damaged chunks, which are then skipped as if they did not exist: episodes that lost one
            come in parts. None: raises CorruptTrace.
        asked: the columns that were used before; then chunks are ChunkOnDemand. None: chunks with all of roots.
    """
    if not wanted.any():
        return  # a writer that has not begun has no schema either
    # Starts are read too: a chunk whose starts are damaged is skipped, which is simpler than an episode without a seed.
    columns = roots if on_damage is None else roots | {"starts"}
    grouping = _Grouping(writer, roots, asked)
    chunks = read_chunks(writer, columns, wanted, on_damage, asked=asked)
    while (read := next(chunks, None)) is not None:
        block, chunk = read
        if chunk is None:
            # Look for all damage now, to compute the remaining parts once and not after each damaged chunk.
            bad = [block.number, *(later.number for later, found in chunks if found is None)]
            before = grouping.reader.parts
            reader, wanted = _without(grouping.reader, bad, wanted)
            grouping, parts = _Grouping(reader, roots, asked, grouping.chunks), reader.parts
            owners = before.of_fragment[parts.last]
            rows = np.flatnonzero(wanted & (parts.last < block.begin) & (before.last[owners] >= block.begin))
            rows = rows[np.lexsort((parts.first_of(rows), before.first_of(owners[rows])))]
            if len(rows):  # the parts before the damage of episodes that go on
                yield grouping.ended(rows)
            chunks = read_chunks(reader, columns, wanted, on_damage, first=block.number + 1)
            continue
        ended = grouping.take(block, chunk)
        if len(ended.rows):
            yield ended
        grouping.drop(block.number)
        del chunk, read, ended  # free memory before the next chunk is read


class _Held(NamedTuple):
    """A chunk, its ChunkRows.offsets, and the number of the last chunk where an episode ends that is in this one."""

    chunk: Chunk
    offsets: tuple[Array, Array]
    last: int


class _Grouping:
    """Groups the episodes of a writer that end in the same chunk.

    Attributes:
        reader: the reader of the writer, without damaged chunks.
        chunks: chunks with fragments of episodes that end later, by number.
    """

    def __init__(
        self,
        reader: WriterReader,
        roots: frozenset[str],
        asked: Asked | None,
        chunks: Mapping[int, _Held] | None = None,
    ):
        self.reader, self._roots, self._asked = reader, roots, asked
        self.chunks = dict(chunks or {})
        parts = reader.parts
        self._steps, self._last = parts["steps"], parts.last
        self._is_alone = (np.diff(parts.first) == 1) & (self._steps > 0) & ~parts.first_step_lost
        self._ends_in = np.searchsorted(reader.chunk_bounds, self._last, side="right") - 1
        leaves = [leaf for layout in reader.layouts[:2] for leaf in layout.leaves()]
        self._row_bytes = _REWARD_BYTES + sum(leaf.row_size or _VALUE_BYTES for leaf in leaves)

    def take(self, block: ChunkRows, chunk: Chunk) -> Ended:
        """Return the episodes that end in the next chunk."""
        present = np.flatnonzero(block.rows >= 0)
        rows = block.rows[present]
        self.chunks[block.number] = _Held(chunk, block.offsets, int(self._ends_in[rows].max()))
        ends = self._last[rows] == block.begin + present
        return self.ended(rows[ends], block, present[ends])

    def drop(self, number: int) -> None:
        """Drop the chunks without fragments of episodes that end after this one."""
        self.chunks = {at: held for at, held in self.chunks.items() if held.last > number}

    def ended(self, rows: Array, block: ChunkRows | None = None, at: Array | None = None) -> Ended:
        """Return episodes in groups. block, at: a chunk where all of them end, and their last fragments in it."""
        groups: list[EpisodeGroup] = []
        group_of = np.zeros(len(rows), np.int64)
        others = np.arange(len(rows))
        if block is not None and at is not None:
            is_alone = self._is_alone[rows]
            others = np.flatnonzero(~is_alone)
            if len(others) < len(rows):
                offsets = self.chunks[block.number].offsets
                places = InOneChunk(block.number, at[is_alone], offsets, block.table["flags"])
                groups.append(self._group(rows[is_alone], places, is_joined=True))
        for begin, end in _batches((self._steps[rows[others]] + 1) * self._row_bytes):
            some = others[begin:end]
            has_steps = self._steps[rows[some]] > 0
            for mine, is_joined in (some[has_steps], True), (some[~has_steps], False):  # without steps: see assemble()
                if len(mine):
                    group_of[mine] = len(groups)
                    places_of = StoredRows(self.reader, rows[mine], lambda number: self.chunks[number].offsets)
                    groups.append(self._group(rows[mine], places_of, is_joined and len(mine) >= _FEWEST))
        return Ended(self.reader, rows, groups, group_of)

    def _group(self, rows: Array, places: Places, is_joined: bool) -> EpisodeGroup:
        chunks = {number: self.chunks[number].chunk for number in places.chunks}
        return EpisodeGroup(self.reader, rows, places, chunks, self._roots, self._asked, is_joined)


def _batches(sizes: Array) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of runs of items with at most _JOINED_BYTES; a larger item is a run of its own."""
    total = np.cumsum(sizes)
    begin = 0
    while begin < len(sizes):
        until = _JOINED_BYTES + (int(total[begin - 1]) if begin else 0)
        end = max(begin + 1, int(np.searchsorted(total, until, side="right")))
        yield begin, end
        begin = end


def arrays_of(writer: WriterReader) -> Iterator[_Arrays]:
    """Yield (observations, actions, rewards) of each episode: the fastest scan of a whole trace."""
    for ended in scan_groups(writer, frozenset(_CALLBACK), np.ones(len(writer.parts), np.bool_)):
        for group in ended.groups:
            group.decode()
        yield from ended.in_order(zip(*map(group.each, _CALLBACK)) for group in ended.groups)
        del ended, group  # free memory before the next chunk is read


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
