"""Convert arrays of other packages, such as tensors, to NumPy, without casts and without importing those packages."""

from __future__ import annotations

import sys
from dataclasses import dataclass
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


def is_masked(value: object) -> bool:
    """Return True for a masked array. Does not import numpy.ma, which is slow: only its importers have such arrays."""
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(value, masked.MaskedArray)


def plain_array(value: Any, warnings: list[str] | None = None) -> Any:
    """Convert lazy frames, tensors and subclasses of arrays to a NumPy array; return any other value unchanged.

    Masked arrays stay masked. A tensor of a dtype that NumPy lacks becomes a RawArray.

    Args:
        warnings: receives a warning if the tensor had to be detached or copied.
    """
    if type(value) is np.ndarray or isinstance(value, np.generic) or is_masked(value):
        return value
    try:
        if not hasattr(value, "__array__"):
            return value
        array = np.asarray(value)
    except Exception as error:  # user code may raise anything
        raise_if_of_signal(error)
        return _from_tensor(value, warnings)
    return value if array.dtype == object and not isinstance(value, np.ndarray) else array


def _from_tensor(tensor: Any, warnings: list[str] | None) -> Any:
    """Convert a tensor that NumPy rejects: it needs gradients, is on a device, is conjugate, or has a dtype that NumPy
    lacks. Return the tensor unchanged if that fails."""
    try:
        plain = tensor.detach()
        for name in ("cpu", "resolve_conj", "resolve_neg"):
            if hasattr(plain, name):
                plain = getattr(plain, name)()
        array = _raw_array(plain) if _lacks_dtype(plain) else np.asarray(plain.numpy())
    except Exception as error:  # also sparse, quantised and meta tensors
        raise_if_of_signal(error)
        return tensor
    if warnings is not None and not isinstance(array, RawArray):
        name = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        warnings.append(f"a {name} needs gradients, is on a device or is lazy; each one is detached and copied")
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
