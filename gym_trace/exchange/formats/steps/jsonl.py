"""Steps as JSON lines, lossless; docs/reference/steps.md describes each line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from gym_trace.data.episode import Episode
from gym_trace.data.json_values import Form, is_plain_map, json_text, rows_of, tagged
from gym_trace.data.layout import Layout, Leaf, Path
from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.steps.windows import Window
from gym_trace.playback.column_selection import ColumnSelection
from gym_trace.playback.episode_columns import MOST_OBJECTIVES

_Read = TypeVar("_Read")
OnError = Callable[[CorruptTrace], None]


def json_lines(
    windows: Iterable[Window],
    selection: ColumnSelection,
    on_error: OnError | None = None,
    identity: Callable[[Episode], str] | None = None,
) -> Iterator[str]:
    """Yield lines of strict JSON, ASCII, with line ends. windows: of the selected columns, with the same on_error.

    identity: returns the text of an episode for its key "gym_trace".
    """
    declared: dict[str, Any] = {}
    index = None
    for window in windows:
        changed, rows = {}, {}
        for root in selection.roots:
            if root != "infos" or ("infos",) in window.columns:
                declaration, rows[root] = _column(window, root, selection)
                if declaration is not None and declaration != declared.get(root):
                    changed[root] = declaration
        if changed:
            declared |= changed
            yield _line({"type": "columns", "writer": window.episode.writer, **changed})
        if window.episode.index != index:
            index = window.episode.index
            known = {} if identity is None else {KEY: identity(window.episode)}
            yield _line(_episode(window.episode, on_error) | known)
        yield from _steps(window, rows, on_error)


def _line(value: Any) -> str:
    return f"{json_text(value)}\n"


def _steps(window: Window, rows: dict[str, list[Any]], on_error: OnError | None) -> Iterator[str]:
    number, first = window.episode.index, window.first_step
    observations = rows.pop("observations", None)
    if window.opens:
        before = {} if observations is None else {"observations": observations[0]}
        if first == 0 and "infos" in rows:
            info = _unless_damaged(lambda: window.episode.reset_info, on_error)
            before |= {} if info is None else {"infos": tagged(info)}
        if before:
            yield _line({"type": "start", "episode": number, "step": first, **before})
    if observations is not None:
        after = observations[1:]
        if window.has_placeholder:
            after[-1:] = [None] * len(after[-1:])
        rows = {"observations": after, **rows}
    names = list(rows)
    for step, values in enumerate(zip(*rows.values()) if rows else (), first):
        yield _line({"type": "step", "episode": number, "step": step, **dict(zip(names, values))})


def _return(episode: Episode) -> float | list[float] | None:
    """Return the return, a list for rewards of several objectives; None where unknown, infinite or too long."""
    total = episode.total_reward
    if np.size(total) > MOST_OBJECTIVES or not np.isfinite(total).all():
        return None
    return total if isinstance(total, float) else np.ravel(total).astype(np.float64).tolist()


def _episode(episode: Episode, on_error: OnError | None) -> dict[str, Any]:
    line = {
        "type": "episode",
        "episode": episode.index,
        **{name: getattr(episode, name) for name in ("episode_id", "writer", "split", "lane", "first_step")},
        "steps": len(episode),
        "return": _return(episode),
        "outcome": episode.outcome,
        **({} if episode.has_final_observation else {"has_final_observation": False}),
        "start_time": _time(episode.start_time),
        "end_time": _time(episode.end_time),
    }
    start = _unless_damaged(
        lambda: {"seed": episode.seed, "options": episode.options, "rng_state": episode.rng_state}, on_error
    )
    return line | {name: tagged(value) for name, value in (start or {}).items()}


def _unless_damaged(read: Callable[[], _Read], on_error: OnError | None) -> _Read | None:
    """Return read(). On damage call on_error and return None; without on_error raise."""
    try:
        return read()
    except CorruptTrace as error:
        if on_error is None:
            raise
        on_error(error)
        return None


def _time(nanoseconds: int | None) -> str | None:
    return None if nanoseconds is None else f"{np.datetime64(nanoseconds, 'ns')}Z"


# -- columns ----------------------------------------------------------------------------------------------------------


def _column(window: Window, root: str, selection: ColumnSelection) -> tuple[Any, list[Any]]:
    """Return the declaration of a column, None if it has no rows to infer it from, and its rows."""
    layouts, count, columns = window.writer.layouts, window.steps, window.columns
    if root == "observations":
        return _tree(layouts.observations, columns, (root,), selection, count + 1)
    if root == "actions":
        declared, rows = _tree(layouts.actions, columns, (root,), selection, count)
    elif root == "annotations":
        parts = {path[1]: _leaf(values, None) for path, values in columns.items() if path[0] == root}
        declared, rows = _dict(parts, count)
    else:
        declared, rows = _leaf(columns[(root,)], None)
    return declared if count else None, rows


def _tree(
    layout: Layout, columns: dict[Path, Array], path: Path, selection: ColumnSelection, count: int
) -> tuple[Any, list[Any]]:
    """Return the declaration of the selected parts of a space, and their rows; no rows if columns has none."""
    if isinstance(layout, Leaf):
        return _leaf(columns.get(path), layout)
    if path in columns:  # some rows of the window lack the structure of the space
        declared, _ = _tree(layout, {}, path, selection, 0)
        return declared, [{"$value": tagged(value)} for value in columns[path]]
    keys: list[Any] = list(range(len(layout.children))) if layout.keys is None else layout.keys
    parts = {
        key: _tree(child, columns, (*path, key), selection, count)
        for key, child in zip(keys, layout.children)
        if any(map(selection.takes, (leaf.path for leaf in child.leaves())))
    }
    if layout.keys is None:
        parts = {key: parts.get(key, (None, [None] * count)) for key in keys}
        return {"tuple": [declared for declared, _ in parts.values()]}, _rows(
            [rows for _, rows in parts.values()], count
        )
    declared, rows = _dict(parts, count)
    return {"dict": declared}, rows


def _dict(parts: dict[Any, tuple[Any, list[Any]]], count: int) -> tuple[Any, list[Any]]:
    """Return a map of the declarations of parts, and their rows as maps."""
    keys = list(parts)
    rows = _rows([rows for _, rows in parts.values()], count)
    return _map(keys, [declared for declared, _ in parts.values()]), [_map(keys, row) for row in rows]


def _rows(columns: list[list[Any]], count: int) -> list[Any]:
    return list(map(list, zip(*columns))) if columns else [[] for _ in range(count)]


def _map(keys: list[Any], values: list[Any]) -> Any:
    """Return a map of JSON values in the form of tagged()."""
    if is_plain_map(keys):
        return dict(zip(keys, values))
    return {"$map": [[tagged(key), value] for key, value in zip(keys, values)]}


def _leaf(rows: Array | None, leaf: Leaf | None) -> tuple[dict[str, Any], list[Any]]:
    """Return the declaration and the rows of a leaf."""
    if rows is not None and rows.dtype != object:
        form: Form | None = Form(rows.dtype, rows.shape[1:])
    else:  # rows of several types: as the space declares
        form = None if leaf is None or leaf.dtype is None else Form(leaf.dtype, leaf.shape)
    return {"dtype": None} if form is None else form.declared(), [] if rows is None else rows_of(rows, form)
