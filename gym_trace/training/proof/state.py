"""Values of a trainer as bytes: inputs of updates, states of networks, optimizers and generators. Needs PyTorch."""

from __future__ import annotations

import hashlib
import random
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, TypeAlias

import msgpack
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from gym_trace.data.packing import pack, unpack
from gym_trace.data.tensors import RawArray, plain_array
from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace, InvalidOption, UnstorableValue
from gym_trace.format.manifest import json_of

TENSOR = 64  # extension type of MessagePack: a safetensors file of one tensor
_CUDA = "cuda:"
_DEVICE = "device"  # metadata of such a file, if it was not the CPU

Parts = Mapping[str, Any]
Devices: TypeAlias = "str | Mapping[str, str] | None"  # replaces the logged GPUs: all, those that are keys, or none


def packed(value: Any, name: str) -> bytes:
    """Return numbers, text, arrays, tensors, and lists and dicts of them as MessagePack. Raises InvalidOption."""
    try:
        return pack(_mapped(torch.Tensor, _stored, value))
    except UnstorableValue as error:
        raise InvalidOption(f"{name}: {error}") from error


def _mapped(value_type: type[Any], function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the values of a type in a tree of lists and dicts."""
    if isinstance(value, value_type):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _mapped(value_type, function, inner) for key, inner in value.items()}
    return [_mapped(value_type, function, inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _stored(tensor: torch.Tensor) -> msgpack.ExtType:
    tensor, device = tensor.detach(), device_of(tensor)
    return msgpack.ExtType(TENSOR, save({"": tensor.contiguous()}, None if device is True else {_DEVICE: device}))


def unpacked(data: Any, devices: Devices = None) -> Any:
    """Return the value of packed(), with lists for tuples. devices: see placed().

    Raises CorruptTrace, InvalidOption.
    """
    try:
        return _mapped(msgpack.ExtType, partial(_restored, devices), unpack(data))
    except InvalidOption:
        raise
    except (TypeError, ValueError, LookupError, RuntimeError, SafetensorError) as error:
        raise CorruptTrace(f"invalid value of an update: {error}") from error


def _restored(devices: Devices, value: msgpack.ExtType) -> Any:
    if value.code != TENSOR:
        return value
    header = json_of(value.data[8 : 8 + int.from_bytes(value.data[:8], "little")])
    return placed(load(value.data)[""], header.get("__metadata__", {}).get(_DEVICE, True), devices)


def device_of(tensor: torch.Tensor) -> str | Literal[True]:
    """Return the device of a tensor as a log stores it: True for the CPU."""
    return True if tensor.device.type == "cpu" else str(tensor.device)


def placed(tensor: torch.Tensor, logged: Any, devices: Devices) -> torch.Tensor:
    """Move a tensor to its logged device, from device_of(), or to the one of `devices` that replaces it.

    Raises InvalidOption if the device is missing.
    """
    if logged is True:
        return tensor
    target = _target(str(logged), devices)
    try:
        return tensor.to(target)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # PyTorch without CUDA, or an unknown device
        raise _missing(str(logged), target, str(error).partition("\n")[0]) from error


def _target(logged: str, devices: Devices) -> str:
    return devices.get(logged, logged) if isinstance(devices, Mapping) else devices or logged


def _missing(logged: str, target: str, problem: str) -> InvalidOption:
    return InvalidOption(
        f"device: the log has values of {logged}, and {target} cannot be used here: {problem}; pass another device"
    )


def distance(then: Any, now: Any) -> str:
    """Return the largest distance of two arrays of one shape; for floats also in units in the last place (ulps)."""
    if type(then) is not type(now) or then.dtype != now.dtype:
        return f"of type {now.dtype}"
    before, after = _numbers(then), _numbers(now)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(before - after)
    finite = np.isfinite(apart)
    if not apart[finite].any():
        return "another NaN, infinity or sign of zero"
    text = f"{apart[finite].max():.3g} away"
    if before.dtype.kind == "c" or not (
        then.is_floating_point() if isinstance(then, torch.Tensor) else then.dtype.kind == "f"
    ):
        return text
    info = torch.finfo(then.dtype) if isinstance(then, torch.Tensor) else np.finfo(then.dtype)
    exponents = np.frexp(np.maximum(np.abs(before), np.abs(after))[finite])[1]
    ulps = apart[finite] / np.ldexp(float(info.eps), np.maximum(exponents - 1, np.frexp(float(info.tiny))[1] - 1))
    return f"{text} ({ulps.max():.3g} ulps)"


def _numbers(array: Any) -> Any:
    if isinstance(array, torch.Tensor):
        return array.to(torch.complex128 if array.is_complex() else torch.float64).numpy()
    return np.asarray(array, np.complex128 if array.dtype.kind == "c" else np.float64)


def digest_of(data: Any) -> str:
    """Return the BLAKE2b digest of bytes or of an array, in hexadecimal."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# -- parts ------------------------------------------------------------------------------------------------------------


def state_of(parts: Parts) -> bytes:
    """Return the state of all parts as bytes. Raises InvalidOption for a part without state_dict()."""
    return packed({name: _state(name, part) for name, part in parts.items()}, "parts")


def state_digest(parts: Parts) -> str:
    """Return a BLAKE2b digest of the state of all parts, in hexadecimal, without a copy of tensors in memory."""
    found = hashlib.blake2b(digest_size=16)

    def added(tensor: torch.Tensor) -> list[Any]:
        found.update(_bytes_of(tensor).data)
        return [str(tensor.dtype), list(tensor.shape)]

    found.update(
        packed({name: _mapped(torch.Tensor, added, _state(name, part)) for name, part in parts.items()}, "parts")
    )
    return found.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> Array:
    array = plain_array(tensor.detach())
    return np.ascontiguousarray(array.data if isinstance(array, RawArray) else array).reshape(-1).view(np.uint8)


def _state(name: str, part: Any) -> Any:
    if isinstance(part, torch.Generator):
        return part.get_state()
    if isinstance(part, np.random.Generator):
        return part.bit_generator.state
    if not hasattr(part, "state_dict"):
        raise InvalidOption(f"parts: {name} is a {type(part).__name__} without state_dict(); pass modules, optimizers, "
                            "schedulers or generators")  # fmt: skip
    return part.state_dict()


def restore(parts: Parts, state: Mapping[str, Any]) -> None:
    """Restore the state of parts. Raises InvalidOption if it does not fit them."""
    if set(parts) != set(state):
        raise InvalidOption(f"parts: pass {', '.join(state)}, as the log has them; these are {', '.join(parts)}")
    for name, part in parts.items():
        try:
            if isinstance(part, torch.Generator):
                part.set_state(state[name])
            elif isinstance(part, np.random.Generator):
                part.bit_generator.state = state[name]
            else:
                part.load_state_dict(state[name])
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            problem = str(error).splitlines()[0]
            raise InvalidOption(f"parts: {name} does not fit its state in the log: {problem}") from error


def norms_of(parts: Parts) -> dict[str, float]:
    """Return the Euclidean norm of the parameters of each module."""
    with torch.no_grad():
        return {
            name: float(sum(float(tensor.detach().double().square().sum()) for tensor in part.parameters()) ** 0.5)
            for name, part in parts.items()
            if isinstance(part, torch.nn.Module)
        }


def marks_of(parts: Parts) -> dict[str, Any]:
    """Return, for each part, a value that differs if the part does, at a fraction of the cost of a digest."""
    return {name: _mark(name, part) for name, part in parts.items()}


def _mark(name: str, part: Any) -> Any:
    if isinstance(part, torch.nn.Module):
        return [_sum(tensor) for tensor in (*part.parameters(), *part.buffers())]
    if isinstance(part, torch.optim.Optimizer):  # its moments change in step() only
        groups = [{key: value for key, value in group.items() if key != "params"} for group in part.param_groups]
        return packed(groups, name)
    return packed(_state(name, part), name)


def _sum(tensor: torch.Tensor) -> int:
    array = _bytes_of(tensor)
    words = array[: len(array) // 8 * 8].view(np.uint64)
    return int(np.add.reduce(words)) ^ zlib.crc32(array[-4096:].data)


# -- generators that functions use implicitly ------------------------------------------------------------------


def generators() -> dict[str, Any]:
    """Return the states of the global generators of PyTorch (CPU and CUDA), NumPy and random, as plain data."""
    kind, keys, *rest = np.random.get_state()
    gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    return {
        **{f"{_CUDA}{number}": torch.cuda.get_rng_state(number).numpy().tobytes() for number in gpus},
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": [str(kind), np.asarray(keys).tobytes(), *rest],
        "random": list(random.getstate()),
    }


def set_generator(name: str, state: Any, devices: Devices = None) -> None:
    """Restore a state of generators(); skip a GPU that the CPU replaces. Raises CorruptTrace, InvalidOption."""
    try:
        if name.startswith(_CUDA):
            target = torch.device(_target(name, devices))
            if target.type == "cuda":
                if (target.index or 0) >= (count := torch.cuda.device_count()):
                    raise _missing(name, str(target), f"PyTorch finds {count} GPUs")
                torch.cuda.set_rng_state(torch.from_numpy(np.frombuffer(state, np.uint8).copy()), target)
        elif name == "torch":
            torch.set_rng_state(torch.from_numpy(np.frombuffer(state, np.uint8).copy()))
        elif name == "numpy":
            kind, keys, *rest = state
            np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))
        elif name == "random":
            version, words, gauss = state
            random.setstate((version, tuple(words), gauss))
        else:
            raise ValueError("unknown generator")
    except InvalidOption:
        raise
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        raise CorruptTrace(f"invalid state of the generator {name}: {error}") from error


def made_with() -> dict[str, str]:
    """Return PyTorch version and processor features, which determine how floats are summed."""
    return {"PyTorch": torch.__version__, "processor": torch.backends.cpu.get_cpu_capability()}


def notes_on(made: Iterable[Any]) -> list[str]:
    """Return the differences between made_with() of a log and of this machine, which may explain other results."""
    return [
        f"{name} was {then}, is {now} here"
        for name, now in made_with().items()
        for then in dict.fromkeys(str(one.get(name)) if isinstance(one, dict) else None for one in made)
        if then != now
    ]


def kernels() -> dict[str, Any]:
    """Return the settings of PyTorch that determine its kernels, and the order of their sums."""
    return {"threads": torch.get_num_threads(), "deterministic": torch.are_deterministic_algorithms_enabled()}
