"""Batches as tensors of PyTorch, by themselves or through a DataLoader. It takes PyTorch, and nothing else loads it.

loader = DataLoader(BatchStream(trace.windows(64, 256)), batch_size=None, num_workers=2)
loader = DataLoader(Items(trace.windows(64)), batch_size=256, shuffle=True, collate_fn=collated)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gym_trace.errors import MissingExtra
from gym_trace.sampling.batches import Batches

try:
    import torch
    from torch.utils.data import Dataset, IterableDataset, get_worker_info
except ImportError as missing:
    raise MissingExtra(f"tensors need PyTorch ({missing}): pip install torch") from missing

__all__ = ["BatchStream", "Items", "collated", "tensors"]


def tensors(batch: Any, device: Any = None, dtype: Any = None) -> Any:
    """The arrays of a batch as tensors, which share their memory where they can. Values of any kind stay as they are.

    device: where they go. dtype: of what has a fraction; None: as it was recorded.
    """
    if isinstance(batch, dict):
        return {key: tensors(value, device, dtype) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(tensors(value, device, dtype) for value in batch)
    array = np.asarray(batch)
    if array.dtype.kind not in "biufc":
        return batch
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    if device is None and dtype is None:
        return tensor
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None, non_blocking=True)


class BatchStream(IterableDataset[Any]):  # type: ignore[misc]  # whose package need not be installed
    """Whole batches, as dicts of tensors: for a DataLoader with batch_size=None.

    Workers of the DataLoader, and processes of torch.distributed, have a share each. Rows are decoded before workers
    are forked; spawned ones decode them again, unless they are cached on disk.
    """

    def __init__(self, batches: Batches, *, device: Any = None, dtype: Any = None):
        self._batches, self._device, self._dtype = batches, device, dtype
        len(batches)

    def __iter__(self) -> Iterator[Any]:
        worker, batches = get_worker_info(), self._batches
        rank, world_size = _rank()
        if worker is not None:
            batches.share(rank * worker.num_workers + worker.id, world_size * worker.num_workers)
        elif world_size > 1:
            batches.share(rank, world_size)
        for batch in batches:
            yield tensors(batch, self._device, self._dtype)


class Items(Dataset[Any]):  # type: ignore[misc]  # whose package need not be installed
    """Windows, transitions or episodes by their number: for a DataLoader with a sampler of its own.

    With ``collate_fn=collated`` a batch is gathered at once; without, PyTorch puts it together once more.
    """

    def __init__(self, batches: Batches, *, dtype: Any = None):
        self._batches, self._dtype = batches, dtype
        len(batches)

    def __len__(self) -> int:
        return self._batches.items

    def __getitem__(self, item: int) -> Any:
        return self.__getitems__([item])[0]

    def __getitems__(self, items: list[int]) -> Any:
        return _Gathered(
            tensors(self._batches.take(np.fromiter(items, np.int64, len(items))), None, self._dtype), len(items)
        )


def collated(batch: Any) -> Any:
    """The collate_fn for Items, whose batches are together already."""
    return batch.whole if isinstance(batch, _Gathered) else batch


class _Gathered(Sequence[Any]):
    """A batch that is together already, and one item after the other for any other collate_fn than collated."""

    def __init__(self, whole: Any, items: int):
        self.whole, self._items = whole, items

    def __len__(self) -> int:
        return self._items

    def __getitem__(self, item: Any) -> Any:
        return _part(self.whole, range(self._items)[item])


def _part(batch: Any, item: int) -> Any:
    if isinstance(batch, dict):
        return {key: _part(value, item) for key, value in batch.items()}
    return tuple(_part(value, item) for value in batch) if isinstance(batch, tuple) else batch[item]


def _rank() -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
