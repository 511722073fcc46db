"""Two S3 servers, moto's and ministack, each behind a proxy that fails."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import faults
import pytest
import s3fs

BUCKET = "traces"


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@pytest.fixture(scope="session", params=["moto", "ministack"])
def s3_port(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port, folder = _free_port(), Path(sys.executable).parent
    if request.param == "moto":
        words = [str(folder / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    else:
        words = [str(folder / "ministack")]
    env = {**os.environ, "GATEWAY_PORT": str(port), "BIND_HOST": "127.0.0.1", "SERVICES": "s3"}
    log = tmp_path_factory.mktemp("s3") / "log"
    with open(log, "wb") as out:
        server = subprocess.Popen(words, env=env, stdout=out, stderr=out)
    try:
        until = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.1)
        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            region_name="us-east-1",
            aws_access_key_id="AKIAKEYFORTESTS",
            aws_secret_access_key="hush-hush",
        )
        client.create_bucket(Bucket=BUCKET)
        yield port
    finally:
        server.terminate()
        server.wait(20)


@pytest.fixture
def s3(s3_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[faults.Faults]:
    """The proxy; the environment says how to reach it."""
    s3fs.S3FileSystem.clear_instance_cache()  # it remembers the endpoint
    with faults.proxy(s3_port) as proxy:
        for key, value in {
            "AWS_ACCESS_KEY_ID": "AKIAKEYFORTESTS",
            "AWS_SECRET_ACCESS_KEY": "hush-hush",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": proxy.url,
            "GYM_TRACE_SPOOL": str(tmp_path / "spool"),
        }.items():
            monkeypatch.setenv(key, value)
        yield proxy


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"s3://{BUCKET}/{tmp_path.parent.name}/{tmp_path.name}/t"
