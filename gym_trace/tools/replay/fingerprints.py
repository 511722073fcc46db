"""Hashes of episodes: equal episodes of two traces are found with one scan of each."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

from gym_trace.data.episode import Episode
from gym_trace.data.packing import pack, pack_lenient
from gym_trace.data.values import Array
from gym_trace.playback.episode_index import index_of, whole_of
from gym_trace.playback.trace import Trace

CONTENT = ("observations", "actions", "rewards")


def content_hashes(trace: Trace, indices: Array, columns: Collection[str] = CONTENT) -> list[bytes | None]:
    """Hash columns of the episodes at these indices; None for the others. Each chunk is read once.

    Episodes with equal hashes are equal bit for bit, including dtypes and shapes. Episodes with different hashes may
    still be equal. Raises CorruptTrace.
    """
    whole, positions = np.unique(index_of(trace).whole_indices[indices], return_inverse=True)
    hashes = [_hash(episode, columns) for episode in whole_of(trace).scan(columns, whole)] if columns else []
    found: list[bytes | None] = [None] * len(trace)
    for index, position in zip(indices.tolist(), positions.tolist() if columns else ()):
        found[index] = hashes[position]
    return found


def _hash(episode: Episode, columns: Collection[str]) -> bytes:
    hashed = blake2b(digest_size=16)
    for name in columns:
        _add(hashed, getattr(episode, name))
    return hashed.digest()


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
