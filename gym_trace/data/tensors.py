"""Convert arrays of other packages, such as tensors, to NumPy, without casts and without importing those packages."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from gym_trace.errors import raise_if_of_signal


@dataclass(frozen=True, eq=False)
class RawArray:
    """An array of records, or of a dtype that NumPy lacks, such as bfloat16.

    ``raw.data.view(dtype)[..., 0]`` gives the array if the dtype is known.

    Attributes:
        dtype: name of the dtype.
        data: the bytes, uint8, of shape (*shape, bytes per element).
    """

    dtype: str
    data: npt.NDArray[Any]
    __hash__ = None  # type: ignore[assignment]  # unhashable, like an array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape[:-1]

    def __len__(self) -> int:
        if self.data.ndim < 2:
            raise TypeError("an array without dimensions has no rows")
        return len(self.data)

    def __getitem__(self, row: int) -> RawArray:
        if not row < len(self):
            raise IndexError(row)
        return RawArray(self.dtype, self.data[row])

    @classmethod
    def of(cls, array: Any) -> RawArray:
        """Copy a NumPy array or scalar that holds no objects."""
        data = np.frombuffer(array.tobytes(), np.uint8)
        return cls(str(array.dtype), data.reshape(*array.shape, array.dtype.itemsize))


PYTORCH, JAX, DLPACK = "PyTorch", "JAX", "DLPack"
_MOST_TYPES = 1024  # types that are remembered
_ON_HOST = (1, 3)  # kDLCPU and kDLCUDAHost of DLPack


_libraries: dict[type, str] = {}


def library_of(kind: type) -> str:
    """Return PYTORCH, JAX, DLPACK for other arrays that may be on a device, or "" for a type of other values."""
    library = _libraries.get(kind)
    if library is None:
        if len(_libraries) >= _MOST_TYPES:
            _libraries.clear()
        library = _libraries[kind] = _find_library(kind)
    return library


def _find_library(kind: type) -> str:
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and issubclass(kind, getattr(torch, "Tensor", ())):
        return PYTORCH
    if jax is not None and issubclass(kind, getattr(jax, "Array", ())):
        return JAX
    return DLPACK if hasattr(kind, "__dlpack_device__") and not issubclass(kind, np.ndarray) else ""


def is_on_device(value: Any) -> bool:
    """Return True for an array or tensor, of any library, whose memory is not the host's."""
    library = library_of(type(value))
    if library == PYTORCH:
        return bool(value.device.type != "cpu")
    if library == JAX:
        return _is_of_device(value.sharding)
    try:
        return library == DLPACK and int(value.__dlpack_device__()[0]) not in _ON_HOST
    except Exception as error:  # foreign code may raise anything
        raise_if_of_signal(error)
        return False


@lru_cache(64)
def _is_of_device(sharding: Any) -> bool:
    return any(device.platform != "cpu" for device in sharding.device_set)


@cache
def numpy_dtype(dtype: Any) -> np.dtype[Any] | None:
    """Return a dtype of PyTorch as NumPy's; None if NumPy lacks it."""
    try:
        return sys.modules["torch"].empty(0, dtype=dtype, device="cpu").numpy().dtype  # type: ignore[no-any-return]
    except (TypeError, RuntimeError):
        return None


def is_masked(value: object) -> bool:
    """Return True for a masked array. Does not import numpy.ma, which is slow: only its importers have such arrays."""
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(value, masked.MaskedArray)


def plain_array(value: Any, warnings: list[str] | None = None) -> Any:
    """Convert lazy frames, tensors and subclasses of arrays to a NumPy array; return any other value unchanged.

    Masked arrays stay masked. A tensor of a dtype that NumPy lacks becomes a RawArray.

    Args:
        warnings: receives a warning if the tensor had to be detached.
    """
    if type(value) is np.ndarray or isinstance(value, np.generic) or is_masked(value):
        return value
    if _is_rejected_by_numpy(value):  # an exception of NumPy would cost more than the copy
        return _from_tensor(value, warnings)
    try:
        if not hasattr(value, "__array__"):
            return value
        array = np.asarray(value)
    except Exception as error:  # user code may raise anything
        raise_if_of_signal(error)
        return _from_tensor(value, warnings)
    return value if array.dtype == object and not isinstance(value, np.ndarray) else array


def _is_rejected_by_numpy(value: Any) -> bool:
    library = library_of(type(value))
    return library == PYTORCH and (
        value.device.type != "cpu" or value.requires_grad or numpy_dtype(value.dtype) is None
    )


def _from_tensor(tensor: Any, warnings: list[str] | None) -> Any:
    """Convert a tensor that NumPy rejects: it needs gradients, is on a device, is conjugate, or has a dtype that NumPy
    lacks. Return the tensor unchanged if that fails."""
    try:
        if library_of(type(tensor)) == DLPACK and hasattr(tensor, "get"):  # an array of CuPy
            return np.asarray(tensor.get())
        plain = tensor.detach() if hasattr(tensor, "detach") else tensor
        for name in ("cpu", "resolve_conj", "resolve_neg"):
            if hasattr(plain, name):
                plain = getattr(plain, name)()
        array = _raw_array(plain) if _lacks_dtype(plain) else np.asarray(plain.numpy())
    except Exception as error:  # also sparse, quantised and meta tensors
        raise_if_of_signal(error)
        return tensor
    if warnings is not None and not isinstance(array, RawArray) and not is_on_device(tensor):
        name = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        warnings.append(f"a {name} needs gradients or is lazy; each one is detached and copied")
    return array


def _lacks_dtype(tensor: Any) -> bool:
    try:
        tensor.numpy()
    except TypeError:
        return True
    return False


def _raw_array(tensor: Any) -> RawArray:
    """Return the bytes of a dense PyTorch tensor. A tensor exists, so torch is imported."""
    if tensor.is_quantized or tensor.is_sparse:
        raise TypeError
    data = tensor.contiguous().reshape(-1).view(sys.modules["torch"].uint8).numpy()
    name = str(tensor.dtype).rpartition(".")[2]
    return RawArray(name, data.reshape(*tensor.shape, tensor.element_size()).copy())
