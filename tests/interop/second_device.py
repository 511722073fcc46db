"""A second device of PyTorch where there is no GPU: its tensors lie in the memory of the CPU, and mix with no others.

They call themselves `meta`, whose operations autograd runs without a backend.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "meta"
_BETWEEN_DEVICES = ("copy_", "_to_copy")


class There(torch.Tensor):
    """Tensor on the second device."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> There:
        options = {"strides": inner.stride(), "dtype": inner.dtype, "device": NAME}
        made: There = torch.Tensor._make_wrapper_subclass(cls, inner.size(), **options)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(function, args, kwargs or {})


class SecondDevice(TorchDispatchMode):
    """There is a second device inside the block."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(function, args, kwargs or {})


def _computed(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    there = [leaf for leaf in given if isinstance(leaf, There)]
    is_mixed = any(not isinstance(leaf, There) and leaf.dim() for leaf in given)
    if there and is_mixed and function.overloadpacket.__name__ not in _BETWEEN_DEVICES:
        raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices")
    wanted = kwargs.get("device")
    stays = bool(there) if wanted is None else torch.device(wanted).type == NAME
    here, options = tree_map(lambda leaf: leaf.inner if isinstance(leaf, There) else leaf, (args, kwargs))
    result = function(*here, **(options if wanted is None else {**options, "device": "cpu"}))
    known = {id(leaf.inner): leaf for leaf in there} | {id(leaf): leaf for leaf in given}  # changed in place

    def back(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return known[id(value)] if id(value) in known else There(value) if stays else value

    return tree_map(back, result)
