"""Arrays of other packages, such as tensors, as NumPy has them: nothing is cast, and no such package is imported."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gym_trace.errors import raise_if_of_signal


@dataclass(frozen=True, eq=False)
class RawArray:
    """An array of a dtype that NumPy does not have by itself, such as bfloat16, or of records.

    ``raw.data.view(dtype)[..., 0]`` is the array again, where the dtype is known.

    Attributes:
        dtype: what it calls itself.
        data: its bytes, uint8, of its shape and one axis more: the bytes of an element.
    """

    dtype: str
    data: npt.NDArray[Any]
    __hash__ = None  # type: ignore[assignment]

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
        """A copy of a NumPy array, or scalar, without objects in it."""
        data = np.frombuffer(array.tobytes(), np.uint8)
        return cls(str(array.dtype), data.reshape(*array.shape, array.dtype.itemsize))


def is_masked(value: object) -> bool:
    """Whether value is a masked array. numpy.ma, which takes a while to import, is there if one is."""
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(value, masked.MaskedArray)


def plain_array(value: Any, remarks: list[str] | None = None) -> Any:
    """The NumPy array in lazy frames, a tensor, or an array of a subclass; any other value as it is.

    Masked arrays stay what they are. A tensor that NumPy has no dtype for becomes a RawArray.

    Args:
        remarks: gets a sentence if it took more than to ask for the array.
    """
    if type(value) is np.ndarray or isinstance(value, np.generic) or is_masked(value):
        return value
    try:
        if not hasattr(value, "__array__"):
            return value
        array = np.asarray(value)
    except Exception as error:  # anything: other people's code runs here
        raise_if_of_signal(error)
        return _from_tensor(value, remarks)
    return value if array.dtype == object and not isinstance(value, np.ndarray) else array


def _from_tensor(tensor: Any, remarks: list[str] | None) -> Any:
    """What is in a tensor that does not become an array by itself: one that needs gradients, lies on a device, is
    conjugate, or of a dtype that NumPy lacks. If it cannot be had the tensor as it is."""
    try:
        plain = tensor.detach()
        for name in ("cpu", "resolve_conj", "resolve_neg"):
            if hasattr(plain, name):
                plain = getattr(plain, name)()
        array = _raw_array(plain) if _lacks_dtype(plain) else np.asarray(plain.numpy())
    except Exception as error:  # as above, and there are sparse, quantised, and empty ones that stand for shapes
        raise_if_of_signal(error)
        return tensor
    if remarks is not None and not isinstance(array, RawArray):
        name = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        remarks.append(f"a {name} needs gradients, lies on a device or is lazy; each one is detached and copied")
    return array


def _lacks_dtype(tensor: Any) -> bool:
    try:
        tensor.numpy()
    except TypeError:
        return True
    return False


def _raw_array(tensor: Any) -> RawArray:
    """The bytes of a dense tensor of PyTorch, which must be loaded, since there is one."""
    if tensor.is_quantized or tensor.is_sparse:
        raise TypeError
    data = tensor.contiguous().reshape(-1).view(sys.modules["torch"].uint8).numpy()
    name = str(tensor.dtype).rpartition(".")[2]
    return RawArray(name, data.reshape(*tensor.shape, tensor.element_size()).copy())
