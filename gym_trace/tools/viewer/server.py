"""The server of the viewer. Only this module needs starlette and uvicorn."""

from __future__ import annotations

import contextlib
import json
import mimetypes
import secrets
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

from gym_trace.errors import CorruptTrace, InvalidOption, MissingExtra, TraceError
from gym_trace.tools.viewer.answers import JSON, Answer, Answers, Query, Refused, as_json
from gym_trace.tools.viewer.guard import HAS_TOKEN, Guard
from gym_trace.tools.viewer.trace import Edited

try:
    import anyio
    import anyio.to_thread
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as missing:
    raise MissingExtra(
        f"the viewer needs starlette and uvicorn ({missing}): pip install 'gym-trace[view]'"
    ) from missing

_WORKERS = 4  # threads that read traces: each has a chunk or two in memory
_MOST_CONNECTIONS = 128  # idle connections
_MOST_NEW = 512 if sys.platform == "linux" else 192  # while they are new; macOS allows 256 open files
_GRACE_SECONDS = 1.0  # younger connections are new
_POLL_SECONDS = 20.0  # after which a request for changes is answered in any case
_FLAGGED = ("good", "bad", "look", None)


class Viewer:
    """A server that listens on a port of this machine as soon as it is made.

    Args:
        answers: answers to requests of the page.
        pages: files of the page, by request path.
        host, port: address to listen on; port 0: a free one.

    Attributes:
        port: port that it listens on.
        url: address with the token, to open in a browser.

    Raises OSError if the port is in use.
    """

    def __init__(self, answers: Answers, pages: Mapping[str, Answer], host: str = "127.0.0.1", port: int = 0):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=_MOST_CONNECTIONS)
        # Connections inherit this option; asyncio does not set it for such sockets. Without it, an answer takes 40 ms.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port: int = self._socket.getsockname()[1]
        token = secrets.token_urlsafe(24)
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        if host in ("0.0.0.0", "::"):
            shown = "127.0.0.1"
        self.url = f"http://{shown}:{self.port}/?token={token}"
        app = _app(answers, pages, lambda: self._server.should_exit)
        self.app = Guard(app, token, pages, self.port, host)
        config = uvicorn.Config(
            self.app,
            log_level="error",
            access_log=False,
            server_header=False,
            date_header=False,
            limit_concurrency=_MOST_NEW + 1,  # the last one gets an error: all others are busy
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=1 << 16,
            http=_Connection,
            ws="none",
            lifespan="on",
            loop="asyncio",
        )
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        """Serve until stop() is called or a signal arrives, which is raised again."""
        try:
            with self._server.capture_signals():  # also while asyncio makes its loop, which must not be interrupted
                self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """End run() in another thread."""
        self._server.should_exit = True


class _Connection(H11Protocol):
    """A connection that is closed for a new one if there are too many, while it waits for a request.

    Other users of this machine can connect without the token. They must not lock the page out, whether they hold
    connections or open new ones again and again. So connections of the page are closed last, and new ones get time to
    send a request.
    """

    def connection_made(self, transport: Any) -> None:
        """Accept a connection; if there are too many, close the one that is idle for longest."""
        self._used = time.monotonic()
        super().connection_made(transport)
        if (count := len(self.connections)) <= _MOST_CONNECTIONS:
            return
        latest = self._used - (_GRACE_SECONDS if count <= _MOST_NEW else 0)
        others = (other for other in self.connections if isinstance(other, _Connection) and other is not self)
        idle = [other for other in others if not other._is_busy() and other._used <= latest]
        if idle:
            oldest = min(idle, key=lambda other: (other._has_token(), other._used))
            self.connections.discard(oldest)
            oldest.transport.abort()

    def _is_busy(self) -> bool:
        """Return True while a request with the token is answered. Other requests are answered at once."""
        return self._has_token() and not self.cycle.response_complete

    def _has_token(self) -> bool:
        """Return True if the last request had the token."""
        return self.cycle is not None and HAS_TOKEN in self.cycle.scope

    def data_received(self, data: bytes) -> None:
        if self._has_token():  # without it, a request that arrives slowly counts as idle
            self._used = time.monotonic()
        super().data_received(data)


def _app(answers: Answers, pages: Mapping[str, Answer], is_ending: Callable[[], bool]) -> Starlette:
    limiter: list[anyio.CapacityLimiter] = []
    refresher = _Refresher(answers)

    async def in_thread(work: Callable[[], Answer], limited: bool = True) -> Response:
        """Answer in a thread. If limited, only a few run at the same time, because each needs memory."""
        if not limiter:
            limiter.append(anyio.CapacityLimiter(_WORKERS))
        try:
            answer = await anyio.to_thread.run_sync(work, limiter=limiter[0] if limited else None)
        except Refused as refused:
            body = {"error": refused.error, "hint": refused.hint, **refused.more}
            return Response(as_json(body).body, refused.status, media_type=JSON)
        return Response(answer.body, media_type=answer.mime)

    async def page(request: Request) -> Response:
        answer = pages.get(request.url.path)
        if answer is None:
            return Response(as_json({"error": "not found", "hint": ""}).body, 404, media_type=JSON)
        return Response(answer.body, media_type=answer.mime)

    async def get(request: Request) -> Response:
        return await in_thread(partial(answers.get, request.url.path, request.query_params))

    async def changes(request: Request) -> Response:
        since = request.query_params.get("since", "0")
        known = int(since) if since.isascii() and since.isdecimal() and len(since) < 16 else 0
        end = time.monotonic() + _POLL_SECONDS
        while answers.version <= known and time.monotonic() < end and not is_ending():
            await anyio.to_thread.run_sync(refresher.refresh)
            if answers.version <= known:
                await anyio.sleep(min(refresher.pause, max(0.0, end - time.monotonic())))
        return Response(as_json(_changes(answers)).body, media_type=JSON)

    async def body_of(request: Request) -> bytes:
        try:
            return await request.body()
        except ClientDisconnect:  # in the middle of it: invalid JSON, and no page waits for the answer
            return b""

    async def flags(request: Request) -> Response:
        body = await body_of(request)
        return await in_thread(partial(_flagged, answers, body))

    names = ["traces", "episodes", "histograms", "learning", "runs"]
    names += ["heat", "episode", "plot", "frames", "steps", "compare", "filter", "marks", "branches", "fan"]

    async def render(request: Request) -> Response:
        if request.method != "POST":
            return await in_thread(partial(_progress, answers, dict(request.query_params)))
        body = await body_of(request)
        # Not limited: it waits for the environment, and must not delay other answers.
        return await in_thread(partial(_render, answers, body), limited=False)

    async def proofs(request: Request) -> Response:
        if request.method != "POST":
            return await get(request)
        body = await body_of(request)
        return await in_thread(partial(_prove, answers, body))

    routes = [Route(f"/api/{name}", get) for name in names]
    routes.append(Route("/api/render", render, methods=["GET", "POST"]))
    routes.append(Route("/api/proofs", proofs, methods=["GET", "POST"]))
    routes += [Route("/api/changes", changes), Route("/api/flags", flags, methods=["POST"])]

    def go_on(done: int, total: int) -> None:
        if is_ending():
            raise TraceError("the server ends")

    @contextlib.asynccontextmanager
    async def looking(_: Starlette) -> AsyncIterator[None]:
        """Look closely while the server runs: signals raise nothing then, and must not in an import beside a thread.

        The thread ends before Python does, which would abort the process while the thread is in C++, as in NumPy.
        """
        thread = threading.Thread(target=answers.look_closely, args=(go_on,), daemon=True)
        thread.start()
        try:
            yield
        finally:  # also after a second Ctrl-C, which cancels this coroutine
            thread.join()

    return Starlette(routes=[*routes, Route("/{path:path}", page)], lifespan=looking)


def _changes(answers: Answers) -> dict[str, Any]:
    traces = [
        {
            "trace": viewed.number,
            "version": viewed.version,
            "episodes": len(viewed.trace),
            "steps": int(viewed.trace.episodes["steps"].sum()),
            "live": viewed.is_live,
        }
        for viewed in answers.traces
    ]
    return {"version": answers.version, "traces": traces}


def _json_of(body: bytes) -> Any:
    """Return the JSON value of a body; None if it is invalid."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _render(answers: Answers, body: bytes) -> Answer:
    """Begin to render an episode. Raises Refused."""
    match _json_of(body):
        case {"trace": int(number), "episode": int(episode), "trust": bool(trust), **more}:
            position, is_asked = more.get("step", 0), more.get("asked", True)
            if type(position) is not int or type(is_asked) is not bool:
                raise Refused(400, "step: pass a whole number; asked: true or false")
        case _:
            raise Refused(400, 'pass {"trace": 0, "episode": 7, "trust": false}')
    try:
        viewed = answers.numbered(number).episode(episode)
    except IndexError as error:
        raise Refused(404, str(error)) from error
    if answers.renderings is None:
        raise Refused(409, "episodes cannot be rendered here")
    from gym_trace.tools.viewer.rendering import Consent

    try:
        return as_json({"job": str(answers.renderings.start(number, viewed, trust, position, is_asked).number)})
    except Consent as consent:
        hint = "render it only if you trust the trace"
        raise Refused(409, str(consent), hint, consent=str(consent)) from consent
    except (TraceError, OSError) as error:
        raise Refused(409, str(error)) from error


def _progress(answers: Answers, query: Mapping[str, str]) -> Answer:
    """Return the progress of a rendering. Raises Refused."""
    try:
        if answers.renderings is None:
            raise LookupError("episodes cannot be rendered here")
        return as_json(answers.renderings.numbered(Query(query).number("job")).plain())
    except LookupError as error:
        raise Refused(404, str(error)) from error


def _prove(answers: Answers, body: bytes) -> Answer:
    """Run a tool over a trace, record branches, or cancel what runs. Raises Refused."""
    if answers.proofs is None:
        raise Refused(409, "nothing can be run here")
    try:
        match _json_of(body):
            case {"trace": int(number), "tool": str(tool), "where": str(where), "trust": bool(trust)}:
                answers.proofs.start(answers.numbered(number), tool, where, trust)
            case {
                "trace": int(number),
                "episode": int(episode),
                "step": int(step),
                "policy": str(policy),
                "episodes": int(episodes),
                "seed": (int() | None) as seed,
                "trust": bool(trust),
            } if answers.what_if is not None:
                viewed = answers.numbered(number)
                plan = answers.what_if.plan(viewed, episode, step, policy, episodes, seed)
                answers.proofs.start(viewed, "branch", plan, trust, partial(answers.add_branches, plan.directory))
            case {
                "trace": int(number),
                "episode": int(episode),
                "ask": str(policy),
                "trust": bool(trust),
            } if answers.what_if is not None:
                viewed = answers.numbered(number)
                answers.proofs.start(viewed, "ask", answers.what_if.question(viewed, episode, policy), trust)
            case {"cancel": True}:
                answers.proofs.cancel()
            case _:
                raise Refused(400, 'pass {"trace": 0, "tool": "lint", "where": "", "trust": false} or {"cancel": true}')
    except IndexError as error:
        raise Refused(404, str(error)) from error
    except TraceError as error:
        raise Refused(400 if isinstance(error, InvalidOption) else 409, str(error)) from error
    return as_json({})


def _flagged(answers: Answers, body: bytes) -> Answer:
    """Store a flag. Raises Refused."""
    match _json_of(body):
        case {
            "trace": int(number),
            "episode": int(episode),
            "identity": str(identity),
            "flag": (str() | None) as flag,
        } if flag in _FLAGGED:
            pass
        case _:
            example = '{"trace": 0, "episode": 7, "identity": "…", "flag": "good", "bad", "look" or null}'
            raise Refused(400, f"pass {example}, with the identity of /api/episode")
    try:
        return as_json({"flag": flag, "flags": answers.numbered(number).set_flag(episode, identity, flag)})
    except Edited as error:
        raise Refused(412, str(error), "find it in the list, which is loaded again") from error
    except CorruptTrace as error:
        raise Refused(409, error.problem, "the flags are kept in the facts of the trace, which are damaged") from error
    except InvalidOption as error:
        raise Refused(409, str(error)) from error
    except (TraceError, OSError) as error:
        raise Refused(409, f"the flag could not be kept: {error}", "is the directory of the trace writable?") from error


class _Refresher:
    """Refreshes the traces while pages wait for changes: one refresh at a time, however many pages wait.

    Attributes:
        pause: seconds to wait between two calls.
    """

    def __init__(self, answers: Answers):
        self._answers, self._lock, self._next = answers, threading.Lock(), 0.0
        self.pause = 0.5

    def refresh(self) -> None:
        if time.monotonic() < self._next or not self._lock.acquire(blocking=False):
            return
        try:
            begin = time.monotonic()
            for trace in self._answers.traces:
                with contextlib.suppress(TraceError, OSError):  # removed, or unreadable: the page keeps what it has
                    trace.refresh()
            seconds = time.monotonic() - begin
            self._next = time.monotonic() + max(1.0, 10 * seconds)  # refreshing takes at most a tenth of the time
        finally:
            self._lock.release()


def pages_of(files: Mapping[str, bytes]) -> dict[str, Answer]:
    """Return the files of the page by request path."""
    pages = {f"/{name}": Answer(data, mimetypes.guess_type(name)[0] or "text/plain") for name, data in files.items()}
    return {**pages, "/": pages["/index.html"]}
