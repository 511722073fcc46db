"""The page of the viewer for a notebook: an iframe that contains some episodes."""

from __future__ import annotations

from contextlib import suppress
from html import escape
from typing import Any

from gym_trace.data.episode import Episode
from gym_trace.errors import TraceError
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.opened import OnDisk
from gym_trace.playback.trace import Trace
from gym_trace.tools.viewer.answers import Answers
from gym_trace.tools.viewer.saving import embedded

_MOST_BYTES = 1_000_000  # limit of a cell
_MOST_STEPS = 20_000  # limit of an episode in a cell
_MOST_LISTED = 10_000  # episodes in the list of a trace
_MOST_EPISODES = 20  # limit of a trace in a cell
_HEIGHTS = {"episode": 640, "trace": 560}  # pixels


def player(shown: Any) -> str:
    """Return a page with an episode, or with a trace and its first episodes, as an iframe; "" if it would be too large.

    The iframe is sandboxed: its script reaches neither the notebook nor a server.
    """
    page = None
    with suppress(TraceError, OSError):  # the trace is damaged or was removed, or the page was not built
        page = _of_trace(shown) if isinstance(shown, Trace) else _of_episode(shown)
    if page is None:
        return ""
    kind = "trace" if isinstance(shown, Trace) else "episode"
    inside = page.replace("&", "&amp;").replace("'", "&#39;")
    style = f"width:100%;height:{_HEIGHTS[kind]}px;border:1px solid #8884;border-radius:6px"
    title = escape(f"Viewer of the {kind}")
    return f"<iframe sandbox='allow-scripts' title='{title}' style='{style}' srcdoc='{inside}'></iframe>"


def _of_trace(trace: Trace) -> str | None:
    table = trace.episodes
    if not 0 < len(table) <= _MOST_LISTED:
        return None
    first = [
        number
        for number, steps in zip(index_of(trace).whole_indices.tolist(), table["steps"].tolist())
        if steps <= _MOST_STEPS
    ]
    still = _still(trace[len(trace) // 2])
    return embedded(Answers([trace], is_shared=True), first[:_MOST_EPISODES], _MOST_BYTES, whole=True, still=still)


def _of_episode(episode: Episode) -> str | None:
    if not isinstance(episode._source, OnDisk) or episode._steps is not None or len(episode) > _MOST_STEPS:
        return None
    trace = Trace(episode._source.storage)
    table, writers = trace.episodes, trace.writers
    found = (table["episode_id"] == episode.episode_id) & (table["first_step"] == episode.first_step)
    numbers = [int(i) for i in found.nonzero()[0] if writers[table["writer"][i]] == episode.writer]
    if len(numbers) != 1:
        return None
    view, still = Answers([trace[numbers]], is_shared=True), _still(episode)
    return embedded(view, numbers, _MOST_BYTES, whole=False, still=still)


def _still(episode: Episode) -> str:
    """Return what the frame shows where scripts do not run."""
    return f'<div class="still"><p>{escape(episode._title)}</p>{"".join(reversed(episode._still))}</div>'
