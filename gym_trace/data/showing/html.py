"""HTML for notebooks. All text of a trace is escaped."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from gym_trace.data.showing.pictures import thumbnail
from gym_trace.plugins import entry_points
from gym_trace.printable import printable

Array = npt.NDArray[Any]
_VIEWERS = "gym_trace.notebook_viewers"  # group of entry points
_WIDTH, _HEIGHT, _POINTS = 240, 40, 120


def page(title: str, lines: Iterable[str], *parts: str) -> str:
    """Return HTML with a title, lines of text, and parts that are already HTML."""
    body = "".join(f"<div>{_text(line)}</div>" for line in lines if line)
    return f"<div><b>{_text(title)}</b>{body}{''.join(parts)}</div>"


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{_text(name)}</th>' for name in headings)}</tr>{body}</table>"


def sparkline(values: Array, label: str) -> str:
    """Return a line chart of values, averaged in groups if there are many; "" for fewer than two values."""
    groups = [group[np.isfinite(group)] for group in np.array_split(values, min(_POINTS, max(1, len(values))))]
    with np.errstate(over="ignore"):
        means = np.array([group.mean() for group in groups if len(group)])
        scale = np.ptp(means) if len(means) else 0.0
    if len(means) < 2 or not np.isfinite(scale):
        return ""
    heights = (means - means.min()) / (scale or 1.0)
    xs = np.linspace(1, _WIDTH - 1, len(means))
    points = " ".join(f"{x:.1f},{_HEIGHT - 1 - y * (_HEIGHT - 2):.1f}" for x, y in zip(xs, heights))
    line = f'<polyline points="{points}" fill="none" stroke="currentColor"/>'
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    svg = f'<svg {size} role="img" aria-label="{_text(label)}">{line}</svg>'
    return f"<div>{svg} <small>{_text(label)}</small></div>"


def image(picture: Array) -> str:
    """Return a thumbnail of an image; see pictures.thumbnail."""
    data = base64.b64encode(thumbnail(picture)).decode("ascii")
    return f'<img src="data:image/png;base64,{data}" alt="an observation"/>'


def player(shown: Any) -> str:
    """Return the viewer of a trace or an episode as HTML; "" if it would be too large, or no viewer is installed."""
    for entry in entry_points(_VIEWERS):
        viewer_html: str = entry.load()(shown)
        return viewer_html
    return ""


def _text(value: Any) -> str:
    return escape(printable(value))
