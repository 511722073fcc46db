"""Steps of recorded episodes, some at a time: memory grows neither with an episode nor with the trace.

A Choice says which columns are read; step_windows() yields steps of one episode at a time, step_blocks() those of many.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.episode import Episode, infos_of
from gym_trace.data.layout import Layout, Leaf, Path
from gym_trace.data.schema import Layouts
from gym_trace.data.trees import mapped
from gym_trace.data.values import Array, Misfit, objects
from gym_trace.data.vocabulary import COLUMNS
from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.format import wire
from gym_trace.format.batch_reader import Chunk
from gym_trace.format.columns import MSGPACK
from gym_trace.playback.trace import Trace
from gym_trace.playback.writer_reader import WriterReader
from gym_trace.printable import printable

_MOST_TOLD = 20


class Choice(NamedTuple):
    """Columns of the first level, in their usual order, and the leaves that are wanted of them; none: all."""

    roots: tuple[str, ...]
    leaves: frozenset[str] = frozenset()

    def takes(self, path: Path) -> bool:
        """Return True if a leaf is chosen, by its own name or by that of a parent."""
        names = [name_of(path[: i + 1]) for i in range(len(path))]
        return path[0] in self.roots and (not self.leaves or not self.leaves.isdisjoint(names))


def name_of(path: Path) -> str:
    """Return the name of a leaf: observations, or observations/position of a Dict."""
    return "/".join(map(str, path))


def names_in(trace: Trace) -> list[str]:
    """The columns that can be chosen of a trace: first those of every trace, then their leaves."""
    paths = {path: None for writer in trace.readers for batch in writer.read_batches for path in batch.totals}
    leaves = [name_of(path) for path in paths if len(path) > 1 and path[0] in COLUMNS]
    return [*COLUMNS, *dict.fromkeys(leaves)]


def choose(trace: Trace, names: Sequence[str] | None) -> Choice:
    """Return the columns of these names, with slashes or dots before leaves: "observations/image".

    None: all, without infos and annotations that no writer has. Raises InvalidOption.
    """
    if names is None:
        roots = {path[0] for writer in trace.readers for batch in writer.read_batches for path in batch.totals}
        optional = ("infos", "annotations")
        return Choice(tuple(root for root in COLUMNS if root not in optional or root in roots))
    known = names_in(trace)
    parents = ("/".join(parts[:end]) for parts in (name.split("/") for name in known) for end in range(1, len(parts)))
    every = {name: name for name in (*parents, *known)}
    every = {name.replace("/", "."): name for name in every} | every
    leaves = set()
    for name in names:
        if name not in every:
            told = ", ".join(map(printable, known[:_MOST_TOLD])) + (", …" if len(known) > _MOST_TOLD else "")
            raise InvalidOption(f"no column {name!r}; choose from {told}")
        leaves.add(every[name])
    roots = {leaf.partition("/")[0] for leaf in leaves}
    return Choice(tuple(root for root in COLUMNS if root in roots), frozenset(leaves))


# -- of one episode ---------------------------------------------------------------------------------------------------

_MOST_ROWS = 1024
_MOST_BYTES = 8 << 20  # of typed values in a window
_VALUE_BYTES = 1024  # what a row of values of any kind counts
_MOST_PENDING = 32 << 20  # bytes of values that a scan may have at hand of episodes that are not complete
# For a final observation that is unknown (Episode.has_final_observation).
KEPT = "kept"  # the placeholder is handed on
REPEATED = "repeated"  # the observation before it stands in
LEFT_OUT = "left out"  # the step that led to it is left out; one that terminated has the observation before it again

OnDamage = Callable[[CorruptTrace], None]
Taken = Callable[[Episode], Episode]


class Window(NamedTuple):
    """Consecutive steps of an episode.

    Attributes:
        episode: whose they are.
        writer: who wrote it.
        start: of the first of them, counted from the first step of the episode that is there.
        steps: number of steps.
        opens: whether they come first, or after a gap, so that no window had the observation before them.
        columns: the chosen rows by path, one per leaf of a space: ("observations", "image"), ("rewards",),
            ("annotations", name). Observations have one row more than the others. Values of any kind, infos among
            them, are an array of objects. Infos that were not recorded are missing, and so may annotations be. Rows
            that do not have the structure of their space are under its own path, ("observations",).
    """

    episode: Episode
    writer: WriterReader
    start: int
    steps: int
    opens: bool
    columns: dict[Path, Array]

    @property
    def first_step(self) -> int:
        """Return the index of the first of these steps in the whole episode."""
        return self.episode.first_step + self.start

    @property
    def closes(self) -> bool:
        """Return True if these are the last steps of the episode."""
        return self.start + self.steps == len(self.episode)

    @property
    def has_placeholder(self) -> bool:
        """Return True if the last row of observations is unknown."""
        return self.closes and not self.episode.has_final_observation


def _columns_of(part: Episode, layouts: Layouts, choice: Choice) -> dict[Path, Array]:
    """The chosen rows of some steps, as a Window has them."""
    found: dict[Path, Array] = {}
    for root in choice.roots:
        if root == "infos":
            infos = infos_of(part)
            found |= {} if infos is None else {("infos",): objects(infos)}
        elif root == "annotations":
            notes = part.annotations
            found |= {(root, name): notes[name] for name in sorted(notes) if choice.takes((root, name))}
        elif root in ("observations", "actions"):
            leaves = leaves_of(getattr(layouts, root), getattr(part, root), (root,))
            found |= {path: rows for path, rows in leaves if path == (root,) or choice.takes(path)}
        else:
            found[(root,)] = getattr(part, root)
    return found


def leaves_of(layout: Layout, tree: Any, path: Path) -> Iterator[tuple[Path, Array]]:
    """Yield the rows of each leaf of a space; all of them under its own path if they have another structure."""
    if isinstance(layout, Leaf) or isinstance(tree, np.ndarray):
        yield path, tree
    else:
        keys = range(len(layout.children)) if layout.keys is None else layout.keys
        for key, child in zip(keys, layout.children):
            yield from leaves_of(child, tree[key], (*path, key))


def step_windows(
    trace: Trace,
    places: Iterable[int],
    choice: Choice,
    steps: slice = slice(None),
    on_damage: OnDamage | None = None,
    finals: str = KEPT,
    taken: Taken | None = None,
) -> Iterator[Window]:
    """The chosen columns of the steps of these episodes, in windows. An episode without steps is one empty window.

    Args:
        trace: whose episodes these are the places of; any order.
        steps: which steps of each of them, as episode[steps].
        on_damage: called with the error of each unreadable part, which is skipped, with the step after it if the
            observation before that is lost; None: CorruptTrace is raised.
        finals: what becomes of unknown final observations: KEPT, REPEATED or LEFT_OUT.
        taken: returns the steps of an episode that are taken, before anything else; None: all.
    """
    wanted = np.fromiter(places, np.int64)
    for place, episode in zip(wanted.tolist(), _episodes(trace, wanted, choice, on_damage is not None)):
        writer, row = trace.place_of(place)
        episode = episode if taken is None else taken(episode)
        if finals == LEFT_OUT:
            episode = without_unknown_end(episode, writer, row)
        chosen = range(len(episode))[steps]
        yield from _windows_of(_Source(episode, writer, row, choice, finals != KEPT), chosen, on_damage)


def without_unknown_end(episode: Episode, writer: WriterReader, row: int) -> Episode:
    """Return the episode without its last step, unless the observation after it is known or it terminated."""
    if episode.has_final_observation or is_terminated(writer, np.array([row]))[0]:
        return episode
    return episode[: max(0, len(episode) - 1)]


def is_terminated(writer: WriterReader, rows: Array) -> Array:
    """Return for each of these episodes of a writer whether its last step is terminated."""
    found: Array = writer.fragments.flags[writer.parts.last_of(rows)] & wire.TERMINATED > 0
    return found


def with_repeated_final(tree: Any) -> Any:
    """Return observations whose last row is the one before it again."""
    return mapped(lambda rows: np.concatenate((rows[:-1], rows[-2:-1])), tree)


def _episodes(trace: Trace, places: Array, choice: Choice, despite_damage: bool) -> Iterator[Episode]:
    """The episodes at these places: where all are short as a scan gives them, which reads each chunk once."""
    done, lanes = 0, int(trace.content["lane"].max(initial=0)) + 1
    longest = int(trace.content["steps"][places].max(initial=0)) * lanes
    if longest * max((_row_bytes(writer, choice) for writer in trace.readers), default=0) <= _MOST_PENDING:
        try:
            for episode in trace.scan(columns=choice.roots, episodes=places):
                yield episode
                done += 1
        except CorruptTrace:
            if not despite_damage:
                raise
    for place in places[done:].tolist():
        yield trace[place]


def _row_bytes(writer: WriterReader, choice: Choice) -> int:
    """About how many bytes a step has of the chosen columns."""
    layouts, size = writer.layouts, 1
    for root, layout in (("observations", layouts.observations), ("actions", layouts.actions)):
        if root in choice.roots:
            size += sum(leaf.row_size or _VALUE_BYTES for leaf in layout.leaves())
    return size + _VALUE_BYTES * ("infos" in choice.roots)


class _Source(NamedTuple):
    episode: Episode
    writer: WriterReader
    row: int
    choice: Choice
    repeats: bool  # whether the observation before it stands in for an unknown final one

    def read(self, start: int, stop: int, opens: bool) -> Window:
        part = self.episode if stop - start == len(self.episode) else self.episode[start:stop]
        columns = _columns_of(part, self.writer.layouts, self.choice)
        window = Window(self.episode, self.writer, start, stop - start, opens, columns)
        if self.repeats and window.steps and window.has_placeholder:
            columns |= {p: with_repeated_final(rows) for p, rows in columns.items() if p[0] == "observations"}
        return window

    def rows_in_a_window(self) -> int:
        return max(1, min(_MOST_ROWS, _MOST_BYTES // _row_bytes(self.writer, self.choice)))

    def ends_of_chunks(self) -> list[int]:
        """Return the number of finished steps of the episode at the end of each of its chunks."""
        counts = [piece.steps.stop - piece.steps.start for piece in self.writer.pieces(self.row)]
        ends: list[int] = np.cumsum(counts, dtype=np.int64).tolist()
        return ends


def _windows_of(source: _Source, steps: range, on_damage: OnDamage | None) -> Iterator[Window]:
    most, start, opens = source.rows_in_a_window(), steps.start, True
    while True:
        stop = max(start, min(start + most, steps.stop))
        try:
            window = source.read(start, stop, opens)
        except CorruptTrace:
            if on_damage is None:
                raise
            opens = yield from _around_damage(source, range(start, stop), opens, on_damage)
            if opens:  # the chunk that this ends in cannot be read, however many windows there are in it
                stop = min(steps.stop, next(end for end in source.ends_of_chunks() if end >= stop))
        else:
            yield window
            opens = False
        if stop >= steps.stop:
            break
        start = stop


def _around_damage(source: _Source, steps: range, opens: bool, on_damage: OnDamage) -> Generator[Window, None, bool]:
    """Yield the readable steps, chunk by chunk. Return True if the last of them are unreadable."""
    ends, start = source.ends_of_chunks(), steps.start
    while start < steps.stop:
        stop = min(steps.stop, *(end for end in ends if end > start))
        for begin in (start, start + 1) if opens else (start,):  # the observation before may be what is lost
            try:
                window = source.read(begin, stop, opens)
            except CorruptTrace as error:
                on_damage(error)
            else:
                yield window
                opens = False
                break
        else:
            opens = True
        start = stop
    return opens


# -- of many ----------------------------------------------------------------------------------------------------------

_FEWEST = 4  # episodes that are worth reading a chunk for
_MOST_CHUNKS = 32 << 20  # bytes of the chunks that a block is cut out of
_BITS = {"terminations": wire.TERMINATED, "truncations": wire.TRUNCATED}


class Block(NamedTuple):
    """Runs of steps: each run has consecutive steps of one episode.

    Attributes:
        episodes: (runs,) the place in the trace of the episode that each run is of.
        starts: (runs,) which step of the episode it begins with, counted from the first that is there.
        steps: (runs,) how many it has.
        opens, closes: (runs,) bool: whether it has the first of the steps that are asked for, the last of the episode.
        columns: by path, the rows of all runs one after the other; of observations one more for each run, which is the
            one before its first step. Values of any kind are an array of objects. Annotations may be missing.
    """

    episodes: Array
    starts: Array
    steps: Array
    opens: Array
    closes: Array
    columns: dict[Path, Array]

    @property
    def size(self) -> int:
        """Number of steps."""
        return int(self.steps.sum())

    @property
    def first_observations(self) -> Array:
        """(runs,) where in the rows of observations those of each run begin."""
        counts = self.steps + 1
        first: Array = np.cumsum(counts) - counts
        return first

    @property
    def last_observations(self) -> Array:
        """(runs,) where in the rows of observations the last one of each run is."""
        return self.first_observations + self.steps

    @property
    def before(self) -> Array:
        """Which rows of observations are those before a step, of all steps: (size,) integers."""
        chosen = np.ones(self.size + len(self.steps), np.bool_)
        chosen[self.last_observations] = False
        return np.flatnonzero(chosen)


def step_blocks(
    trace: Trace, choice: Choice, finals: str = KEPT, steps: slice = slice(None), taken: Taken | None = None
) -> Iterator[Block]:
    """Yield the chosen columns of all episodes in order, some at a time, in bounded memory.

    Whole episodes that end in one chunk are cut together out of the chunks that hold them, if these are not too large;
    all else comes in windows. finals, steps and taken: as of step_windows. Raises CorruptTrace.
    """
    if steps != slice(None) or taken is not None:
        yield from _windows(trace, range(len(trace)), choice, finals, steps, taken)
        return
    writers, rows = trace.content["writer"], trace.rows
    chunks = np.full(len(trace), -1, np.int64)  # that episodes end in; -1: they come in windows
    for number, reader in enumerate(trace.readers):
        mine = np.flatnonzero(writers == number)
        whole = ~reader.parts.first_step_lost[rows[mine]]
        if finals != KEPT:
            whole &= trace.content["has_final_observation"][mine]
        ends = reader.parts.last_of(rows[mine[whole]])
        chunks[mine[whole]] = np.searchsorted(reader.chunk_bounds, ends, side="right") - 1
    changes = np.flatnonzero((np.diff(writers) != 0) | (np.diff(chunks) != 0)) + 1
    begin = 0  # of the episodes that are to come in windows
    plain: _PlainChunks | None = None
    for first, last in pairwise([0, *changes.tolist(), len(trace)]):
        if chunks[first] < 0 or last - first < _FEWEST:
            continue
        reader = trace.readers[int(writers[first])]
        if plain is None or plain.reader is not reader:
            plain = _PlainChunks(reader, choice)
        block = plain.block(np.arange(first, last), rows[first:last])
        if block is None:
            continue
        yield from _windows(trace, range(begin, first), choice, finals)
        yield block
        begin = last
    yield from _windows(trace, range(begin, len(trace)), choice, finals)


def _windows(
    trace: Trace, places: range, choice: Choice, finals: str, steps: slice = slice(None), taken: Taken | None = None
) -> Iterator[Block]:
    for window in step_windows(trace, places, choice, steps, finals=finals, taken=taken) if places else ():
        facts = (window.episode.index, window.start, window.steps, window.opens, window.closes)
        place, start, count, opens, closes = (np.array([fact]) for fact in facts)
        yield Block(place, start, count, opens, closes, window.columns)


class _PlainChunks:
    """Chunks of a writer whose rows equal those of their episodes; those of the last block stay decoded."""

    def __init__(self, reader: WriterReader, choice: Choice):
        self.reader, self._choice = reader, choice
        self._leaves = [leaf for root in reader.layouts[:2] for leaf in root.leaves()]
        self._held: dict[int, Chunk] = {}

    def block(self, episodes: Array, rows: Array) -> Block | None:
        """Return whole episodes, which lie in these rows of the reader; None if they are not to be had like this."""
        reader, parts, choice = self.reader, self.reader.parts, self._choice
        counts = np.diff(parts.first)[rows]
        fragments = parts.fragments[_ranges(parts.first[rows], counts)]  # in the order of the episodes
        found = np.searchsorted(reader.chunk_bounds, fragments, side="right") - 1
        chunks = self._chunks(np.unique(found).tolist())
        if chunks is None:
            return None
        steps = reader.fragments.steps[fragments].astype(np.int64)
        observed = steps + (reader.fragments.flags[fragments] & wire.LEADS > 0)
        places: list[list[Array | slice]] = [[], []]  # in each chunk, of the rows of observations and of steps
        for number in chunks:
            begin = int(reader.chunk_bounds[number])
            for offsets, of_chunks in zip(reader.offsets(number), places):
                of_chunks.append(_rows(offsets, fragments[found == number] - begin))
        order = np.argsort(found, kind="stable")
        in_order = [_moved(order, counts) for counts in (observed, steps)] if len(chunks) > 1 else []
        columns: dict[Path, Array] = {}
        paths = [leaf.path for leaf in self._leaves if choice.takes(leaf.path)]
        paths += [path for chunk in chunks.values() for path in chunk.columns if choice.takes(path)]
        for path in dict.fromkeys(paths):
            if any(path not in chunk for chunk in chunks.values()):
                return None
            is_step = path[0] != "observations"
            arrays = [chunk.array(path)[mine] for chunk, mine in zip(chunks.values(), places[is_step])]
            if len({(array.dtype, array.shape[1:]) for array in arrays}) > 1:
                return None
            if arrays[0].dtype == object and any(isinstance(value, Misfit) for array in arrays for value in array):
                return None
            columns[path] = np.concatenate(arrays)[in_order[is_step]] if in_order else arrays[0]
        for name, bit in _BITS.items():
            if name in choice.roots:
                flagged = (reader.fragments.flags[fragments] & bit > 0) & (steps > 0)
                columns[(name,)] = np.zeros(int(steps.sum()), np.bool_)
                columns[(name,)][np.cumsum(steps)[flagged] - 1] = True
        whole = np.ones(len(rows), np.bool_)
        steps = np.add.reduceat(steps, np.cumsum(counts) - counts)
        return Block(episodes, np.zeros(len(rows), np.int64), steps, whole, whole, columns)

    def _chunks(self, numbers: list[int]) -> dict[int, Chunk] | None:
        """Return these chunks; None if their rows do not equal those of the episodes, or are too large."""
        size, anything = 0, {leaf.path for leaf in self._leaves if leaf.dtype is None}
        for number in numbers:
            held = self._held.get(number)
            for column in self.reader.columns_of(number) if held is None else held.described:
                if column.path[0] in self._choice.roots:
                    of_any_kind = column.dtype == MSGPACK and column.path not in anything and column.path[0] != "infos"
                    if of_any_kind or column.is_delta_encoded:
                        return None
                    size += column.full_size
            if size > _MOST_CHUNKS:
                return None
        roots = frozenset(self._choice.roots)
        self._held = {number: self._held.get(number) or self.reader.chunk(number, roots) for number in numbers}
        return self._held


def _ranges(begins: Array, counts: Array) -> Array:
    """Return the numbers of ranges, one range after the other."""
    firsts = np.cumsum(counts) - counts
    found: Array = np.repeat(begins - firsts, counts) + np.arange(int(counts.sum()))
    return found


def _moved(order: Array, counts: Array) -> Array:
    """Return the places of the rows of runs after these were put into another order."""
    begins = np.empty(len(order), np.int64)
    begins[order] = np.cumsum(counts[order]) - counts[order]
    return _ranges(begins, counts)


def _rows(offsets: Array, mine: Array) -> Array | slice:
    """Return the positions of the rows of some fragments; a slice if they are contiguous."""
    begins, counts = offsets[mine], offsets[mine + 1] - offsets[mine]
    if bool((np.diff(mine) == 1).all()):
        return slice(int(begins[0]), int(begins[-1] + counts[-1]))
    return _ranges(begins, counts)
