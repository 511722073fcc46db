"""The steps of episodes, some at a time: memory grows neither with an episode nor with the trace."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.formats.steps.choice import Choice
from gym_trace.model.episode import Episode, infos_of
from gym_trace.model.layout import Layout, Leaf, Path
from gym_trace.model.schema import Layouts
from gym_trace.model.values import Array, objects
from gym_trace.playback.trace import Trace
from gym_trace.reading.writer_reader import WriterReader

_MOST_ROWS = 1024
_MOST_BYTES = 8 << 20  # of typed values in a window
_VALUE_BYTES = 1024  # what a row of values of any kind counts
_MOST_PENDING = 32 << 20  # bytes of values that a scan may have at hand of episodes that are not complete
# For a final observation that is unknown (Episode.has_final_observation).
KEPT = "kept"  # the placeholder is handed on
REPEATED = "repeated"  # the observation before it stands in
LEFT_OUT = "left out"  # the step that led to it is left out; one that terminated has the observation before it again

OnDamage = Callable[[CorruptTrace], None]


class Window(NamedTuple):
    """Some steps of an episode, one after the other.

    Attributes:
        episode: whose they are.
        writer: who wrote it.
        start: of the first of them, counted from the first step of the episode that is there.
        steps: how many they are.
        opens: whether they come first, or after a gap, so that the observation before them has not been told yet.
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
        """The number that the first of these steps has in the whole episode."""
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
            layout = layouts.observations if root == "observations" else layouts.actions
            leaves = _leaves(layout, getattr(part, root), (root,))
            found |= {path: rows for path, rows in leaves if path == (root,) or choice.takes(path)}
        else:
            found[(root,)] = getattr(part, root)
    return found


def _leaves(layout: Layout, tree: Any, path: Path) -> Iterator[tuple[Path, Array]]:
    if isinstance(layout, Leaf) or isinstance(tree, np.ndarray):
        yield path, tree
    else:
        keys = range(len(layout.children)) if layout.keys is None else layout.keys
        for key, child in zip(keys, layout.children):
            yield from _leaves(child, tree[key], (*path, key))


def step_windows(
    trace: Trace,
    places: Iterable[int],
    choice: Choice,
    steps: slice = slice(None),
    on_damage: OnDamage | None = None,
    finals: str = KEPT,
) -> Iterator[Window]:
    """The chosen columns of the steps of these episodes, in windows. An episode without steps is one empty window.

    Args:
        trace: whose episodes these are the places of; any order.
        steps: which steps of each of them, as episode[steps].
        on_damage: called with the error of each unreadable part, which is skipped, with the step after it if the
            observation before that is lost; None: CorruptTrace is raised.
        finals: what becomes of unknown final observations: KEPT, REPEATED or LEFT_OUT.
    """
    wanted = np.fromiter(places, np.int64)
    for place, episode in zip(wanted.tolist(), _episodes(trace, wanted, choice, on_damage is not None)):
        writer, row = trace.place_of(place)
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
    found: Array = writer.fragments["flags"][writer.parts.last[rows]] & wire.TERMINATED > 0
    return found


def with_repeated_final(tree: Any) -> Any:
    """Observations whose last row is the one before it again."""
    if isinstance(tree, dict):
        return {key: with_repeated_final(part) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map(with_repeated_final, tree))
    rows = tree.copy()
    rows[-1:] = rows[-2:-1]
    return rows


def _episodes(trace: Trace, places: Array, choice: Choice, despite_damage: bool) -> Iterator[Episode]:
    """The episodes at these places: where all are short as a scan gives them, which reads each chunk once."""
    done, table = 0, trace.episodes
    longest = int(table["steps"][places].max(initial=0)) * (int(table["lane"].max(initial=0)) + 1)
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
        trimmed = bool(self.writer.parts.trimmed[self.row])
        ends: list[int] = (np.cumsum(counts, dtype=np.int64) - trimmed).tolist()
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
