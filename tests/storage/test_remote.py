"""Traces at URLs, read through fsspec from memory, from a web server, and from a store that fails."""

import gzip
import json
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import fsspec
import gymnasium
import numpy as np
import pytest
from faulty_server import QuietHandler, Web, running, serving
from faulty_store import FaultyFileSystem
from gym_trace_cli import show
from gymnasium import spaces
from memory_storage import MemoryStorage
from runs import in_a_child, play, recorded
from scripted_env import small_blocks
from shell import ok, run
from storage_contract import ReadContract

import gym_trace
from gym_trace import TraceRecordingWrapper, check_trace, edit, open_trace, summarize
from gym_trace.errors import InvalidOption, RemoteError, TraceError, TraceNotFound
from gym_trace.format.directory import _KINDS, kind_of
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.trace import Trace
from gym_trace.storage.local import LocalStorage
from gym_trace.storage.opening import storage_at
from gym_trace.storage.protocol import ReadStorage, Span
from gym_trace.storage.remote import objects, stores
from gym_trace.storage.remote.address import UrlPath, url_of
from gym_trace.storage.remote.cache import BLOCK, DiskBlocks, MemoryBlocks
from gym_trace.storage.remote.storage import RemoteStorage
from gym_trace.tools.statistics import describe
from gym_trace.tools.statistics.describe import find_traces

fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_FIRST_WAIT", 0.001)
    for name in ("GYM_TRACE_URL_CACHE", "GYM_TRACE_URL_CACHE_BYTES"):
        monkeypatch.delenv(name, raising=False)
    FaultyFileSystem.reset()


@pytest.fixture
def web() -> Iterator[Web]:
    with serving() as web:
        yield web


class Noise(gymnasium.Env[Any, Any]):
    """40 steps of 20,000 bytes that do not compress."""

    observation_space = spaces.Box(0, 255, (20_000,), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self._seen(), float(self.steps), self.steps == 40, False, {}

    def _seen(self) -> Any:
        return self.np_random.integers(0, 256, 20_000, np.uint8)


def wide(directory: Path, seed: int = 0, **options: Any) -> None:
    """Record 12 episodes of 40 steps, 10 MB."""
    with TraceRecordingWrapper(Noise(), directory, **options) as env:
        play(env, 12, seed)


def uploaded(directory: Path, url: str) -> str:
    fs, root = fsspec.url_to_fs(url)
    for path in directory.iterdir():
        fs.pipe_file(f"{root}/{path.name}", path.read_bytes())
    return url


def served(directory: Path, web: Web) -> str:
    web.files |= {f"/t/{path.name}": path.read_bytes() for path in directory.iterdir()}
    return f"{web.url}/t"


def same_steps(one: Trace, other: Trace) -> None:
    assert one.episodes.tolist() == other.episodes.tolist()
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a.observations, b.observations)
        np.testing.assert_array_equal(a.rewards, b.rewards)


_Fill = Callable[[dict[str, bytes]], ReadStorage]


class TestLocal(ReadContract):
    @pytest.fixture
    def filled(self, tmp_path: Path) -> _Fill:
        def fill(files: dict[str, bytes]) -> ReadStorage:
            (tmp_path / "t").mkdir(exist_ok=True)
            for name, data in files.items():
                (tmp_path / "t" / name).write_bytes(data)
            return LocalStorage(tmp_path / "t")

        return fill


class TestMemory(ReadContract):
    @pytest.fixture
    def filled(self, tmp_path: Path) -> _Fill:
        def fill(files: dict[str, bytes]) -> ReadStorage:
            storage = MemoryStorage(tmp_path)
            if files:
                storage.make()
            for name, data in files.items():
                if name in storage.names():
                    storage.remove(name)
                storage.create(name).write(data)
            return storage

        return fill


class TestFsspec(ReadContract):
    @pytest.fixture(params=["memory", "disk"])
    def filled(self, tmp_path: Path, request: pytest.FixtureRequest) -> _Fill:
        def fill(files: dict[str, bytes]) -> ReadStorage:
            fs, root = fsspec.url_to_fs(f"memory:/{tmp_path}")
            for name, data in files.items():
                fs.pipe_file(f"{root}/{name}", data)
            cache = DiskBlocks(tmp_path / "cache") if request.param == "disk" else MemoryBlocks()
            return RemoteStorage(f"memory:/{tmp_path}", cache)

        return fill


class TestWeb(ReadContract):
    @pytest.fixture
    def filled(self, web: Web) -> _Fill:
        def fill(files: dict[str, bytes]) -> ReadStorage:
            web.files |= {f"/t/{name}": data for name, data in files.items()}
            return RemoteStorage(f"{web.url}/t")

        return fill


def test_a_trace_at_a_url_is_the_trace_in_its_directory(tmp_path: Path) -> None:
    recorded(tmp_path / "t", episodes=5)
    local = open_trace(tmp_path / "t")
    url = uploaded(tmp_path / "t", f"memory:/{tmp_path}/x")
    for cache in (None, tmp_path / "cache"):
        for _ in range(2):
            trace = open_trace(url, cache=cache)
            same_steps(local, trace)
            np.testing.assert_array_equal(trace[3].observations, local[3].observations)
            same_steps(pickle.loads(pickle.dumps(trace[1:])), local[1:])
            assert next(trace.windows(2))["rewards"].tolist() == next(local.windows(2))["rewards"].tolist()
    assert summarize(url)["steps"] == summarize(local)["steps"]
    assert check_trace(url).damages == []
    assert str(trace.directory) == url
    assert url in repr(trace)
    edit.merge([url], tmp_path / "copy")
    same_steps(open_trace(tmp_path / "copy"), local)


def test_a_file_url_is_a_directory(tmp_path: Path) -> None:
    recorded(tmp_path / "t", episodes=1)
    same_steps(open_trace((tmp_path / "t").as_uri()), open_trace(tmp_path / "t"))
    with pytest.raises(InvalidOption, match="names a host"):
        open_trace("file://elsewhere/t")


def test_commands_read_urls(tmp_path: Path, web: Web) -> None:
    recorded(tmp_path / "t", episodes=3)
    url = served(tmp_path / "t", web)
    for words in (("info", url), ("stats", url), ("ls", url), ("cat", url), ("check", url)):
        assert run(*words).exit_code == 0, words
    cache = str(tmp_path / "cache")
    before = web.sent
    assert run("--cache", cache, "cat", url).output == run("cat", str(tmp_path / "t")).output
    once = web.sent - before
    assert run("--cache", cache, "cat", url).exit_code == 0
    assert web.sent - before - once < once / 2  # names, and the page with them
    assert run("info", f"{web.url}/nothing").exit_code == 1


def test_no_command_says_that_a_writer_at_a_url_was_killed(web: Web) -> None:
    url = served(Path(__file__).parents[2] / "sample_traces/format-1.3/killed", web)
    told = "1 writer did not close, or records elsewhere: episodes left open have the outcome lost"
    assert told in run("info", url).output
    assert "note: writer sample did not close, or records elsewhere\n" in run("check", url).output


def test_names_txt_names_the_files_where_a_server_lists_none(tmp_path: Path, web: Web) -> None:
    recorded(tmp_path / "t", episodes=2)
    url = served(tmp_path / "t", web)
    web.lists = False
    with pytest.raises(TraceNotFound, match=r"names\.txt"):
        open_trace(url)
    web.files["/t/names.txt"] = "\n".join(path.name for path in (tmp_path / "t").iterdir()).encode()
    same_steps(open_trace(url), open_trace(tmp_path / "t"))


def test_a_server_without_ranges_is_refused(tmp_path: Path, web: Web) -> None:
    wide(tmp_path / "t")
    url = served(tmp_path / "t", web)
    web.has_ranges = False
    with pytest.raises(RemoteError, match="no ranges of bytes"):
        open_trace(url)[0].rewards  # noqa: B018


@pytest.mark.parametrize("failures", [[503, "close", "cut"], [500] * 5], ids=["mixed", "500"])
def test_failures_of_a_server_are_tried_again(tmp_path: Path, web: Web, failures: list[int | str]) -> None:
    wide(tmp_path / "t")
    url = served(tmp_path / "t", web)
    trace = open_trace(url)
    web.failures += failures
    same_steps(trace, open_trace(tmp_path / "t"))
    assert web.failures == []


def test_lasting_failures_are_described_without_the_answer_of_the_store(tmp_path: Path) -> None:
    recorded(tmp_path / "t", episodes=3)
    url = uploaded(tmp_path / "t", f"faulty:/{tmp_path}/x")
    FaultyFileSystem.reset(*[OSError("AKIASECRET")] * objects.TRIES)
    with pytest.raises(RemoteError, match=r"faulty://.*/x: OSError, 7 times; try again later") as raised:
        open_trace(url)
    assert "AKIASECRET" not in str(raised.value)
    assert raised.value.__suppress_context__
    FaultyFileSystem.reset(PermissionError("AKIASECRET"))
    with pytest.raises(RemoteError, match="access denied; check the credentials"):
        open_trace(url)
    assert FaultyFileSystem.calls == [("ls", "x")]


@pytest.mark.parametrize(
    ("answer", "said", "tries"),
    [
        ("status code 404: <Code>NoSuchBucket</Code>", "no such bucket or container; check the URL", 1),
        ("retry_timeout: 180s, tcp connect error: Connection refused", "connection refused, 7 times", objects.TRIES),
        ("retry_timeout: 180s, dns error: failed to lookup", "host not found, 7 times", objects.TRIES),
    ],
)
def test_a_reason_is_found_in_the_answer_of_a_store(tmp_path: Path, answer: str, said: str, tries: int) -> None:
    FaultyFileSystem.reset(*[OSError(answer)] * objects.TRIES)
    with pytest.raises(RemoteError, match=said):
        open_trace(f"faulty:/{tmp_path}/x")
    assert len(FaultyFileSystem.calls) == tries


def test_a_large_upload_has_more_time_than_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(QuietHandler):
        def do_PUT(self) -> None:  # noqa: N802 - name of http.server
            self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(1)
            self.answer(200, b"", {"ETag": '"1"'})

    monkeypatch.setitem(stores._CLIENT_OPTIONS, "timeout", "300ms")
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(key, "k")
    with running(Slow) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        store = stores.store_at("s3://b/t")
        store.put("large", bytes(2 << 20), new=True)
        with pytest.raises(Exception, match="PUT") as raised:
            store.put("small", b"1", new=True)
        assert objects.reason_of(raised.value)[0] == "timed out"


def test_a_short_answer_is_fetched_again(tmp_path: Path) -> None:
    recorded(tmp_path / "t", episodes=3)
    url = uploaded(tmp_path / "t", f"faulty:/{tmp_path}/x")
    FaultyFileSystem.reset(None, "short", "short")
    same_steps(open_trace(url), open_trace(tmp_path / "t"))


def test_credentials_in_a_url_are_not_shown(tmp_path: Path, web: Web) -> None:
    recorded(tmp_path / "t", episodes=2)
    url = served(tmp_path / "t", web).replace("//", "//me:hush@") + "?signature=hush"
    trace = open_trace(url)
    assert len(trace) == 2
    assert "hush" not in f"{trace!r} {trace.directory} {index_of(trace).readers[0].files.where}"
    with pytest.raises(TraceNotFound) as raised:
        open_trace(url.replace("/t?", "/u?"))
    assert "hush" not in str(raised.value)
    edit.merge([trace], tmp_path / "copy")
    assert not any(b"hush" in path.read_bytes() for path in (tmp_path / "copy").iterdir())


def test_an_overwritten_object_is_never_served_from_the_cache(tmp_path: Path, web: Web) -> None:
    for name, length in (("one", 2), ("other", 3)):
        recorded(tmp_path / name, episodes=length, uid="w")
    url, cache = served(tmp_path / "one", web), tmp_path / "cache"
    same_steps(open_trace(url, cache=cache), open_trace(tmp_path / "one"))
    opened = open_trace(url)
    served(tmp_path / "other", web)
    same_steps(open_trace(url, cache=cache), open_trace(tmp_path / "other"))
    opened.refresh()
    same_steps(opened, open_trace(tmp_path / "other"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("edit", "compact", "THERE", "--in-place"), "gym-trace pull THERE DIR"),
        (("edit", "repair", "THERE", "--in-place"), "gym-trace pull THERE DIR"),
        (("edit", "annotate", "THERE", "--fact", "license=MIT"), "gym-trace pull THERE DIR"),
        (("edit", "compact", "THERE", "-o", "THERE/new"), "gym-trace push PATH THERE/new"),
        (("export", "THERE", "-o", "THERE/steps.csv"), "is a URL; write to a local path"),
        (("import", "THERE/steps.csv", "-o", "new"), "is a URL; copy it to a local path"),
    ],
)
def test_commands_that_write_name_push_and_pull_for_urls(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    recorded(tmp_path / "t")
    url = uploaded(tmp_path / "t", f"faulty:/{tmp_path}/u")
    refused = run(*(word.replace("THERE", url) for word in words))
    assert refused.exit_code == 2
    assert said.replace("THERE", url) in refused.output.replace("\n", " ").replace("  ", " ")


@pytest.mark.parametrize("kind", ["memory", "web"])
def test_traces_below_a_url_are_listed(tmp_path: Path, web: Web, kind: str) -> None:
    top = f"faulty:/{tmp_path}" if kind == "memory" else f"{web.url}/top"
    for name in ("a", "deep/er/b", ".hidden/c"):
        recorded(tmp_path / name)
        for path in (tmp_path / name).iterdir():
            if kind == "memory":
                FaultyFileSystem().pipe_file(f"{top}/{name}/{path.name}", path.read_bytes())
            else:
                web.files[f"/top/{name}/{path.name}"] = path.read_bytes()
    assert list(find_traces(top)) == [f"{top}/a", f"{top}/deep/er/b"]
    listed = [json.loads(line) for line in run("ls", top, "--json").output.splitlines()]
    assert [row["directory"] for row in listed] == [f"{top}/a", f"{top}/deep/er/b"]
    assert all(row["state"] == "closed" for row in listed)
    missing = run("ls", f"{top}/missing")
    assert missing.exit_code == 1
    assert "nothing there" in missing.output or "lists no files there" in missing.output


def test_check_of_a_damaged_copy_at_a_url_names_pull(tmp_path: Path, web: Web) -> None:
    recorded(tmp_path / "t", uid="w", episodes=20)
    url = served(tmp_path / "t", web)
    batch = web.files["/t/w.000000.gtb"]
    web.files["/t/w.000000.gtb"] = batch[:1500] + bytes([batch[1500] ^ 1]) + batch[1501:]
    assert f"restored from parity; 'gym-trace pull {url} NEW' writes them into the copy" in run("check", url).output
    assert "the copy here is restored" in run("pull", url, tmp_path / "copy").output
    assert (tmp_path / "copy" / "w.000000.gtb").read_bytes() == batch


def test_a_search_below_a_url_that_never_ends_is_given_up(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    page = b"".join(b'<a href="%d/">' % number for number in range(50))
    web.answers["/top/"] = lambda handler: handler.answer(200, page, {"Content-Type": "text/html"})
    web.answers |= {f"/top/{number}/": web.answers["/top/"] for number in range(50)}
    monkeypatch.setattr(describe, "_SEARCH_SECONDS", 0.2)
    with pytest.raises(RemoteError, match="takes too long; pass a URL further below"):
        list(find_traces(f"{web.url}/top"))
    assert len(web.requests) < 5000


def test_iterating_fetches_only_the_columns_that_are_asked_for(tmp_path: Path, web: Web) -> None:
    wide(tmp_path)
    trace = open_trace(served(tmp_path, web))
    rewards = [episode.rewards for episode in trace]
    assert web.sent < sum(map(len, web.files.values())) / 10
    for found, episode in zip(rewards, open_trace(tmp_path), strict=True):
        np.testing.assert_array_equal(found, episode.rewards)


def test_iterating_fetches_ahead_what_was_asked_for_before(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_blocks(rows=40, chunk=1 << 16):
        wide(tmp_path)
    trace = open_trace(served(tmp_path, web))
    ahead: list[set[str]] = []
    monkeypatch.setattr(RemoteStorage, "soon", lambda self, call: ahead.append(set(call.args[1])))
    monkeypatch.setattr("gym_trace.playback.writer_reader._MOST_AHEAD", 1)
    for episode in trace:
        if episode.index < 4:
            assert len(episode.rewards) == len(episode.actions) == 40
    assert ahead
    assert all(roots == {"rewards", "actions"} for roots in ahead)


def test_an_object_overwritten_while_it_is_read_raises(tmp_path: Path, web: Web) -> None:
    wide(tmp_path / "one", uid="w")
    wide(tmp_path / "other", uid="w", seed=5)
    trace = open_trace(served(tmp_path / "one", web))
    served(tmp_path / "other", web)
    with pytest.raises(TraceError, match="was overwritten while it was read; open it again"):
        [episode.observations for episode in trace]


def test_files_fetched_with_overwritten_ones_need_no_other_request(web: Web) -> None:
    names = [f"w{number}.manifest.jsonl" for number in range(20)]
    web.files |= {f"/t/{name}": b"first" for name in names}
    storage = RemoteStorage(f"{web.url}/t", MemoryBlocks())
    storage.names()
    web.files |= {f"/t/{name}": b"second" for name in names[3:5]}
    with pytest.raises(RemoteError, match=r"w4.*was overwritten while it was read"):
        storage.expect(Span(name, 0, 5) for name in names)
    storage.names()
    web.requests.clear()
    storage.expect(Span(name, 0, 6) for name in names)
    assert sorted({path for _, path, _ in web.requests}) == [f"/t/{name}" for name in names[3:5]]


def test_new_batches_and_a_longer_manifest_are_seen_by_a_refresh(tmp_path: Path) -> None:
    recorded(tmp_path / "t", episodes=2, uid="first")
    url = uploaded(tmp_path / "t", f"memory:/{tmp_path}/x")
    trace = open_trace(url)
    recorded(tmp_path / "t", episodes=3, uid="second", on_exist="append")
    uploaded(tmp_path / "t", url)
    assert trace.refresh() == 3
    same_steps(trace, open_trace(tmp_path / "t"))


def test_rewards_are_read_without_the_observations(tmp_path: Path) -> None:
    wide(tmp_path / "t")
    url = uploaded(tmp_path / "t", f"faulty:/{tmp_path}/x")
    total = sum(path.stat().st_size for path in (tmp_path / "t").iterdir())
    FaultyFileSystem.reset()
    trace = open_trace(url)
    assert trace[7].rewards.tolist() == open_trace(tmp_path / "t")[7].rewards.tolist()
    assert FaultyFileSystem.fetched < total / 20


# -- the cache --------------------------------------------------------------------------------------------------------


def test_blocks_are_fetched_once(tmp_path: Path) -> None:
    recorded(tmp_path / "t", episodes=5)
    url = uploaded(tmp_path / "t", f"faulty:/{tmp_path}/x")
    list(open_trace(url, cache=tmp_path / "cache"))
    FaultyFileSystem.reset()
    list(open_trace(url, cache=tmp_path / "cache"))
    assert {call for call, _ in FaultyFileSystem.calls} == {"ls"}


def test_a_cache_on_the_disk_has_a_block_once_any_process_put_it(tmp_path: Path) -> None:
    one, other = DiskBlocks(tmp_path / "cache"), DiskBlocks(tmp_path / "cache")
    key = "0" * 40
    one.put(key, 0, b"a")
    assert one.has(key, [0])
    assert not one.has(key, [0, 1])
    other.put(key, 1, b"b")
    assert one.has(key, [0, 1])
    assert one.get(key, 1) == b"b"
    assert one.get(key, 2) is None


def test_opening_with_a_cache_on_the_disk_fetches_each_manifest_once(tmp_path: Path, web: Web) -> None:
    with TraceRecordingWrapper(Noise(), tmp_path / "t") as env:
        play(env, 1)
    web.files = {f"/t/{path.name}": path.read_bytes() for path in (tmp_path / "t").iterdir()}
    web.files["/t/names.txt"] = "\n".join(path.name for path in (tmp_path / "t").iterdir()).encode()
    open_trace(RemoteStorage(f"{web.url}/t", DiskBlocks(tmp_path / "cache")))
    fetched = [path for method, path, _ in web.requests if method == "GET" and path.endswith(".jsonl")]
    assert len(fetched) == 1


def test_the_cache_stays_under_its_limit_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    limit = 8 << 20
    cache = DiskBlocks(tmp_path, limit)
    for number in range(1000):
        cache.put("a" * 32, number, bytes([number % 251]) * BLOCK)
    used = sum(512 * path.stat().st_blocks for path in tmp_path.rglob("*.blocks"))
    assert limit / 2 < used <= limit
    for number in (0, 999):
        block = cache.get("a" * 32, number)
        assert block == (None if number == 0 else bytes([999 % 251]) * BLOCK)


def test_blocks_that_another_process_reads_are_not_removed(tmp_path: Path) -> None:
    other = DiskBlocks(tmp_path, 64 << 20)
    other.put("b" * 32, 0, b"theirs")
    cache = DiskBlocks(tmp_path, 2 << 20)
    for number in range(500):
        cache.put("a" * 32, number, bytes(BLOCK))
    assert (tmp_path / f"object-{'b' * 32}" / "000000.blocks").exists()
    assert other.get("b" * 32, 0) == b"theirs"


def test_the_cache_follows_no_link_and_uses_no_directory_of_others(tmp_path: Path) -> None:
    recorded(tmp_path / "t", episodes=2)
    url, cache = uploaded(tmp_path / "t", f"memory:/{tmp_path}/x"), tmp_path / "cache"
    same_steps(open_trace(url, cache=cache), open_trace(tmp_path / "t"))
    (tmp_path / "mine").mkdir()
    for planted, kind in zip(sorted(cache.iterdir()), ("link", "writable")):
        for path in planted.iterdir():
            path.unlink()
        if kind == "link":
            planted.rmdir()
            planted.symlink_to(tmp_path / "mine")
        else:
            planted.chmod(0o777)
    same_steps(open_trace(url, cache=cache), open_trace(tmp_path / "t"))
    assert [path for path in cache.rglob("*") if path.is_file()] == list((tmp_path / "mine").iterdir()) == []
    cache.chmod(0o777)
    with pytest.raises(InvalidOption, match="cache: writable by others; keep blocks in"):
        open_trace(url, cache=cache)
    cache.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(cache, 12345, 12345)
        with pytest.raises(InvalidOption, match="cache: belongs to another user"):
            open_trace(url, cache=cache)


def test_a_damaged_block_of_the_cache_is_fetched_again(tmp_path: Path) -> None:
    recorded(tmp_path / "t", episodes=5)
    url = uploaded(tmp_path / "t", f"memory:/{tmp_path}/x")
    list(open_trace(url, cache=tmp_path / "cache"))
    for path in (tmp_path / "cache").rglob("*.blocks"):
        data = bytearray(path.read_bytes())
        data[4096 + 100] ^= 1
        path.write_bytes(data)
    same_steps(open_trace(url, cache=tmp_path / "cache"), open_trace(tmp_path / "t"))


def test_a_limit_under_one_chunk_warns_and_reading_goes_on(tmp_path: Path) -> None:
    wide(tmp_path / "t")
    url = uploaded(tmp_path / "t", f"memory:/{tmp_path}/x")
    with pytest.warns(UserWarning, match="raise the limit"):
        same_steps(open_trace(url, cache=tmp_path / "cache", cache_bytes=2 << 20), open_trace(tmp_path / "t"))


def test_options_of_the_cache_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidOption, match="only for URLs"):
        open_trace(tmp_path, cache=tmp_path / "cache")
    with pytest.raises(InvalidOption, match="too small"):
        open_trace("memory://x", cache=tmp_path / "cache", cache_bytes=10)
    with pytest.raises(InvalidOption, match="unknown scheme"):
        open_trace("gopher://x/t")
    monkeypatch.setenv("GYM_TRACE_URL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("GYM_TRACE_URL_CACHE_BYTES", "many")
    with pytest.raises(InvalidOption, match="not a number of bytes"):
        gym_trace.open_trace("memory://x")


def test_a_forked_process_reads_with_connections_of_its_own(tmp_path: Path, web: Web) -> None:
    recorded(tmp_path / "t", episodes=3)
    trace = open_trace(served(tmp_path / "t", web), cache=tmp_path / "cache")
    list(trace)
    in_a_child(lambda: same_steps(trace, open_trace(tmp_path / "t")))
    in_a_child(lambda: same_steps(open_trace(f"{web.url}/t"), open_trace(tmp_path / "t")))


def test_blocks_that_are_expected_or_put_again_outlast_others() -> None:
    cache = MemoryBlocks(4)
    for number in range(4):
        cache.put("a", number, b"x")
    assert cache.has("a", [0])
    cache.put("a", 1, b"x")
    cache.put("a", 4, b"x")
    cache.put("a", 5, b"x")
    assert [number for number in range(6) if cache.get("a", number)] == [0, 1, 4, 5]


@pytest.mark.parametrize("kind", [MemoryBlocks, DiskBlocks])
def test_a_child_forked_while_threads_fetch_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    recorded(tmp_path / "t", episodes=3)
    cache = MemoryBlocks() if kind is MemoryBlocks else DiskBlocks(tmp_path / "cache")
    storage = RemoteStorage(uploaded(tmp_path / "t", f"faulty:/{tmp_path}/x"), cache)
    name = next(name for name in storage.names() if name.endswith(".gtb"))
    get, parent, asked, answer = FaultyFileSystem.cat_file, os.getpid(), Event(), Event()

    def slow(self: FaultyFileSystem, *args: Any, **options: Any) -> bytes:
        if os.getpid() == parent:
            asked.set()
            assert answer.wait(60)
        return get(self, *args, **options)

    def read() -> None:
        signal.alarm(0 if os.getpid() == parent else 60)  # instead of waiting for ever
        with storage.open(name) as file:
            assert file.read(0, 1000) == (tmp_path / "t" / name).read_bytes()[:1000]

    monkeypatch.setattr(FaultyFileSystem, "cat_file", slow)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        assert asked.wait(60)
        with cache._lock:
            try:
                in_a_child(read)
            finally:
                answer.set()
        reading.result()


@pytest.mark.parametrize("url", ["file:///a/b", "s3://bucket/a", "memory://a/b", "local:///a"])
def test_a_url_survives_pathlib_which_removes_slashes(url: str) -> None:
    assert url_of(Path(url)) == url
    assert str(UrlPath(url)) == url


@pytest.mark.parametrize("words", ["ls URL", "info URL", "pull URL new", "record CartPole-v1 -o URL"])
@pytest.mark.parametrize("url", ["s3://", "gs:///", "az:/", "https://"])
def test_a_url_without_a_bucket_is_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*words.replace("URL", url).split())
    scheme = url.partition(":")[0]
    assert result.output == f"error: {scheme}://: names no bucket or host; write {scheme}://BUCKET/PATH\n"
    assert result.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_the_root_of_the_file_system_is_a_url() -> None:
    assert storage_at("file:///").root == "/"


def test_an_object_that_is_gone_is_named_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("duckdb")
    recorded(tmp_path / "t")
    (batch,) = (path.name for path in (tmp_path / "t").glob("*.gtb"))
    url = uploaded(tmp_path / "t", f"faulty:/{tmp_path}/u")
    read = FaultyFileSystem.cat_file
    monkeypatch.setattr(FaultyFileSystem, "cat_file", lambda fs, path, **at: read(fs, path.replace("gtb", "x"), **at))
    for words in (("sql", url, "SELECT sum(reward) FROM steps"), ("edit", "compact", url, "-o", str(tmp_path / "new"))):
        result = run(*words)
        assert (result.exit_code, result.output) == (1, f"error: {url}/{batch}: no longer there\n")


def test_compact_of_a_url_compares_sizes_of_files(tmp_path: Path) -> None:
    recorded(tmp_path / "t")
    url = uploaded(tmp_path / "t", f"faulty:/{tmp_path}/u")
    last = ok("edit", "compact", url, "-o", str(tmp_path / "new")).output.splitlines()[-1]
    before, now = (sum(path.stat().st_size for path in (tmp_path / name).iterdir()) for name in ("t", "new"))
    assert last == f"before: {show.size(before)}, now {show.size(now)}, as sizes of files"


# -- servers that are not trusted -------------------------------------------------------------------------------------


def endless(handler: QuietHandler) -> None:
    """Send a body without an end, as long as anyone reads it."""
    handler.send_response(200)
    handler.send_header("Content-Type", "text/html")
    handler.send_header("Connection", "close")
    handler.end_headers()
    while handler.command == "GET":
        handler.wfile.write(b"w.manifest.jsonl\n" * 10_000)


@pytest.mark.parametrize("path", ["/t/names.txt", "/t/"])
def test_a_list_of_files_without_an_end_is_not_read_whole(web: Web, path: str) -> None:
    web.answers[path] = endless
    with pytest.raises(RemoteError, match="larger than 4194304 bytes"):
        open_trace(f"{web.url}/t")


def test_a_file_that_is_longer_than_was_asked_for_is_not_read_whole(tmp_path: Path, web: Web) -> None:
    recorded(tmp_path / "t", uid="w")
    url = served(tmp_path / "t", web)
    web.answers["/t/w.000000.gtb"] = lambda handler: (
        handler.answer(200, b"", {"Content-Length": "10000"}) if handler.command == "HEAD" else endless(handler)
    )
    with pytest.raises(RemoteError, match="sends whole files"):
        open_trace(url)


def test_a_compressed_answer_is_refused_and_never_decompressed(web: Web) -> None:
    asked = []

    def bomb(handler: QuietHandler) -> None:
        asked.append(handler.headers["Accept-Encoding"])
        handler.answer(200, gzip.compress(bytes(10 << 20)), {"Content-Encoding": "gzip"})

    web.answers["/t/names.txt"] = bomb
    with pytest.raises(RemoteError, match="compresses what it sends"):
        open_trace(f"{web.url}/t")
    assert asked == ["identity"]


def test_only_files_of_a_trace_are_asked_for(tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path / "t", uid="w", episodes=2)
    url, mine = served(tmp_path / "t", web), [path.name for path in (tmp_path / "t").iterdir()]
    web.files["/t/names.txt"] = "\n".join([*mine, *mine, *(f"{n}.txt" for n in range(5000)), "../../w.ring"]).encode()
    same_steps(open_trace(url), open_trace(tmp_path / "t"))
    assert sorted(path for method, path, _ in web.requests if method == "HEAD") == sorted(f"/t/{n}" for n in mine)
    monkeypatch.setattr("gym_trace.storage.remote.stores._MOST_FILES", 1)
    with pytest.raises(RemoteError, match="lists more than 1 files"):
        open_trace(url)


def test_every_kind_of_file_of_a_trace_is_listed_on_the_web() -> None:
    names = ["w.000000.gtb", "w.000000.gtb.part", "w.manifest.jsonl", "w.ring", "w.video.000001.mp4", "facts.json"]
    assert {kind_of(name) for name in names} == {*_KINDS, "facts"}
    assert all(stores._TRACE_FILE.fullmatch(name) for name in names)


def test_redirects_are_followed_on_the_same_server_only(tmp_path: Path, web: Web) -> None:
    recorded(tmp_path / "t", episodes=2)
    served(tmp_path / "t", web)
    for path in ("names.txt", *(path.name for path in (tmp_path / "t").iterdir())):
        web.answers[f"/old/{path}"] = lambda handler, to=f"/t/{path}": handler.answer(302, b"", {"Location": to})
    web.files["/t/names.txt"] = "\n".join(path.name for path in (tmp_path / "t").iterdir()).encode()
    same_steps(open_trace(f"{web.url}/old"), open_trace(tmp_path / "t"))
    same_steps(open_trace(f"{web.url}/old".replace("//", "//me:hush@")), open_trace(tmp_path / "t"))
    with serving() as other:
        for to in (f"{other.url}/t/names.txt", "//127.0.0.2:80/t", "mailto:me@example.org", "http://[", "file:///etc"):
            web.answers["/old/names.txt"] = lambda handler, to=to: handler.answer(302, b"", {"Location": to})
            with pytest.raises(RemoteError, match="redirects to another server"):
                open_trace(f"{web.url}/old")
        assert other.requests == []
    web.answers["/old/names.txt"] = lambda handler: handler.answer(302, b"", {"Location": "names.txt"})
    with pytest.raises(RemoteError, match="more than 5 redirects"):
        open_trace(f"{web.url}/old")


@pytest.mark.parametrize("path", ["names.txt", "w.000000.gtb"])
def test_a_server_that_sends_a_byte_now_and_then_is_given_up(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    recorded(tmp_path / "t", uid="w")
    url, over = served(tmp_path / "t", web), Event()

    def drip(handler: QuietHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        while handler.command == "GET" and not over.wait(0.02):
            handler.wfile.write(b"w")

    web.answers[f"/t/{path}"] = drip
    monkeypatch.setattr(stores, "_SECONDS", 0.5)
    monkeypatch.setattr(stores, "_LEAST_RATE", 1 << 30)
    try:
        with pytest.raises(RemoteError, match="answers too slowly"):
            open_trace(url)
    finally:
        over.set()


def test_a_server_that_answers_no_head_tells_sizes_by_ranges(tmp_path: Path, web: Web) -> None:
    recorded(tmp_path / "t", uid="w")
    url = served(tmp_path / "t", web)
    web.has_head = False
    same_steps(open_trace(url), open_trace(tmp_path / "t"))
