"""Batches as tensors of PyTorch, alone or through a DataLoader.

loader = DataLoader(BatchStream(trace.windows(64, 256)), batch_size=None, num_workers=2)
loader = DataLoader(BatchItems(trace.windows(64)), batch_size=256, shuffle=True, collate_fn=collated)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from gym_trace.data.trees import leaves_of, mapped
from gym_trace.errors import MissingExtra, raise_if_of_signal
from gym_trace.playback.sampling.batches import Batches

try:
    import torch
    from torch.utils.data import Dataset, IterableDataset, get_worker_info
except ImportError as missing:
    raise MissingExtra(f"tensors need PyTorch ({missing}): pip install torch") from missing
from gym_trace.playback.sampling.on_device import TensorBatches, available, reader_of, sent, type_of

__all__ = ["BatchItems", "BatchStream", "collated", "tensors"]

_AHEAD = 2  # batches
_LOOP_IDS = 1 << 31  # a loop over a DataLoader is known by the seed that its workers share


def tensors(batch: Any, device: Any = None, dtype: Any = None) -> Any:
    """Return the numeric arrays of a batch as tensors, which share memory with writable arrays. Keep other values, and
    arrays of dtypes that PyTorch lacks.

    device: of the tensors. dtype: of floats; None: as recorded.

    Examples:
        >>> batch = next(iter(gym_trace.open_trace("traces/cartpole").windows(8, 32)))
        >>> gym_trace.exchange.torch.tensors(batch)["rewards"].shape
        torch.Size([32, 8])
    """

    def tensor(rows: Any) -> Any:
        if isinstance(rows, torch.Tensor):
            converted = rows
        else:
            array = np.asarray(rows)
            if type_of(array.dtype) is None:
                return rows
            converted = torch.from_numpy(array if array.flags.writeable else array.copy())
        if device is None and dtype is None:
            return converted
        return converted.to(device=device, dtype=dtype if converted.is_floating_point() else None, non_blocking=True)

    return mapped(tensor, batch)


class BatchStream(IterableDataset[Any]):
    """Whole batches, as dicts of tensors: for a DataLoader with batch_size=None.

    Each process of torch.distributed gets its share. Workers of the DataLoader take turns, so that any number of them
    yields the same batches in the same order. With workers, a loop begins at the position of the batches in this
    process, or with the epoch after the last complete one. Rows are decoded before workers are forked; spawned
    workers decode them again, unless they are cached on disk.

    With device="cuda", the next batches are gathered into pinned memory and copied on a stream of their own, while the
    current one is used. Iterate over the stream itself then, or use a DataLoader without workers::

        for batch in BatchStream(trace.windows(16, 256), device="cuda"):
            loss = model(batch["observations"])  # (256, 17, ...) on the GPU

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> windows = gym_trace.open_trace("traces/cartpole").windows(8, 32)
        >>> loader = DataLoader(gym_trace.exchange.torch.BatchStream(windows), batch_size=None)
        >>> next(iter(loader))["rewards"].shape
        torch.Size([32, 8])
    """

    def __init__(self, batches: Batches, *, device: Any = None, dtype: Any = None):
        """device: of the tensors. dtype: of floats; None: as recorded."""
        self._batches, self._device, self._dtype = batches, device, dtype
        # Epoch and loop of the last complete epoch: workers leave them to those of later loops.
        self._ended = torch.zeros((), dtype=torch.int64).share_memory_()
        len(batches)

    def __getstate__(self) -> dict[str, Any]:
        self._share()  # here, as a spawned worker does not know the rank
        return self.__dict__

    def __iter__(self) -> Iterator[Any]:
        self._share()
        worker, batches = get_worker_info(), self._batches
        loop = 0 if worker is None else (worker.seed - worker.id) % _LOOP_IDS
        if worker is not None:
            batches.take_turns(worker.id, worker.num_workers)
            state = batches.state_dict()
            epoch, ended_in = divmod(int(self._ended), _LOOP_IDS)
            epoch -= ended_in == loop  # another worker of this loop has already ended its epoch
            if epoch > state["epoch"]:
                batches.load_state_dict({**state, "epoch": epoch, "number": 0})
        if self._device is None:
            yield from (tensors(batch, None, self._dtype) for batch in batches)
        else:
            yield from _Transfers(batches, self._device, self._dtype)
        if worker is not None:
            self._ended.fill_(batches.state_dict()["epoch"] * _LOOP_IDS + loop)

    def _share(self) -> None:
        rank, world_size = _rank()
        if world_size > 1:
            self._batches.share(rank, world_size)


class _Transfers:
    """Batches on a device. On CUDA, the next ones are copied on a stream of their own, while the current one is used.

    The consumer's stream waits for the copy of a batch, not the host. When the consumer drops a batch, its memory is
    not used again before the work that the consumer's stream has by then is done.
    """

    def __init__(self, batches: Batches, device: Any, dtype: Any):
        """Raises InvalidOption if the device is missing."""
        self._batches, self._device, self._dtype = batches, available(device, "device"), dtype
        is_there = isinstance(batches, TensorBatches) and batches.device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" and not is_there else None

    def __iter__(self) -> Iterator[Any]:
        batches, copies = self._batches, dict[tuple[int, int], Any]()
        reader = batches if self._stream is None else reader_of(batches, self._device)
        ahead = 0 if self._stream is None or not batches.reads_ahead else _AHEAD
        for position in iter(batches.advance, None):
            before, copies = copies, {}
            for number in (position, *batches.next_positions(ahead)):
                try:
                    copies[number] = before.get(number) or self._copied(reader.at(*number))
                except Exception as error:
                    raise_if_of_signal(error)
                    if number == position:
                        raise
                    break  # it is read again, and raises, in its turn
            batch, is_copied = copies.pop(position)
            if is_copied is not None:
                consumer = torch.cuda.current_stream(self._device)
                consumer.wait_event(is_copied)
                for tensor in leaves_of(batch):
                    if isinstance(tensor, torch.Tensor):
                        tensor.record_stream(consumer)
            yield batch

    def _copied(self, batch: Any) -> tuple[Any, Any]:
        """Start to copy a batch; return it there, and the event after the copy (None: there is nothing to wait for)."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            there = sent(batch, self._device)
            if self._dtype is not None:
                there = tensors(there, None, self._dtype)
            return there, None if self._stream is None else self._stream.record_event()


class BatchItems(Dataset[Any]):
    """Windows, transitions or episodes by index, for a DataLoader with a custom sampler.

    Pass ``collate_fn=collated`` to keep each batch as it was gathered. Otherwise, PyTorch joins its items again.

    Examples:
        >>> windows = gym_trace.open_trace("traces/cartpole").windows(8)
        >>> gym_trace.exchange.torch.BatchItems(windows)[0]["rewards"].shape
        torch.Size([8])
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
    """Return a batch of BatchItems as it was gathered; for collate_fn.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> items = gym_trace.exchange.torch.BatchItems(gym_trace.open_trace("traces/cartpole").windows(8))
        >>> loader = DataLoader(items, batch_size=32, collate_fn=gym_trace.exchange.torch.collated)
        >>> next(iter(loader))["rewards"].shape
        torch.Size([32, 8])
    """
    return batch.whole if isinstance(batch, _Gathered) else batch


class _Gathered(Sequence[Any]):
    """A gathered batch, which is a sequence of its items for any collate_fn but collated()."""

    def __init__(self, whole: Any, items: int):
        self.whole, self._items = whole, items

    def __len__(self) -> int:
        return self._items

    def __getitem__(self, item: Any) -> Any:
        index = range(self._items)[item]
        return mapped(lambda rows: rows[index], self.whole)


def _rank() -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
