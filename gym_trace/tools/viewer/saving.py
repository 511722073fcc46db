"""The page with its answers inside, as one HTML file."""

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
from gym_trace.playback.trace import TraceLike, as_trace
from gym_trace.storage.staging import replaced_file
from gym_trace.tools.viewer import container, page
from gym_trace.tools.viewer.answers import Answers, as_json
from gym_trace.tools.viewer.episode import Encoding
from gym_trace.tools.viewer.trace import ViewedTrace

MOST_BYTES = 25_000_000  # most mail servers accept it
_STEPS, _FRAMES = 32, 16  # rows of one answer, as the page asks for them
_LEVEL, _GZIP = 6, 31  # level and window of zlib
_LISTED = 64  # bytes that an episode takes in the list, at most
_SPARE = 1 << 16  # bytes that the descriptions of traces take
_WIDEST_WEBP = 16383  # pixels
_CHARSET = b'<meta charset="utf-8">'
_SCRIPT = b'<script type="module" src="app.js"></script>'
_STYLE = b'<link rel="stylesheet" href="app.css">'
_POLICY = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; img-src blob: data:; base-uri 'none'; "
    "form-action 'none'"
)


class SavedPage(NamedTuple):
    """Result of save_page.

    episodes: number in the page. left_out: number that did not fit. bytes: size of the file.
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

    It holds the pictures, numbers and steps of these episodes; long texts are cut. When it is opened, it loads nothing
    from elsewhere.

    Args:
        traces: open traces, views of some of their episodes, storages or directories.
        target: the file; it is replaced when the new one is complete.
        max_bytes: limit of the file. Episodes that do not fit, from the first one on, are left out.
        on_progress: called with episodes done, episodes in all, and bytes of the page so far.

    Raises:
        TraceError: there is no episode, or the first one does not fit.
        CorruptTrace, TraceNotFound, OSError
    """
    opened = [as_trace(trace) for trace in traces]
    total = sum(map(len, opened))
    if not total:
        raise TraceError("no episode to save; choose at least one")
    answers = Answers(opened, is_shared=True)
    shell = _Shell(page.static_files())
    with tempfile.TemporaryFile() as file, replaced_file(target) as staged:
        body = _Body(file, max_bytes - len(shell) - _SPARE - _LISTED * total)
        kept = _collected(answers, body, total, on_progress)
        if not sum(map(len, kept)):
            needed = body.packed_bytes + len(shell)
            why = f"the first episode alone takes {needed:,} bytes or more"
            raise TraceError(f"{target}: {why}; raise the limit of {max_bytes:,} bytes")
        _finish(answers, kept, body)
        with open(staged, "wb") as out:
            shell.write(out, body.packed({"page": "saved", "start": _start(kept)}))
    count = sum(map(len, kept))
    return SavedPage(count, total - count, os.path.getsize(target))


def embedded(answers: Answers, episodes: Iterable[int], max_bytes: int, *, whole: bool) -> str | None:
    """Return the page as HTML for a notebook, with episodes of the first trace; None if not even one of them fits.

    Args:
        episodes: their numbers; those from the first one on that does not fit are left out.
        max_bytes: limit of the page.
        whole: list all episodes of the trace; otherwise those in the page.
    """
    (trace,) = answers.traces
    shell = _Shell(page.static_files())
    with io.BytesIO() as file, io.BytesIO() as out:
        body = _Body(file, max_bytes - len(shell) - _SPARE - _LISTED * len(trace.trace))
        kept = list(takewhile(lambda number: body.take(answers_of(trace, number)), episodes))
        if not kept:
            return None
        _finish(answers, None if whole else [kept], body)
        shell.write(out, body.packed({"page": "notebook", "start": None if whole else _start([kept])}))
        return out.getvalue().decode()


def _collected(
    answers: Answers, body: _Body, total: int, on_progress: Callable[[int, int, int], None] | None
) -> list[list[int]]:
    """Take in episodes while they fit; return their numbers."""
    kept: list[list[int]] = [[] for _ in answers.traces]
    done = 0
    for trace in answers.traces:
        for episode in trace.trace.chosen.tolist():
            if not body.take(answers_of(trace, episode)):
                return kept
            kept[trace.number].append(episode)
            done += 1
            if on_progress is not None:
                on_progress(done, total, body.packed_bytes)
    return kept


def _finish(answers: Answers, kept: list[list[int]] | None, body: _Body) -> None:
    """Take in the descriptions of the traces, for these episodes alone; None: for all of them."""
    for trace, episodes in zip(answers.traces, kept or ()):
        trace.keep(episodes)
    body.add("/api/traces", as_json([trace.facts() for trace in answers.traces]).body)
    for trace in answers.traces:
        body.add(f"/api/episodes?trace={trace.number}", trace.episodes("", "", "", 0, None))
        body.add(f"/api/histograms?trace={trace.number}", as_json(trace.histograms("", "")).body)
    pair = [f"{trace}:{episode}" for trace, episodes in enumerate(kept or ()) for episode in episodes]
    if len(pair) == 2:  # so that they can be compared
        for a, b in (pair, pair[::-1]):
            url = f"/api/compare?a={_quoted(a)}&b={_quoted(b)}"
            body.add(url, answers.get("/api/compare", {"a": a, "b": b}).body)


def _start(kept: list[list[int]]) -> str | None:
    """Return what the page shows first: a single episode, or two side by side."""
    pair = [(trace, episode) for trace, episodes in enumerate(kept) for episode in episodes]
    if len(pair) > 2:
        return None
    start = f"#trace={pair[0][0]}&episode={pair[0][1]}"
    return start if len(pair) == 1 else f"{start}&compare={pair[1][0]}:{pair[1][1]}"


def answers_of(trace: ViewedTrace, number: int) -> Iterator[tuple[str, bytes]]:
    """Yield what the page may ask about an episode, and the answers."""
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
    """Return the encoding of saved pictures: WebP if Pillow is there, which takes a fraction of PNG's bytes."""
    try:
        from PIL import Image, features
    except ImportError:
        return Encoding("image/png", png)
    if not features.check("webp") or max(shape) > _WIDEST_WEBP:
        return Encoding("image/png", png)

    def encode(picture: Array) -> bytes:
        plain = picture[..., 0] if picture.ndim == 3 and picture.shape[2] == 1 else picture
        with io.BytesIO() as file:
            Image.fromarray(np.ascontiguousarray(plain)).save(file, "WEBP", lossless=True, method=1, quality=30)
            return file.getvalue()

    return Encoding("image/webp", encode)


class _Body:
    """Answers in a file, in the order in which they come, until they are too large together.

    Attributes:
        packed_bytes: about what they take in the page.
    """

    def __init__(self, file: IO[bytes], most: int):
        self._file, self._most = file, most
        self._sizes: dict[str, int] = {}
        self._end = 0
        self._compressor = zlib.compressobj(_LEVEL)
        self._compressed = 0

    @property
    def packed_bytes(self) -> int:
        return self._compressed * 4 // 3

    def take(self, answers: Iterable[tuple[str, bytes]]) -> bool:
        """Take in the answers of an episode; return False, and take in none, if they do not fit."""
        taken, end = dict(self._sizes), self._end
        for url, body in answers:
            self.add(url, body)
            if self.packed_bytes > self._most:
                break
        else:
            self._compressed += len(self._compressor.flush(zlib.Z_SYNC_FLUSH))
        if self.packed_bytes > self._most:
            self._sizes, self._end = taken, end
            return False
        return True

    def add(self, url: str, body: bytes) -> None:
        """Take in an answer."""
        self._file.seek(self._end)
        self._file.write(body)
        self._sizes[url] = len(body)
        self._end += len(body)
        self._compressed += len(self._compressor.compress(url.encode())) + len(self._compressor.compress(body))

    def packed(self, head: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield all of them as a container, compressed with gzip."""
        compressor = zlib.compressobj(_LEVEL, wbits=_GZIP)
        entries = ((url, "|u1", (size,), size) for url, size in self._sizes.items())
        yield compressor.compress(container.opening(head, entries))
        self._file.seek(0)
        for size in self._sizes.values():
            yield compressor.compress(self._file.read(size))
            yield compressor.compress(container.padding(size))
        yield compressor.flush()


class _Shell:
    """The page around the answers: its script and style inside, and a policy that allows these alone."""

    def __init__(self, files: Mapping[str, bytes]):
        html, script, style = files["index.html"], files["app.js"], files["app.css"]
        if html.count(_SCRIPT) != 1 or html.count(_STYLE) != 1 or b"</script" in script or b"</style" in style:
            raise TraceError("gym_trace/tools/viewer/static: not the page of this version; build it with 'make viewer'")
        policy = _POLICY.format(script=_hash(script), style=_hash(style))
        meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'.encode()
        html = html.replace(_CHARSET, _CHARSET + b"\n" + meta, 1)
        html = html.replace(_STYLE, b"<style>" + style + b"</style>")
        html = html.replace(_SCRIPT, b'<script type="module">' + script + b"</script>")
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
        for part in compressed:
            rest += part
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
