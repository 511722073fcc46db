"""Values of a trainer as plain data and bytes: inputs of updates, states of networks, optimizers and generators."""

from __future__ import annotations

import hashlib
import json
import random
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from gym_trace.errors import CorruptTrace, InvalidOption, MissingExtra
from gym_trace.format.manifest import json_of
from gym_trace.model.values import Array

try:
    import torch
    from safetensors import SafetensorError
    from safetensors.numpy import load, save
except ImportError as missing:
    raise MissingExtra(f"proofs need PyTorch and safetensors ({missing}): pip install 'gym-trace[train]'") from missing

_DEPTH = 32
_NUMPY, _TORCH = "numpy", "torch"
_PLAIN = {torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8}  # which NumPy has
_SMALL = 1 << 16  # bytes

Arrays = list[Array]
Parts = Mapping[str, Any]


class Packed:
    """A tree of dicts, lists, numbers, text, arrays and tensors.

    Attributes:
        tree: plain data, with ["numpy" or "torch", number, dtype, shape] for arrays. arrays: by number, as bytes.
    """

    def __init__(self, value: Any, name: str):
        self.arrays: Arrays = []
        self.tree = self._packed(value, name)

    def _packed(self, value: Any, name: str) -> Any:
        if value is None or (isinstance(value, (bool, int, float, str)) and type(value).__module__ == "builtins"):
            return value
        if isinstance(value, torch.Tensor):
            return self._added(_bytes_of(value), _TORCH, str(value.dtype)[len("torch.") :], value.shape)
        if isinstance(value, (np.ndarray, np.generic)):
            array = np.ascontiguousarray(value)
            if array.dtype.kind not in "biufc":
                raise InvalidOption(f"{name}: an array of {array.dtype} cannot be logged; pass numbers")
            return self._added(array.reshape(-1).view(np.uint8), _NUMPY, array.dtype.str, np.shape(value))
        if isinstance(value, Mapping):
            return {"d": [[key, self._packed(inner, f"{name}/{key}")] for key, inner in value.items()]}
        if isinstance(value, (list, tuple)):
            return {"l": [self._packed(inner, f"{name}/{at}") for at, inner in enumerate(value)]}
        kind = type(value).__name__
        raise InvalidOption(f"{name}: a {kind} cannot be logged; pass numbers, arrays, tensors, dicts or lists")

    def _added(self, array: Array, kind: str, dtype: str, shape: tuple[int, ...]) -> list[Any]:
        self.arrays.append(array)
        return [kind, len(self.arrays) - 1, dtype, list(shape)]

    def stored(self) -> list[Any]:
        """Return JSON of the tree, and the arrays as a safetensors file."""
        return [json.dumps(self.tree), save({str(number): array for number, array in enumerate(self.arrays)})]

    def digest(self) -> str:
        """Return a BLAKE2b digest of everything."""
        found = hashlib.blake2b(json.dumps(self.tree).encode(), digest_size=16)
        for array in self.arrays:
            found.update(array.data)
        return found.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> Array:
    """Return the bytes of a tensor, in its memory if that is possible."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        tensor = tensor.cpu().contiguous()
    if tensor.dtype not in _PLAIN:
        tensor = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    rows: Array = tensor.numpy().reshape(-1).view(np.uint8)
    return rows


def unpacked(stored: Any) -> Any:
    """Return the value of Packed.stored(). Raises CorruptTrace."""
    try:
        text, data = stored
        return _unpacked(json_of(text), load(data), 0)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, SafetensorError) as error:
        raise CorruptTrace(f"no value of an update: {error}") from error


def _unpacked(tree: Any, arrays: Mapping[str, Array], depth: int) -> Any:
    if depth > _DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(tree, dict) and "d" in tree:
        return {key: _unpacked(inner, arrays, depth + 1) for key, inner in tree["d"]}
    if isinstance(tree, dict):
        return [_unpacked(inner, arrays, depth + 1) for inner in tree["l"]]
    if isinstance(tree, list):
        kind, number, dtype, shape = tree
        return as_value(kind, arrays[str(number)], str(dtype), shape)
    return tree


def as_value(kind: str, data: Array, dtype: str, shape: Any) -> Any:
    """Return an array or a tensor of bytes."""
    if kind == _NUMPY:
        return data.view(np.dtype(dtype)).reshape(shape)
    wanted = getattr(torch, dtype)
    if not isinstance(wanted, torch.dtype):
        raise ValueError(f"no dtype {dtype!r}")
    if not data.size:
        return torch.empty(shape, dtype=wanted)
    return torch.from_numpy(data.copy()).view(wanted).reshape(shape)


# -- parts ------------------------------------------------------------------------------------------------------------


def state_of(parts: Parts) -> Packed:
    """Return the state of all parts. Raises InvalidOption for one that has none."""
    return Packed({name: _state(name, part) for name, part in parts.items()}, "")


def _state(name: str, part: Any) -> Any:
    if isinstance(part, torch.Generator):
        return part.get_state()
    if isinstance(part, np.random.Generator):
        return json.dumps(part.bit_generator.state, default=lambda array: array.tolist())
    if not hasattr(part, "state_dict"):
        raise InvalidOption(f"parts: {name} is a {type(part).__name__} without state_dict(); pass modules, optimizers, "
                            "schedulers or generators")  # fmt: skip
    return part.state_dict()


def restore(parts: Parts, state: Mapping[str, Any]) -> None:
    """Bring parts into a state. Raises InvalidOption if they are other ones."""
    if set(parts) != set(state):
        raise InvalidOption(f"parts: pass {', '.join(state)}, as the log has them; these are {', '.join(parts)}")
    for name, part in parts.items():
        try:
            if isinstance(part, torch.Generator):
                part.set_state(state[name])
            elif isinstance(part, np.random.Generator):
                part.bit_generator.state = json_of(state[name])
            else:
                part.load_state_dict(state[name])
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            problem = str(error).splitlines()[0]
            raise InvalidOption(f"parts: {name} is another one than in the log: {problem}") from error


def norms_of(parts: Parts) -> dict[str, float]:
    """Return the Euclidean norm of the parameters of each module."""
    with torch.no_grad():
        return {
            name: float(sum(float(tensor.detach().double().square().sum()) for tensor in part.parameters()) ** 0.5)
            for name, part in parts.items()
            if isinstance(part, torch.nn.Module)
        }


class Watched:
    """Notices parts that change between updates, at a fraction of the cost of a digest."""

    def __init__(self, parts: Parts):
        self._parts = parts

    def marks(self) -> dict[str, Any]:
        """Return, for each part, a value that differs if the part does."""
        return {name: _mark(name, part) for name, part in self._parts.items()}


def _mark(name: str, part: Any) -> Any:
    if isinstance(part, torch.nn.Module):
        return [_sum(tensor) for tensor in (*part.parameters(), *part.buffers())]
    if isinstance(part, torch.optim.Optimizer):  # its moments change in step() only
        return [{name: value for name, value in group.items() if name != "params"} for group in part.param_groups]
    return Packed(_state(name, part), name).digest()


def _sum(tensor: torch.Tensor) -> int:
    data = _bytes_of(tensor)
    if len(data) < _SMALL:
        return zlib.crc32(data.data)
    whole = data[: len(data) // 8 * 8].view(np.uint64)
    return int(np.add.reduce(whole)) ^ zlib.crc32(data[len(whole) * 8 :].data)


# -- generators that functions use without being told ------------------------------------------------------------------


class Generators:
    """States of the global generators of PyTorch (CPU), NumPy and random."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._numpy: Any = np.random.get_state()
        self._random = random.getstate()

    def differing(self, other: Generators) -> list[str]:
        """Return the names of those that differ."""
        found = [] if torch.equal(self._torch, other._torch) else ["torch"]
        if self._numpy[2:] != other._numpy[2:] or not np.array_equal(self._numpy[1], other._numpy[1]):
            found.append("numpy")
        return found if self._random == other._random else [*found, "random"]

    def stored(self, name: str) -> Any:
        """Return a state as plain data."""
        if name == "torch":
            return bytes(self._torch.numpy())
        if name == "numpy":
            kind, keys, *rest = self._numpy
            return [str(kind), np.asarray(keys).tobytes(), *rest]
        version, keys, gauss = self._random
        return [version, np.array(keys, np.uint64).tobytes(), gauss]


def set_generator(name: str, stored: Any) -> None:
    """Restore a state. Raises CorruptTrace."""
    try:
        if name == "torch":
            torch.set_rng_state(torch.from_numpy(np.frombuffer(stored, np.uint8).copy()))
        elif name == "numpy":
            kind, keys, *rest = stored
            np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))
        elif name == "random":
            version, keys, gauss = stored
            random.setstate((version, tuple(np.frombuffer(keys, np.uint64).tolist()), gauss))
    except (ValueError, TypeError, RuntimeError) as error:
        raise CorruptTrace(f"no state of the generator {name}: {error}") from error


def made_with() -> dict[str, str]:
    """Return what else decides how floats are summed: PyTorch, and the processor features that it uses."""
    return {"PyTorch": torch.__version__, "processor": torch.backends.cpu.get_cpu_capability()}


def kernels() -> dict[str, Any]:
    """Return the settings of PyTorch that decide which kernels compute, and in which order they add."""
    return {"threads": torch.get_num_threads(), "deterministic": torch.are_deterministic_algorithms_enabled()}
