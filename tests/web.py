"""A small web server with ranges, ETags and If-Match, which can be made to fail."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class Web:
    """Files served at .url. requests: (method, path, Range) of each. failures: what to do instead, one after the other.

    failures: a status; "cut" in the middle of the body; "close" without an answer.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.failures: list[int | str] = []
        self.lists = True
        self.has_ranges = True
        self.sent = 0
        self.url = ""


@contextlib.contextmanager
def serving() -> Iterator[Web]:
    web = Web()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            asked = self.headers.get("Range")
            web.requests.append((self.command, path, asked))
            failure = web.failures.pop(0) if web.failures and self.command == "GET" else None
            if failure == "close":
                self.close_connection = True
                return
            if isinstance(failure, int):
                self._answer(failure, b"secret-in-an-answer", {})
                return
            if path.endswith("/") and web.lists:
                links = "".join(f'<a href="{name}">{name}</a>' for name in self._below(path))
                self._answer(200 if links else 404, f"<html>{links}</html>".encode(), {"Content-Type": "text/html"})
                return
            data = web.files.get(path)
            if data is None:
                self._answer(404, b"", {})
                return
            tag = '"' + hashlib.md5(data).hexdigest() + '"'
            if self.headers.get("If-Match") not in (None, tag):
                self._answer(412, b"", {})
                return
            status = 200
            if asked and web.has_ranges:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                data, status = data[int(first) : int(last) + 1], 206
            self._answer(status, data, {"ETag": tag, "Accept-Ranges": "bytes"}, failure == "cut")

        def _below(self, path: str) -> list[str]:
            return [name.removeprefix(path) for name in web.files if name.startswith(path)]

        def _answer(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                web.sent += len(body)
                self.wfile.write(body[: len(body) // 2] if cut else body)
            self.close_connection = cut

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    web.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield web
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
