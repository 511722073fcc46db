"""push and pull between a directory and stores in memory, in a folder, and one that fails."""

import errno
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import pytest
from faulty_store import FaultyFileSystem
from runs import play, recorded
from scripted_env import CountingEnv
from shell import run

from gym_trace import TraceRecordingWrapper, check_trace, open_trace, pull, push
from gym_trace.edit import compact
from gym_trace.errors import CorruptTrace, InvalidOption, RemoteError, TraceExists, TraceNotFound
from gym_trace.format.facts import add_facts
from gym_trace.storage.local import LocalStorage
from gym_trace.storage.remote import objects
from gym_trace.storage.remote.address import url_of
from gym_trace.storage.remote.cache import MemoryBlocks
from gym_trace.storage.remote.storage import RemoteStorage

fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(objects, "_FIRST_WAIT", 0.001)
    monkeypatch.setenv("GYM_TRACE_CACHE", str(tmp_path / "cache"))
    FaultyFileSystem.reset()
    yield
    FaultyFileSystem.reset()


@pytest.fixture(params=["file", "memory", "faulty"])
def url(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    slashes = "://" if request.param == "file" else ":/"
    return f"{request.param}{slashes}{tmp_path}/bucket/trace"


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trace of two writers with several batches each."""
    monkeypatch.setattr("gym_trace.format.batch_files.BATCH_FRAGMENTS", 2)
    for writer in ("a", "b"):
        with TraceRecordingWrapper(CountingEnv(), tmp_path / "t", uid=writer, on_exist="append") as env:
            for _ in range(6):
                play(env, 1)
                env.flush()
    return tmp_path / "t"


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_pushed_trace_is_read_and_pulled_as_it_was(trace: Path, url: str, tmp_path: Path) -> None:
    add_facts(LocalStorage(trace), {"license": "MIT"})
    (trace / "mine.txt").write_text("not of the trace")
    done = []
    report = push(trace, url, on_progress=lambda *counts: done.append(counts))
    assert sorted(report.pushed) == sorted({*files(trace)} - {"mine.txt"})
    assert done[-1] == (report.bytes, report.bytes)
    assert open_trace(url).episodes.tolist() == open_trace(trace).episodes.tolist()
    assert check_trace(url).damages == []
    assert pull(url, tmp_path / "copy").pulled == report.pushed
    assert files(tmp_path / "copy") == {name: data for name, data in files(trace).items() if name != "mine.txt"}


def test_a_second_push_or_pull_copies_only_new_files(trace: Path, url: str, tmp_path: Path) -> None:
    first = push(trace, url)
    recorded(trace, uid="c", on_exist="append")
    second = push(trace, url)
    assert second.same == len(first.pushed)
    assert {name[0] for name in second.pushed} == {"c"}
    pull(url, tmp_path / "copy")
    os.unlink(next((tmp_path / "copy").glob("a.000001.gtb")))
    assert pull(url, tmp_path / "copy").pulled == ["a.000001.gtb"]


def test_a_dry_run_copies_nothing(trace: Path, url: str, tmp_path: Path) -> None:
    report = push(trace, url, dry_run=True)
    assert len(report.pushed) == len(files(trace))
    with pytest.raises(TraceNotFound):
        pull(url, tmp_path / "copy")
    push(trace, url)
    assert pull(url, tmp_path / "copy", dry_run=True).bytes == report.bytes
    assert not (tmp_path / "copy").exists()


def test_facts_are_those_of_the_source(trace: Path, url: str, tmp_path: Path) -> None:
    push(trace, url)
    pull(url, tmp_path / "copy")
    add_facts(LocalStorage(trace), {"license": "MIT"})
    push(trace, url)
    add_facts(LocalStorage(tmp_path / "copy"), {"license": "BSD"})
    pull(url, tmp_path / "copy")
    assert open_trace(tmp_path / "copy").facts == open_trace(url).facts == {"license": "MIT"}


def test_a_file_of_the_same_name_and_other_content_is_never_overwritten(url: str, tmp_path: Path) -> None:
    recorded(tmp_path / "one", episodes=2, uid="w")
    recorded(tmp_path / "other", episodes=2, uid="w")
    push(tmp_path / "one", url)
    before = open_trace(url).episodes.tolist()
    with pytest.raises(TraceExists, match="differs from the file of this name"):
        push(tmp_path / "other", url)
    with pytest.raises(TraceExists):
        pull(url, tmp_path / "other")
    assert open_trace(url).episodes.tolist() == before


def test_a_damaged_batch_is_not_pushed(trace: Path, url: str) -> None:
    path = trace / "a.000001.gtb"
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptTrace, match="in the manifest"):
        push(trace, url)


def flipped(data: bytes, at: int = 200, count: int = 1) -> bytes:
    return data[:at] + bytes(byte ^ 1 for byte in data[at : at + count]) + data[at + count :]


def flip(url: str, name: str, count: int = 1) -> None:
    """Flip bits in an object, which keeps its size."""
    fs, root = fsspec.url_to_fs(url)
    fs.pipe_file(f"{root}/{name}", flipped(fs.cat_file(f"{root}/{name}"), count=count))


@pytest.mark.parametrize("tags", ["", "md5", "opaque"])
def test_a_damaged_object_is_replaced_by_push_and_never_called_the_same(trace: Path, tmp_path: Path, tags: str) -> None:
    url = f"faulty:/{tmp_path}/bucket"
    push(trace, url)
    FaultyFileSystem.tags = tags
    flip(url, "a.000001.gtb", count=1 if tags != "opaque" else 10**9)
    words = f"{url_of(url)}/a.000001.gtb: damaged; the intact file here replaces it"
    assert words in push(trace, url, dry_run=True).remarks
    report = push(trace, url)
    assert report.pushed == ["a.000001.gtb"]
    assert report.same == len(files(trace)) - 1
    assert words in report.remarks
    assert check_trace(url).damages == []
    again = push(trace, url)
    assert (again.pushed, again.same) == ([], len(files(trace)))
    assert again.remarks == []


@pytest.mark.parametrize("tags", ["md5", "opaque"])
def test_a_push_with_nothing_to_do_only_lists_the_url(trace: Path, tmp_path: Path, tags: str) -> None:
    url = f"faulty:/{tmp_path}/bucket"
    FaultyFileSystem.tags = tags
    push(trace, url)
    FaultyFileSystem.calls.clear()
    report = push(trace, url)
    assert (report.pushed, report.same, report.remarks) == ([], len(files(trace)), [])
    assert {call for call, _ in FaultyFileSystem.calls} == {"ls"}


def test_an_object_or_local_file_that_has_changed_is_compared_again(trace: Path, tmp_path: Path) -> None:
    url, path = f"faulty:/{tmp_path}/bucket", trace / "a.000001.gtb"
    FaultyFileSystem.tags = "opaque"
    push(trace, url)
    flip(url, "a.000001.gtb", count=10**9)
    assert push(trace, url).pushed == ["a.000001.gtb"]
    path.write_bytes(flipped(path.read_bytes(), 0, 10**9))
    with pytest.raises(CorruptTrace, match="in the manifest"):
        push(trace, url)
    (known,) = (tmp_path / "cache" / "objects").iterdir()
    known.write_text("[1")
    assert pull(url, trace).pulled == ["a.000001.gtb"]


def test_an_object_whose_copy_parity_restored_is_not_remembered(trace: Path, tmp_path: Path) -> None:
    url = f"faulty:/{tmp_path}/bucket"
    push(trace, url)
    FaultyFileSystem.tags = "opaque"
    fs, root = fsspec.url_to_fs(url)
    fs.pipe_file(f"{root}/a.000001.gtb", flipped(fs.cat_file(f"{root}/a.000001.gtb"), at=8))
    assert "restored by parity" in str(pull(url, tmp_path / "copy").remarks)
    assert push(tmp_path / "copy", url).pushed == ["a.000001.gtb"]
    assert check_trace(url).damages == []


def test_a_file_that_changes_during_a_push_is_pushed_the_next_time(trace: Path, tmp_path: Path) -> None:
    url = f"faulty:/{tmp_path}/bucket"
    FaultyFileSystem.tags = "opaque"
    add_facts(LocalStorage(trace), {"license": "MIT"})
    push(trace, url)
    (known,) = (tmp_path / "cache" / "objects").iterdir()
    known.unlink()
    with TraceRecordingWrapper(CountingEnv(), trace, uid="c", on_exist="append") as env:
        play(env, 1)
    push(trace, url, on_progress=lambda *_: add_facts(LocalStorage(trace), {"license": "BSD"}))
    assert push(trace, url).pushed == ["facts.json"]
    assert open_trace(url).facts == {"license": "BSD"}


@pytest.mark.parametrize("tags", ["", "md5", "opaque"])
def test_a_damaged_local_file_is_replaced_by_pull_and_not_by_push(trace: Path, tmp_path: Path, tags: str) -> None:
    url, path = f"faulty:/{tmp_path}/bucket", trace / "a.000001.gtb"
    push(trace, url)
    whole = path.read_bytes()
    path.write_bytes(flipped(whole, 0, 10**9))
    FaultyFileSystem.tags = tags
    with pytest.raises(CorruptTrace, match="in the manifest"):
        push(trace, url)
    report = pull(url, trace)
    assert (report.pulled, report.pushed) == (["a.000001.gtb"], [])
    assert f"{path}: damaged; the intact file at the URL replaces it" in report.remarks
    assert path.read_bytes() == whole


def test_pull_keeps_an_intact_file_whose_object_is_damaged(trace: Path, url: str) -> None:
    push(trace, url)
    before = files(trace)
    flip(url, "a.000001.gtb")
    report = pull(url, trace)
    assert (report.pulled, files(trace)) == ([], before)
    assert "damaged; the file here is intact, and 'gym-trace push' puts it there" in str(report.remarks)


def test_an_object_that_no_manifest_at_the_url_lists_is_not_overwritten(trace: Path, url: str) -> None:
    push(trace, url)
    fs, root = fsspec.url_to_fs(url)
    fs.rm_file(f"{root}/a.manifest.jsonl")
    flip(url, "a.000001.gtb")
    before = fs.cat_file(f"{root}/a.000001.gtb")
    with pytest.raises(TraceExists, match="differs from the file of this name"):
        push(trace, url)
    assert fs.cat_file(f"{root}/a.000001.gtb") == before


def test_push_asks_for_no_batch_where_the_store_lists_md5(trace: Path, tmp_path: Path) -> None:
    url = f"faulty:/{tmp_path}/bucket"
    push(trace, url)
    FaultyFileSystem.reset()
    FaultyFileSystem.tags = "md5"
    assert push(trace, url).same == len(files(trace))
    assert FaultyFileSystem.calls == [("ls", "bucket")]


def test_a_damaged_object_is_restored_by_its_parity_when_it_is_pulled(trace: Path, url: str, tmp_path: Path) -> None:
    push(trace, url)
    flip(url, "a.000001.gtb")
    report = pull(url, tmp_path / "copy")
    assert "a.000001.gtb: damaged; the copy here is restored by parity" in str(report.remarks)
    assert files(tmp_path / "copy") == files(trace)


def test_a_damaged_object_that_parity_does_not_restore_is_not_pulled(trace: Path, tmp_path: Path) -> None:
    push(trace, (tmp_path / "bucket").as_uri())
    flip((tmp_path / "bucket").as_uri(), "a.000001.gtb", count=10**9)
    with pytest.raises(CorruptTrace, match="in the manifest"):
        pull((tmp_path / "bucket").as_uri(), tmp_path / "copy")
    assert not (tmp_path / "copy" / "a.000001.gtb").exists()


def test_pull_says_which_batches_are_missing_at_the_url(trace: Path, url: str, tmp_path: Path) -> None:
    push(trace, url)
    fs, root = fsspec.url_to_fs(url)
    for name in ("a.000001.gtb", "a.000002.gtb", "b.000000.gtb"):
        fs.rm_file(f"{root}/{name}")
    for _ in range(2):  # the second one finds nothing to copy
        report = pull(url, tmp_path / "copy")
        remarks = [remark.rpartition("/")[2].partition(":")[0] for remark in report.remarks]
        assert (report.missing, remarks) == (3, ["a.000001.gtb to a.000002.gtb", "b.000000.gtb"])
        assert run("pull", url, str(tmp_path / "copy"), "--quiet").exit_code == 5
    push(trace, url)
    assert run("pull", url, str(tmp_path / "copy")).exit_code == 0
    assert pull(url, tmp_path / "copy").remarks == []
    assert files(tmp_path / "copy") == files(trace)


def test_a_put_whose_answer_was_lost_counts_as_success(trace: Path, tmp_path: Path) -> None:
    url = f"faulty:/{tmp_path}/x"
    FaultyFileSystem.reset(None, "lost", ConnectionResetError(), "lost")
    push(trace, url, workers=1)
    assert check_trace(url).damages == []
    assert open_trace(url).episodes.tolist() == open_trace(trace).episodes.tolist()


def test_a_push_that_broke_off_goes_on(trace: Path, tmp_path: Path) -> None:
    url = f"faulty:/{tmp_path}/x"
    FaultyFileSystem.reset(None, None, None, *[ConnectionResetError("hush")] * 100)
    with pytest.raises(RemoteError, match=r"connection lost, \d times; try again later") as raised:
        push(trace, url, workers=1)
    assert "hush" not in str(raised.value)
    FaultyFileSystem.reset()
    assert push(trace, url).same == 2
    assert open_trace(url).episodes.tolist() == open_trace(trace).episodes.tolist()


def test_a_pull_that_broke_off_leaves_whole_files_only(trace: Path, tmp_path: Path) -> None:
    url = f"faulty:/{tmp_path}/x"
    push(trace, url)
    FaultyFileSystem.reset(*[None] * 12, *[ConnectionResetError()] * 200)
    with pytest.raises(RemoteError):
        pull(url, tmp_path / "copy")
    there, whole = files(tmp_path / "copy"), files(trace)
    assert there.items() <= whole.items()
    FaultyFileSystem.reset()
    pull(url, tmp_path / "copy")
    assert files(tmp_path / "copy") == whole


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> dict[str, Exception]:
    """Errors of reading an object, by its name."""
    errors: dict[str, Exception] = {}
    read = FaultyFileSystem.cat_file

    def cat_file(self: FaultyFileSystem, path: str, **options: Any) -> bytes:
        if (error := errors.get(path.rpartition("/")[2])) is not None:
            raise error
        return read(self, path, **options)

    monkeypatch.setattr(FaultyFileSystem, "cat_file", cat_file)
    return errors


@pytest.mark.parametrize("error", [PermissionError("hush"), FileNotFoundError(), OSError("status 500")])
def test_an_object_that_cannot_be_read_hinders_none_before_it(
    trace: Path, tmp_path: Path, unreadable: dict[str, Exception], error: Exception
) -> None:
    url, copy = f"faulty:/{tmp_path}/x", tmp_path / "copy"
    push(trace, url)
    unreadable["a.000002.gtb"] = error
    pulled = run("pull", url, copy)
    assert pulled.exit_code == 1
    assert pulled.output.startswith(f"error: {url}/a.000002.gtb: ")
    assert sorted(files(copy)) == ["a.000000.gtb", "a.000001.gtb", "a.manifest.jsonl", "b.manifest.jsonl"]
    assert run("check", copy).exit_code == 5  # not a whole trace of fewer episodes
    unreadable.clear()
    assert run("pull", url, copy).exit_code == 0
    assert files(copy) == files(trace)


@pytest.mark.parametrize("is_listed", [True, False])
def test_check_reports_a_batch_that_goes_away_during_the_check(
    trace: Path, tmp_path: Path, unreadable: dict[str, Exception], is_listed: bool
) -> None:
    url = f"faulty:/{tmp_path}/x"
    push(trace, url)
    unreadable["a.000001.gtb"] = FileNotFoundError()
    storage = RemoteStorage(url, MemoryBlocks())
    storage.names()
    if not is_listed:
        FaultyFileSystem().rm_file(f"{url.removeprefix('faulty:/')}/a.000001.gtb")
    (damage,) = check_trace(storage).damages
    assert damage.path == f"{url}/a.000001.gtb"
    assert damage.problem == ("listed, but cannot be read" if is_listed else "this batch is missing")


def test_a_full_disk_ends_a_pull_with_the_path(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"faulty:/{tmp_path}/x"
    push(trace, url)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patched:
        patched.setattr("gym_trace.recording.publishing.whole_files.crc32", Mock(side_effect=full))
        pulled = run("pull", url, tmp_path / "copy")
    assert (pulled.exit_code, pulled.output) == (
        1,
        f"error: {tmp_path}/copy/a.manifest.jsonl: No space left on device\n",
    )
    assert run("pull", url, tmp_path / "copy").exit_code == 0
    assert files(tmp_path / "copy") == files(trace)


def test_commands_push_and_pull(trace: Path, tmp_path: Path) -> None:
    url, copy = (tmp_path / "bucket").as_uri(), str(tmp_path / "copy")
    listed = run("push", str(trace), url, "--dry-run").output
    assert listed.count("push ") == len(files(trace))
    assert "copied" in run("push", str(trace), url).output
    assert '"same"' in run("pull", url, copy, "--json").output
    assert run("push", copy, url).output.startswith("0 files")
    assert run("push", str(trace), str(tmp_path / "plain")).exit_code == 2
    assert run("push", str(tmp_path / "nothing"), url).exit_code == 1


def test_places_are_checked(trace: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="is the directory itself"):
        push(trace, trace.as_uri())
    with pytest.raises(InvalidOption, match="workers=0"):
        push(trace, (tmp_path / "b").as_uri(), workers=0)
    with pytest.raises(InvalidOption, match="is a URL"):
        push(trace.as_uri(), (tmp_path / "b").as_uri())


def test_the_longer_manifest_is_copied_and_one_that_differs_raises(trace: Path, url: str, tmp_path: Path) -> None:
    push(trace, url)
    path = trace / "a.manifest.jsonl"
    whole = path.read_bytes()
    for other in (whole[:-20], b""):
        path.write_bytes(other)
        assert push(trace, url, dry_run=True).pushed == []
        assert pull(url, trace).pulled == [path.name]
        assert path.read_bytes() == whole
    path.write_bytes(whole + b"{}\n")
    assert pull(url, trace).pulled == []
    assert push(trace, url).pushed == [path.name]
    for other in (whole + b"[]\n", b"x" + whole[1:], whole[:-1] + b"x"):
        path.write_bytes(other)
        with pytest.raises(TraceExists, match="differs from the file of this name"):
            push(trace, url)


def test_a_text_at_a_url_is_not_read_further_than_the_local_one(trace: Path, tmp_path: Path) -> None:
    url = f"faulty:/{tmp_path}/bucket"
    push(trace, url)
    fs, root = fsspec.url_to_fs(url)
    path = f"{root}/a.manifest.jsonl"
    fs.pipe_file(path, fs.cat_file(path) + b" " * (100 << 20))
    FaultyFileSystem.reset()
    assert pull(url, trace, dry_run=True).pulled == ["a.manifest.jsonl"]
    assert FaultyFileSystem.fetched < 40 << 20


def test_a_compacted_trace_is_not_put_next_to_its_old_files(trace: Path, url: str, tmp_path: Path) -> None:
    push(trace, url)
    compact(trace, in_place=True)
    for copy in (partial(push, trace, url), partial(push, trace, url, dry_run=True), partial(pull, url, trace)):
        with pytest.raises(TraceExists, match=r"holds the episodes of a in other files than .*'edit compact'"):
            copy()
    assert len(open_trace(url)) == len(open_trace(trace)) == 12
    assert push(trace, f"{url}-2").remarks == []
    recorded(tmp_path / "another", uid="d")
    assert push(tmp_path / "another", url).remarks == [f"{url}: has 2 other writers, and keeps them"]


def test_a_compacted_trace_is_not_pulled_next_to_older_manifests(trace: Path, url: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("a.manifest.jsonl", "b.manifest.jsonl"):
        (copy / name).write_bytes((trace / name).read_bytes())
    compact(trace, in_place=True)
    push(trace, url)
    with pytest.raises(TraceExists, match=r"holds the episodes of a in other files than .*'edit compact'"):
        pull(url, copy)
    assert len(files(copy)) == 2


def test_a_web_server_takes_no_files(trace: Path) -> None:
    for write in (partial(push, trace), partial(TraceRecordingWrapper, CountingEnv())):
        with pytest.raises(InvalidOption, match=r"^https://x.example/t: a web server takes no files; pass .* s3://$"):
            write("https://x.example/t")
