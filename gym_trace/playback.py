"""Reading traces: Trace, and scan_recorded_traces as in gym_recording."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from gym_trace.episode import COLUMNS, Episode, Load
from gym_trace.errors import CorruptTrace, InvalidOption, TraceError, TraceNotFound
from gym_trace.format.batch import Chunk, Damage
from gym_trace.format.buffers import common
from gym_trace.format.directory import find_writers
from gym_trace.stored.assembly import Piece, assemble, cut_down
from gym_trace.stored.table import EPISODE
from gym_trace.stored.writer import StoredWriter
from gym_trace.values import Array, pack_lenient

EpisodeCallback = Callable[[Any, Any, Array], Any]
_CACHE_BYTES = 64 << 20  # of decoded chunks that random access keeps


def scan_recorded_traces(
    directory: str | os.PathLike[str], episode_cb: EpisodeCallback | None = None, max_episodes: int | None = None
) -> int:
    """Hands the arrays of each recorded episode to a callback, in the order of the trace.

    Args:
        directory: of the trace.
        episode_cb: called as ``episode_cb(observations, actions, rewards)``: arrays of N + 1, N and N rows (dicts and
            tuples of arrays for Dict and Tuple spaces), which belong to the callback. A truthy result ends the scan.
        max_episodes: end after so many episodes.

    Returns:
        How many episodes were handed over.

    Raises:
        TraceNotFound, CorruptTrace.
    """
    return open_trace(directory).call_back(episode_cb, max_episodes)


def open_trace(directory: str | os.PathLike[str]) -> Trace:
    """Opens a trace for reading. It may still be written to. Raises TraceNotFound."""
    return Trace(directory)


class Trace:
    """A recorded trace: a sequence of episodes.

    Only indexes are read on opening; steps are read and decoded when asked for, chunk by chunk.

    Attributes:
        directory: pathlib.Path.
        episodes: structured array, a row an episode: index, episode_id, writer (a place in .writers), lane, first_step,
            steps, return, outcome, seed (-1: none), start_time, end_time (datetime64[ns], UTC), clock_offset and
            duration (ns).
        writers: ids of the writers.
        damage: what was found damaged so far, as (path, start, end, problem).
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = FilePath(directory)
        self._writers: dict[str, StoredWriter] = {}
        self._cache: OrderedDict[tuple[str, int, str], Chunk] = OrderedDict()
        self._cached_bytes = 0
        self._skipped: list[Damage] = []
        self.episodes: Array = np.empty(0, EPISODE)
        self.refresh()
        if not self._writers:
            raise TraceNotFound(f"{self.directory}: no trace here; it has no *.manifest.jsonl and no *.gtb files")

    def refresh(self) -> int:
        """Takes in what was recorded since; returns how many episodes more there are."""
        before = len(self.episodes)
        found = find_writers(self.directory)
        changed = {files.writer for files in found} != set(self._writers)
        for files in found:
            writer = self._writers.get(files.writer)
            if writer is None:
                self._writers[files.writer] = StoredWriter(files)
            else:
                changed |= writer.refresh(files)
        if changed:
            present = [self._writers[files.writer] for files in found]
            present.sort(key=lambda writer: (writer.created, writer.writer))
            self._writers = {writer.writer: writer for writer in present}
            tables = [writer.parts.table for writer in self._writers.values()]
            empty = np.empty(0, EPISODE)
            self.episodes = tables[0] if len(tables) == 1 else np.concatenate([empty, *tables])
            self.episodes["index"] = np.arange(len(self.episodes))
            self.episodes["writer"] = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
            self._bounds = np.concatenate([[0], np.cumsum([len(table) for table in tables], dtype=np.int64)])
        return len(self.episodes) - before

    # -- what was recorded --------------------------------------------------------------------------------------------

    @property
    def writers(self) -> list[str]:
        return list(self._writers)

    @property
    def stored(self) -> list[StoredWriter]:
        """The writers with what is known of their files."""
        return list(self._writers.values())

    @property
    def damage(self) -> list[Damage]:
        found = [damage for writer in self._writers.values() for damage in writer.damage]
        return list(dict.fromkeys(found + self._skipped))

    def writer_of(self, index: int) -> StoredWriter:
        """Who wrote an episode: .writer (its id), .metadata, .env_spec, .observation_space, .action_space, .schema."""
        return self._at(index)[0]

    @property
    def metadata(self) -> Any:
        """What was given as metadata when the trace was recorded. Raises TraceError if writers were given different."""
        return self._agreed("metadata").metadata

    @property
    def env_spec(self) -> dict[str, Any]:
        """What is known of the environment: id, spec (JSON), wrappers, class. Raises TraceError as metadata does."""
        return self._agreed("environment").env_spec

    @property
    def observation_space(self) -> Any:
        """The recorded gymnasium space. Raises TraceError if writers recorded different ones."""
        return self._agreed("observation_space").observation_space

    @property
    def action_space(self) -> Any:
        """The recorded gymnasium space. Raises TraceError if writers recorded different ones."""
        return self._agreed("action_space").action_space

    def _agreed(self, name: str) -> StoredWriter:
        """A writer whose schema says of name what those of all writers with episodes say."""
        counts = np.diff(self._bounds).tolist()
        having = [writer for writer, count in zip(self.stored, counts) if count] or self.stored
        said = {pack_lenient(writer.schema.get(name))[0] for writer in having}
        if len(said) > 1:
            raise TraceError(
                f"{self.directory}: the writers of this trace differ in their {name}; trace.writer_of(i) gives the "
                "writer of episode i, with what that one says"
            )
        return having[0]

    def make_env(self, *, allow_import: bool = False, **kwargs: Any) -> Any:
        """Makes the recorded environment, with its wrappers; kwargs override the recorded ones.

        Args:
            allow_import: import modules that only the trace names. Trust the trace before you do.

        Raises:
            EnvironmentUnavailable: says what is missing.
        """
        from gym_trace.environment import make_environment

        return make_environment(self.env_spec, allow_import, **kwargs)

    # -- episodes -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.episodes)

    def __iter__(self) -> Iterator[Episode]:
        return self.scan()

    def __getitem__(self, index: int) -> Episode:
        """An episode by its place in the trace. Reads nothing until its arrays are asked for."""
        index = range(len(self))[index]
        writer, row = self._at(index)

        # Of the whole episode, and of the slice that was asked for last; all empty ranges would be equal.
        found: dict[tuple[int, int] | None, list[Piece]] = {}

        def load(name: str, steps: range | None) -> Any:
            trimmed = bool(writer.parts.trimmed[row])
            key = None if steps is None else (steps.start, steps.stop)
            if key not in found:
                whole = found.get(None) or writer.pieces(row)
                found.clear()
                found[None] = whole
                if key is not None:
                    found[key] = cut_down(whole, *key, trimmed)
            pieces, trimmed = found[key], trimmed and steps is None
            pieces = [piece._replace(chunk=self._cached_chunk(writer, piece.chunk_number, name)) for piece in pieces]
            return assemble(name, pieces, writer.layouts, trimmed, copy=True)

        return self._episode(writer, row, index, load)

    def _at(self, index: int) -> tuple[StoredWriter, int]:
        """The writer of an episode, and its row there."""
        index = range(len(self))[index]
        number = int(np.searchsorted(self._bounds, index, side="right")) - 1
        return self.stored[number], index - int(self._bounds[number])

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
            episodes: a slice, indices, or a boolean array over the trace; in the order given (which, if it does not
                ascend, is read episode by episode, and columns when they are asked for). None: all.
            on_damage: "raise" CorruptTrace at a damaged chunk, or "skip" it: what it broke apart comes in parts, a
                warning tells what was skipped, and .damage lists it.
        """
        roots = _checked_columns(columns)
        if on_damage not in ("raise", "skip"):
            raise InvalidOption(f'on_damage={on_damage!r}: pass "raise" or "skip"')
        wanted, ordered = self._selection(episodes)
        if not ordered and on_damage == "skip":
            raise InvalidOption('on_damage="skip" reads a trace from front to back: give episodes in ascending order')
        if not ordered:
            return (self[int(i)] for i in wanted)
        return self._scan(roots, wanted, on_damage == "skip")

    def _scan(self, roots: frozenset[str], wanted: Array, skip: bool) -> Iterator[Episode]:
        for number, writer in enumerate(self.stored):
            begin, end = int(self._bounds[number]), int(self._bounds[number + 1])
            mine = np.zeros(end - begin, bool)
            mine[wanted[(wanted >= begin) & (wanted < end)] - begin] = True
            if not mine.any() and len(wanted) < len(self):
                continue
            if writer.damage and not skip:
                raise _as_error(writer.damage[0])
            reader = writer.reader(roots, mine, self._report if skip else None)
            for parts, row, pieces in reader:
                yield self._scanned(writer, parts, row, begin, pieces, roots, skip)
        if skip:
            for damage in self.damage:
                if damage not in self._skipped:
                    self._report(damage)

    def _scanned(
        self,
        writer: StoredWriter,
        parts: Any,
        row: int,
        begin: int,
        pieces: list[Piece],
        roots: frozenset[str],
        skip: bool,
    ) -> Episode:
        trimmed = bool(parts.trimmed[row])

        def load(name: str, steps: range | None) -> Any:
            if name not in roots:
                raise TraceError(f"{name} were not asked for; name them in scan(columns=...)")
            if steps is None:
                return assemble(name, pieces, writer.layouts, trimmed, copy=False)
            cut = cut_down(pieces, steps.start, steps.stop, trimmed)
            return assemble(name, cut, writer.layouts, False, copy=True)

        return self._episode(writer, row, begin + row, load, parts.table[row], skip)

    def call_back(self, episode_cb: EpisodeCallback | None, max_episodes: int | None = None) -> int:
        """As scan_recorded_traces."""
        count = 0
        limit = len(self) if max_episodes is None else max_episodes
        if limit <= 0:
            return 0
        for writer in self.stored:
            if writer.damage:
                raise _as_error(writer.damage[0])
            for observations, actions, rewards in writer.arrays():
                count += 1
                if (episode_cb is not None and episode_cb(observations, actions, rewards)) or count >= limit:
                    return count
        return count

    def _episode(
        self,
        writer: StoredWriter,
        row: int,
        index: int,
        load: Load,
        record: Any = None,
        skip: bool = False,
    ) -> Episode:
        if record is None:
            record = self.episodes[index]
        else:
            record = record.copy()
            record["index"] = index

        def start() -> dict[str, Any]:
            try:
                return writer.start_of(int(record["episode_id"]))
            except CorruptTrace:
                if skip:  # the part of the episode that is left does not know how it started
                    return {}
                raise

        return Episode(record, writer.writer, writer.split, load, start)

    def _selection(self, episodes: slice | Iterable[int] | Array | None) -> tuple[Array, bool]:
        """The indices asked for, and whether they ascend."""
        everything = np.arange(len(self))
        if episodes is None:
            return everything, True
        if isinstance(episodes, slice):
            chosen = everything[episodes]
        else:
            given = np.asarray(episodes if isinstance(episodes, np.ndarray) else list(episodes))
            if given.size == 0:
                return everything[:0], True
            if given.dtype.kind not in "biu" or given.ndim != 1:
                raise InvalidOption("episodes: give a slice, indices, or a boolean array with an element an episode")
            try:
                chosen = everything[given]
            except IndexError as error:
                raise InvalidOption(f"episodes: the trace has {len(self)} episodes; {error}") from error
        return chosen, bool(np.all(np.diff(chosen) > 0))

    def _cached_chunk(self, writer: StoredWriter, number: int, root: str) -> Chunk:
        key = (writer.writer, number, root)
        chunk = self._cache.get(key)
        if chunk is None:
            chunk = writer.chunk(number, frozenset((root,)), common().take)
            try:
                chunk.decode()
            finally:
                common().rest()
            self._cache[key] = chunk
            self._cached_bytes += chunk.full_size
            while self._cached_bytes > _CACHE_BYTES and len(self._cache) > 1:
                _, dropped = self._cache.popitem(last=False)
                self._cached_bytes -= dropped.full_size
        self._cache.move_to_end(key)
        return chunk

    def _report(self, damage: Damage) -> None:
        if damage not in self._skipped:
            self._skipped.append(damage)
            warnings.warn(
                f"{damage.path}: skipped bytes {damage.start} to {damage.end}: {damage.problem}",
                UserWarning,
                stacklevel=4,
            )


def _checked_columns(columns: Iterable[str] | None) -> frozenset[str]:
    if columns is None:
        return frozenset(COLUMNS)
    roots = frozenset([columns] if isinstance(columns, str) else columns)
    if unknown := roots - set(COLUMNS):
        raise InvalidOption(f"columns: no such columns {sorted(unknown)}; there are {', '.join(COLUMNS)}")
    return roots


def _as_error(damage: Damage) -> CorruptTrace:
    return CorruptTrace(damage.problem, damage.path, damage.start)


__all__ = ["Episode", "Trace", "open_trace", "scan_recorded_traces"]
