"""One writer of a trace as it lies on disk: its batches as one sequence of chunks and fragments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.batch import PART, BatchReader, Chunk, Damage
from gym_trace.format.buffers import common
from gym_trace.format.directory import WriterFiles
from gym_trace.format.manifest import read_manifest
from gym_trace.layout import put_together
from gym_trace.stored.assembly import Layouts, Piece, assemble
from gym_trace.stored.reading_ahead import decoded_in_turn
from gym_trace.stored.table import Parts, parts_of, step_offsets
from gym_trace.values import Array, copied

_CALLBACK_ROOTS = frozenset(("observations", "actions", "rewards"))
_ROOTS = frozenset(("observations", "actions", "rewards", "infos", "annotations"))


class StoredWriter:
    """Reads the files of one writer.

    Attributes:
        writer: its id.
        alive: whether its process holds the lock of its manifest.
        schema: what it said of itself.
        batches: its readable batches, in order.
        damage: what was found not to check.
        parts: its episodes.
    """

    def __init__(self, files: WriterFiles):
        self.writer = files.writer
        self.alive = files.is_alive()
        self.batches: list[BatchReader] = []
        self._unreadable: list[Damage] = []
        self._readers: dict[int, BatchReader] = {}
        self._starts: dict[int, dict[int, Any]] = {}
        self._schema: dict[str, Any] | None = None
        self._layouts: Layouts | None = None
        self._files = files
        self.refresh(files)

    def refresh(self, files: WriterFiles) -> bool:
        """Takes in what the files hold by now; returns whether anything is new."""
        known = (self.alive, len(self._readers), sum(len(b.chunks) for b in self.batches))
        self.alive = files.is_alive()  # asked before the files are read: what a dead writer left is all there
        self._files = files
        for number, path in files.batches.items():
            reader = self._readers.get(number)
            if reader is None:
                reader = self._opened(path)
                if reader is not None:
                    self._readers[number] = reader
            elif not reader.sealed:
                reader.refresh()
        self.batches = [self._readers[number] for number in sorted(self._readers)]
        if known == (self.alive, len(self._readers), sum(len(b.chunks) for b in self.batches)) and known[1]:
            return False
        self._chunk_places = [(batch, i) for batch in self.batches for i in range(len(batch.chunks))]
        self.fragments = wire.join_fragments([batch.fragments for batch in self.batches])
        counts = [batch.chunks["fragments"].astype(np.int64) for batch in self.batches]
        self.chunk_bounds = (
            np.concatenate([[0], np.cumsum(np.concatenate(counts))]) if counts else np.zeros(1, np.int64)
        )
        self.parts = parts_of(self.fragments, self.alive)
        self._starts.clear()
        common().rest()
        return True

    def _opened(self, path: Any) -> BatchReader | None:
        """The batch at path; None if its writer died before its header was whole, or nothing of it can be read."""
        size = wire.HEADER_SIZE
        with contextlib.suppress(FileNotFoundError):  # sealed since it was listed, which BatchReader knows of
            size = path.stat().st_size  # beforehand: the header may be written meanwhile
        try:
            return BatchReader(path)
        except CorruptTrace as error:
            if not (path.name.endswith(PART) and size < wire.HEADER_SIZE):
                damage = Damage(str(path), 0, size, error.problem)
                if damage not in self._unreadable:
                    self._unreadable.append(damage)
            return None
        except FileNotFoundError:
            return None  # sealed under another name between the listing and now: the next refresh finds it

    @property
    def damage(self) -> list[Damage]:
        return self._unreadable + [damage for batch in self.batches for damage in batch.damage]

    @property
    def schema(self) -> dict[str, Any]:
        """From the first batch that has one, otherwise from the manifest. Raises CorruptTrace."""
        if self._schema is None:
            found: Any = next((batch.schema for batch in self.batches if batch.schema is not None), None)
            if found is None and self._files.manifest is not None:
                first = next(read_manifest(self._files.manifest), {})
                found = first if first.get("type") == "writer" else None
            if found is None:
                raise CorruptTrace(
                    f"writer {self.writer}: no readable schema", str(self._files.manifest or self.writer)
                )
            self._schema = found
        return self._schema

    @property
    def metadata(self) -> Any:
        """What it was given as metadata."""
        return self.schema.get("metadata")

    @property
    def env_spec(self) -> dict[str, Any]:
        """What is known of its environment: id, spec (JSON), wrappers, class."""
        environment = self.schema.get("environment")
        return dict(environment) if isinstance(environment, dict) else {}

    @property
    def observation_space(self) -> Any:
        """The recorded gymnasium space."""
        from gym_trace.spaces import restore  # here, because most reading does not need gymnasium

        return restore(self.schema.get("observation_space"))

    @property
    def action_space(self) -> Any:
        """The recorded gymnasium space."""
        from gym_trace.spaces import restore

        return restore(self.schema.get("action_space"))

    @property
    def layouts(self) -> Layouts:
        if self._layouts is None:
            self._layouts = Layouts.of(self.schema)
        return self._layouts

    @property
    def split(self) -> str:
        return str(self.schema.get("split", ""))

    @property
    def created(self) -> int:
        """When the writer began, UTC ns; 0 where that is damaged."""
        try:
            created = self.schema.get("created")
        except CorruptTrace:
            return 0
        return created if isinstance(created, int) else 0

    @property
    def chunk_count(self) -> int:
        return len(self._chunk_places)

    def chunk(self, number: int, roots: frozenset[str], room: Callable[[int], Array] | None = None) -> Chunk:
        """The columns under roots of a chunk. room: gives memory for their bytes. Raises CorruptTrace."""
        batch, i = self._chunk_places[number]
        chunk = batch.read_chunk(i, lambda path: path[0] in roots, room)
        table = self.fragments[self.chunk_bounds[number] : self.chunk_bounds[number + 1]]
        observation_rows, step_rows = (int(offsets[-1]) for offsets in step_offsets(table))
        for path, rows in {("rewards",): 0, **chunk.rows}.items():  # rewards are always there, if there are steps
            expected = observation_rows if path[0] == "observations" else step_rows
            if path[0] in _ROOTS and rows != expected:
                offset = int(batch.chunks["offset"][i])
                raise CorruptTrace(
                    f"column {'/'.join(map(str, path))} has the wrong number of rows", batch.path, offset
                )
        return chunk

    def pieces(self, row: int) -> list[Piece]:
        """The fragments of an episode, their chunks not read."""
        found = []
        for f in self.parts.fragments[self.parts.first[row] : self.parts.first[row + 1]].tolist():
            number = int(np.searchsorted(self.chunk_bounds, f, side="right")) - 1
            begin = int(self.chunk_bounds[number])
            observations, steps = step_offsets(self.fragments[begin : f + 1])
            flags = int(self.fragments["flags"][f])
            o, s = observations[-2:].tolist(), steps[-2:].tolist()
            found.append(Piece(_UNREAD, number, slice(*o), slice(*s), flags))
        return found

    def start_of(self, episode: int) -> dict[str, Any]:
        """What was kept of the reset of an episode: options, rng_state, reset_info, a large seed."""
        table = self.fragments
        places = np.flatnonzero((table["episode"] == episode) & (table["flags"] & wire.STARTS > 0))
        if not len(places):
            return {}
        number = int(np.searchsorted(self.chunk_bounds, places[0], side="right")) - 1
        if number not in self._starts:
            begin, end = self.chunk_bounds[number : number + 2]
            flags = table["flags"][begin:end]
            batch, i = self._chunk_places[number]
            chunk = batch.read_chunk(i, lambda path: path[0] == "starts")
            ids = table["episode"][begin:end][flags & wire.STARTS > 0].tolist()
            values = chunk.array(("starts",)).tolist() if ("starts",) in chunk else []
            self._starts = {number: dict(zip(ids, values))}
        entry: Any = self._starts[number].get(episode)
        return copied(entry) if isinstance(entry, dict) else {}

    # -- reading through ----------------------------------------------------------------------------------------------

    def reader(
        self, roots: frozenset[str], wanted: Array, on_damage: Callable[[Damage], None] | None
    ) -> Iterator[tuple[Parts, int, list[Piece]]]:
        """Each wanted episode as (parts, row, pieces), each chunk read once.

        on_damage: told of damaged chunks, which are then left out as if they were not there; None: CorruptTrace.
        """
        parts, bad = self.parts, np.zeros(len(self.fragments), bool)
        pending: dict[int, list[tuple[int, Piece]]] = {}
        for number in range(self.chunk_count):
            begin, end = self.chunk_bounds[number : number + 2].tolist()
            rows = parts.of_fragment[begin:end]
            mine = (rows >= 0) & wanted[rows] if len(wanted) else np.zeros(len(rows), bool)
            if not mine.any():
                continue
            try:
                # How its episodes began is read too: to leave out a chunk is plainer than to forget a seed.
                chunk = self.chunk(number, roots if on_damage is None else roots | {"starts"})
                if on_damage is not None:
                    for path in chunk.columns:
                        chunk.array(path)
            except CorruptTrace as error:
                if on_damage is None:
                    raise
                batch, i = self._chunk_places[number]
                start, length = (int(batch.chunks[name][i]) for name in ("offset", "length"))
                on_damage(Damage(str(batch.path), start, start + length, error.problem))
                wanted_fragments = wanted[parts.of_fragment] & (parts.of_fragment >= 0)
                bad[begin:end] = True
                parts, wanted = self._without(bad, wanted_fragments)
                pieces = [item for items in pending.values() for item in items]
                pending = {}
                for f, piece in pieces:
                    pending.setdefault(int(parts.of_fragment[f]), []).append((f, piece))
                for row in [row for row, items in pending.items() if _is_whole(parts, row, items)]:
                    yield parts, row, [piece for _, piece in pending.pop(row)]
                continue
            flags = self.fragments["flags"][begin:end].tolist()
            o, s = (offsets.tolist() for offsets in step_offsets(self.fragments[begin:end]))
            row_list = rows.tolist()
            for i in np.flatnonzero(mine).tolist():
                row = row_list[i]
                piece = Piece(chunk, number, slice(o[i], o[i + 1]), slice(s[i], s[i + 1]), flags[i])
                items = pending.setdefault(row, [])
                items.append((begin + i, piece))
                if _is_whole(parts, row, items):
                    yield parts, row, [piece for _, piece in pending.pop(row)]

    def _without(self, bad: Array, wanted_fragments: Array) -> tuple[Parts, Array]:
        """The parts that are left without bad fragments, numbered as if these had no rows, and which are wanted."""
        left = np.flatnonzero(~bad)
        parts = parts_of(self.fragments[left], self.alive)
        of_fragment = np.full(len(self.fragments), -1)
        of_fragment[left] = parts.of_fragment
        wanted = np.zeros(len(parts.table), bool)
        wanted[of_fragment[wanted_fragments & (of_fragment >= 0)]] = True
        return parts._replace(of_fragment=of_fragment, fragments=left[parts.fragments]), wanted

    def arrays(self) -> Iterator[tuple[Any, Any, Array]]:
        """(observations, actions, rewards) of each episode: the quick way through a whole trace."""
        parts = self.parts
        alone = (np.diff(parts.first) == 1) & (parts.table["steps"] > 0)  # no steps have no dtype of their own
        alone[parts.trimmed] = False
        pending: dict[int, list[tuple[int, Piece]]] = {}
        bounds = self.chunk_bounds
        numbers = [n for n in range(self.chunk_count) if (parts.of_fragment[bounds[n] : bounds[n + 1]] >= 0).any()]
        for number, chunk in decoded_in_turn(lambda n, room: self.chunk(n, _CALLBACK_ROOTS, room), numbers):
            begin, end = bounds[number : number + 2].tolist()
            rows = parts.of_fragment[begin:end]
            o, s = (offsets.tolist() for offsets in step_offsets(self.fragments[begin:end]))
            sliced = self._slicer(chunk)
            whole = (alone[rows] & (rows >= 0)).tolist()
            for i, row in enumerate(rows.tolist()):
                if sliced is not None and whole[i]:
                    yield sliced(o[i], o[i + 1], s[i], s[i + 1])
                elif row >= 0:
                    piece = Piece(chunk, number, slice(o[i], o[i + 1]), slice(s[i], s[i + 1]), 0)
                    items = pending.setdefault(row, [])
                    items.append((begin + i, piece))
                    if _is_whole(parts, row, items):
                        pieces, trimmed = [piece for _, piece in pending.pop(row)], bool(parts.trimmed[row])
                        yield (
                            assemble("observations", pieces, self.layouts, trimmed, copy=False),
                            assemble("actions", pieces, self.layouts, trimmed, copy=False),
                            assemble("rewards", pieces, self.layouts, trimmed, copy=False),
                        )
            del chunk, sliced  # so that their memory can be used for the next ones

    def _slicer(self, chunk: Chunk) -> Callable[[int, int, int, int], tuple[Any, Any, Array]] | None:
        """A function that cuts an episode out of the columns of a chunk; None if they are not all typed."""
        layouts = self.layouts
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


def _is_whole(parts: Parts, row: int, items: list[tuple[int, Piece]]) -> bool:
    return row >= 0 and bool(len(items) == parts.first[row + 1] - parts.first[row])


_UNREAD = Chunk({}, {}, lambda error: error)
