"""Scan episodes in file order, reading each chunk once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import numpy as np

from gym_trace.data.episode import Episode
from gym_trace.data.values import Array
from gym_trace.data.vocabulary import SCANNED
from gym_trace.format.batch_reader import Chunk
from gym_trace.format.kernels import ranges
from gym_trace.playback.episode_groups import EpisodeGroup, Scanned
from gym_trace.playback.episode_index import EpisodeIndex
from gym_trace.playback.episode_table import EpisodeRecord
from gym_trace.playback.on_demand import Asked
from gym_trace.playback.scan import OnDamage, read_chunks
from gym_trace.playback.step_runs import raise_or_report
from gym_trace.playback.writer_reader import WriterReader

_Arrays = tuple[Any, Any, Array]  # observations, actions, rewards
_CALLBACK = "observations", "actions", "rewards"


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
        for group in scan_groups(writer, roots, mine, on_damage, asked):
            rows = group.rows
            if group.reader is not writer:
                rows = writer.parts.of_fragment[group.reader.parts.first_of(rows)]
            records = content.records(number, group.reader, group.rows, wanted[np.searchsorted(whole, begin + rows)])
            yield from map(
                Episode,
                map(EpisodeRecord, repeat(records), range(len(rows))),
                repeat(writer.writer),
                repeat(writer.split),
                map(Scanned, repeat(group), range(len(group))),
                repeat(None),
                repeat(writer.about.prefix),
            )
            group.release()
            del group  # free memory before the next chunk is read


def scan_groups(
    writer: WriterReader,
    roots: frozenset[str],
    wanted: Array,
    on_damage: OnDamage | None = None,
    asked: Asked | None = None,
) -> Iterator[EpisodeGroup]:
    """Yield the wanted episodes of a writer, those that end in the same chunk together, reading each chunk once.

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
    # By the number of a chunk: the chunk, and the last fragment of the episodes in it.
    reader, held, needed = writer, dict[int, Chunk](), dict[int, int]()
    chunks = read_chunks(reader, columns, wanted, on_damage, asked=asked)
    while (read := next(chunks, None)) is not None:
        block, chunk = read
        if chunk is None:
            # Look for all damage now, to compute the remaining parts once and not after each damaged chunk.
            bad = [block.number, *(later.number for later, found in chunks if found is None)]
            before = reader.parts
            reader, wanted = _without(reader, bad, wanted)
            parts = reader.parts
            owners = before.of_fragment[parts.last]
            rows = np.flatnonzero(wanted & (parts.last < block.begin) & (before.last[owners] >= block.begin))
            if len(rows):  # the parts before the damage of episodes that go on
                rows = rows[np.lexsort((parts.first_of(rows), before.first_of(owners[rows])))]
                yield EpisodeGroup(reader, rows, held, roots, asked, skip=True)
            chunks = read_chunks(reader, columns, wanted, on_damage, first=block.number + 1)
            continue
        held[block.number] = chunk
        del chunk, read
        present = np.flatnonzero(block.rows >= 0)
        rows = block.rows[present]
        lasts = reader.parts.last_of(rows)
        needed[block.number] = int(lasts.max())
        ended = rows[lasts == block.begin + present]
        if len(ended):
            yield EpisodeGroup(reader, ended, held, roots, asked, skip=on_damage is not None)
        for number in [number for number in held if needed[number] < block.begin + len(block.rows)]:
            del held[number], needed[number]  # free memory before the next chunk is read


def arrays_of(writer: WriterReader) -> Iterator[_Arrays]:
    """Yield (observations, actions, rewards) of each episode: the fastest scan of a whole trace."""
    raise_or_report(writer, None)
    for group in scan_groups(writer, frozenset(_CALLBACK), np.ones(len(writer.parts), np.bool_)):
        group.decode()
        yield from zip(*map(group.each, _CALLBACK))
        del group  # free memory before the next chunk is read


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
        chosen = order[ranges(low, counts)]
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
