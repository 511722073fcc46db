"""Reject all requests except those of our own page, in a browser that has the token.

A page of another site may send requests to this port, or have its own name point here (DNS rebinding). It does not know
the token or name this host. The token is not in a cookie, because browsers send cookies to every port of this machine,
where servers of other users may listen.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Cache-Control": "no-store",
}
_RAW_HEADERS = {name.lower().encode(): value.encode("latin-1") for name, value in HEADERS.items()}
HAS_TOKEN = "gym-trace.has-token"  # key in the scope of a request with the token
_REQUESTED_WITH = "gym-trace-viewer"  # a page of another site cannot send this header without a CORS preflight
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_MOST_BODY = 1 << 14  # bytes


class Guard:
    """Rejects requests that are not allowed, and adds headers to the answers of all others.

    Args:
        app: answers the allowed requests.
        token: required in requests, as "Authorization: Bearer".
        pages: paths that need no token: the files of the page, which reads the token from its address.
        port: port of the server.
        host: host that the server listens on. Requests may name it, or this machine; if other machines can connect,
            also any IP address.
    """

    def __init__(self, app: App, token: str, pages: Collection[str], port: int, host: str):
        self._app, self._token, self._pages, self._port, self._host = app, token.encode(), pages, port, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        problem = self._problem(scope, headers)
        if problem is not None:
            await _answer(send, *problem)
        elif self._has_token(headers):
            scope[HAS_TOKEN] = True
            await self._app(scope, receive, _with_headers(send))
        elif scope["path"] in self._pages:
            await self._app(scope, receive, _with_headers(send))
        else:
            await _answer(send, 403, "no token, or a wrong one; open the address that gym-trace view printed")

    def _problem(self, scope: Scope, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """Return status and text if a request is rejected, with or without a token."""
        if not self._is_this_server(headers.get("host", "")):
            return 403, "the request names another host"
        origin = headers.get("origin")
        if origin is not None and not self._is_this_server(origin.removeprefix("http://")):
            return 403, "the request comes from another site"
        site = headers.get("sec-fetch-site", "none")
        if site not in ("same-origin", "none") and headers.get("sec-fetch-mode") != "navigate":
            return 403, "the request comes from another site"
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return 405, "only GET, HEAD and POST"
        if scope["method"] == "POST":
            if headers.get("x-requested-with") != _REQUESTED_WITH or origin is None:
                return 403, f"a POST needs an Origin and X-Requested-With: {_REQUESTED_WITH}"
            if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
                return 415, "a POST needs Content-Type: application/json"
            length = headers.get("content-length", "")
            if "transfer-encoding" in headers:  # then Content-Length means nothing
                return 413, "a POST needs a Content-Length and no Transfer-Encoding"
            if not length.isdecimal() or len(length) > 9 or int(length) > _MOST_BODY:
                return 413, f"a POST needs a Content-Length of at most {_MOST_BODY}"
        return None

    def _is_this_server(self, host: str) -> bool:
        name, colon, port = host.rpartition(":")
        if not colon or port != str(self._port):
            return False
        if name in _LOOPBACK or name == self._host:
            return True
        try:  # a name may be made to point here, an IP address cannot
            address = ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return address.is_loopback or not is_loopback(self._host)

    def _has_token(self, headers: Mapping[str, str]) -> bool:
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and secrets.compare_digest(bearer.strip().encode(), self._token)


def is_loopback(host: str) -> bool:
    """Return True for a name or an address that only this machine reaches."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _answer(send: Send, status: int, text: str) -> None:
    body = f'{{"error": "{text}", "hint": ""}}'.encode()
    content = (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*_RAW_HEADERS.items(), *content]})
    await send({"type": "http.response.body", "body": body})


def _with_headers(send: Send) -> Send:
    """Return send() with our headers added to an answer."""

    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            others = [(name, value) for name, value in message.get("headers", ()) if name not in _RAW_HEADERS]
            message = {**message, "headers": [*others, *_RAW_HEADERS.items()]}
        await send(message)

    return sending
