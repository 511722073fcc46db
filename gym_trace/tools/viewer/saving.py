"""Save the page with all answers that it needs as one HTML file."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import IO, Any, NamedTuple
from urllib.parse import quote

import numpy as np

from gym_trace.data.showing.pictures import png
from gym_trace.data.values import Array
from gym_trace.errors import TraceError
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.trace import TraceLike, as_trace
from gym_trace.storage.staging import replaced_file
from gym_trace.tools.viewer import container, page
from gym_trace.tools.viewer.answers import Answers, as_json
from gym_trace.tools.viewer.episode import Encoding
from gym_trace.tools.viewer.trace import ViewedTrace

MOST_BYTES = 25_000_000  # most mail servers accept this size
_STEPS, _FRAMES = 32, 16  # rows of one answer, as requested by the page
_LEVEL, _GZIP = 6, 31  # level and window of zlib
_LIST_BYTES = 64  # limit per episode in the list
_TRACE_BYTES = 1 << 16  # limit of the descriptions of traces
_MOST_WEBP_PIXELS = 16383  # per side
_CHARSET = b'<meta charset="utf-8">'
_SCRIPT = b'<script type="module" src="app.js"></script>'
_NOSCRIPT, _APP = b"<noscript>This page needs JavaScript.</noscript>", b'<div id="app">'
_STYLE = b'<link rel="stylesheet" href="app.css">'
_POLICY = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; img-src blob: data:; base-uri 'none'; "
    "form-action 'none'"
)


class SavedPage(NamedTuple):
    """Result of save_page.

    Attributes:
        episodes: number of episodes in the page.
        left_out: number of episodes that did not fit.
        bytes: size of the file.

    Examples:
        >>> saved = gym_trace.viewer.save_page(gym_trace.open_trace("traces/cartpole")[:2], target="two.html")
        >>> saved.episodes, saved.left_out
        (2, 0)
    """

    episodes: int
    left_out: int
    bytes: int


def save_page(
    *traces: TraceLike,
    target: str | os.PathLike[str],
    max_bytes: int = MOST_BYTES,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> SavedPage:
    """Write episodes and the page that shows them to one HTML file, which a browser opens from disk.

    The file holds the images, numbers and steps of these episodes; long texts are truncated. It loads nothing from
    elsewhere.

    Args:
        traces: open traces, views, storages or directories.
        target: the file; it is replaced when the new one is complete.
        max_bytes: size limit of the file. The first episode that does not fit, and all later ones, are left out.
        on_progress: called with the episodes done, the total, and the bytes of the page so far.

    Raises:
        TraceError: there is no episode, or the first one does not fit.
        CorruptTrace, TraceNotFound, OSError

    Examples:
        >>> gym_trace.viewer.save_page("traces/cartpole", target="cartpole.html").episodes
        20
    """
    opened = [as_trace(trace) for trace in traces]
    total = sum(map(len, opened))
    if not total:
        raise TraceError("no episode to save; choose at least one")
    answers = Answers(opened, is_shared=True)
    shell = _Shell(page.static_files())
    with tempfile.TemporaryFile() as file, replaced_file(target) as staged:
        body = _Body(file, max_bytes - len(shell) - _TRACE_BYTES - _LIST_BYTES * total)
        saved = _add_episodes(answers, body, total, on_progress)
        if not sum(map(len, saved)):
            needed = body.packed_bytes + len(shell)
            why = f"the first episode alone takes {needed:,} bytes or more"
            raise TraceError(f"{target}: {why}; raise the limit of {max_bytes:,} bytes")
        _add_traces(answers, saved, body)
        with open(staged, "wb") as out:
            shell.write(out, body.packed({"page": "saved", "start": _start(saved)}))
    count = sum(map(len, saved))
    return SavedPage(count, total - count, os.path.getsize(target))


def embedded(answers: Answers, episodes: Iterable[int], max_bytes: int, *, whole: bool, still: str = "") -> str | None:
    """Return the page as HTML for a notebook, with episodes of the only trace; None if no episode fits.

    Args:
        episodes: their numbers; the first one that does not fit, and all later ones, are left out.
        max_bytes: size limit of the page.
        whole: list all episodes of the trace; otherwise only the episodes in the page.
        still: HTML that is shown where scripts do not run.
    """
    (trace,) = answers.traces
    shell = _Shell(page.static_files(), still)
    with io.BytesIO() as file, io.BytesIO() as out:
        body = _Body(file, max_bytes - len(shell) - _TRACE_BYTES - _LIST_BYTES * len(trace.trace))
        saved = list(takewhile(lambda number: body.add_if_fits(answers_of(trace, number)), episodes))
        if not saved:
            return None
        _add_traces(answers, None if whole else [saved], body)
        shell.write(out, body.packed({"page": "notebook", "start": None if whole else _start([saved])}))
        return out.getvalue().decode()


def _add_episodes(
    answers: Answers, body: _Body, total: int, on_progress: Callable[[int, int, int], None] | None
) -> list[list[int]]:
    """Add episodes while they fit; return their numbers, by trace."""
    saved: list[list[int]] = [[] for _ in answers.traces]
    done = 0
    for trace in answers.traces:
        for episode in index_of(trace.trace).whole_indices.tolist():
            if not body.add_if_fits(answers_of(trace, episode)):
                return saved
            saved[trace.number].append(episode)
            done += 1
            if on_progress is not None:
                on_progress(done, total, body.packed_bytes)
    return saved


def _add_traces(answers: Answers, saved: list[list[int]] | None, body: _Body) -> None:
    """Add the descriptions of the traces. saved: the episodes to list, by trace; None: all."""
    for trace, episodes in zip(answers.traces, saved or ()):
        trace.list_only(episodes)
        trace.read_figures()
        trace.read_agents()
    body.add("/api/traces", as_json([trace.facts() for trace in answers.traces]).body)
    for trace in answers.traces:
        body.add(f"/api/episodes?trace={trace.number}", trace.episodes("", "", "", 0, None))
        body.add(f"/api/histograms?trace={trace.number}", as_json(trace.histograms("", "")).body)
        body.add(f"/api/learning?trace={trace.number}", trace.learning("", ""))
    pair = [f"{trace}:{episode}" for trace, episodes in enumerate(saved or ()) for episode in episodes]
    if len(pair) == 2:  # so that they can be compared
        for a, b in (pair, pair[::-1]):
            url = f"/api/compare?a={_quoted(a)}&b={_quoted(b)}"
            body.add(url, answers.get("/api/compare", {"a": a, "b": b}).body)


def _start(saved: list[list[int]]) -> str | None:
    """Return the route that the page shows first: a single episode, or two side by side."""
    pair = [(trace, episode) for trace, episodes in enumerate(saved) for episode in episodes]
    if len(pair) > 2:
        return None
    start = f"#trace={pair[0][0]}&episode={pair[0][1]}"
    return start if len(pair) == 1 else f"{start}&compare={pair[1][0]}:{pair[1][1]}"


def answers_of(trace: ViewedTrace, number: int) -> Iterator[tuple[str, bytes]]:
    """Yield all requests that the page may send about an episode, and the answers."""
    viewed, of = trace.episode(number), f"trace={trace.number}&episode={number}"
    yield f"/api/episode?{of}", as_json({**trace.episode_facts(number), "renderable": False}).body
    for column in viewed.columns.values():
        name = _quoted(column.name)
        if column.kind == "numeric":
            yield f"/api/plot?{of}&column={name}&full=1", viewed.whole(column.name)
        elif column.kind == "frames":
            encoding = small_encoding(column.shape)
            for start in range(0, column.rows, _FRAMES):
                url = f"/api/frames?{of}&column={name}&from={start}&count={_FRAMES}&scale=1"
                yield url, viewed.frames(column.name, start, _FRAMES, encoding=encoding)
    for start in range(0, len(viewed.episode) + 1, _STEPS):
        yield f"/api/steps?{of}&from={start}&count={_STEPS}", as_json(viewed.steps(start, _STEPS)).body


def small_encoding(shape: tuple[int, ...]) -> Encoding:
    """Return the encoding of saved images: WebP if Pillow is installed, much smaller than PNG."""
    try:
        from PIL import Image, features
    except ImportError:
        return Encoding("image/png", png)
    if not features.check("webp") or max(shape) > _MOST_WEBP_PIXELS:
        return Encoding("image/png", png)

    def encode(picture: Array) -> bytes:
        plain = picture[..., 0] if picture.ndim == 3 and picture.shape[2] == 1 else picture
        with io.BytesIO() as file:
            Image.fromarray(np.ascontiguousarray(plain)).save(file, "WEBP", lossless=True, method=1, quality=30)
            return file.getvalue()

    return Encoding("image/webp", encode)


class _Body:
    """Answers in a temporary file, limited in size."""

    def __init__(self, file: IO[bytes], max_bytes: int):
        self._file, self._max_bytes = file, max_bytes
        self._sizes: dict[str, int] = {}
        self._end = 0
        self._compressor = zlib.compressobj(_LEVEL)
        self._compressed = 0

    @property
    def packed_bytes(self) -> int:
        """Approximate size of the answers in the page."""
        return self._compressed * 4 // 3

    def add_if_fits(self, answers: Iterable[tuple[str, bytes]]) -> bool:
        """Add the answers about an episode; if they do not fit, add none and return False."""
        sizes, end = dict(self._sizes), self._end
        for url, body in answers:
            self.add(url, body)
            if self.packed_bytes > self._max_bytes:
                break
        else:
            self._compressed += len(self._compressor.flush(zlib.Z_SYNC_FLUSH))
        if self.packed_bytes > self._max_bytes:
            self._sizes, self._end = sizes, end
            return False
        return True

    def add(self, url: str, body: bytes) -> None:
        self._file.seek(self._end)
        self._file.write(body)
        self._sizes[url] = len(body)
        self._end += len(body)
        self._compressed += len(self._compressor.compress(url.encode())) + len(self._compressor.compress(body))

    def packed(self, head: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield all answers as a container, compressed with gzip."""
        compressor = zlib.compressobj(_LEVEL, wbits=_GZIP)
        entries = ((url, "|u1", (size,), size) for url, size in self._sizes.items())
        yield compressor.compress(container.opening(head, entries))
        self._file.seek(0)
        for size in self._sizes.values():
            yield compressor.compress(self._file.read(size))
            yield compressor.compress(container.padding(size))
        yield compressor.flush()


class _Shell:
    """The page around the answers: it contains its script and style, and a policy that allows only these."""

    def __init__(self, files: Mapping[str, bytes], still: str = ""):
        html, script, style = files["index.html"], files["app.js"], files["app.css"]
        if html.count(_SCRIPT) != 1 or html.count(_STYLE) != 1 or b"</script" in script or b"</style" in style:
            raise TraceError("gym_trace/tools/viewer/static: not the page of this version; build it with 'make viewer'")
        policy = _POLICY.format(script=_hash(script), style=_hash(style))
        meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'.encode()
        html = html.replace(_CHARSET, _CHARSET + b"\n" + meta, 1)
        html = html.replace(_STYLE, b"<style>" + style + b"</style>")
        html = html.replace(_SCRIPT, b'<script type="module">' + script + b"</script>")
        if still:  # the script replaces it
            html = html.replace(_NOSCRIPT, b"").replace(_APP, _APP + still.encode(), 1)
        before, _, after = html.rpartition(b"</body>")
        self._before = before + b'<script type="application/x-gym-trace-saved">'
        self._after = b"</script>\n</body>" + after

    def __len__(self) -> int:
        """Return the bytes of the page without answers."""
        return len(self._before) + len(self._after)

    def write(self, out: IO[bytes], compressed: Iterable[bytes]) -> None:
        """Write the page with the answers, given as gzip."""
        out.write(self._before)
        rest = b""
        for data in compressed:
            rest += data
            whole = len(rest) // 3 * 3
            out.write(base64.b64encode(rest[:whole]))
            rest = rest[whole:]
        out.write(base64.b64encode(rest))
        out.write(self._after)


def _hash(text: bytes) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}"


def _quoted(text: str) -> str:
    """Quote a parameter as JavaScript's encodeURIComponent does."""
    return quote(text, safe="!~*'()")
