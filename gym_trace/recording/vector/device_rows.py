"""Copy arrays from a device to the host: the recorded rows of all arrays of a step in one transfer, or whole arrays.

A tree is an array, or nested dicts and tuples of arrays, with one row per lane. Copies are planned once per signature:
the library, dtype, shape and device of each array. A plan packs the bytes of all rows side by side on the device,
copies the packed bytes, and cuts them into NumPy arrays.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from gym_trace.data.tensors import JAX, PYTORCH, RawArray, is_on_device, library_of, numpy_dtype
from gym_trace.data.trees import leaves_of, mapped
from gym_trace.data.values import Array
from gym_trace.errors import raise_if_of_signal
from gym_trace.recording.vector.lanes import Lanes

_MOST_PLANS = 16  # signatures that are remembered
_KEPT = (np.ndarray, np.generic, bool, int, float, str, bytes, type(None))  # types that can be kept


class Fetched(Protocol):
    """Packed rows on their way to the host."""

    def has_arrived(self) -> bool:
        """Return True if arrays() would not wait."""

    def arrays(self) -> list[Any]:
        """Wait, then return one array per packed array. They are valid until release()."""

    def release(self) -> None:
        """Let the memory of the arrays be used again."""


class FetchedTree:
    """A tree on its way to the host. release() ends the life of its arrays."""

    def __init__(self, tree: Any, groups: list[tuple[Fetched, list[int]]], leaves: list[Any]):
        self._tree, self._groups, self._leaves = tree, groups, leaves

    def has_arrived(self) -> bool:
        try:
            return all(fetched.has_arrived() for fetched, _ in self._groups)
        except Exception as error:  # an earlier error of the device, which tree() raises, too
            raise_if_of_signal(error)
            return True

    def tree(self) -> Any:
        """Wait, then return the tree with arrays on the host, with one row per recorded lane."""
        for fetched, positions in self._groups:
            for position, array in zip(positions, fetched.arrays()):
                self._leaves[position] = array
        leaves = iter(self._leaves)
        return mapped(lambda _: next(leaves), self._tree)

    def release(self) -> None:
        for fetched, _ in self._groups:
            fetched.release()


class DeviceCopies:
    """Copies trees of a vector environment to the host.

    Args:
        lanes: the lanes of the environment, and those that are recorded.
        lag: how many steps may be on their way at the same time. With 0, fetch() returns when all rows have arrived.
    """

    def __init__(self, lanes: Lanes, lag: int):
        self._lanes, self._lag = lanes, lag
        self._plans: dict[Any, Callable[[Sequence[Any]], Fetched]] = {}

    def keep(self, tree: Any) -> Any:
        """Return a copy, on the device, that the environment cannot change; None if that is impossible.

        Without a lag, also None if no array is on a device.
        """
        try:
            has_any = self._lag or any(map(is_on_device, leaves_of(tree)))
            return mapped(_kept, tree) if has_any else None
        except Exception as error:  # a value that cannot be kept, or foreign arrays, which may raise anything
            raise_if_of_signal(error)
            return None

    def fetch(self, tree: Any) -> FetchedTree | None:
        """Begin to copy the rows of the recorded lanes; None if some value has no row per lane."""
        try:
            return self._fetch(tree)
        except Exception as error:  # see keep()
            raise_if_of_signal(error)
            return None

    def _fetch(self, tree: Any) -> FetchedTree:
        leaves = [_as_tensor(leaf) for leaf in leaves_of(tree)]
        groups: dict[Any, tuple[list[int], list[Any]]] = {}
        for position, leaf in enumerate(leaves):
            part = self._part(leaf)
            if part is None:
                leaves[position] = self._on_host(leaf)
            else:
                positions, signature = groups.setdefault(part[:2], ([], []))
                positions.append(position)
                signature.append(part[2:])
        fetched = []
        for (library, device), (positions, signature) in groups.items():
            key = library, device, tuple(signature)
            plan = self._plans.get(key)
            arrays = [leaves[position] for position in positions]
            if plan is None:
                if len(self._plans) >= _MOST_PLANS:
                    self._plans.clear()
                make = _TorchPlan if library == PYTORCH else _JaxPlan
                plan = self._plans[key] = make(arrays, self._lanes, self._lag).begin
            fetched.append((plan(arrays), positions))
        return FetchedTree(tree, fetched, leaves)

    def _part(self, leaf: Any) -> tuple[Any, ...] | None:
        """Return library, device, dtype and shape of an array that can be packed; None: it is copied by itself."""
        library = library_of(type(leaf))
        if library == PYTORCH:
            device, shape = leaf.device, leaf.shape
            is_packed = (self._lag > 0 or device.type != "cpu") and leaf.layout is sys.modules["torch"].strided
        elif library == JAX:
            device, shape = leaf.sharding, leaf.shape
            is_packed = (self._lag > 0 or is_on_device(leaf)) and _is_packed_by_jax(leaf)
        else:
            return None
        is_packed = is_packed and len(shape) > 0 and shape[0] == self._lanes.count
        return (library, device, leaf.dtype, tuple(shape)) if is_packed else None

    def _on_host(self, leaf: Any) -> Any:
        """Return the recorded rows of an array that is not packed. Raises any error."""
        if leaf is None:
            return None
        rows = self._lanes.host_rows(leaf)
        if not self._lag:
            return rows
        if type(rows) is not np.ndarray or rows.dtype == object:
            raise TypeError("the environment may change it")
        return rows.copy()


def fetched(leaves: Sequence[Any]) -> list[Any]:
    """Copy arrays on devices as a whole, all before the first is waited for; return other values as they are.

    PyTorch copies into page-locked memory, which it uses again, where the device has streams.
    """
    try:
        found, streams = list(map(_as_tensor, leaves)), {}
        for position, leaf in enumerate(found):
            if library_of(type(leaf)) == PYTORCH and is_on_device(leaf) and numpy_dtype(leaf.dtype) is not None:
                streams[leaf.device] = module = _stream_module(leaf.device)
                plain = leaf.detach().resolve_conj().resolve_neg()
                found[position] = plain.cpu() if module is None else plain.to("cpu", non_blocking=True)
        if of_jax := [i for i, leaf in enumerate(found) if library_of(type(leaf)) == JAX and is_on_device(leaf)]:
            arrays = sys.modules["jax"].device_get([found[position] for position in of_jax])
            for position, array in zip(of_jax, arrays):
                found[position] = array
        for device, module in streams.items():
            if module is not None:
                module.current_stream(device).synchronize()
        return found
    except Exception as error:  # foreign arrays may raise anything; the caller copies them one by one
        raise_if_of_signal(error)
        return list(leaves)


def _as_tensor(leaf: Any) -> Any:
    """Return an array of CuPy, Warp or another library on a device as a PyTorch tensor, if that is possible."""
    torch = sys.modules.get("torch")
    if torch is None or library_of(type(leaf)) in ("", PYTORCH, JAX) or not is_on_device(leaf):
        return leaf
    try:
        return torch.from_dlpack(leaf)
    except Exception as error:  # foreign code may raise anything
        raise_if_of_signal(error)
        return leaf


def _kept(leaf: Any) -> Any:
    leaf = _as_tensor(leaf)
    library = library_of(type(leaf))
    if library == PYTORCH:
        return leaf.detach().clone()
    if library == JAX:
        return _jax_copy()(leaf)  # the environment may donate the array
    if library or not isinstance(leaf, _KEPT) or (type(leaf) is np.ndarray and leaf.dtype == object):
        raise TypeError
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


@functools.cache
def _jax_copy() -> Any:
    jax = sys.modules["jax"]
    return jax.jit(jax.numpy.copy)


class _Slice(NamedTuple):
    """The bytes of one array in the packed bytes."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    raw: str  # name of a dtype that NumPy lacks; dtype is uint8 then

    def cut(self, packed: Array) -> Any:
        array: Array = np.ndarray(self.shape, self.dtype, packed, self.offset, self.strides)
        return RawArray(self.raw, array) if self.raw else array


class _Layout:
    """Positions of the rows of arrays in the packed bytes.

    The rows of all arrays of a lane are side by side if some lanes are recorded, because these are then gathered at
    once. Otherwise each array is contiguous.

    Args:
        forms: shape, bytes per element, dtype of NumPy, and name of a dtype that NumPy lacks, of each array.

    Attributes:
        order: positions of the arrays in the packed bytes: larger elements come first, so that they are aligned.
        widths: bytes per row of each array.
    """

    def __init__(self, forms: Sequence[tuple[tuple[int, ...], int, np.dtype[Any], str]], lanes: Lanes):
        self.numbers, self.count = lanes.numbers, lanes.count
        self.widths = [math.prod(shape[1:]) * size for shape, size, *_ in forms]
        self.order = sorted(range(len(forms)), key=lambda position: -forms[position][1])
        width, offset = sum(self.widths), 0
        self.bytes = width * lanes.recorded
        slices: dict[int, _Slice] = {}
        for position in self.order:
            shape, _, dtype, raw = forms[position]
            row = np.empty((1, *shape[1:], *([forms[position][1]] if raw else [])), dtype)
            own = self.widths[position]
            stride = own if self.numbers is None else width
            slices[position] = _Slice(
                offset, (lanes.recorded, *row.shape[1:]), (stride, *row.strides[1:]), row.dtype, raw
            )
            offset += own * (lanes.recorded if self.numbers is None else 1)
        self.slices = [slices[position] for position in range(len(forms))]

    def cut(self, packed: Array) -> list[Any]:
        return [one.cut(packed) for one in self.slices]


# -- PyTorch ----------------------------------------------------------------------------------------------------------


class _TorchPlan:
    """Packs tensors by one torch.cat of their bytes, and one index_select of the recorded lanes."""

    def __init__(self, tensors: Sequence[Any], lanes: Lanes, lag: int):
        self._torch = torch = sys.modules["torch"]
        forms = []
        for tensor in tensors:
            dtype = numpy_dtype(tensor.dtype)
            raw = "" if dtype is not None else str(tensor.dtype).rpartition(".")[2]
            forms.append((tuple(tensor.shape), tensor.element_size(), dtype or np.dtype(np.uint8), raw))
        self._layout, self._device, self._lag = _Layout(forms, lanes), tensors[0].device, lag
        numbers = self._layout.numbers
        self._index = None if numbers is None else tensors[0].new_tensor(numbers, dtype=torch.int64)
        self._streams = _stream_module(self._device)
        self._side = self._streams.Stream(self._device) if self._streams is not None and lag else None
        self._free: list[_PinnedRows] = []  # buffers that no step uses

    def begin(self, tensors: Sequence[Any]) -> Fetched:
        torch, layout = self._torch, self._layout
        parts = []
        for position in layout.order:
            tensor, width = tensors[position], layout.widths[position]
            if not width:
                continue
            if tensor.requires_grad:
                tensor = tensor.detach()
            if tensor.is_conj() or tensor.is_neg():
                tensor = tensor.resolve_conj().resolve_neg()
            rows = tensor.reshape(-1) if self._index is None else tensor.reshape(layout.count, -1)
            parts.append(rows.contiguous().view(torch.uint8))
        if not parts:
            return _HostRows(layout.cut(np.empty(0, np.uint8)))
        if self._index is None:
            packed = torch.cat(parts)
        else:
            packed = torch.cat(parts, 1).index_select(0, self._index).reshape(-1)
        if self._streams is None:
            return _HostRows(layout.cut(packed.cpu().numpy()))
        rows = self._free.pop() if self._free else self._new_rows()
        rows.copy(packed)
        return rows

    def _new_rows(self) -> _PinnedRows:
        pinned = _pinned(self._layout.bytes)
        arrays = self._layout.cut(pinned.numpy())
        return _PinnedRows(self._streams, self._device, self._side, pinned, arrays, self._free)


class _PinnedRows:
    """Page-locked memory for one step. A side stream copies to it; without one, the copy blocks."""

    def __init__(self, streams: Any, device: Any, side: Any, pinned: Any, arrays: list[Any], free: list[_PinnedRows]):
        self._streams, self._device, self._side, self._pinned = streams, device, side, pinned
        self._arrays, self._free = arrays, free
        self._event = None if side is None else streams.Event()
        self._packed: Any = None  # alive until it is copied, so that its memory is not used for other tensors

    def copy(self, packed: Any) -> None:
        if self._side is None:
            self._pinned.copy_(packed)
            return
        self._side.wait_stream(self._streams.current_stream(self._device))
        self._packed = packed
        with self._streams.stream(self._side):
            self._pinned.copy_(packed, non_blocking=True)
            self._event.record(self._side)  # type: ignore[union-attr]

    def has_arrived(self) -> bool:
        return self._event is None or bool(self._event.query())

    def arrays(self) -> list[Any]:
        if self._event is not None:
            self._event.synchronize()
        self._packed = None
        return self._arrays

    def release(self) -> None:
        if self not in self._free:  # after an interrupt it may be released again
            self._free.append(self)


class _HostRows:
    """Rows that are on the host already. They count as late, so that a lag on the CPU is one."""

    def __init__(self, arrays: list[Any]):
        self._arrays = arrays

    def has_arrived(self) -> bool:
        return False

    def arrays(self) -> list[Any]:
        return self._arrays

    def release(self) -> None:
        pass


def _pinned(size: int) -> Any:
    torch = sys.modules["torch"]
    with torch.inference_mode(False):  # otherwise it could be written only in inference mode
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


@functools.cache
def _stream_module(device: Any) -> Any:
    """Return the module with the streams of a device of PyTorch, such as torch.cuda; None without one."""
    if device.type == "cpu":
        return None
    try:
        module = sys.modules["torch"].get_device_module(device)
    except RuntimeError:  # a device of an extension
        return None
    return module if hasattr(module, "Stream") and hasattr(module, "Event") and hasattr(module, "stream") else None


# -- JAX --------------------------------------------------------------------------------------------------------------


class _JaxPlan:
    """Packs arrays of JAX in one compiled function."""

    def __init__(self, arrays: Sequence[Any], lanes: Lanes, lag: int):
        jax = sys.modules["jax"]
        forms = [(tuple(array.shape), array.dtype.itemsize, array.dtype, "") for array in arrays]
        self._layout = layout = _Layout(forms, lanes)
        self._lag = lag
        np_, cast, byte = jax.numpy, jax.lax.bitcast_convert_type, jax.numpy.uint8

        def pack(arrays: list[Any]) -> Any:
            parts = []
            for position in layout.order:
                array = arrays[position]
                array = array.astype(byte) if array.dtype == bool else cast(array, byte)
                parts.append(array.reshape(layout.count, -1) if layout.numbers is not None else array.reshape(-1))
            if layout.numbers is None:
                return np_.concatenate(parts)
            return np_.take(np_.concatenate(parts, 1), layout.numbers, 0).reshape(-1)

        self._pack = jax.jit(pack) if layout.bytes else None

    def begin(self, arrays: Sequence[Any]) -> Fetched:
        if self._pack is None:
            return _HostRows(self._layout.cut(np.empty(0, np.uint8)))
        packed = self._pack(list(arrays))
        if not self._lag:
            return _HostRows(self._layout.cut(np.asarray(packed)))
        packed.copy_to_host_async()
        return _JaxRows(packed, self._layout)


class _JaxRows:
    def __init__(self, packed: Any, layout: _Layout):
        self._packed, self._layout = packed, layout
        self._is_late = not is_on_device(packed)  # see _HostRows

    def has_arrived(self) -> bool:
        return not self._is_late and bool(self._packed.is_ready())

    def arrays(self) -> list[Any]:
        return self._layout.cut(np.asarray(self._packed))

    def release(self) -> None:
        pass


def _is_packed_by_jax(array: Any) -> bool:
    dtype = array.dtype
    is_usual = isinstance(dtype, np.dtype) and dtype.kind != "c" and "int2" not in dtype.name
    return is_usual and "int4" not in dtype.name and "float4" not in dtype.name and array.is_fully_addressable
