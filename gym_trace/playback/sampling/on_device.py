"""Batches as tensors on a device of PyTorch: rows are gathered there, or in pinned memory that is copied there."""

from __future__ import annotations

import warnings
from functools import cache, partial
from itertools import accumulate
from typing import Any

import numpy as np

from gym_trace.data.layout import Path
from gym_trace.data.trees import leaves_of, mapped
from gym_trace.data.values import Array
from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.playback.episode_index import RecordedEpisodes
from gym_trace.playback.sampling.batches import CACHES, Batches, Make, Order
from gym_trace.playback.sampling.items import Batch
from gym_trace.playback.sampling.rows import DecodedRows, DecodePlan
from gym_trace.playback.sampling.store import decoded
from gym_trace.playback.scan import OnDamage

try:
    import torch
except ImportError as missing:
    raise MissingExtra(f"rows on a device need PyTorch ({missing}): pip install torch") from missing

_ON_HOST = ("rewards", "terminations", "truncations", "infos")  # small; the flags are needed to find items
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}  # PyTorch gathers these
_PACKED_BYTES = 1 << 16  # arrays up to this size are copied together
_ALIGNMENT = 16
_CPU = torch.device("cpu")


class TensorColumn:
    """Rows of a column in a tensor. Gathers them like an array."""

    def __init__(self, array: Array, device: torch.device, pinned: bool):
        """pinned: gather into pinned memory, for copies that run in the background."""
        rows = _tensor(array)
        self._dtype, self._pinned = rows.dtype, pinned
        self._rows = rows.to(device).view(_SIGNED.get(rows.dtype, rows.dtype))

    def take(self, index: Array, axis: int = 0, padding: Array | None = None) -> torch.Tensor:
        """Return the rows at an index of any shape. padding: (*index.shape) bool, True for rows of zeros."""
        rows, shape = self._rows, self._rows.shape[1:]
        found = torch.empty((index.size, *shape), dtype=rows.dtype, device=rows.device, pin_memory=self._pinned)
        torch.index_select(rows, axis, sent(index.reshape(-1), rows.device), out=found)
        if padding is not None:
            found.masked_fill_(sent(padding.reshape(-1, *[1] * len(shape)), rows.device), 0)
        return found.view(self._dtype).view((*index.shape, *shape))


def in_tensors(columns: dict[Path, Any], device: torch.device, pinned: bool = False) -> dict[Path, Any]:
    """Return columns in tensors on a device, except small ones, objects, and dtypes that PyTorch lacks."""
    return {
        path: TensorColumn(array, device, pinned)
        if isinstance(array, np.ndarray) and path[0] not in _ON_HOST and type_of(array.dtype) is not None
        else array
        for path, array in columns.items()
    }


def sent(tree: Any, device: torch.device) -> Any:
    """Return a tree with its numeric arrays as tensors on a device; copies to CUDA run in the background.

    Small arrays are copied together: their tensors share memory. On the CPU tensors share the memory of the arrays.
    """
    arrays = {id(leaf): leaf for leaf in leaves_of(tree) if isinstance(leaf, np.ndarray) and type_of(leaf.dtype)}
    small = [array for array in arrays.values() if device != _CPU and array.nbytes <= _PACKED_BYTES]
    packed = dict(zip(map(id, small), _packed(small, device))) if len(small) > 1 else {}

    def moved(leaf: Any) -> Any:
        if id(leaf) in packed:
            return packed[id(leaf)]
        if id(leaf) in arrays:
            leaf = _tensor(leaf)
        if not isinstance(leaf, torch.Tensor) or leaf.device == device:
            return leaf
        is_pageable = device.type == "cuda" and leaf.device == _CPU and not leaf.is_pinned()
        return (leaf.pin_memory() if is_pageable else leaf).to(device, non_blocking=device.type == "cuda")

    return mapped(moved, tree)


def _packed(arrays: list[Array], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to a device in one transfer."""
    begins = [0, *accumulate(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]
    host = torch.empty(begins[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    parts = [slice(begin, begin + array.nbytes) for begin, array in zip(begins, arrays)]
    for part, array in zip(parts, arrays):
        host.numpy()[part].view(array.dtype).reshape(array.shape)[...] = array
    there = host.to(device, non_blocking=device.type == "cuda")
    return [there[part].view(_tensor(array).dtype).view(array.shape) for part, array in zip(parts, arrays)]


def _tensor(array: Array) -> torch.Tensor:
    """Return a tensor in the memory of an array, which is read-only if it is mapped."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


@cache
def type_of(dtype: np.dtype[Any]) -> torch.dtype | None:
    """Return the dtype of PyTorch for a dtype of NumPy; None without one."""
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype if dtype.kind in "biufc" else None
    except (TypeError, ValueError):  # ValueError: another byte order
        return None


def available(device: Any, option: str, advice: str = 'pass "cpu", or another device') -> torch.device:
    """Return a device with its number. Raises InvalidOption if it is missing."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # PyTorch without CUDA, or an unknown device
        raise InvalidOption(f"{option}={str(device)!r}: {str(error).partition(chr(10))[0]}; {advice}") from error


# -- rows on a device -------------------------------------------------------------------------------------------------


class TensorBatches(Batches):
    """Batches of tensors, gathered on the device where their rows lie."""

    def __init__(
        self,
        device: str,
        trace: RecordedEpisodes,
        order: Order,
        make: Make,
        plan: DecodePlan,
        on_damage: OnDamage | None,
    ):
        """Raises InvalidOption if the device is missing, or too small for the rows."""
        self.device = available(device, "cache", CACHES)
        indices, _ = plan.distinct()
        size = plan.size_of(int(np.diff(plan.first)[indices].sum()), len(indices))
        try:
            torch.empty(size, dtype=torch.uint8, device=self.device)  # its memory is freed for the rows
        except RuntimeError as error:
            raise InvalidOption(
                f"cache={device!r}: decoded rows take {size / 1e9:.3g} GB, which {self.device} does not have: pass "
                'cache="memory", or fewer columns or episodes'
            ) from error
        super().__init__(trace, order, make, partial(_decoded_on, self.device), plan, on_damage)

    def at(self, number: int, epoch: int = 0) -> Batch:
        return self._sent(super().at(number, epoch))

    def take(self, items: Array) -> Batch:
        return self._sent(super().take(items))

    def _sent(self, batch: Batch) -> Batch:
        there: Batch = sent(batch, self.device)
        return there


def _decoded_on(device: torch.device, plan: DecodePlan) -> DecodedRows:
    rows = decoded(plan)
    return rows._replace(columns=in_tensors(rows.columns, device))


def reader_of(batches: Batches, device: torch.device) -> Batches:
    """Return batches to read at any position: these, or, from rows in memory, ones that gather tensors for a device."""
    if type(batches) is not Batches or not batches.reads_ahead or batches.has_goals:
        return batches
    return batches.with_columns(partial(in_tensors, device=_CPU, pinned=device.type == "cuda"))
