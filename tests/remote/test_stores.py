"""Object stores through a proxy that fails: reading, push and pull, recording, a recording killed again and again."""

from __future__ import annotations

import collections
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import BUCKET
from faults import Faults
from forked_recordings import LENGTH
from runs import play
from scripted_env import CountingEnv
from shell import run
from storage_contract import ReadContract

from gym_trace import TraceRecordingWrapper, check_trace, open_trace, pull, push
from gym_trace.errors import RemoteError, TraceExists
from gym_trace.format import batch_files
from gym_trace.recording.publishing.spool import publish, spool_of
from gym_trace.storage.protocol import Overwritten, ReadStorage
from gym_trace.storage.remote.objects import StoredObject, Wanted
from gym_trace.storage.remote.ranges import RangeReader
from gym_trace.storage.remote.storage import RemoteStorage
from gym_trace.storage.remote.stores import FsspecStore, ObstoreStore, store_at
from gym_trace.tools.statistics.describe import find_traces

KILLS = int(os.environ.get("KILLS", "100"))
RATE = 0.2  # share of the requests that fail


class TestStores(ReadContract):
    @pytest.fixture
    def filled(self, store: Faults, url: str):
        def fill(files: dict[str, bytes]) -> ReadStorage:
            for name, data in files.items():
                store_at(url).put(name, data, new=False)
            return RemoteStorage(url)

        return fill


@pytest.mark.parametrize("kind", [FsspecStore, ObstoreStore])
def test_the_seam_creates_only_and_reads_one_version(store: Faults, url: str, kind: type) -> None:
    if kind is FsspecStore and url.startswith("s3:"):
        pytest.skip("S3 is read by obstore alone")
    reader = RangeReader(url)
    objects = reader._store = FsspecStore(url) if kind is FsspecStore else store_at(url)
    if not isinstance(objects, kind):
        pytest.skip("obstore knows no emulator of Google Cloud Storage")
    assert objects.entries() == {}
    objects.put("a", b"one" * 1000, new=True)
    with pytest.raises(FileExistsError):
        objects.put("a", b"other", new=True)
    stored = objects.entries()["a"]
    assert stored.size == 3000
    assert list(reader.read([Wanted("a", stored, 3, 3), Wanted("a", stored, 2999, 1)])) == [b"one", b"e"]
    with pytest.raises(FileNotFoundError):
        objects.get(Wanted("b", StoredObject(3, ""), 0, 3))
    objects.put("a", b"two" * 1000, new=False)
    with pytest.raises(Overwritten):
        list(reader.read([Wanted("a", stored, 0, 3)]))


def test_a_large_object_is_stored_in_parts(
    store: Faults, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_trace.storage.remote.stores._MOST_IN_ONE_PUT", 1 << 20)
    data = np.random.default_rng(0).integers(0, 256, 40 << 20, np.uint8).tobytes()
    (tmp_path / "large").write_bytes(data)
    objects = store_at(url)
    objects.put("large", tmp_path / "large", new=True)
    stored = objects.entries()["large"]
    assert objects.get(Wanted("large", stored, 0, stored.size)) == data
    with pytest.raises(FileExistsError):
        objects.put("large", tmp_path / "large", new=True)


def test_a_trace_goes_to_s3_and_back_through_faults(store: Faults, url: str, tmp_path: Path) -> None:
    batch_files.BATCH_FRAGMENTS, before = 2, batch_files.BATCH_FRAGMENTS
    try:
        with TraceRecordingWrapper(CountingEnv(), tmp_path / "t") as env:
            for _ in range(40):
                play(env, 1)
                env.flush()
    finally:
        batch_files.BATCH_FRAGMENTS = before
    store.rate = RATE
    push(tmp_path / "t", url)
    assert push(tmp_path / "t", url).bytes == 0
    assert open_trace(url).episodes.tolist() == open_trace(tmp_path / "t").episodes.tolist()
    assert check_trace(url).damages == []
    assert list(find_traces(url.rpartition("/")[0])) == [url]
    pull(url, tmp_path / "copy")
    for path in (tmp_path / "t").iterdir():
        assert (tmp_path / "copy" / path.name).read_bytes() == path.read_bytes()
    assert all(store.counts[kind] for kind in ("status", "cut before", "lost answer", "half an answer"))


def test_a_clash_of_names_overwrites_nothing(store: Faults, url: str, tmp_path: Path) -> None:
    for name in ("one", "other"):
        with TraceRecordingWrapper(CountingEnv(), tmp_path / name, uid="w") as env:
            play(env, 3)
    push(tmp_path / "one", url)
    store.rate = RATE
    with pytest.raises(TraceExists):
        push(tmp_path / "other", url)
    pull(url, tmp_path / "copy")
    assert open_trace(tmp_path / "copy").episodes.tolist() == open_trace(tmp_path / "one").episodes.tolist()


def test_a_store_that_stays_away_is_described_without_keys(
    store: Faults, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if url.startswith("gs://"):
        pytest.skip("gcsfs repeats each request six times by itself, for half a minute")
    monkeypatch.setattr("gym_trace.storage.remote.objects._FIRST_WAIT", 0.001)
    store.rate = 1.0
    with pytest.raises(RemoteError, match="7 times; try again later") as raised:
        open_trace(url)
    for key in ("AKIA", "hush", "Eby8"):
        assert key not in str(raised.value)
        assert key not in run("info", url).output


def test_a_missing_bucket_is_reported_at_once(store: Faults, url: str, tmp_path: Path) -> None:
    with TraceRecordingWrapper(CountingEnv(), tmp_path / "t") as env:
        play(env, 1)
    begin = sum(store.counts.values())
    with pytest.raises(RemoteError, match="no such bucket or container; check the URL"):
        push(tmp_path / "t", url.replace(f"//{BUCKET}/", "//missing/"))
    assert sum(store.counts.values()) - begin < 5


def test_commands_print_no_warnings_of_the_clients(
    store: Faults, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TraceRecordingWrapper(CountingEnv(), tmp_path / "t") as env:
        play(env, 1)
    push(tmp_path / "t", url)
    monkeypatch.delenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", raising=False)  # gym-trace sets it, before it imports gcsfs
    command = [sys.executable, "-m", "gym_trace", "info", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_recording_left_open_is_published_at_exit(store: Faults, url: str) -> None:
    code = (
        "import sys; from gym_trace import TraceRecordingWrapper\n"
        "from runs import play; from scripted_env import CountingEnv\n"
        "env = TraceRecordingWrapper(CountingEnv(), sys.argv[1]); play(env, 3)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, url], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    if isinstance(store_at(url), ObstoreStore):
        assert done.stderr == ""
    else:
        assert "out of reach while the program ends; call close() before that; unpublished files stay in" in done.stderr
        assert publish(spool_of(url)) is not None
    assert len(open_trace(url)) == 3


def test_kills_of_a_recording_lose_and_double_nothing(store: Faults, url: str, tmp_path: Path) -> None:
    """KILLS recordings to one URL, through faults, each killed at a random moment; the next one publishes its spool."""
    randomly = random.Random(0)
    store.rate = 0.1
    words = [sys.executable, str(Path(__file__).parent / "forked_recordings.py"), url]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as recordings:
        assert recordings.stdin is not None
        assert recordings.stdout is not None
        for number in range(KILLS):
            path = tmp_path / f"acknowledged-{number}"
            recordings.stdin.write(f"w{number:03d} {path}\n")
            recordings.stdin.flush()
            child = int(recordings.stdout.readline())
            until = time.monotonic() + 60
            while not (path.exists() and path.stat().st_size):
                assert time.monotonic() < until
                time.sleep(0.005)
            time.sleep(randomly.uniform(0, 0.8))
            os.kill(child, signal.SIGKILL)
            assert recordings.stdout.readline() == "gone\n"
        recordings.stdin.close()
    assert publish(spool_of(url)) is not None
    trace = open_trace(url)
    report = check_trace(url)
    assert report.damages == []
    episodes = collections.defaultdict(list)
    for episode in trace:
        episodes[episode.writer].append(episode)
    steps = 0
    for number in range(KILLS):
        last = int((tmp_path / f"acknowledged-{number}").read_text().splitlines()[-1])
        mine = episodes[f"w{number:03d}"]
        assert [episode.episode_id for episode in mine] == list(range(len(mine)))
        assert len(mine) > last
        for episode in mine[: last + 1]:
            assert len(episode) == LENGTH
            assert episode.outcome == "terminated"
        steps += LENGTH * (last + 1)
    assert not [path for path in spool_of(url).iterdir() if ".gtb" in path.name or "manifest" in path.name]
    print(f"\n{KILLS} kills, {steps:,} acknowledged steps: all at the URL, each once; requests: {dict(store.counts)}")
