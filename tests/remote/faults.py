"""A proxy in front of an S3 server that fails at random: 5xx, cut connections, halves of answers, lost successes."""

from __future__ import annotations

import collections
import contextlib
import http.client
import random
import threading
import time
from collections.abc import Iterator

from faulty_server import QuietHandler, running

KINDS = ("status", "cut before", "lost answer", "half an answer")


class Faults:
    """rate: share of requests that fail. wait: seconds before each. counts: how many of each kind did. sent: bytes of
    answers."""

    def __init__(self, seed: int):
        self.rate = self.wait = 0.0
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

    class Handler(QuietHandler):
        def _forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            time.sleep(faults.wait)
            fault = faults.next()
            if fault == "cut before":
                self.close_connection = True
                return
            if fault == "status":
                self.answer(503, b"", {})
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
            dropped = ("transfer-encoding", "connection", "date", "server")
            headers = {key.title(): value for key, value in answer.headers.items() if key.lower() not in dropped}
            faults.sent += self.answer(answer.status, data, headers, fault == "half an answer")

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward  # noqa: N815 - names of http.server

    with running(Handler) as faults.url:
        yield faults
