"""Files of a writer that drops its oldest batches, except for the episodes that the user wants."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from gym_trace.data.deltas import DeltaRows
from gym_trace.data.values import Array
from gym_trace.data.vocabulary import OUTCOMES
from gym_trace.errors import CorruptTrace, TraceError
from gym_trace.format import wire
from gym_trace.format.batch_files import BATCH_BYTES, BatchFiles, RowsOrEncoded
from gym_trace.format.batch_reader import BatchReader
from gym_trace.format.columns import LargeRows, Path
from gym_trace.format.directory import batch_name
from gym_trace.format.manifest import DROPPED, line
from gym_trace.format.rewrite import SourceChunk, rewrite
from gym_trace.storage.protocol import Reader, Storage

NAN = "nan"
KeepIf = Callable[[dict[str, Any]], bool]

_BATCHES_KEPT = 8  # a batch has keep_bytes / _BATCHES_KEPT bytes
_LEAST_BATCH = 1 << 20  # bytes
_SEARCHED = ("observations", "actions", "rewards")
_LARGE_ROWS_AT_ONCE = 64
_EPISODE = np.dtype(
    [
        *(("episode", "<i8"), ("lane", "<i8"), ("steps", "<i8"), ("return", "<f8"), ("outcome", "<i8")),
        *(("has_nan", "?"), ("has_begun", "?"), ("has_ended", "?"), ("first", "<i8"), ("last", "<i8")),  # batches
    ]
)
_log = logging.getLogger("gym_trace")


class NewestBatches(BatchFiles):
    """Drops the oldest sealed batches, so that the others take about keep_bytes.

    Batches are dropped in order, each atomically: it is removed, or replaced by one with the wanted episodes. Readers
    skip an episode whose start was dropped, so a batch stays while an open episode began in it or before it. The
    newest sealed batch also stays, because it has the number of the last slab in batches.

    Args:
        keep_if: see RecordingOptions.
    """

    def __init__(
        self,
        storage: Storage,
        schema: dict[str, Any],
        level: int,
        fsync: bool,
        keep_bytes: int,
        keep_if: KeepIf | str | None,
        threads: int,
    ):
        super().__init__(storage, schema, level, fsync, threads=threads)
        self._level, self._keep_if = level, keep_if
        self.batch_bytes = min(BATCH_BYTES, max(_LEAST_BATCH, keep_bytes // _BATCHES_KEPT))
        self._least = max(0, keep_bytes - 2 * self.batch_bytes)  # min bytes of sealed batches
        self._whole: deque[tuple[int, int]] = deque()  # number and bytes of the batches that were not dropped
        self._open = np.empty(0, _EPISODE)
        self._wanted: list[Array] = []  # wanted episodes that have ended, in batches that were not dropped
        self._encoding_episodes: deque[Array] = deque()  # episodes of the chunks that are not appended yet

    def write(
        self,
        fragments: Array,
        columns: Mapping[Path, RowsOrEncoded | LargeRows],
        slab: tuple[int, bool] | None = None,
        pending: Sequence[Any] = (),
    ) -> None:
        episodes = np.zeros(len(fragments), _EPISODE)
        for name in ("episode", "lane", "steps", "outcome"):
            episodes[name] = fragments[name]
        episodes["return"] = fragments["reward_sum"]
        episodes["has_begun"] = fragments["flags"] & wire.STARTS > 0
        episodes["has_ended"] = fragments["flags"] & wire.ENDS > 0
        if self._keep_if is not None:
            episodes["has_nan"] = self._nans(fragments, columns)
        self._encoding_episodes.append(episodes)
        super().write(fragments, columns, slab, pending)

    def _wrote(self, fragments: Array) -> None:
        super()._wrote(fragments)
        episodes = self._encoding_episodes.popleft()
        episodes["first"] = episodes["last"] = self._batches
        self._follow(episodes)

    def _nans(self, fragments: Array, columns: Mapping[Path, RowsOrEncoded | LargeRows]) -> Array:
        """Return True for fragments with a NaN or an infinity."""
        steps = fragments["steps"].astype(np.int64)
        result = np.zeros(len(fragments), np.bool_)
        for path, rows in columns.items():
            arrays = list(_float_arrays(rows)) if path[0] in _SEARCHED else []
            if arrays and (rows_with := np.concatenate(list(map(_has_nan, arrays)))).any():
                counts = steps + (fragments["flags"] & wire.HAS_INITIAL > 0) if path[0] == "observations" else steps
                of_row = np.repeat(np.arange(len(fragments)), counts)
                result[of_row[rows_with]] = True
        return result

    def _follow(self, new: Array) -> None:
        """Update the open and the wanted episodes with new fragments, given as rows of _EPISODE."""
        known = np.concatenate([self._open, new])
        known = known[np.argsort(known["episode"], kind="stable")]
        begins = np.flatnonzero(np.diff(known["episode"], prepend=-1))
        joined = known[begins]
        if len(begins) < len(known):
            with np.errstate(all="ignore"):  # rewards may be infinite
                for name in ("steps", "return"):
                    joined[name] = np.add.reduceat(known[name], begins)
            for name in ("outcome", "has_nan", "has_begun", "has_ended", "last"):
                joined[name] = np.maximum.reduceat(known[name], begins)
        late = joined["episode"][~joined["has_begun"]]  # steps after the end of an episode are part of it
        for wanted in self._wanted if len(late) else ():
            wanted["last"][np.isin(wanted["episode"], late)] = self._batches
        joined = joined[joined["has_begun"]]
        self._open, ended = joined[~joined["has_ended"]], joined[joined["has_ended"]]
        if len(chosen := self._chosen(ended)):
            self._wanted.append(chosen)

    def _chosen(self, ended: Array) -> Array:
        """Return the wanted episodes among these, which have ended."""
        if self._keep_if is None or not len(ended):
            return ended[:0]
        if not callable(self._keep_if):
            return np.compress(ended["has_nan"], ended)
        names = ("episode", "lane", "steps", "return", "has_nan", "outcome")
        columns = zip(*(ended[name].tolist() for name in names))
        return np.compress([self._is_wanted(*row) for row in columns], ended)

    def _is_wanted(self, episode: int, lane: int, steps: int, total: float, has_nan: bool, outcome: int) -> bool:
        facts = {"episode_id": episode, "lane": lane, "steps": steps, "return": total, "outcome": OUTCOMES[outcome]}
        assert callable(self._keep_if)
        try:
            return bool(self._keep_if({**facts, "has_nan": has_nan}))
        except BaseException as error:  # user code; SystemExit would end the writer thread
            raise TraceError(f"keep_if raised {error!r:.200} for episode {episode}") from error

    # -- dropping -----------------------------------------------------------------------------------------------------

    def _sealed(self, name: str, size: int, crc: int, index: str) -> None:
        super()._sealed(name, size, crc, index)
        number = self._batches - 1
        self._whole.append((number, size))
        before = min(number, int(self._open["first"].min(initial=number)))
        held = sum(size for _, size in self._whole)
        while self._whole[0][0] < before and held - self._whole[0][1] >= self._least:
            number, size = self._whole.popleft()
            held -= size
            self._drop(number)

    def _drop(self, number: int) -> None:
        """Remove a batch, or replace it by one with its wanted episodes."""
        name = batch_name(self.writer, number)
        known = np.concatenate([np.empty(0, _EPISODE), *self._wanted])
        wanted = known["episode"][known["first"] <= number]
        self._wanted = [known[known["last"] > number]]
        rest = BatchFiles(self._storage, self._schema, self._level, False, self._manifest)
        rest.resume(number, None)
        try:
            batch = BatchReader(self._storage, name, warns=False)
            for damage in batch.damage:
                raise damage.error()
            with batch.open() as file:
                has_rest = rewrite(_wanted_chunks(batch, file, wanted), rest, is_one_batch=True) > 0
        except CorruptTrace as error:
            _log.warning("%s; kept as it is", error)
            rest.discard()
            return
        self._manifest.write(line({"type": DROPPED, "file": name}))
        if has_rest:
            rest.seal()
        else:
            self._storage.remove(name)
            self._storage.sync()


def _wanted_chunks(batch: BatchReader, file: Reader, wanted: Array) -> Iterator[SourceChunk]:
    """Yield the chunks of a batch with wanted episodes. file: this batch, open."""
    is_wanted = np.isin(batch.fragments["episode"].astype(np.int64), wanted)
    begin = 0
    for number, count in enumerate(batch.chunks["fragments"].tolist()):
        table, kept = batch.fragments[begin : begin + count], is_wanted[begin : begin + count]
        begin += count
        if kept.any():
            read, stored = partial(batch.read_chunk, number), partial(batch.stored_chunk, file, number)
            yield SourceChunk(table, read, kept, stored=stored)


def _float_arrays(rows: RowsOrEncoded | LargeRows) -> Iterator[Array]:
    """Yield the rows in arrays of floats; none if they are of another type."""
    for part in rows.parts if isinstance(rows, LargeRows) else [rows]:
        if isinstance(part, DeltaRows) and part.dtype.kind in "fc":
            yield from (array.view(part.dtype) for array in part.arrays(_LARGE_ROWS_AT_ONCE))
        elif isinstance(part, np.ndarray) and part.dtype.kind in "fc":
            yield part


def _has_nan(rows: Array) -> Array:
    """Return True for rows with a NaN or an infinity."""
    return np.logical_not(np.isfinite(rows.reshape(len(rows), -1)).all(axis=1))
