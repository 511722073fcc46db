"""Requests that a trace at a URL takes, counted by a store in memory, and manifests with wrong lines."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import numpy as np
import pytest
import zstandard
from batch_forgery import taken_apart
from faulty_store import FaultyFileSystem
from gymnasium import spaces
from long_tests import LONG
from runs import in_a_child, play, record_lengths
from scripted_env import Result, ToyEnv, small_blocks
from shell import ok

from gym_trace import TraceRecordingWrapper, check_trace, edit, open_trace, pull, push
from gym_trace.data.packing import pack
from gym_trace.errors import CorruptTrace, RemoteError, TraceError
from gym_trace.format import listed_manifests, wire
from gym_trace.format.batch_files import BatchFiles
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.row_types import row_types
from gym_trace.playback.trace import Trace
from gym_trace.storage.protocol import Span
from gym_trace.storage.remote import objects, ranges
from gym_trace.storage.remote.cache import BLOCK, MemoryBlocks
from gym_trace.storage.remote.storage import RemoteStorage

fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
SAMPLES = Path(__file__).parents[2] / "sample_traces"


@pytest.fixture(autouse=True)
def quick() -> None:
    FaultyFileSystem.reset()


class Noise(ToyEnv):
    """Observations of incompressible bytes, so that batches differ, but not in size."""

    observation_space = spaces.Box(0, 255, (64,), np.uint8)
    action_space = spaces.Discrete(2)

    def result(self, action: Any) -> Result:
        return Result(self.np_random.integers(0, 256, 64, np.uint8), float(self.t), self.t == 9)


def batches(directory: Path, count: int, **options: Any) -> Path:
    """Record one batch per episode."""
    small = mock.patch("gym_trace.format.batch_files.BATCH_BYTES", 1)
    with small, TraceRecordingWrapper(Noise(), directory, flush_seconds=1e6, **options) as recorder:
        for number in range(count):
            play(recorder, 1, number)
            recorder.flush()
    return directory


def uploaded(directory: Path) -> str:
    url = f"faulty:/{directory}/url"
    fs, root = fsspec.url_to_fs(url)
    if fs.exists(root):
        fs.rm(root, recursive=True)
    for path in directory.iterdir():
        fs.pipe_file(f"{root}/{path.name}", path.read_bytes())
    FaultyFileSystem.reset()
    FaultyFileSystem.tags = "md5"
    return url


def requests() -> dict[str, int]:
    """Return the number of requests since the last upload, by the ends of the names of files."""
    names = [name for _, name in FaultyFileSystem.calls]
    kinds = [name.rpartition(".")[2] if "." in name else "list" for name in names]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def steps_of(trace: Trace) -> list[Any]:
    return [(e.writer, e.episode_id, e.outcome, e.observations.tolist(), e.rewards.tolist()) for e in trace]


@pytest.fixture
def pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A trace of four writers, which count as many here, and the URL that has it."""
    monkeypatch.setattr(listed_manifests, "LEAST_WRITERS", 4)
    monkeypatch.setenv("GYM_TRACE_CACHE", str(tmp_path / "cache"))
    for number in range(4):
        batches(tmp_path / "t", 3, uid=f"w{number}", on_exist="append")
    url = uploaded(tmp_path / "t")
    fs, root = fsspec.url_to_fs(url)
    fs.rm(root, recursive=True)
    push(tmp_path / "t", url)
    FaultyFileSystem.calls.clear()
    return tmp_path / "t", url


# -- opening ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 40])
def test_opening_a_url_takes_a_listing_and_the_manifest(tmp_path: Path, count: int) -> None:
    trace = open_trace(uploaded(batches(tmp_path, count)))
    assert len(trace) == count
    assert trace.metadata is None
    assert requests() == {"list": 1, "jsonl": 1}


@pytest.mark.parametrize("command", ["info", "edit compact -o NEW"])
def test_commands_list_a_url_once(tmp_path: Path, command: str) -> None:
    url = uploaded(batches(tmp_path / "t", 3))
    ok(*command.replace("NEW", str(tmp_path / "new")).split(), url)
    assert requests()["list"] == 1


def test_chunks_of_several_batches_are_expected_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (reader,) = index_of(open_trace(uploaded(batches(tmp_path, 5)))).readers
    expected: list[list[Span]] = []
    monkeypatch.setattr(RemoteStorage, "expect", lambda self, spans: expected.append(list(spans)))
    reader.expect(dict.fromkeys(range(5)), frozenset(("rewards",)))
    ((*spans,),) = expected
    assert [span.name for span in spans] == list(reader.files.batches.values())


def test_opening_a_url_of_several_writers_takes_a_request_for_each(tmp_path: Path) -> None:
    for number in range(4):
        batches(tmp_path, 3, uid=f"w{number}", on_exist="append")
    assert len(open_trace(uploaded(tmp_path))) == 12
    assert requests() == {"list": 1, "jsonl": 4}


def test_opening_a_url_of_many_pushed_writers_takes_two_requests(pushed: tuple[Path, str]) -> None:
    directory, url = pushed
    trace = open_trace(url)
    assert len(trace) == 12
    assert requests() == {"list": 1, "index": 1}
    assert steps_of(trace) == steps_of(open_trace(directory))
    FaultyFileSystem.calls.clear()
    assert push(directory, url).pushed == []
    assert requests() == {"list": 1}


def test_a_push_from_elsewhere_lists_the_manifests_of_both(pushed: tuple[Path, str], tmp_path: Path) -> None:
    _, url = pushed
    push(batches(tmp_path / "other", 1, uid="w9"), url)
    assert requests() == {"list": 3, "gtb": 1, "jsonl": 1, "index": 3}  # nothing of the four writers is read
    FaultyFileSystem.calls.clear()
    assert len(open_trace(url)) == 13
    assert requests() == {"list": 1, "index": 1}


def test_a_manifest_that_changed_since_the_push_is_read_itself(pushed: tuple[Path, str]) -> None:
    directory, url = pushed
    fs, root = fsspec.url_to_fs(url)
    name = "w2.manifest.jsonl"
    lines = (directory / name).read_bytes().splitlines(keepends=True)
    fs.pipe_file(f"{root}/{name}", b"".join([lines[0].replace(b'"split":"train"', b'"split":"evalu"'), *lines[1:]]))
    FaultyFileSystem.calls.clear()
    trace = open_trace(url)
    assert len(trace) == 12
    assert requests() == {"list": 1, "index": 1, "jsonl": 1, "gtb": 1}  # the schema is read from a batch, too
    assert not trace.damage


def test_no_damage_of_the_file_of_manifests_is_noticed(pushed: tuple[Path, str]) -> None:
    directory, url = pushed
    fs, root = fsspec.url_to_fs(url)
    path = f"{root}/{listed_manifests.NAME}"
    whole, expected = fs.cat_file(path), steps_of(open_trace(directory))
    bomb = zstandard.ZstdCompressor().compress(bytes(listed_manifests.MOST_BYTES + 1))
    forged = [b"", bomb, *(zstandard.ZstdCompressor().compress(pack(it)) for it in (7, {"w0": 7}, {"w0": ["", 7]}))]
    cuts = [whole[:at] for at in range(0, len(whole), len(whole) // 9)]
    flips = [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in range(0, len(whole), len(whole) // 9)]
    for content in (*forged, *cuts, *flips):
        fs.pipe_file(path, content)
        trace = open_trace(url)
        assert steps_of(trace) == expected
        assert not trace.damage


def test_a_push_that_replaces_the_file_of_manifests_hinders_no_reader(
    pushed: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, url = pushed
    fs, root = fsspec.url_to_fs(url)
    names = RemoteStorage.names

    def replaced_after(storage: RemoteStorage) -> list[str]:
        found = names(storage)
        fs.pipe_file(f"{root}/{listed_manifests.NAME}", b"by another push")
        return found

    monkeypatch.setattr(RemoteStorage, "names", replaced_after)
    assert steps_of(open_trace(url)) == steps_of(open_trace(directory))


@pytest.mark.parametrize("refusal", [PermissionError, FileExistsError, ConnectionError])
def test_a_push_that_may_not_write_the_file_of_manifests_says_so(
    pushed: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, refusal: type[OSError]
) -> None:
    directory, url = pushed
    monkeypatch.setattr(objects, "_FIRST_WAIT", 0)
    put = FaultyFileSystem.pipe_file

    def refused(self: FaultyFileSystem, path: str, value: bytes, **options: Any) -> None:
        if path.endswith(listed_manifests.NAME):
            raise refusal("AKIASECRET")
        put(self, path, value, **options)

    monkeypatch.setattr(FaultyFileSystem, "pipe_file", refused)
    batches(directory, 1, uid="w9", on_exist="append")
    report = push(directory, url)
    assert len(report.pushed) == 2
    (remark,) = report.remarks
    assert "manifests.index is not up to date; all files of the trace are copied" in remark
    assert "AKIASECRET" not in remark
    assert steps_of(open_trace(url)) == steps_of(open_trace(directory))
    assert push(directory, url).remarks == []


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("times", [3, 1000])
def test_manifests_that_are_overwritten_during_opening_are_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, times: int
) -> None:
    for number in range(count):
        batches(tmp_path, 2, uid=f"w{number}", on_exist="append")
    url, names, listings = uploaded(tmp_path), RemoteStorage.names, []

    def publish() -> None:  # recorders do the same
        for number in range(count):
            fs, path = fsspec.url_to_fs(f"{url}/w{number}.manifest.jsonl")
            fs.pipe_file(path, fs.cat_file(path) + b'{"type":"note"}\n')

    def overwritten_after(storage: RemoteStorage) -> list[str]:
        found = names(storage)
        if len(listings) < times:
            publish()
        listings.append(len(found))
        return found

    def opens(call: Callable[[], object]) -> None:
        publish()
        listings.clear()
        if times > 3:
            with pytest.raises(RemoteError, match="was overwritten while it was read; open it again"):
                call()
            assert 3 < len(listings) < 50
        else:
            call()
            assert len(listings) == 4

    trace = open_trace(url, cache=tmp_path / "cache")
    monkeypatch.setattr(RemoteStorage, "names", overwritten_after)
    opens(lambda: open_trace(url))
    opens(trace.refresh)
    opens(lambda: pickle.loads(pickle.dumps(trace)))
    assert steps_of(trace) == steps_of(open_trace(tmp_path))


def test_a_manifest_that_grows_during_a_check_is_read_again(tmp_path: Path) -> None:
    directory = batches(tmp_path / "t", 3)
    url = uploaded(directory)
    fs, root = fsspec.url_to_fs(url)
    (manifest,) = directory.glob("*.jsonl")
    storage = RemoteStorage(url, MemoryBlocks())
    storage.names()
    fs.pipe_file(f"{root}/{manifest.name}", manifest.read_bytes() + b'{"type": "note"}\n')
    assert check_trace(storage).damages == []


def test_metadata_without_a_json_form_is_read_from_the_first_batch(tmp_path: Path) -> None:
    metadata = {"bytes": b"\0", "pair": (1, 2)}
    trace = open_trace(uploaded(batches(tmp_path, 9, metadata=metadata)))
    assert trace.metadata == metadata
    assert requests() == {"list": 1, "jsonl": 1, "gtb": 1}


def test_a_large_index_is_read_from_its_batch_in_one_request(tmp_path: Path) -> None:
    with mock.patch("gym_trace.format.listed_index._MOST_LISTED", 64):
        batches(tmp_path, 5)
    trace = open_trace(uploaded(tmp_path))
    assert requests() == {"list": 1, "jsonl": 1, "gtb": 5}
    assert steps_of(trace) == steps_of(open_trace(tmp_path))


# -- manifests that do not agree with the batches ---------------------------------------------------------------------


def test_a_manifest_cut_at_any_byte_costs_requests_but_no_episode(tmp_path: Path) -> None:
    known = steps_of(open_trace(batches(tmp_path, 3, uid="w")))
    manifest = tmp_path / "w.manifest.jsonl"
    whole = manifest.read_bytes()
    ends = {at + 1 for at, byte in enumerate(whole) if byte == ord("\n")}
    for end in sorted({0, *ends, *range(0, len(whole), 1 if LONG else 211)}):
        manifest.write_bytes(whole[:end])
        trace = open_trace(uploaded(tmp_path))
        assert requests().get("gtb", 0) == 3 - whole[:end].rpartition(b"\n")[0].count(b'"type":"batch"')
        assert steps_of(trace) == known


def test_a_writer_killed_before_the_line_of_its_batch_loses_nothing(tmp_path: Path) -> None:
    sealed = BatchFiles._sealed

    def killed(files: BatchFiles, name: str, *rest: Any) -> None:
        if name.endswith("2.gtb"):
            os._exit(0 if (tmp_path / name).exists() else 1)
        sealed(files, name, *rest)

    with mock.patch.object(BatchFiles, "_sealed", killed):
        in_a_child(lambda: batches(tmp_path, 5, uid="w"))
    trace = open_trace(uploaded(tmp_path))
    assert requests()["gtb"] == 1
    assert len(steps_of(trace)) == 3
    assert steps_of(trace) == steps_of(open_trace(tmp_path))


def test_no_changed_byte_of_a_manifest_changes_a_step(tmp_path: Path) -> None:
    known = steps_of(open_trace(batches(tmp_path, 3, uid="w")))
    manifest = tmp_path / "w.manifest.jsonl"
    whole = manifest.read_bytes()
    for at in range(0, len(whole), 1 if LONG else 193):
        for bit in (1, 2):
            manifest.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            try:
                assert steps_of(open_trace(uploaded(tmp_path))) == known, whole[max(0, at - 20) : at + 1]
            except CorruptTrace as error:  # a line names a batch that does not exist
                with pytest.raises(CorruptTrace, match=error.problem):
                    steps_of(open_trace(tmp_path))


def test_lines_that_name_each_others_batches_are_not_used(tmp_path: Path) -> None:
    known = steps_of(open_trace(batches(tmp_path, 2, uid="w")))
    manifest = tmp_path / "w.manifest.jsonl"
    text = (
        manifest.read_text().replace("000000.gtb", "x").replace("000001.gtb", "000000.gtb").replace("x", "000001.gtb")
    )
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines[1:3]:
        line["bytes"] = (tmp_path / line["file"]).stat().st_size
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = open_trace(uploaded(tmp_path))
    assert requests()["gtb"] == 2
    assert steps_of(trace) == known
    assert any("wrong" in damage.problem for damage in check_trace(tmp_path).damages)


@pytest.mark.parametrize("most", [64, 1 << 20])
def test_another_batch_of_the_same_size_is_never_read_as_damage(tmp_path: Path, most: int) -> None:
    with mock.patch("gym_trace.format.listed_index._MOST_LISTED", most):
        batches(tmp_path / "t", 4, uid="w")
    before, other = (tmp_path / "t" / f"w.00000{number}.gtb" for number in (1, 2))
    assert before.stat().st_size == other.stat().st_size
    before.write_bytes(other.read_bytes())
    trace = open_trace(uploaded(tmp_path / "t"))
    if most == 64:  # its index is in the batch, and not that of the manifest
        assert steps_of(trace) == steps_of(open_trace(tmp_path / "t"))
        return
    assert trace[0].rewards.tolist()
    with pytest.raises(TraceError, match=r"not the batch that its manifest lists; call refresh\(\)"):
        steps_of(trace)
    trace.refresh()
    assert steps_of(trace) == steps_of(open_trace(tmp_path / "t"))


def test_a_damaged_chunk_of_a_listed_batch_is_restored_by_parity(tmp_path: Path) -> None:
    batches(tmp_path, 3, uid="w")
    known = steps_of(open_trace(tmp_path))
    path = tmp_path / "w.000001.gtb"
    columns = index_of(open_trace(tmp_path)).readers[0].batches[1].columns
    assert columns is not None
    (offset,) = (at for column, at in columns.columns_in(0) if column.path == ("observations",))
    data = bytearray(path.read_bytes())
    data[offset + 5] ^= 1
    path.write_bytes(data)
    trace = open_trace(uploaded(tmp_path))
    with pytest.warns(UserWarning, match="restored by its parity"):
        assert steps_of(trace) == known


def test_batches_that_were_dropped_are_not_expected_at_a_url(tmp_path: Path) -> None:
    with mock.patch("gym_trace.recording.newest._LEAST_BATCH", 2000):
        record_lengths(tmp_path, [20] * 40, keep_bytes=10_000, flush_after=16, flush_seconds=1e6)
    trace = open_trace(tmp_path)
    assert index_of(trace).readers[0].files.listed()[1]
    assert steps_of(open_trace(uploaded(tmp_path))) == steps_of(trace)


@pytest.mark.parametrize("name", ["format-1.0/cartpole", "format-1.1/batches", "format-1.2/compacted"])
def test_traces_of_older_formats_are_read_at_a_url(tmp_path: Path, name: str) -> None:
    for path in (SAMPLES / name).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert steps_of(open_trace(uploaded(tmp_path))) == steps_of(open_trace(tmp_path))


def test_a_manifest_without_an_end_is_not_fetched_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = steps_of(open_trace(batches(tmp_path, 2, uid="w")))
    with open(tmp_path / "w.manifest.jsonl", "ab") as manifest:
        manifest.write(b"x" * (4 << 20))
    for name in ("READ_AHEAD", "_MAX_LINE"):
        monkeypatch.setattr(f"gym_trace.format.manifest.{name}", 1 << 16)
    trace = open_trace(uploaded(tmp_path))
    assert steps_of(trace) == known
    assert FaultyFileSystem.fetched < 1 << 18


def test_no_more_is_fetched_ahead_than_the_cache_has_space_for(tmp_path: Path) -> None:
    (tmp_path / "w.000000.gtb").write_bytes(bytes(1 << 20))
    storage = RemoteStorage(uploaded(tmp_path), MemoryBlocks(1 << 18))
    small = mock.patch.object(ranges, "_REQUEST_BYTES", (2 * BLOCK, 2 * BLOCK))
    with pytest.warns(UserWarning, match="larger than the cache"), small:
        storage.expect([Span("w.000000.gtb", 0, 1 << 20), Span("w.000000.gtb", 1 << 19, 1 << 19)])
    assert FaultyFileSystem.fetched == 1 << 18
    assert requests()["gtb"] == 8


# -- reading everything -----------------------------------------------------------------------------------------------


def test_a_check_reads_each_batch_in_one_request(tmp_path: Path) -> None:
    batches(tmp_path, 30)
    report = check_trace(uploaded(tmp_path))
    assert (report.files, report.damages) == (30, [])
    assert requests() == {"list": 1, "jsonl": 1, "gtb": 30}


@pytest.fixture
def chunks(tmp_path: Path) -> Path:
    """Return a trace of one batch with 25 chunks, each of which takes several blocks."""
    with small_blocks(rows=400, chunk=1 << 20), TraceRecordingWrapper(Noise(), tmp_path, flush_seconds=1e6) as recorder:
        play(recorder, 800)
    assert index_of(open_trace(tmp_path)).readers[0].chunk_count == 25
    return tmp_path


def test_types_of_columns_are_known_without_a_request(chunks: Path) -> None:
    trace = open_trace(uploaded(chunks))
    assert row_types(trace) == row_types(open_trace(chunks))
    assert requests() == {"list": 1, "jsonl": 1}


@pytest.mark.parametrize(("gap", "most"), [(0, 25), (1 << 20, 8)])
def test_a_column_takes_at_most_a_request_for_each_chunk(chunks: Path, gap: int, most: int) -> None:
    trace = open_trace(uploaded(chunks))
    with mock.patch.object(ranges, "_GAP_BYTES", (gap, gap)):
        assert sum(episode.rewards.sum() for episode in trace.scan(["rewards"])) == 800 * 45
    assert requests()["gtb"] <= most


def test_a_column_of_a_compacted_trace_takes_one_request(chunks: Path) -> None:
    edit.compact(chunks, in_place=True)
    trace = open_trace(uploaded(chunks))
    with mock.patch.object(ranges, "_GAP_BYTES", (0, 0)):
        assert sum(episode.rewards.sum() for episode in trace.scan(["rewards"])) == 800 * 45
    assert requests() == {"list": 1, "jsonl": 1, "gtb": 1}


def test_an_episode_takes_one_request_where_its_columns_are_near(chunks: Path) -> None:
    trace = open_trace(uploaded(chunks))
    episode, known = trace[417], open_trace(chunks)[417]
    assert episode.observations.tolist() == known.observations.tolist()
    assert episode.actions.tolist() == known.actions.tolist()
    assert episode.rewards.tolist() == known.rewards.tolist()
    assert requests() == {"list": 1, "jsonl": 1, "gtb": 1}


def test_a_pull_reads_each_batch_in_one_request(tmp_path: Path) -> None:
    url = uploaded(batches(tmp_path / "t", 30))
    assert len(pull(url, tmp_path / "copy").pulled) == 31
    assert requests()["gtb"] == 30


def test_columns_of_an_index_that_differ_from_the_chunks_are_damage(tmp_path: Path) -> None:
    batches(tmp_path, 1, uid="w")
    path = tmp_path / "w.000000.gtb"
    forgery = taken_apart(path)
    table = forgery.index.table("columns", wire.COLUMN_ENTRY).copy()
    table["crc"][1] ^= 1
    forgery.index.put_table("columns", table)
    path.write_bytes(forgery.data(reindexed=False))
    assert any("index does not agree" in damage.problem for damage in check_trace(tmp_path).damages)
