"""Write a static site: the page, the script that reads traces in the browser, and the traces."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from gym_trace.errors import InvalidOption, TraceError
from gym_trace.format.directory import kind_of
from gym_trace.playback.episode_index import whole_of
from gym_trace.playback.trace import Trace, TraceLike, as_trace, storage_of
from gym_trace.storage.local import LocalStorage
from gym_trace.storage.staging import replaced_file
from gym_trace.tools.editing.episodes import filter_trace
from gym_trace.tools.statistics.comparison import AXES
from gym_trace.tools.viewer import page
from gym_trace.tools.viewer.answers import Answers

_LISTED = "traces.json"  # names, addresses and files of the traces: static hosts do not list directories
_COMPARED = "runs.json"  # their comparison over each axis
_READ = ("batch", "ring", "facts")  # kinds of files that the page reads, or says that it does not
_CHARSET = b'<meta charset="utf-8">'
# The page itself fetches nothing: its worker does, which a host may give a policy in a header.
_POLICY = (
    "default-src 'none'; script-src 'self'; worker-src 'self'; style-src 'self'; img-src blob: data:; "
    "base-uri 'none'; form-action 'none'"
)
_HEAD = f"""
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="gym-trace-site" content="site.js">"""


class SavedSite(NamedTuple):
    """Result of save_site.

    Attributes:
        traces: number of traces.
        episodes: number of episodes in them.
        copied: number of traces that were copied; the others already lay in the directory.
        bytes: size of the traces and the page.

    Examples:
        >>> saved = gym_trace.viewer.save_site("traces/cartpole", target="another-site")
        >>> saved.traces, saved.copied
        (1, 1)
    """

    traces: int
    episodes: int
    copied: int
    bytes: int


def save_site(
    *traces: TraceLike,
    target: str | os.PathLike[str],
    settings: Sequence[str] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> SavedSite:
    """Write a static site that shows traces: any host that serves byte ranges of files can hold it.

    The browser reads only the parts of the traces that it shows. A trace inside the directory stays where it is; the
    episodes of all others are copied there, as edit.filter() does.

    Args:
        traces: open traces, views, storages or directories.
        target: directory of the site; it is created. An existing page in it is replaced.
        settings: name of the setting of each trace, as for serve().
        on_progress: called while a trace is copied, with the bytes done and the total.

    Raises:
        InvalidOption: no trace.
        TraceError: there is no episode, or the page was not built.
        TraceExists: another trace has the name of a copied one.
        TraceNotFound, CorruptTrace, RecordingError, OSError

    Examples:
        >>> gym_trace.viewer.save_site("traces/cartpole", target="site").episodes
        20
    """
    opened = [as_trace(trace) for trace in traces]
    if not opened:
        raise InvalidOption("traces: none; pass at least one")
    if not sum(map(len, opened)):
        raise TraceError("no episode to show; choose at least one")
    files = page.static_files()
    files["index.html"] = files["index.html"].replace(_CHARSET, _CHARSET + _HEAD.encode(), 1)
    site = Path(target)
    site.mkdir(parents=True, exist_ok=True)
    listed: list[dict[str, Any]] = []
    used, copied = set[str](), 0
    answers = Answers(opened, is_shared=True, settings=settings)
    for number, trace in enumerate(opened):
        inside = _path_inside(trace, site)
        if inside is None:
            inside = _free_name(trace.directory.name, used)
            filter_trace(trace, site / inside, on_progress=on_progress)
            copied += 1
        used.add(inside)
        sizes = {
            name: (site / inside / name).stat().st_size
            for name in LocalStorage(site / inside).names()
            if kind_of(name) in _READ
        }
        url = "/".join(map(quote, Path(inside).parts)) + "/"
        about = {"name": trace.directory.name, "setting": answers.traces[number].setting, "url": url}
        listed.append({**about, "files": sorted(sizes.items())})
    files[_LISTED] = json.dumps({"traces": listed}).encode()
    compared = {x: json.loads(answers.get("/api/runs", {"x": x}).body) for x in AXES} if len(opened) > 1 else {}
    files[_COMPARED] = json.dumps(compared).encode()
    for name, data in files.items():
        with replaced_file(site / name) as staged:
            Path(staged).write_bytes(data)
    size = sum(map(len, files.values())) + sum(size for one in listed for _, size in one["files"])
    return SavedSite(len(opened), sum(map(len, opened)), copied, size)


def _path_inside(trace: Trace, site: Path) -> str | None:
    """Return the path of a whole trace below the site; None for a view, and for a trace elsewhere."""
    storage = storage_of(trace)
    if whole_of(trace) is not trace or not isinstance(storage, LocalStorage):
        return None
    path = Path(trace.directory).resolve()
    return path.relative_to(site.resolve()).as_posix() if site.resolve() in path.parents else None


def _free_name(name: str, used: set[str]) -> str:
    names = (name if not number else f"{name}-{number + 1}" for number in range(len(used) + 1))
    return next(one for one in names if one not in used)
