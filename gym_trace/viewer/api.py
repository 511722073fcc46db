"""See traces in a browser."""

from __future__ import annotations

from collections.abc import Callable

from gym_trace.errors import InvalidOption
from gym_trace.playback.trace import TraceLike, as_trace
from gym_trace.viewer import page
from gym_trace.viewer.answers import Answers


def serve(
    *traces: TraceLike,
    host: str = "127.0.0.1",
    port: int = 0,
    on_start: Callable[[str], None] | None = None,
) -> None:
    """Serve a page that shows traces, until Ctrl-C. Needs the extra [view].

    Everyone with the address can see the traces and flag episodes in them. Traces that are still recorded grow on the
    page. Memory is bounded, however large they are.

    Args:
        traces: open traces, storages or directories.
        host: address to listen on. Others than loopback let other machines in: the connection is not encrypted.
        port: 0: a free one.
        on_start: called with the address, which holds a secret token, before the first request is answered.

    Raises:
        MissingExtra: starlette or uvicorn is not installed.
        OSError: the port is taken.
        TraceNotFound
    """
    from gym_trace.viewer.server import Viewer, pages_of  # needs an optional package; raises if it is missing

    if not traces:
        raise InvalidOption("traces: none; pass at least one")
    pages = pages_of(page.static_files())
    viewer = Viewer(Answers([as_trace(one) for one in traces]), pages, host, port)
    if on_start is not None:
        on_start(viewer.url)
    viewer.run()
