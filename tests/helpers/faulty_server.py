"""A small web server with ranges, ETags and If-Match, also as a server of S3, which can be made to fail."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_PIECE_BYTES = 256 << 10
_BURST_SECONDS = 0.02  # time that a connection may have been idle and still make up for


class QuietHandler(BaseHTTPRequestHandler):
    """Keeps connections, logs nothing, and minds no client that has gone."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle()

    def count(self, length: int) -> None:
        """Called with the bytes of each piece of a body before it is sent."""

    def answer(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> int:
        """Send an answer, of the body only half if it is cut; return the bytes of the body that were sent."""
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        self.close_connection |= cut
        sent = memoryview(body)[: 0 if self.command == "HEAD" else len(body) // 2 if cut else len(body)]
        for begin in range(0, len(sent), _PIECE_BYTES):
            piece = sent[begin : begin + _PIECE_BYTES]
            self.count(len(piece))
            self.wfile.write(piece)
        return len(sent)


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

    failures: a status; "cut" in the middle of the body; "close" without an answer; "other range", of the same length;
    "slow", after .slow seconds; None: no failure. sent: bytes of bodies. answers: what to do instead for a path, with
    the handler. A path with list-type in its query is a bucket of S3, whose objects are the files below it.
    """

    def __init__(self, latency: float, rate: float):
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.failures: list[int | str | None] = []
        self.answers: dict[str, Callable[[QuietHandler], object]] = {}
        self.lists = True
        self.has_ranges = self.has_head = True
        self.sent = 0
        self._lock = threading.Lock()
        self._busy_until = 0.0
        self.url = ""
        self.latency, self.rate = latency, rate
        self.slow = 0.05

    def count(self, length: int) -> None:
        """Count bytes of a body and, with a rate, wait until all connections together could have sent them."""
        with self._lock:
            self.sent += length
            if not self.rate:
                return
            self._busy_until = max(self._busy_until, time.monotonic() - _BURST_SECONDS) + length / self.rate
            seconds = self._busy_until - time.monotonic()
        time.sleep(max(0.0, seconds))

    def listed(self, bucket: str, prefix: str, delimiter: str) -> bytes:
        """Return the answer of S3 to a list of the objects of a bucket with a prefix, up to the next delimiter."""
        found = {}
        for path, data in self.files.items():
            name = path.removeprefix(f"{bucket}/")
            folder, slash, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if not path.startswith(f"{bucket}/{prefix}"):
                continue
            if slash:
                found[folder] = f"<CommonPrefixes><Prefix>{escape(prefix + folder + slash)}</Prefix></CommonPrefixes>"
                continue
            found[name] = (
                f"<Contents><Key>{escape(name)}</Key><Size>{len(data)}</Size><ETag>{escape(tag_of(data))}</ETag>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            )
        return (
            f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(found.values())}</ListBucketResult>".encode()
        )


def tag_of(data: bytes) -> str:
    return f'"{hash(data):x}"'


@contextlib.contextmanager
def serving(latency: float = 0, rate: float = 0) -> Iterator[Web]:
    """latency: seconds to wait before each answer. rate: bytes per second of all bodies together; 0: no limit."""
    web = Web(latency, rate)

    class Handler(QuietHandler):
        def count(self, length: int) -> None:
            web.count(length)

        def do_GET(self) -> None:
            time.sleep(web.latency)
            path, query = unquote(urlsplit(self.path).path), parse_qs(urlsplit(self.path).query)
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
            elif "list-type" in query:
                asked_for = (query.get(name, [""])[0] for name in ("prefix", "delimiter"))
                found = web.listed(path.rstrip("/"), *asked_for)
                self.answer(200, found, {}, failure == "cut")
            elif path.endswith("/") and web.lists:
                names = [name.removeprefix(path).partition("/") for name in web.files if name.startswith(path)]
                links = dict.fromkeys(name + slash for name, slash, _ in names)
                page = "".join(f'<a href="{link}">{link}</a>' for link in links).encode()
                self.answer(200 if names else 404, page, {"Content-Type": "text/html"})
            else:
                self._answer_file(web.files.get(path), asked, failure)

        do_HEAD = do_GET  # noqa: N815 - name of http.server

        def do_PUT(self) -> None:
            web.requests.append((self.command, self.path, None))
            path, data = unquote(urlsplit(self.path).path), self.rfile.read(int(self.headers["Content-Length"]))
            exists = self.headers.get("If-None-Match") == "*" and path in web.files
            if not exists:
                web.files[path] = data
            self.answer(412 if exists else 200, b"", {"ETag": tag_of(web.files[path])})

        def _answer_file(self, data: bytes | None, asked: str | None, failure: str | None) -> None:
            if data is None or self.headers.get("If-Match") not in (None, tag_of(data)):
                self.answer(404 if data is None else 412, b"", {})
                return
            time.sleep(web.slow if failure == "slow" else 0)
            status, headers = (
                200,
                {
                    "ETag": tag_of(data),
                    "Accept-Ranges": "bytes",
                    "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
                    "Cache-Control": "no-store",  # a browser would ask once for what has not changed for long
                },
            )
            if asked and web.has_ranges:
                begin, _, end = asked.removeprefix("bytes=").partition("-")
                first = int(begin) if begin else max(0, len(data) - int(end))
                last = min(int(end), len(data) - 1) if begin and end else len(data) - 1
                if failure == "other range":
                    first, last = first + 1, last + 1
                headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
                data, status = data[first : last + 1], 206
            self.answer(status, data, headers, failure == "cut")

    with running(Handler) as web.url:
        yield web
