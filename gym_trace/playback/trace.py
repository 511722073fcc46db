"""Reading traces: Trace, and scan_recorded_traces as in gym_recording."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, overload

import numpy as np

from gym_trace.errors import InvalidOption, TraceNotFound
from gym_trace.model.episode import Episode
from gym_trace.model.values import Array
from gym_trace.model.vocabulary import COLUMNS
from gym_trace.reading.content import Content
from gym_trace.reading.episode_columns import EpisodeColumns
from gym_trace.reading.episode_scan import arrays_of, scan_content
from gym_trace.reading.opened import Opened, extents_of, reopened
from gym_trace.reading.writer_reader import Extent
from gym_trace.sampling.sampled import Sampled
from gym_trace.selecting.choice import chosen_rows
from gym_trace.storage.local import LocalStorage, refuse_url
from gym_trace.storage.protocol import Storage

EpisodeCallback = Callable[[Any, Any, Array], Any]


def scan_recorded_traces(
    directory: Trace | str | os.PathLike[str],
    episode_cb: EpisodeCallback | None = None,
    max_episodes: int | None = None,
) -> int:
    """Hands the arrays of each recorded episode to a callback, in the order of the trace.

    Episodes that came to no end are among them, also those that are still being recorded, with their steps so far. To
    have only those that are over: ``trace[trace.episodes["outcome"] != "running"].call_back(episode_cb)``.

    Args:
        directory: of the trace; or the trace, or a view of one.
        episode_cb: called as ``episode_cb(observations, actions, rewards)``: arrays of N + 1, N and N rows (dicts and
            tuples of arrays for Dict and Tuple spaces), which belong to the callback. A truthy result ends the scan.
        max_episodes: end after so many episodes.

    Returns:
        How many episodes were handed over.

    Raises:
        TraceNotFound, CorruptTrace.
    """
    return as_trace(directory).call_back(episode_cb, max_episodes)


def open_trace(directory: str | os.PathLike[str]) -> Trace:
    """Opens a trace for reading. It may still be written to. Raises TraceNotFound."""
    return Trace(directory)


def as_trace(trace: Trace | str | os.PathLike[str]) -> Trace:
    """What functions do that take a trace or its directory: a trace stays as it is. Raises TraceNotFound."""
    return trace if isinstance(trace, Trace) else Trace(trace)


def storage_of(trace: Trace | str | os.PathLike[str]) -> Storage:
    """Where a trace lies, for functions that read its files by themselves; of a view, where the whole trace does."""
    return trace._opened.storage if isinstance(trace, Trace) else LocalStorage(trace)


class Trace(Sampled):
    """A recorded trace: a sequence of episodes.

    Only indexes are read on opening; steps are read and decoded when asked for, chunk by chunk.

    ``trace[3]`` is an episode. ``trace[10:20]``, ``trace[[1, 4]]`` and ``trace[mask]``, a mask over .episodes, are
    views: traces of these episodes alone, for all that takes a trace. A view stays as it is when more is recorded.

    A trace can be pickled and copied. Undone, it opens the same directory and has the same episodes at the same places,
    until it is refreshed. It may be read in any number of threads.

    Attributes:
        directory: pathlib.Path, absolute.
        episodes: structured array, a row an episode: index, episode_id, writer (a place in .writers), lane, first_step,
            steps, return, outcome, seed (-1: none), start_time, end_time (datetime64[ns], UTC), clock_offset and
            duration (ns), has_final_observation (see Episode). Episodes that are being recorded are here, too, with the
            outcome "running" and the steps so far: ``trace[trace.episodes["outcome"] != "running"]`` leaves them out.
        writers: ids of the writers.
        damage: what was found damaged so far, as (path, start, end, problem).
    """

    def __init__(self, directory: str | os.PathLike[str]):
        if not os.path.isdir(directory):
            refuse_url(directory)
        self._opened = Opened(LocalStorage(os.path.abspath(directory)))
        self._content = Content.whole(())
        self.refresh()
        if not self._content.writers:
            raise TraceNotFound(
                f"{self.directory}: no trace here; it has no *.manifest.jsonl and no *.gtb files",
                directory=str(self.directory),
            )

    def __copy__(self) -> Trace:
        return self._with(self._content)

    def __deepcopy__(self, memo: Any) -> Trace:
        return self._with(self._content)

    def __reduce__(self) -> Any:
        return _reopened, (self._opened.storage, extents_of(self._content.writers), self._content.chosen)

    def _with(self, content: Content) -> Trace:
        other = Trace.__new__(Trace)
        other._opened, other._content = self._opened, content
        return other

    def __iter__(self) -> Iterator[Episode]:
        return self.scan()

    @overload
    def __getitem__(self, index: int) -> Episode: ...

    @overload
    def __getitem__(self, index: slice | Iterable[int] | Array) -> Trace: ...

    def __getitem__(self, index: int | slice | Iterable[int] | Array) -> Episode | Trace:
        """An episode by its place in the trace, or a view of several. Reads nothing until arrays are asked for."""
        content = self._content
        if isinstance(index, (int, np.integer)):
            if not -len(self) <= index < len(self):
                raise IndexError(f"there is no episode {index}; the trace has {len(self)}")
            return self._episode(content, range(len(content.table))[index])
        if index is None or isinstance(index, (str, float)):
            raise TypeError(f"trace[{index!r}]: give a place, a slice, places, or a mask over trace.episodes")
        places, _ = content.selected(index)
        return self._with(content.view(places))

    def select(
        self,
        where: str | None = None,
        *,
        sort: str | None = None,
        limit: int | None = None,
        sample: int | None = None,
        seed: int | None = None,
        best: int | None = None,
        worst: int | None = None,
    ) -> Trace:
        """A view of the episodes that are meant: ``trace.select("return > 100", sort="-return", limit=3)``.

        First where is applied, then sample, then sort, then limit. Nothing of it is run as Python; a million episodes
        take a fraction of a second.

        Args:
            where: a condition: ``return > 100 and outcome == "lost"``. It has and, or, not; == != < <= > >= (chains,
                too: ``0 < steps <= 10``), in and not in, of lists and of text; + - * / % and abs() of numbers; and
                numbers, text, True, False and None. Of the columns

                - index (place in the whole trace), steps, lane, episode_id, first_step, duration (seconds), seed,
                  return are numbers (where rewards are several numbers each, it is return[0] and so on that are);
                - outcome, split, writer (its id) are text;
                - has_final_observation is true or false: ``not has_final_observation`` has the imported episodes whose
                  last step led to an observation that nobody knows;
                - start, end are times, and compared with ISO 8601 text: ``start >= "2026-11-01"``, UTC if it does not
                  say otherwise, the first moment of what it leaves out;
                - metadata.KEY is what was given as metadata to the writer, options.KEY what was given to reset, which
                  has to be read; ``metadata["a key"].deeper[0]`` goes on in dicts and lists. Each can be of any
                  kind, and is compared with values of that kind alone; alone it is true where it is True.

                What is not known is None, and equal to None alone (``seed is None``, ``options.level is None``): a
                seed that was not given, a return that is NaN, the end and the duration of what
                came to no end, a key that is not there, a division by 0. It is neither less nor greater than
                anything, so that ``seed != 5`` and ``not return < 100`` have the episodes without a seed, a return.
                Integers of any size are compared with integers exactly, such as seeds; sums and products of them are
                exact up to 64 bits; all else is float64.
            sort: a column, or several, ``"split, -return"``: a - in front has it descend. What is not known comes
                last; episodes that are the same in it keep their order. None: the order here. In an order of returns
                complete episodes (terminated or truncated, with a step) come first, unless where names outcome.
            limit: the first so many.
            sample: so many, drawn at random, each once, in their order here; all, where there are no more.
            seed: of the draw, to have the same sample again.
            best: the so many with the highest returns, the highest first, in place of sort and limit. Of complete
                episodes, unless where names outcome.
            worst: likewise those with the lowest returns, the lowest first.

        Raises:
            InvalidOption: something does not make sense; points to the place.
            CorruptTrace: options, or rewards, were asked for and are damaged.
        """
        content = self._content
        columns = EpisodeColumns(content, self._with(content).scan)
        chosen = chosen_rows(
            columns,
            where,
            sort=sort,
            limit=limit,
            sample=sample,
            seed=seed,
            best=best,
            worst=worst,
            complete=columns.complete,
        )
        return self._with(content.view(chosen))

    @property
    def whole(self) -> Trace:
        """Of a view, the trace that it was taken of, as that was then; otherwise the trace itself."""
        content = self._content
        return self if content.chosen is None else self._with(Content.whole(content.writers))

    def scan(
        self,
        columns: Iterable[str] | None = None,
        episodes: slice | Iterable[int] | Array | None = None,
        on_damage: str = "raise",
    ) -> Iterator[Episode]:
        """Yields episodes, reading each chunk once, in memory that does not grow with the trace.

        Args:
            columns: read only these: "observations", "actions", "rewards", "terminations", "truncations", "infos",
                "annotations". None: all.
            episodes: a slice, indices, or a boolean array over the trace; in the order given. None: all. An order that
                does not ascend, as of a sorted view, is read episode by episode, and columns when they are asked for.
            on_damage: "raise" CorruptTrace at a damaged chunk, or "skip" it: what it broke apart comes in parts, a
                warning tells what was skipped, and .damage lists it.
        """
        roots = _checked_columns(columns)
        if on_damage not in ("raise", "skip"):
            raise InvalidOption(f'on_damage={on_damage!r}: pass "raise" or "skip"')
        content = self._content
        wanted, ordered = content.selected(episodes)
        if ordered:
            return self._scan(content, roots, wanted, on_damage == "skip")
        if on_damage == "raise":
            return (self._episode(content, int(i)) for i in wanted)
        places = wanted if content.chosen is None else content.chosen[wanted]
        runs = np.split(wanted, np.flatnonzero(np.diff(places) <= 0) + 1)
        return chain.from_iterable(self._scan(content, roots, run, True) for run in runs)

    def _scan(self, content: Content, roots: frozenset[str], wanted: Array, skip: bool) -> Iterator[Episode]:
        yield from scan_content(content, roots, wanted, self._report if skip else None)
        for damage in self.damage if skip else ():
            self._report(damage)

    def call_back(self, episode_cb: EpisodeCallback | None, max_episodes: int | None = None) -> int:
        """As scan_recorded_traces."""
        count = 0
        limit = len(self) if max_episodes is None else max_episodes
        if limit <= 0:
            return 0
        for observations, actions, rewards in chain.from_iterable(self._arrays(self._content)):
            count += 1
            if (episode_cb is not None and episode_cb(observations, actions, rewards)) or count >= limit:
                break
        return count

    def _arrays(self, content: Content) -> Iterator[Iterator[tuple[Any, Any, Array]]]:
        """What call_back hands over, of one writer after the other: a generator around theirs would cost a tenth."""
        if content.chosen is not None:
            episodes = self.scan(("observations", "actions", "rewards"))
            yield ((episode.observations, episode.actions, episode.rewards) for episode in episodes)
            return
        for writer in content.writers:
            if writer.damage:
                raise writer.damage[0].error()
            yield arrays_of(writer)


def _reopened(storage: Storage, extents: tuple[Extent, ...], chosen: Array | None) -> Trace:
    trace = Trace.__new__(Trace)
    trace._opened = reopened(storage, extents)
    trace._content = Content.whole(list(trace._opened.writers.values()))
    return trace if chosen is None else trace[chosen]


def _checked_columns(columns: Iterable[str] | None) -> frozenset[str]:
    if columns is None:
        return frozenset(COLUMNS)
    roots = frozenset([columns] if isinstance(columns, str) else columns)
    if unknown := roots - set(COLUMNS):
        raise InvalidOption(f"columns: no such columns {sorted(unknown)}; there are {', '.join(COLUMNS)}")
    return roots
