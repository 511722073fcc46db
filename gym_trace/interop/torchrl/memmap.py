"""Directories that TensorDict.load_memmap maps: a file of bare elements for each tensor, and meta.json for each level.

As tensordict 0.14 writes and reads them (TensorDict.memmap); nothing of it is needed here.
"""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gym_trace.model.values import Array

Key = tuple[str, ...]
RESERVED = frozenset(("shape", "device", "_type"))  # of meta.json, which therefore has no tensors of these names
_CLASS = "<class 'tensordict._td.TensorDict'>"
_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}
_UNSAFE = frozenset('/<>:"|?*\\ %\x7f') | {chr(code) for code in range(32)}


def has_tensors_of(dtype: np.dtype[Any]) -> bool:
    """Whether torch has such a dtype."""
    most = {"c": 16, "b": 1}.get(dtype.kind, 8)
    return dtype.kind in _KINDS and dtype.itemsize <= most


class MemmapWriter:
    """A TensorDict that is written some rows at a time; to be used with ``with``.

    Each tensor has as many rows as all others in the end; close() then says how many in meta.json.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._forms: dict[Key, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._files: dict[Key, BinaryIO] = {}
        self._stack = ExitStack()
        self._rows = 0

    def __enter__(self) -> MemmapWriter:
        return self

    def __exit__(self, *failure: Any) -> None:
        self._stack.close()

    def declare(self, key: Key, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        """A tensor, (rows, *shape)."""
        self._forms[key] = dtype.newbyteorder("="), shape
        folder = self._folder(key[:-1])
        folder.mkdir(parents=True, exist_ok=True)
        if math.prod(shape):  # of a tensor without elements there is no file
            path = folder / f"{_name(key[-1])}.memmap"
            self._files[key] = self._stack.enter_context(path.open("xb"))

    def add(self, rows: int, tensors: dict[Key, Array]) -> None:
        """Adds rows to all of the tensors."""
        self._rows += rows
        for key, (dtype, shape) in self._forms.items():
            array = np.ascontiguousarray(tensors[key], dtype).reshape(rows, *shape)
            if key in self._files:
                self._files[key].write(array.data)

    def close(self) -> None:
        """Says what there is. Raises OSError."""
        self._stack.close()
        for depth_first in sorted({key[:depth] for key in self._forms for depth in range(len(key))}):
            self._folder(depth_first).joinpath("meta.json").write_text(json.dumps(self._meta(depth_first)))

    def _meta(self, level: Key) -> dict[str, Any]:
        meta: dict[str, Any] = {}
        for key, (dtype, shape) in self._forms.items():
            if key[: len(level)] != level:
                continue
            if len(key) == len(level) + 1:
                kind = f"torch.{torch_name(dtype)}"
                meta[key[-1]] = {"device": "cpu", "shape": [self._rows, *shape], "dtype": kind, "is_nested": False}
            else:
                meta[key[len(level)]] = {"type": "TensorDict"}
        return meta | {"shape": [self._rows], "device": "cpu", "_type": _CLASS}

    def _folder(self, level: Key) -> Path:
        return self._directory.joinpath(*map(_name, level))


def torch_name(dtype: np.dtype[Any]) -> str:
    """float32, bool, uint8 ..., as torch has them."""
    return "bool" if dtype.kind == "b" else f"{_KINDS[dtype.kind]}{dtype.itemsize * 8}"


def _name(key: str) -> str:
    """The name of a file for a key, as tensordict makes it."""
    if key in ("", ".", ".."):
        return "%2E" * len(key) or "%"
    return "".join(f"%{ord(char):02X}" if char in _UNSAFE else char for char in key)
