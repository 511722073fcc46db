"""Readers of the features of steps: arrays or values for a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gym_trace.data.layout import Layout, Leaf, PlainSpace
from gym_trace.data.schema import Layouts
from gym_trace.exchange.formats.foreign import widest
from gym_trace.exchange.formats.images import pixels
from gym_trace.exchange.formats.rlds.examples import FeatureList, ListReader, MalformedExample
from gym_trace.exchange.formats.rlds.exporter import name_of
from gym_trace.exchange.formats.rlds.features import Feature, Features
from gym_trace.exchange.formats.rlds.values import unpacked
from gym_trace.exchange.formats.rows import custom, placeholder

_VALUE_BYTES = 1024  # assumed size of a row without a fixed size
ReadRows = Callable[[int], Any]


class StepColumns:
    """The observations and actions of a record, read from its beginning to its end."""

    def __init__(self, layouts: Layouts, steps: Features, lists: dict[str, FeatureList], ours: bool):
        self.row_size = 1
        self._ours, self._lists = ours, lists
        self._readers: dict[tuple[str | int, ...], tuple[ReadRows, Feature]] = {}
        self._layouts = layouts
        for name, layout in (("observation", layouts.observations), ("action", layouts.actions)):
            self._open(layout, steps.get(name), f"steps/{name}")

    def _open(self, layout: Layout, feature: Feature | Features | None, name: str) -> None:
        if isinstance(layout, Leaf):
            if not isinstance(feature, Feature) or name not in self._lists:
                raise MalformedExample(f"{name}: missing")
            self._readers[layout.path] = reader_of(ListReader(self._lists[name]), feature, self._ours), feature
            fixed = feature.kind == "tensor" or feature.kind == "image"
            self.row_size += (feature.numbers * feature.dtype.itemsize if fixed else 0) or _VALUE_BYTES
            return
        parts = feature if isinstance(feature, dict) else {}
        for key, child in layout.parts():
            called = name_of(key) if self._ours else str(key)
            self._open(child, parts.get(called), f"{name}/{called}")

    def observations(self, count: int) -> Any:
        """ReadRows the next `count` rows. Raises MalformedExample."""
        return self._joined(self._layouts.observations, lambda read, _: read(count))

    def actions(self, count: int) -> Any:
        """ReadRows the next `count` rows. Raises MalformedExample."""
        return self._joined(self._layouts.actions, lambda read, _: read(count))

    def unknown(self) -> Any:
        """Return a placeholder for a missing observation."""
        return self._joined(
            self._layouts.observations, lambda _, one: placeholder(None if one.kind == "text" else one.dtype, one.sizes)
        )

    def _joined(self, layout: Layout, rows: Callable[[ReadRows, Feature], Any]) -> Any:
        return layout.join(rows(*self._readers[leaf.path]) for leaf in layout.leaves())


def reader_of(rows: ListReader, feature: Feature, ours: bool) -> ReadRows:
    """Return a function that reads the next `count` rows: an array, or a list of values."""

    def read(count: int) -> Any:
        values = values_of(rows, feature, count)
        if feature.kind != "text":
            return values
        return list(unpacked(values)) if ours else [text.decode(errors="replace") for text in values]

    return read


def values_of(rows: ListReader, feature: Feature, count: int) -> Any:
    """ReadRows the next `count` rows: an array; a list of bytes for text; a list of arrays for images of any size."""
    if feature.kind == "text":
        return rows.values(count)
    if feature.kind == "image":
        try:
            pictures = [pixels(data, feature.shape) for data in rows.values(count)]
        except ValueError as error:
            raise MalformedExample(str(error)) from error
        return pictures if None in feature.shape else np.array(pictures, np.uint8).reshape(count, *feature.sizes)
    dtype, shape, numbers = feature.dtype, feature.sizes, feature.numbers
    if feature.encoding in ("bytes", "zlib"):
        size = numbers * dtype.itemsize
        raw = (rows.raw if feature.encoding == "bytes" else rows.inflated)(count, size)
        return np.frombuffer(raw, dtype).reshape(count, *shape)
    found = (rows.floats if dtype.kind == "f" else rows.integers)(count * numbers)
    return found.astype(dtype, copy=False).reshape(count, *shape)


def space_of(feature: Feature | Features) -> PlainSpace:
    """Return the widest space of the rows of a feature, as plain data (docs/FORMAT.md, section 5)."""
    if isinstance(feature, dict):
        return {"type": "Dict", "spaces": [[name, space_of(part)] for name, part in feature.items()]}
    dtype = feature.dtype
    if feature.kind == "label" and feature.classes:
        return {"type": "Discrete", "dtype": dtype.str, "n": feature.classes, "start": 0}
    if feature.kind == "text" or None in feature.shape or dtype.kind == "c":
        description = "text" if feature.kind == "text" else f"{feature.kind}s of {dtype}, shape {feature.shape}"
        return custom(description)
    return widest(dtype, feature.sizes)
