"""Convert plain spaces (docs/FORMAT.md, section 5) to the JSON of Minari, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gym_trace.data.layout import Layout, Leaf, PlainSpace, from_array_map, leaves_in, to_array_map
from gym_trace.data.values import Array, dtype_from
from gym_trace.errors import CorruptTrace, InvalidOption, UnreadableRecording
from gym_trace.exchange.formats.images import pixels
from gym_trace.format.manifest import json_of
from gym_trace.printable import printable

_MOST_ELEMENTS = 1 << 22  # numbers in the bounds of a space; each is written as JSON
_MOST_TEXT = 256 << 20  # characters
_DEEPEST = 32
Name = tuple[str, ...]


def with_leaves(space: PlainSpace, leaves: Iterator[PlainSpace]) -> PlainSpace:
    """Return a space with its leaves replaced. leaves: in the order of leaves_in()."""
    if space["type"] == "Dict":
        return {"type": "Dict", "spaces": [[key, with_leaves(child, leaves)] for key, child in space["spaces"]]}
    if space["type"] == "Tuple":
        return {"type": "Tuple", "spaces": [with_leaves(child, leaves) for child in space["spaces"]]}
    return next(leaves)


def names_of(layout: Layout, name: Name, part_of_tuple: Callable[[int], str], groups: list[str]) -> list[Name]:
    """Return Minari's names of the leaves of a space; append those of its Dicts and Tuples, with slashes, to groups."""
    if isinstance(layout, Leaf):
        return [name]
    groups.append("/".join(name))
    leaves = []
    for key, child in layout.parts():
        part = part_of_tuple(int(key)) if layout.keys is None else str(key)
        leaves += names_of(child, (*name, part), part_of_tuple, groups)
    return leaves


def index_in_hdf5(index: int) -> str:
    """Return the name of a part of a Tuple in HDF5; in Arrow it is the number alone."""
    return f"_index_{index}"


def text_of(length: int, characters: str) -> PlainSpace:
    """Return a Text space. characters: the allowed ones."""
    return {"type": "Text", "min_length": 0, "max_length": max(1, length), "characters": characters}


# -- export -----------------------------------------------------------------------------------------------------------


def to_json(space: PlainSpace) -> str:
    """Return the same text as minari.serialization.serialize_space(). Raises InvalidOption, CorruptTrace."""
    if sum(math.prod(leaf.get("shape", ())) for _, leaf in leaves_in(space, ())) > _MOST_ELEMENTS:
        raise InvalidOption("spaces: too many bounds for Minari")
    return json.dumps(_to_plain(space))


def _to_plain(space: PlainSpace) -> dict[str, Any]:
    kind = space["type"]
    if kind == "Dict":
        return {"type": kind, "subspaces": {str(key): _to_plain(child) for key, child in space["spaces"]}}
    if kind == "Tuple":
        return {"type": kind, "subspaces": [_to_plain(child) for child in space["spaces"]]}
    if kind == "Text":
        limits = {"max_length": space["max_length"], "min_length": space["min_length"]}
        return {"type": kind, **limits, "charset": space["characters"]}
    dtype, shape = dtype_from(space["dtype"]), tuple(space.get("shape", ()))
    if kind == "Discrete":
        return {"type": kind, "dtype": "int64", "start": space["start"], "n": space["n"]}
    if kind == "MultiBinary":
        return {"type": kind, "n": list(shape) if len(shape) != 1 else shape[0]}
    names = ("low", "high") if kind == "Box" else ("nvec", "start")
    arrays = {name: from_array_map(space[name], shape).tolist() for name in names}
    return {"type": kind, "dtype": dtype.name, **({"shape": list(shape)} if kind == "Box" else {}), **arrays}


# -- import -----------------------------------------------------------------------------------------------------------


def from_json(text: Any) -> PlainSpace:
    """Invert to_json(). Raises UnreadableRecording."""
    try:
        plain = json_of(text) if isinstance(text, str) and len(text) <= _MOST_TEXT else text
        return _from_plain(plain, 0)
    except (ArithmeticError, AttributeError, CorruptTrace, LookupError, RecursionError, TypeError, ValueError) as error:
        raise UnreadableRecording(f"a space is malformed ({printable(repr(error)):.100})") from error


def _from_plain(plain: Any, depth: int) -> PlainSpace:
    kind = plain["type"]
    if depth > _DEEPEST:
        raise ValueError("nested too deep")
    if kind == "Dict":
        return {
            "type": kind,
            "spaces": [[str(key), _from_plain(child, depth + 1)] for key, child in plain["subspaces"].items()],
        }
    if kind == "Tuple":
        return {"type": kind, "spaces": [_from_plain(child, depth + 1) for child in plain["subspaces"]]}
    if kind == "Text":
        limits = {"min_length": int(plain["min_length"]), "max_length": int(plain["max_length"])}
        return {"type": kind, **limits, "characters": "".join(map(str, plain["charset"]))}
    if kind == "Discrete":
        return {"type": kind, "dtype": "<i8", "n": int(plain["n"]), "start": int(plain.get("start", 0))}
    if kind == "MultiBinary":
        shape = plain["n"] if isinstance(plain["n"], list) else [plain["n"]]
        return {"type": kind, "dtype": "|i1", "shape": _sizes(shape)}
    if kind not in ("Box", "MultiDiscrete"):
        raise ValueError(f"unsupported type {kind}")
    dtype = np.dtype(str(plain["dtype"]))
    if dtype.kind not in "biuf":
        raise ValueError(f"unsupported dtype {dtype}")
    names = ("low", "high") if kind == "Box" else ("nvec", "start")
    bounds = {name: plain.get(name, 0) if name == "start" else plain[name] for name in names}
    arrays: dict[str, Array] = {name: np.array(values, dtype) for name, values in bounds.items()}
    shape = _sizes(plain["shape"] if kind == "Box" else list(arrays["nvec"].shape))
    maps = {name: to_array_map(np.broadcast_to(array, shape)) for name, array in arrays.items()}
    return {"type": kind, "dtype": dtype.newbyteorder("<").str, "shape": shape, **maps}


def _sizes(shape: Any) -> list[int]:
    sizes = [int(n) for n in shape]
    if any(n < 0 for n in sizes) or math.prod(sizes) > _MOST_ELEMENTS:
        raise ValueError("invalid size")
    return sizes


def is_picture(space: PlainSpace) -> bool:
    """Return True if Minari may have stored values of this space as JPEG."""
    shape = space.get("shape", ())
    if space["type"] != "Box" or space["dtype"] != "|u1" or len(shape) not in (2, 3) or min(shape[:2]) < 32:
        return False
    low, high = (from_array_map(space[name], tuple(shape)) for name in ("low", "high"))
    return bool((low == 0).all() and (high == 255).all())


def jpeg_pictures(rows: Any, shape: tuple[int, ...], fault: Callable[[str], UnreadableRecording]) -> Array:
    """Decode JPEG images of Minari to (rows, *shape) uint8. rows: bytes, or uint8 arrays."""
    pictures = np.empty((len(rows), *shape), np.uint8)
    for i, row in enumerate(rows):
        raw = row if isinstance(row, bytes) else np.asarray(row, np.uint8).tobytes()
        try:
            pictures[i] = pixels(raw, (*shape, 1)[:3], formats=("JPEG",)).reshape(shape)
        except ValueError as error:
            raise fault(f"unreadable image ({error!s:.200})") from error
    return pictures
