"""Hashes of episodes: equal episodes of two traces are found with one scan of each."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

from gym_trace.data.packing import pack, pack_lenient
from gym_trace.data.values import Array
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.episode_scan import scan_groups
from gym_trace.playback.trace import Trace
from gym_trace.playback.writer_reader import WriterReader

CONTENT = ("observations", "actions", "rewards")


def content_hashes(trace: Trace, indices: Array, columns: Collection[str] = CONTENT) -> list[bytes | None]:
    """Hash columns of the episodes at these indices; None for the others. Each chunk is read once.

    Episodes with equal hashes are equal bit for bit, including dtypes and shapes. Episodes with different hashes may
    still be equal. Raises CorruptTrace.
    """
    found: list[bytes | None] = [None] * len(trace)
    index = index_of(trace)
    writers, rows = index["writer"][indices], index.rows[indices]
    for number in np.unique(writers).tolist() if columns else ():
        own = np.flatnonzero(writers == number)
        own = own[np.argsort(rows[own], kind="stable")]
        own_rows, own_indices = rows[own], indices[own].tolist()
        for row, content in _hashed(index.readers[number], own_rows, columns):
            begin, end = own_rows.searchsorted((row, row + 1)).tolist()  # a view may have an episode several times
            for i in own_indices[begin:end]:
                found[i] = content
    return found


def _hashed(writer: WriterReader, rows: Array, columns: Collection[str]) -> Iterator[tuple[int, bytes]]:
    if writer.damage:
        raise writer.damage[0].error()
    wanted = np.zeros(len(writer.parts), bool)
    wanted[rows] = True
    for group in scan_groups(writer, frozenset(columns), wanted):
        for i, row in enumerate(group.rows.tolist()):
            hashed = blake2b(digest_size=16)
            for name in columns:
                _add(hashed, group.column(name, i))
            yield row, hashed.digest()


def _add(hashed: Any, value: Any) -> None:
    """Add a value to a hash. Equal values add equal bytes."""
    if type(value) is np.ndarray and value.dtype != object:
        hashed.update(_head_of_array(value.dtype.str, value.shape[1:], len(value)))
        hashed.update(np.ascontiguousarray(value).reshape(-1).data)
    elif type(value) in (dict, tuple):
        children = dict(enumerate(value)) if type(value) is tuple else value
        hashed.update(_head_of_tree(type(value), children))
        for child in children.values():
            _add(hashed, child)
    else:
        hashed.update(b"V" + pack_lenient(value)[0])


@lru_cache(maxsize=4096)
def _head_of_array(dtype: str, shape: tuple[int, ...], rows: int) -> bytes:
    return b"A" + pack([dtype, rows, list(shape)])


def _head_of_tree(kind: type, children: dict[Any, Any]) -> bytes:
    return kind.__name__.encode() + pack(list(children))
