"""Trees: nested dicts and tuples, like a space, with arrays or lists of values as leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


def mapped(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply a function to each leaf of a tree, together with the leaves at the same path of the others."""
    if isinstance(tree, dict):
        return {key: mapped(function, part, *(other[key] for other in others)) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(mapped(function, *parts) for parts in zip(tree, *others))
    return function(tree, *others)


def leaves_of(tree: Any) -> Iterator[Any]:
    """Yield the leaves of a tree, in order."""
    if isinstance(tree, (dict, tuple)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves_of(part)
    else:
        yield tree


def cut(tree: Any, begin: int, end: int | None = None) -> Any:
    """Return the rows from begin to end."""
    if isinstance(tree, dict):
        return {key: cut(part, begin, end) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(cut(part, begin, end) for part in tree)
    return tree[begin:end]


def joined(first: Any, second: Any) -> Any:
    """Concatenate the rows of two trees."""
    return mapped(_joined, first, second)


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return np.concatenate([first, second])
    return [*first, *second]
