"""The reader of ranges: its order, window and retries; faults of servers of S3 and of the web."""

import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_server import QuietHandler, Web, serving
from runs import recorded

from gym_trace import open_trace, pull, push
from gym_trace.errors import MissingExtra, RemoteError
from gym_trace.storage.protocol import Overwritten
from gym_trace.storage.remote import objects, ranges
from gym_trace.storage.remote.objects import ObjectStore, StoredObject, Wanted
from gym_trace.storage.remote.ranges import RangeReader

DATA = bytes(range(256)) * 64
STORED = StoredObject(len(DATA), '"1"')


class Store(ObjectStore):
    """Objects of equal bytes. failures: of the next calls. version: the version of "a" now; others keep theirs."""

    def __init__(self) -> None:
        self.failures: list[Exception | bytes] = []
        self.version, self.confirmed = '"1"', 0
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Semaphore(0)
        self.count = self.gate_after = 0  # the first requests pass the gate

    def get(self, wanted: Wanted) -> bytes:
        self.count += 1
        self.begun.release()
        assert self.count <= self.gate_after or self.gate.wait(60)
        failure = self.failures.pop(0) if self.failures else None
        if isinstance(failure, Exception):
            raise failure
        return DATA[wanted.offset : wanted.offset + wanted.length] if failure is None else failure

    def confirm(self, read: Any) -> None:
        self.confirmed += 1
        if "a" in read and read["a"].version != self.version:
            raise Overwritten


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    found = Store()
    monkeypatch.setattr(ranges, "store_at", lambda url: found)
    monkeypatch.setattr(objects, "_FIRST_WAIT", 0.001)
    return found


def spread(count: int, length: int = 16) -> list[Wanted]:
    return [Wanted("a", STORED, 1000 * number, length) for number in range(count)]


def test_ranges_come_in_the_order_in_which_they_were_asked_for(store: Store) -> None:
    wanted = spread(16)[::-1]
    assert list(RangeReader("s3://b/t").read(wanted)) == [DATA[it.offset : it.offset + 16] for it in wanted]


def test_a_range_that_fails_is_fetched_again_by_itself(store: Store) -> None:
    store.failures += [OSError("status code: 503"), b"short", ConnectionResetError()]
    assert b"".join(RangeReader("s3://b/t").read(spread(8))) == b"".join(DATA[1000 * n :][:16] for n in range(8))
    assert store.count == 8 + 3


def test_no_more_bytes_are_in_flight_than_the_window_holds(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_WINDOW_BYTES", (64, 64))
    store.gate.clear()
    reader = RangeReader("s3://b/t")
    both = [reader.read(spread(10)), reader.read(spread(10))]
    threads = [threading.Thread(target=next, args=(one,)) for one in both]
    for thread in threads:
        thread.start()
    for _ in range(4):
        assert store.begun.acquire(timeout=60)
    assert 64 <= reader._in_flight <= 64 + 16  # a call without any range in flight begins one
    store.gate.set()
    for thread in threads:
        thread.join()
    assert [len(list(one)) for one in both] == [9, 9]
    assert reader._in_flight == 0


def test_a_reader_without_space_still_reads_one_range_at_a_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_WINDOW_BYTES", (64, 64))
    reader = RangeReader("s3://b/t")
    stalled = reader.read(spread(10))
    next(stalled)
    assert len(list(reader.read(spread(10, length=1000)))) == 10
    assert len(list(stalled)) == 9


def test_leaving_off_cancels_the_ranges_that_have_not_begun(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_MOST_REQUESTS", 1)
    reader = RangeReader("s3://b/t")
    reading = reader.read(spread(16))
    store.gate_after = 1
    store.gate.clear()
    next(reading)
    reading.close()
    store.gate.set()
    assert reader._in_flight == 0
    assert reader._pool is not None
    reader._pool.shutdown()
    assert store.count < 16


def test_leaving_off_ends_the_retries_of_what_was_in_flight(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_FIRST_WAIT", 60)
    store.failures += [PermissionError(), *[OSError("status code: 500")] * 30]
    reader = RangeReader("s3://b/t")
    with pytest.raises(RemoteError, match="access denied"):
        list(reader.read(spread(8)))
    assert reader._pool is not None
    reader._pool.shutdown()


def test_versions_are_confirmed_for_all_ranges_that_have_arrived(store: Store) -> None:
    store.gate.clear()
    reader = RangeReader("s3://b/t")
    reading = reader.read(spread(8))
    threading.Thread(target=lambda: [store.begun.acquire() for _ in range(8)] and store.gate.set()).start()
    next(reading)
    assert len(list(reading)) == 7
    assert 1 <= store.confirmed <= 8
    store.version = '"2"'
    with pytest.raises(Overwritten):
        next(reader.read(spread(8)))


def test_ranges_before_those_of_an_overwritten_object_are_read(store: Store) -> None:
    store.gate.clear()
    store.version = '"2"'
    reading = RangeReader("s3://b/t").read([Wanted("b", STORED, 0, 16), Wanted("b", STORED, 16, 16), *spread(2)])
    threading.Thread(target=lambda: [store.begun.acquire() for _ in range(4)] and store.gate.set()).start()
    assert [next(reading), next(reading)] == [DATA[:16], DATA[16:32]]
    with pytest.raises(Overwritten, match="s3://b/t/a: was overwritten while it was read"):
        next(reading)


def test_the_window_follows_latency_and_throughput(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(ranges.time, "monotonic", lambda: clock[0])
    reader = RangeReader("s3://b/t")
    assert (reader.gap, reader.most) == (256 << 10, 4 << 20)
    reader._begin(1 << 30, at_once=True)
    for _ in range(10):  # 200 MB/s, 30 ms
        clock[0] += 0.1
        reader._measure(clock[0] - 0.03, 20_000_000)
    assert reader.most == pytest.approx(6_000_000, rel=0.01)
    for _ in range(200):  # 50 MB/s, 30 ms
        clock[0] += 0.1
        reader._measure(clock[0] - 0.03, 5_000_000)
    assert reader.gap == pytest.approx(150_000, rel=0.01)
    for _ in range(1000):  # 2 MB/s, 10 ms
        clock[0] += 0.1
        reader._measure(clock[0] - 0.01, 200_000)
    assert (reader.gap, reader.most) == (32 << 10, 4 << 20)
    for _ in range(1000):  # 10 GB/s, 300 ms
        clock[0] += 0.1
        reader._measure(clock[0] - 0.3, 1_000_000_000)
    assert (reader.gap, reader.most) == (256 << 10, 8 << 20)


# -- servers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def web() -> Iterator[Web]:
    with serving() as web:
        yield web


@pytest.fixture(params=["s3", "http"])
def url(request: pytest.FixtureRequest, web: Web, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of the directory /b/t of a server, as a bucket of S3 or as a directory of the web."""
    monkeypatch.setattr(objects, "_FIRST_WAIT", 0.001)
    if request.param == "http":
        pytest.importorskip("aiohttp")
        return f"{web.url}/b/t"
    pytest.importorskip("obstore")
    for name, value in {"ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "hush", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", web.url)
    return "s3://b/t"


def stored(directory: Path, web: Web) -> None:
    web.files |= {f"/b/t/{path.name}": path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("failure", [500, 503, 429, "close", "cut", "other range", "slow"])
def test_no_fault_of_a_server_changes_a_byte(web: Web, url: str, failure: Any) -> None:
    web.files["/b/t/w.000000.gtb"] = DATA
    reader = RangeReader(url)
    stored = reader.entries()["w.000000.gtb"]
    web.failures += [failure, None, failure]
    wanted = [Wanted("w.000000.gtb", stored, at, 1000) for at in range(0, 8000, 1000)]
    assert b"".join(reader.read(wanted)) == DATA[:8000]
    assert web.failures == []
    assert len([asked for *_, asked in web.requests if asked]) == (8 if failure == "slow" else 10)


def test_an_object_that_is_replaced_while_it_is_read_raises(web: Web, url: str) -> None:
    web.files["/b/t/w.000000.gtb"] = DATA
    reader = RangeReader(url)
    stored = reader.entries()["w.000000.gtb"]
    web.files["/b/t/w.000000.gtb"] = DATA[::-1]
    with pytest.raises(Overwritten):
        list(reader.read([Wanted("w.000000.gtb", stored, 0, 10)]))


def test_a_pull_through_faults_is_the_trace(tmp_path: Path, web: Web, url: str) -> None:
    recorded(tmp_path / "t", episodes=5)
    stored(tmp_path / "t", web)
    trace = open_trace(url)
    assert [episode.rewards.sum() for episode in trace]
    web.failures += [None, 503, "cut", None, "close", "other range"]
    pull(url, tmp_path / "copy")
    assert web.failures == []
    for path in (tmp_path / "t").iterdir():
        assert (tmp_path / "copy" / path.name).read_bytes() == path.read_bytes()


# -- S3 ---------------------------------------------------------------------------------------------------------------

_only_s3 = pytest.mark.parametrize("url", ["s3"], indirect=True)


@_only_s3
def test_a_push_to_s3_creates_and_never_overwrites(tmp_path: Path, web: Web, url: str) -> None:
    recorded(tmp_path / "t", episodes=2, uid="w")
    push(tmp_path / "t", url)
    assert {name.rpartition("/")[2]: data for name, data in web.files.items()} == {
        path.name: path.read_bytes() for path in (tmp_path / "t").iterdir()
    }
    assert len(open_trace(url)) == 2
    with pytest.raises(FileExistsError):
        RangeReader(url).store.put("w.000000.gtb", b"other", new=True)


@_only_s3
def test_a_request_that_s3_rejects_for_its_time_names_the_clock(web: Web, url: str) -> None:
    body = b"<?xml version='1.0'?><Error><Code>RequestTimeTooSkewed</Code><Message>too large</Message></Error>"
    web.answers["/b"] = lambda handler: handler.answer(403, body, {"Content-Type": "application/xml"})
    with pytest.raises(
        RemoteError, match=r"another time than this machine \(RequestTimeTooSkewed\); correct the clock"
    ):
        open_trace(url)


@_only_s3
def test_credentials_come_from_the_profile_that_botocore_reads(
    tmp_path: Path, web: Web, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "credentials").write_text("[default]\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "botocore", None)
    with pytest.raises(MissingExtra, match="need botocore; install it with: pip install botocore"):
        open_trace(url)
    keys = types.SimpleNamespace(access_key="FROM-PROFILE", secret_key="hush", token=None)
    session = types.SimpleNamespace(
        get_scoped_config=lambda: {"region": "eu-north-1", "endpoint_url": web.url},
        get_credentials=lambda: types.SimpleNamespace(get_frozen_credentials=lambda: keys),
    )
    botocore: Any = types.ModuleType("botocore")
    botocore.session = types.ModuleType("botocore.session")
    botocore.session.get_session = lambda: session
    monkeypatch.setitem(sys.modules, "botocore", botocore)
    monkeypatch.setitem(sys.modules, "botocore.session", botocore.session)
    signed: list[str] = []

    def answered(handler: QuietHandler) -> None:
        signed.append(handler.headers["Authorization"])
        handler.answer(200, web.listed("/b", "t/", "/"), {})

    web.answers["/b"] = answered
    assert RangeReader(url).entries() == {}
    assert "Credential=FROM-PROFILE/" in signed[0]
    assert "/eu-north-1/s3/" in signed[0]
