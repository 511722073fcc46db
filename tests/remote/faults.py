"""A proxy in front of an S3 server that fails at random: 5xx, cut connections, halves of answers, lost successes."""

from __future__ import annotations

import collections
import contextlib
import http.client
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KINDS = ("status", "cut before", "lost answer", "half an answer")


class Faults:
    """rate: share of requests that fail. counts: how many of each kind did. sent: bytes of answers."""

    def __init__(self, seed: int):
        self.rate = 0.0
        self.url = ""
        self.counts: collections.Counter[str] = collections.Counter()
        self.sent = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def next(self) -> str | None:
        with self._lock:
            kind = self._random.choice(KINDS) if self._random.random() < self.rate else None
            self.counts[kind or "fine"] += 1
        return kind


@contextlib.contextmanager
def proxy(port: int, seed: int = 0) -> Iterator[Faults]:
    """Forward to a server on this port of this machine."""
    faults = Faults(seed)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def _forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fault = faults.next()
            if fault == "cut before":
                self.close_connection = True
                return
            if fault == "status":
                self.send_response(503)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            server = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            try:
                server.request(self.command, self.path, body, dict(self.headers.items()))
                answer = server.getresponse()
                data = answer.read()
            finally:
                server.close()
            if fault == "lost answer":
                self.close_connection = True
                return
            self.send_response(answer.status)
            length = answer.headers.get("Content-Length")
            for key, value in answer.headers.items():
                if key.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                    self.send_header(key, value)
            self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(data)))
            self.end_headers()
            if fault == "half an answer":
                data, self.close_connection = data[: len(data) // 2], True
            faults.sent += len(data)
            self.wfile.write(data)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward  # noqa: N815 - names of http.server

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # the client has gone
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    faults.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield faults
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
