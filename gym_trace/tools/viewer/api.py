"""Show traces in a browser."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from gym_trace.errors import InvalidOption, warn
from gym_trace.playback.trace import TraceLike, as_trace
from gym_trace.tools.viewer import page
from gym_trace.tools.viewer.answers import Answers
from gym_trace.tools.viewer.guard import is_loopback


def serve(
    *traces: TraceLike,
    settings: Sequence[str] | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    trust: bool = False,
    env_kwargs: Mapping[str, Any] | None = None,
    make_env: Callable[..., Any] | None = None,
    atol: float = 0.0,
    rtol: float = 0.0,
    tolerances: Mapping[str, float] | None = None,
    ignore: Collection[str] = (),
    start: str = "auto",
    imports: Sequence[str] = (),
    policies: Mapping[str, str | Callable[..., Any]] | None = None,
    branches: str | os.PathLike[str] | None = None,
    on_start: Callable[[str], None] | None = None,
) -> None:
    """Serve a page that shows traces, until Ctrl-C. Needs the extra [view].

    Everyone with the address can see the traces and flag episodes in them. Traces that are still recorded grow on the
    page. Memory is bounded, however large the traces are.

    Args:
        traces: open traces, storages or directories.
        settings: name of the setting of each trace, as in gym_trace.compare(): traces of one name are its seeds. None:
            each trace is a setting.
        host: address to listen on. If it is not loopback, other machines can connect, without encryption.
        port: port to listen on; 0: a free one.
        trust, env_kwargs, make_env: how to make environments for rendering episodes, as for gym_trace.render(). Without
            trust, the page shows what a trace would import, call or open, and asks for consent.
        atol, rtol, tolerances, ignore: how renderings are compared with the recording, as for verify_trace().
        start: "auto", "replay" or "states", see gym_trace.replay.Making.
        imports: modules to import before rendering, such as modules that register environments.
        policies: policies for branches on the page by name, as for gym_trace.branch(), and also random actions and the
            versions of the run that the trace is of.
        branches: directory for the traces of such branches; None: a temporary one, removed at the end.
        on_start: called with the address, which holds a secret token, before the first request is answered.

    Raises:
        MissingExtra: starlette or uvicorn is not installed.
        OSError: the port is in use.
        TraceNotFound, InvalidOption

    Examples:
        >>> gym_trace.viewer.serve("traces/cartpole", port=8000)  # doctest: +SKIP
    """
    from gym_trace.tools.replay.making import Making  # needs gymnasium
    from gym_trace.tools.viewer.proofs import Proofs  # as above
    from gym_trace.tools.viewer.rendering import Recipe, Renderings  # as above
    from gym_trace.tools.viewer.server import Viewer, pages_of  # needs an optional package; raises if it is missing
    from gym_trace.tools.viewer.whatif import WhatIf  # as above

    if not traces:
        raise InvalidOption("traces: none; pass at least one")
    pages = pages_of(page.static_files())
    making = Making(trust, env_kwargs, make_env, atol, rtol, tolerances, ignore, start=start)
    _ = making.comparison  # raises now, not in the process that renders
    recipe = Recipe(making, tuple(imports))
    renderings, proofs = Renderings(recipe), Proofs(recipe)
    scratch = tempfile.TemporaryDirectory(prefix="gym-trace-branches-", ignore_cleanup_errors=True)
    try:
        what_if = WhatIf(recipe, policies or {}, Path(branches or scratch.name).absolute(), bool(branches))
        answers = Answers(list(map(as_trace, traces)), renderings, proofs=proofs, what_if=what_if, settings=settings)
        viewer = Viewer(answers, pages, host, port)
        if not is_loopback(host):
            warn(
                f"host {host}: other machines can connect, unencrypted; everyone with the address sees the traces and "
                "can flag episodes",
            )
        if on_start is not None:
            on_start(viewer.url)
        viewer.run()
    finally:
        proofs.close()
        renderings.close()
        scratch.cleanup()
