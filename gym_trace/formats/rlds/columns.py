"""The rows of steps: what reads each feature of a record, as the arrays or values that a trace has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gym_trace.formats.foreign import widest
from gym_trace.formats.images import pixels
from gym_trace.formats.rlds.examples import MalformedExample, RowReader, Rows
from gym_trace.formats.rlds.exporter import name_of
from gym_trace.formats.rlds.features import Feature, Features
from gym_trace.formats.rlds.values import MOST_BYTES, unpacked
from gym_trace.model.layout import Layout, Leaf, PlainSpace
from gym_trace.model.schema import Layouts

_VALUE_BYTES = 1024  # what a row of any size counts
Read = Callable[[int], Any]


class Columns:
    """The observations and actions of a record, read from its beginning to its end."""

    def __init__(self, layouts: Layouts, steps: Features, lists: dict[str, Rows], ours: bool):
        self.row_size = 1
        self._ours, self._lists = ours, lists
        self._readers: dict[tuple[str | int, ...], tuple[Read, Feature]] = {}
        self._layouts = layouts
        for name, layout in (("observation", layouts.observations), ("action", layouts.actions)):
            self._open(layout, steps.get(name), f"steps/{name}")

    def _open(self, layout: Layout, feature: Feature | Features | None, name: str) -> None:
        if isinstance(layout, Leaf):
            if not isinstance(feature, Feature) or name not in self._lists:
                raise MalformedExample(f"there is no {name}")
            self._readers[layout.path] = reader_of(RowReader(self._lists[name]), feature, self._ours), feature
            fixed = feature.kind == "tensor" or feature.kind == "image"
            self.row_size += (feature.numbers * feature.dtype.itemsize if fixed else 0) or _VALUE_BYTES
            return
        keys = range(len(layout.children)) if layout.keys is None else layout.keys
        parts = feature if isinstance(feature, dict) else {}
        for key, child in zip(keys, layout.children):
            called = name_of(key) if self._ours else str(key)
            self._open(child, parts.get(called), f"{name}/{called}")

    def observations(self, count: int) -> Any:
        """Read the next `count` rows. Raises MalformedExample."""
        return self._layouts.observations.join(
            self._readers[leaf.path][0](count) for leaf in self._layouts.observations.leaves()
        )

    def actions(self, count: int) -> Any:
        """Read the next `count` rows. Raises MalformedExample."""
        return self._layouts.actions.join(self._readers[leaf.path][0](count) for leaf in self._layouts.actions.leaves())

    def unknown(self) -> Any:
        """An observation that the source does not have."""
        return self._layouts.observations.join(
            _unknown(self._readers[leaf.path][1]) for leaf in self._layouts.observations.leaves()
        )


def _unknown(feature: Feature) -> Any:
    if feature.kind == "text":
        return [""]
    return np.full((1, *feature.sizes), np.nan if feature.dtype.kind in "fc" else 0, feature.dtype)


def joined(one: Any, other: Any) -> Any:
    """Rows, or dicts and tuples of them, one after the other."""
    if isinstance(one, dict):
        return {key: joined(part, other[key]) for key, part in one.items()}
    if isinstance(one, tuple):
        return tuple(map(joined, one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.concatenate([one, other])
    return [*one, *other]


def reader_of(rows: RowReader, feature: Feature, ours: bool) -> Read:
    """Return a function that reads the next `count` rows: an array, or a list of values of any kind."""

    def read(count: int) -> Any:
        values = values_of(rows, feature, count)
        if feature.kind != "text":
            return values
        return list(unpacked(values)) if ours else [text.decode(errors="replace") for text in values]

    return read


def values_of(rows: RowReader, feature: Feature, count: int) -> Any:
    """Read the next `count` rows: an array; a list of bytes for text; a list of arrays for images of any size."""
    if feature.kind == "text":
        return list(rows.values(count, MOST_BYTES))
    if feature.kind == "image":
        try:
            pictures = [pixels(data, feature.shape) for data in rows.values(count, MOST_BYTES)]
        except ValueError as error:
            raise MalformedExample(str(error)) from error
        return pictures if None in feature.shape else np.array(pictures, np.uint8).reshape(count, *feature.sizes)
    dtype, shape, numbers = feature.dtype, feature.sizes, feature.numbers
    if feature.encoding == "bytes":
        raw = rows.raw(count, numbers * dtype.itemsize)
        return np.frombuffer(raw.tobytes(), dtype).reshape(count, *shape)
    if feature.encoding == "zlib":
        return np.frombuffer(b"".join(rows.inflated(count, numbers * dtype.itemsize)), dtype).reshape(count, *shape)
    if dtype.kind == "f":
        return rows.floats(count * numbers).astype(dtype, copy=False).reshape(count, *shape)
    return rows.integers(count * numbers).astype(dtype, copy=False).reshape(count, *shape)


def space_of(feature: Feature | Features) -> PlainSpace:
    """The widest space that rows of a feature can be of, as plain data (docs/FORMAT.md, section 5)."""
    if isinstance(feature, dict):
        return {"type": "Dict", "spaces": [[name, space_of(part)] for name, part in feature.items()]}
    dtype = feature.dtype
    if feature.kind == "label" and feature.classes:
        return {"type": "Discrete", "dtype": dtype.str, "n": feature.classes, "start": 0}
    if feature.kind == "text" or None in feature.shape or dtype.kind == "c":
        told = "text" if feature.kind == "text" else f"{feature.kind}s of {dtype}, shape {feature.shape}"
        return {"type": "custom", "class": "", "repr": told}
    return widest(dtype, feature.sizes)
