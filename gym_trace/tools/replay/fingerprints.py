"""Fingerprints of episodes: hashes that compare two traces with one scan of each."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.layout import Layout, Leaf, Path
from gym_trace.data.packing import pack, pack_lenient
from gym_trace.data.schema import Layouts
from gym_trace.data.values import Array
from gym_trace.format import wire
from gym_trace.format.batch_reader import Chunk
from gym_trace.playback.assembly import ChunkSlice, assemble
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.episode_scan import scan_episodes
from gym_trace.playback.trace import Trace
from gym_trace.playback.writer_reader import WriterReader

CONTENT = ("observations", "actions", "rewards")
_OTHER_COLUMNS = ("terminations", "truncations", "infos", "annotations")
_FLAGS = {"terminations": wire.TERMINATED, "truncations": wire.TRUNCATED}
_IN_TABLE = ("seed", "first_step", "outcome", "has_final_observation")
_IN_STARTS = frozenset(("options", "infos"))


class Fingerprints(NamedTuple):
    """Hashes of the episodes of a trace, one per episode; None for an unknown hash.

    Episodes with equal hashes are equal bit for bit, including dtypes and shapes. Episodes with different hashes may
    still be equal.

    Attributes:
        content: hashes of the compared columns of CONTENT.
        whole: hashes of all compared columns and values.
    """

    content: list[bytes | None]
    whole: list[bytes | None]

    @classmethod
    def none(cls, episodes: int) -> Fingerprints:
        return cls([None] * episodes, [None] * episodes)


def fingerprints_of(
    trace: Trace, indices: Array, compared: Collection[str], *, only_content: bool = False
) -> Fingerprints:
    """Hash the episodes at these indices; each chunk is read once. Raises CorruptTrace."""
    found = Fingerprints.none(len(trace))
    writers, rows = index_of(trace)["writer"][indices], index_of(trace).rows[indices]
    for number in np.unique(writers).tolist():
        own = np.flatnonzero(writers == number)
        own = own[np.argsort(rows[own], kind="stable")]
        own_rows, own_indices = rows[own], indices[own].tolist()
        for row, content, whole in _hashed(index_of(trace).readers[number], own_rows, compared, only_content):
            begin, end = own_rows.searchsorted((row, row + 1)).tolist()  # a view may have an episode several times
            for index in own_indices[begin:end]:
                found.content[index], found.whole[index] = content, whole
    return found


def _hashed(
    writer: WriterReader, rows: Array, compared: Collection[str], only_content: bool
) -> Iterator[tuple[int, bytes | None, bytes | None]]:
    if writer.damage:
        raise writer.damage[0].error()
    wanted = np.zeros(len(writer.parts), bool)
    wanted[rows] = True
    content = [name for name in CONTENT if name in compared]
    other_columns = [name for name in _OTHER_COLUMNS if name in compared and not only_content]
    hasher, values = _Hasher(writer), _EpisodeValues(writer, rows, compared)
    for _, row, slices in scan_episodes(writer, frozenset((*content, *other_columns)), wanted, None):
        hasher.begin(slices)
        for name in content:
            hasher.add_column(name)
        content_hash = hasher.digest() if content else None
        if only_content:
            yield row, content_hash, None
            continue
        for name in other_columns:
            hasher.add_column(name)
        hasher.add(values.of(row))
        yield row, content_hash, hasher.digest() if hasher.is_exact else None


class _EpisodeValues:
    """Values compared in addition to columns. Unlike in Episode, the seed and the info of the reset are as stored."""

    def __init__(self, writer: WriterReader, rows: Array, compared: Collection[str]):
        """rows: ascending rows of the episodes."""
        self._writer, self._rows, self._compared = writer, rows, compared
        self._columns = [writer.parts.column(name, rows).tolist() for name in ("steps", *_IN_TABLE)]

    def of(self, row: int) -> list[Any]:
        i = int(self._rows.searchsorted(row))
        steps, *in_table = (column[i] for column in self._columns)
        values: dict[str, Any] = dict(zip(_IN_TABLE, in_table))
        seed = values["seed"]
        if seed == wire.SEED_ELSEWHERE or not _IN_STARTS.isdisjoint(self._compared):
            start = self._writer.shared_start_of(row)
            values["seed"] = start.get("seed") if seed == wire.SEED_ELSEWHERE else seed
            values["options"], values["infos"] = start.get("options"), start.get("reset_info")
        return [steps, *(value for name, value in values.items() if name in self._compared)]


class _StoredArray(NamedTuple):
    """An array column of a chunk, to be hashed like the tree that it is a leaf of.

    Attributes:
        head: heads of the trees that begin with this leaf.
        data: bytes of all rows. width: bytes per row.
    """

    head: bytes
    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    width: int


class _Hasher:
    """Hashes one episode after another. Equal arrays give equal hashes, however chunks divide them."""

    def __init__(self, writer: WriterReader):
        self._layouts = writer.layouts
        self._chunk: Chunk | None = None
        self._stored: dict[str, list[_StoredArray] | None] = {}  # columns of that chunk

    def begin(self, slices: list[ChunkSlice]) -> None:
        self._slices = slices
        self._hash = blake2b(digest_size=16)
        self.is_exact = True

    def digest(self) -> bytes:
        return self._hash.digest()

    def add_column(self, name: str) -> None:
        (first, *others), update = self._slices, self._hash.update
        rows = first.observations if name == "observations" else first.steps
        count = rows.stop - rows.start
        if others or not count:
            stored = None
        elif name in _FLAGS:
            update(_head_of_array("|b1", (), count) + bytes(count - 1))
            update(b"\1" if first.flags & _FLAGS[name] else b"\0")
            return
        else:
            stored = self._stored_in(first.chunk, name)
        if stored is None:
            self.add(assemble(name, self._slices, self._layouts, copy=False))
        for head, dtype, shape, data, width in stored or ():  # hash the same bytes as add()
            update(head + _head_of_array(dtype, shape, count))
            update(data[rows.start * width : rows.stop * width])

    def add(self, value: Any) -> None:
        if type(value) is np.ndarray and value.dtype != object:
            self._hash.update(_head_of_array(value.dtype.str, value.shape[1:], len(value)))
            self._hash.update(np.ascontiguousarray(value).reshape(-1).data)
        elif type(value) in (dict, tuple):
            children = dict(enumerate(value)) if type(value) is tuple else value
            self._hash.update(_head_of_tree(type(value), children))
            for child in children.values():
                self.add(child)
        else:
            packed, losses = pack_lenient(value)
            self.is_exact &= not losses
            self._hash.update(b"V" + packed)

    def _stored_in(self, chunk: Chunk, name: str) -> list[_StoredArray] | None:
        """Return the arrays of a column as a chunk stores them; None if they must be assembled."""
        if chunk is not self._chunk:
            self._chunk, self._stored = chunk, {}
        if name not in self._stored:
            self._stored[name] = _stored_arrays(chunk, name, self._layouts)
        return self._stored[name]


def _stored_arrays(chunk: Chunk, name: str, layouts: Layouts) -> list[_StoredArray] | None:
    if name == "infos":
        return None
    if name == "annotations":
        annotations: dict[Any, Path] = {path[1]: path for path in chunk.columns if path[0] == name and len(path) == 2}
        heads = [_head_of_tree(dict, annotations), *[b""] * len(annotations)]
        paths: list[tuple[bytes, Path]] = list(zip(heads, annotations.values()))
    elif name == "rewards":
        paths = [(b"", (name,))]
    else:
        paths = list(_paths_of(layouts.observations if name == "observations" else layouts.actions))
    if not paths or not all(path in chunk and not chunk.is_delta_encoded(path) for _, path in paths):
        return None
    arrays = [chunk.array(path) for _, path in paths]
    if any(array.dtype == object for array in arrays):
        return None
    return [
        _StoredArray(head, array.dtype.str, array.shape[1:], array.reshape(-1).view(np.uint8).data, array[:1].nbytes)
        for (head, _), array in zip(paths, arrays)
    ]


def _paths_of(layout: Layout, head: bytes = b"") -> Iterator[tuple[bytes, Path]]:
    """Yield the paths of the leaves, each with the heads of the trees that begin there."""
    if isinstance(layout, Leaf):
        yield head, layout.path
        return
    if not layout.children:
        yield head, ()  # no column: an empty tree must be assembled
    head += _head_of_tree(tuple if layout.keys is None else dict, dict(layout.parts()))
    for _, child in layout.parts():
        yield from _paths_of(child, head)
        head = b""


@lru_cache(maxsize=4096)
def _head_of_array(dtype: str, shape: tuple[int, ...], rows: int) -> bytes:
    return b"A" + pack([dtype, rows, list(shape)])


def _head_of_tree(kind: type, children: dict[Any, Any]) -> bytes:
    return kind.__name__.encode() + pack(list(children))
