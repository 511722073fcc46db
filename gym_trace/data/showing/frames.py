"""Tables as pandas DataFrames. pandas is imported on first use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from gym_trace.errors import MissingExtra

Array = npt.NDArray[Any]
_MOST_ELEMENTS = 64  # a value with more elements becomes one column of arrays, not one column per element


def episodes_frame(table: Array, writers: list[str], splits: list[str], seeds: list[int | None]) -> Any:
    """Return a table of episodes as a DataFrame; see Trace.to_pandas."""
    pandas = _pandas()
    duration = np.where(np.isnat(table["end_time"]), np.iinfo(np.int64).min, table["duration"]).view("m8[ns]")
    largest = max((seed for seed in seeds if seed is not None), default=0)
    columns = {
        "episode_id": table["episode_id"],
        "writer": pandas.Categorical.from_codes(*_distinct(table["writer"], writers)),
        "split": pandas.Categorical.from_codes(*_distinct(table["writer"], splits)),
        **{name: table[name].astype(np.int64) for name in ("lane", "first_step", "steps")},
        "return": table["return"],
        "outcome": pandas.Categorical(table["outcome"]),
        "seed": pandas.array(seeds, dtype="Int64" if largest < 2**63 else object),
        **{name: pandas.to_datetime(table[name], utc=True) for name in ("start_time", "end_time")},
        "duration": duration,
        "has_final_observation": table["has_final_observation"],
    }
    return pandas.DataFrame(columns, index=pandas.Index(table["index"], name="index"))


def steps_frame(trees: Mapping[str, Any], rows: int) -> Any:
    """Return a DataFrame with one row per step and one column per number; see Episode.to_pandas.

    Args:
        trees: arrays, or dicts and tuples of arrays, by name.
        rows: number of steps; extra rows of the arrays are ignored.
    """
    pandas = _pandas()
    columns = {label: values for name, tree in trees.items() for label, values in _columns(name, tree, rows)}
    return pandas.DataFrame(columns, index=pandas.RangeIndex(rows, name="step"))


def _columns(name: str, tree: Any, rows: int) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, part in tree.items():
            yield from _columns(f"{name}.{key}", part, rows)
    elif isinstance(tree, tuple):
        for i, part in enumerate(tree):
            yield from _columns(f"{name}[{i}]", part, rows)
    elif isinstance(tree, np.ndarray) and tree.ndim > 1 and 0 < tree[0:1].size <= _MOST_ELEMENTS:
        for index in np.ndindex(tree.shape[1:]):
            yield f"{name}[{', '.join(map(str, index))}]", tree[(slice(rows), *index)]
    elif isinstance(tree, np.ndarray) and tree.ndim == 1:
        yield name, tree[:rows]
    else:
        values = np.empty(rows, object)
        for i in range(rows):
            values[i] = tree[i]
        yield name, values


def _distinct(codes: Array, names: list[str]) -> tuple[Array, list[str]]:
    """Return codes and names with duplicate names merged."""
    distinct = list(dict.fromkeys(names))
    return np.array([distinct.index(name) for name in names], np.int64)[codes], distinct


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as missing:
        raise MissingExtra(f"to_pandas needs pandas ({missing}): pip install 'gym-trace[pandas]'") from missing
    return pandas
