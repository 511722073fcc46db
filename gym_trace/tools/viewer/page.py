"""The files of the page, as npm has built them."""

from __future__ import annotations

from importlib.resources import files

from gym_trace.errors import TraceError

_NEEDED = ("index.html", "app.js", "app.css", "site.js")


def static_files() -> dict[str, bytes]:
    """Return the files of the page by name. Raises TraceError if they were not built."""
    folder = files("gym_trace.tools.viewer") / "static"
    found = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} if folder.is_dir() else {}
    if missing := [name for name in _NEEDED if name not in found]:
        raise TraceError(
            f"gym_trace/tools/viewer/static/{missing[0]}: missing; build the page with 'make viewer', or reinstall"
        )
    return found
