"""Batches as tensors of PyTorch, by themselves or through a DataLoader. It takes PyTorch, and nothing else loads it.

loader = DataLoader(BatchStream(trace.windows(64, 256)), batch_size=None, num_workers=2)
loader = DataLoader(Items(trace.windows(64)), batch_size=256, shuffle=True, collate_fn=collated)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gym_trace.data.trees import mapped
from gym_trace.errors import MissingExtra
from gym_trace.playback.sampling.batches import Batches

try:
    import torch
    from torch.utils.data import Dataset, IterableDataset, get_worker_info
except ImportError as missing:
    raise MissingExtra(f"tensors need PyTorch ({missing}): pip install torch") from missing

__all__ = ["BatchStream", "Items", "collated", "tensors"]

_LOOPS = 1 << 31  # number of distinct loops: each has a seed that its workers share


def tensors(batch: Any, device: Any = None, dtype: Any = None) -> Any:
    """The arrays of a batch as tensors, which share their memory where they can. Other values stay as they are.

    device: of the tensors. dtype: of floats; None: as recorded.
    """

    def tensor(rows: Any) -> Any:
        array = np.asarray(rows)
        if array.dtype.kind not in "biufc":
            return rows
        made = torch.from_numpy(array if array.flags.writeable else array.copy())
        if device is None and dtype is None:
            return made
        return made.to(device=device, dtype=dtype if made.is_floating_point() else None, non_blocking=True)

    return mapped(tensor, batch)


class BatchStream(IterableDataset[Any]):
    """Whole batches, as dicts of tensors: for a DataLoader with batch_size=None.

    Processes of torch.distributed have a share each. Workers of the DataLoader take turns: what comes is the same, in
    the same order, with any number of them. A loop over one with workers begins where the batches are in this process,
    or with the epoch after the last one that came to its end. Rows are decoded before workers are forked; spawned ones
    decode them again, unless they are cached on disk.
    """

    def __init__(self, batches: Batches, *, device: Any = None, dtype: Any = None):
        self._batches, self._device, self._dtype = batches, device, dtype
        self._ended = torch.zeros((), dtype=torch.int64).share_memory_()  # workers pass these to later workers
        len(batches)

    def __getstate__(self) -> dict[str, Any]:
        self._share()  # a spawned worker does not know the rank
        return self.__dict__

    def __iter__(self) -> Iterator[Any]:
        self._share()
        worker, batches = get_worker_info(), self._batches
        loop = 0 if worker is None else (worker.seed - worker.id) % _LOOPS
        if worker is not None:
            batches.take_turns(worker.id, worker.num_workers)
            state = batches.state_dict()
            epoch, by = divmod(int(self._ended), _LOOPS)
            epoch -= by == loop  # another worker of this loop is through already
            if epoch > state["epoch"]:
                batches.load_state_dict({**state, "epoch": epoch, "number": 0})
        for batch in batches:
            yield tensors(batch, self._device, self._dtype)
        if worker is not None:
            self._ended.fill_(batches.state_dict()["epoch"] * _LOOPS + loop)

    def _share(self) -> None:
        rank, world_size = _rank()
        if world_size > 1:
            self._batches.share(rank, world_size)


class Items(Dataset[Any]):
    """Windows, transitions or episodes by index, for a DataLoader with a custom sampler.

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
        place = range(self._items)[item]
        return mapped(lambda rows: rows[place], self.whole)


def _rank() -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
