"""Windows of a trace and of its Lance export, the same ones, in an object store: requests, bytes and seconds.

    pip install 'moto[server]' 'gym-trace[remote,lance]'
    python benchmarks/remote_lance.py TRACE [--batches 10] [--size 64] [--length 8] [--latency 20]

Pushes both to moto, a server that imitates S3, behind a proxy that counts and waits --latency milliseconds before each
request. Reads observations and actions with cold caches: batches of windows anywhere in the trace, and an epoch of all
windows, which gym-trace streams in shuffled order and Lance takes row by row. Images of Lance are not decoded.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import gym_trace

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / name) for name in ("helpers", "remote")]
KEYS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "hush",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}


@contextmanager
def moto() -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).parent / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert server.poll() is None, "moto_server ended"
                time.sleep(0.1)
        yield port
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--length", type=int, default=8)
    parser.add_argument("--latency", type=float, default=20.0)
    given = parser.parse_args()
    import boto3
    import lance
    from faults import proxy

    os.environ |= KEYS
    with moto() as port, proxy(port) as web, tempfile.TemporaryDirectory() as folder:
        os.environ["AWS_ENDPOINT_URL"] = web.url
        s3 = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}")
        s3.create_bucket(Bucket="traces")
        gym_trace.push(given.trace, "s3://traces/trace")
        gym_trace.export(given.trace, Path(folder, "lance"), "lance")
        sizes = {"gym-trace": sum(path.stat().st_size for path in given.trace.iterdir()), "Lance": 0}
        for path in Path(folder, "lance", "steps.lance").rglob("*"):
            if path.is_file():
                s3.upload_file(str(path), "traces", str(path.relative_to(folder)))
                sizes["Lance"] += path.stat().st_size
        web.wait = given.latency / 1e3
        rng = np.random.default_rng(0)
        steps = gym_trace.open_trace(given.trace).episodes["steps"]
        first = np.append(0, np.cumsum(steps))
        whole = [(e, s) for e, count in enumerate(steps.tolist()) for s in range(count - given.length + 1)]
        chosen = rng.permutation(len(whole))[: given.batches * given.size].reshape(given.batches, given.size)
        columns = [
            name
            for name in lance.dataset(Path(folder, "lance", "steps.lance")).schema.names
            if name.split("_")[0] in ("pixels", "observation", "action")
        ]

        def ours() -> int:
            trace = gym_trace.open_trace("s3://traces/trace")
            for batch in chosen.tolist():
                for episode, start in (whole[index] for index in batch):
                    window = trace[episode][start : start + given.length]
                    assert len(window.actions) == len(window.observations) - 1 == given.length
            return chosen.size

        def lances() -> int:
            table = lance.dataset("s3://traces/lance/steps.lance")
            for batch in chosen.tolist():
                rows = np.unique([first[e] + s + np.arange(given.length) for e, s in (whole[i] for i in batch)])
                assert table.take(rows, columns).num_rows == len(rows)
            return chosen.size

        def our_epoch() -> int:
            trace = gym_trace.open_trace("s3://traces/trace")
            windows: Any = trace.windows(
                given.length, given.size, replacement=False, columns=("observations", "actions"), cache=None
            )
            return sum(len(batch["actions"]) for batch in windows)

        def lance_epoch() -> int:
            table, order = lance.dataset("s3://traces/lance/steps.lance"), rng.permutation(len(whole))
            for batch in np.array_split(order, -(-len(order) // given.size)):
                rows = [first[e] + s + np.arange(given.length) for e, s in (whole[i] for i in batch)]
                table.take(np.unique(rows), columns)
            return len(order)

        calls: list[tuple[str, str, Callable[[], int]]] = [
            ("windows", "gym-trace", ours),
            ("windows", "Lance", lances),
            ("epoch", "gym-trace", our_epoch),
            ("epoch", "Lance", lance_epoch),
        ]
        print(f"{first[-1]:,} steps: {', '.join(f'{name} {size / 1e6:.1f} MB' for name, size in sizes.items())}")
        for what, name, call in calls:
            requests, sent, begin = web.counts.total(), web.sent, time.perf_counter()
            count = call()
            seconds = time.perf_counter() - begin
            print(
                f"{what}, {name}: {count:,} windows, {web.counts.total() - requests:,} requests, "
                f"{(web.sent - sent) / 1e6:.1f} MB, {seconds:.1f} s, {count / seconds:,.0f} windows/s"
            )


if __name__ == "__main__":
    main()
