"""A small web server with ranges, ETags and If-Match, which can be made to fail."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class QuietHandler(BaseHTTPRequestHandler):
    """Keeps connections, logs nothing, and minds no client that has gone."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle()

    def answer(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> int:
        """Send an answer, of the body only half if it is cut; return the bytes of the body that were sent."""
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        self.close_connection |= cut
        return 0 if self.command == "HEAD" else self.wfile.write(body[: len(body) // 2] if cut else body)


@contextlib.contextmanager
def running(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Run a server on this machine, and return its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Web:
    """Files served at .url. requests: (method, path, Range) of each. failures: what to do instead, one after the other.

    failures: a status; "cut" in the middle of the body; "close" without an answer. sent: bytes of bodies.
    answers: what to do instead for a path, with the handler.
    """

    def __init__(self, latency: float):
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.failures: list[int | str] = []
        self.answers: dict[str, Callable[[QuietHandler], object]] = {}
        self.lists = True
        self.has_ranges = self.has_head = True
        self.sent = 0
        self.url = ""
        self.latency = latency


@contextlib.contextmanager
def serving(latency: float = 0) -> Iterator[Web]:
    """latency: seconds to wait before each answer."""
    web = Web(latency)

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            time.sleep(web.latency)
            path = unquote(urlsplit(self.path).path)
            asked = self.headers.get("Range")
            web.requests.append((self.command, path, asked))
            failure = web.failures.pop(0) if web.failures and self.command == "GET" else None
            if self.command == "HEAD" and not web.has_head:
                self.answer(405, b"", {})
            elif path in web.answers:
                web.answers[path](self)
            elif failure == "close":
                self.close_connection = True
            elif isinstance(failure, int):
                self.answer(failure, b"secret-in-an-answer", {})
            elif path.endswith("/") and web.lists:
                names = [name.removeprefix(path).partition("/") for name in web.files if name.startswith(path)]
                links = dict.fromkeys(name + slash for name, slash, _ in names)
                page = "".join(f'<a href="{link}">{link}</a>' for link in links).encode()
                web.sent += self.answer(200 if names else 404, page, {"Content-Type": "text/html"})
            else:
                self._answer_file(web.files.get(path), asked, failure == "cut")

        do_HEAD = do_GET  # noqa: N815 - name of http.server

        def _answer_file(self, data: bytes | None, asked: str | None, cut: bool) -> None:
            tag = f'"{hash(data):x}"'
            if data is None or self.headers.get("If-Match") not in (None, tag):
                self.answer(404 if data is None else 412, b"", {})
                return
            status, headers = 200, {"ETag": tag, "Accept-Ranges": "bytes"}
            if asked and web.has_ranges:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
                data, status = data[int(first) : int(last) + 1], 206
            web.sent += self.answer(status, data, headers, cut)

    with running(Handler) as web.url:
        yield web
