"""Rings of dead writers are written into their batches, whole and once, also after a kill at any moment."""

import itertools
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked_python
import gymnasium
import pytest
import rings
from damage import flip
from forked_python import HELPERS
from long_tests import LONG

from gym_trace import Trace, check_trace, open_trace
from gym_trace.data.episode import infos_of
from gym_trace.data.packing import pack_lenient
from gym_trace.playback.episode_index import index_of
from gym_trace.recording.dead_rings import take_in_rings
from gym_trace.storage.local import LocalAppender, LocalStorage

COLUMNS = ("observations", "actions", "rewards", "terminations", "truncations", "annotations")
OF_THE_RESET = ("seed", "options", "rng_state", "reset_info", "outcome")
NOTHING = pack_lenient([])[0]


def told(trace: Trace) -> list[bytes]:
    """All columns of each episode, bit for bit."""
    found = [[getattr(episode, name) for name in COLUMNS + OF_THE_RESET] for episode in trace]
    return [pack_lenient([*one, infos_of(episode)])[0] for one, episode in zip(found, trace)]


def held(directory: Path) -> tuple[list[bytes], bytes, bytes]:
    """All that a trace says, bit for bit."""
    trace = open_trace(directory)
    assert trace.damage == []
    pending = [one.described() for reader in index_of(trace).readers for one in reader.pending]
    return told(trace), trace.episodes.tobytes(), pack_lenient(pending)[0]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("written", range(6))
def test_the_ring_of_a_dead_writer_becomes_sealed_batches(tmp_path: Path, written: int) -> None:
    run = rings.Run().play(3, 7, 100, 1, 60, 5, 100, 100, 100, 2, open_end=True)
    del run.slabs[written + 3 :]
    run.slab.ask(3)
    rings.killed(tmp_path, run, written)
    before = held(tmp_path)
    reader = open_trace(tmp_path)
    assert take_in_rings(tmp_path) == (["w"], [])
    assert names(tmp_path) == ["w.000000.gtb", "w.manifest.jsonl"]
    assert held(tmp_path) == before
    assert told(reader) == before[0]  # a trace that was already open
    reader.refresh()
    assert told(reader) == before[0]
    checked = check_trace(tmp_path)
    assert checked.damages == []
    assert checked.remarks == ["writer w was killed"]
    assert take_in_rings(tmp_path) == ([], [])


def test_an_action_that_was_never_answered_is_kept_without_a_step(tmp_path: Path) -> None:
    run = rings.Run().play(3, 30, open_end=True)
    run.turn()
    run.slab.ask(2)
    rings.killed(tmp_path, run, written=len(run.slabs) - 1)
    before = held(tmp_path)
    assert before[2] != NOTHING
    take_in_rings(tmp_path)
    assert held(tmp_path) == before


def half_written(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that died while it wrote the chunks of its second slab, and left a torn record and a torn line."""
    run = rings.Run().play(3, 7, 100, 20, open_end=True)
    writer = rings.Writer(directory)
    writer.put(run.ring())
    writer.write(run.slabs[0])
    with monkeypatch.context() as patch:
        patch.setattr("gym_trace.format.ring.chunk_builder.most_bytes", lambda: 400)
        write, count = writer.files.write, itertools.count()
        patch.setattr(writer.files, "write", lambda *chunk: write(*chunk) if next(count) < 3 else None)
        writer.write(run.slabs[1])
    writer.die()
    part = directory / "w.000000.gtb.part"
    part.write_bytes(part.read_bytes() + b"\x89GTREC" * 3)
    manifest = directory / "w.manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes() + b'{"type":"vid')


def test_chunks_of_a_slab_that_was_being_written_are_not_there_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_written(tmp_path, monkeypatch)
    before = held(tmp_path)
    assert take_in_rings(tmp_path) == (["w"], [])
    assert held(tmp_path) == before
    assert check_trace(tmp_path).damages == []
    lines = (tmp_path / "w.manifest.jsonl").read_text().splitlines()
    assert [json.loads(line)["type"] for line in lines] == ["writer", "batch"]


class Killed(BaseException):
    """As if the process had been killed."""


def kill_at(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process die at this change of the disk, or in the middle of it."""
    counter = itertools.count()

    def dying(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(self: Any, *arguments: Any) -> Any:
            if next(counter) == number:
                if name == "write":
                    real(self, bytes(arguments[0])[: len(arguments[0]) // 2])
                raise Killed
            return real(self, *arguments)

        monkeypatch.setattr(owner, name, call)

    for owner, method in [(LocalAppender, "write"), (LocalAppender, "truncate"), (LocalAppender, "sync")]:
        dying(owner, method)
    for method in ("rename", "remove", "sync"):
        dying(LocalStorage, method)


@pytest.mark.parametrize("most_bytes", [None, 1000], ids=["one chunk", "several chunks"])
def test_a_death_at_any_moment_leaves_the_trace_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int | None
) -> None:
    half_written(tmp_path / "t", monkeypatch)
    if most_bytes is not None:
        monkeypatch.setattr("gym_trace.format.ring.chunk_builder.most_bytes", lambda: most_bytes)
    before = held(tmp_path / "t")
    for number in itertools.count():
        place = tmp_path / str(number)
        shutil.copytree(tmp_path / "t", place)
        with monkeypatch.context() as patch:
            kill_at(number, patch)
            try:
                take_in_rings(place)
                died = False
            except Killed:
                died = True
        assert held(place) == before, number
        if not died:
            break
        assert take_in_rings(place)[1] == []
        assert held(place) == before, number
        assert check_trace(place).damages == []
        assert not (place / "w.ring").exists()
    assert number > 10


def test_rings_of_writers_that_live_and_of_another_start_are_left_alone(tmp_path: Path) -> None:
    rings.killed(tmp_path, rings.Run().play(50, 50, open_end=True), written=1, boot=b"\1" * 16)
    alive = rings.Writer(tmp_path, "v")
    alive.put(rings.Run().play(5, open_end=True).ring())
    before = names(tmp_path)
    assert take_in_rings(tmp_path) == ([], [])
    alive.die()
    assert names(tmp_path) == before
    assert take_in_rings(tmp_path) == (["v"], [])


def test_rings_that_dead_writers_never_began_are_named_and_removed(tmp_path: Path) -> None:
    rings.killed(tmp_path, rings.Run().play(50, 50, open_end=True), written=1)
    rings.killed(tmp_path, rings.Run().play(5), written=1, name="x")
    alive = rings.Writer(tmp_path, "v")
    alive.put(rings.Run().play(5, open_end=True).ring())
    (tmp_path / "x.ring").unlink()
    for writer in "vwx":
        (tmp_path / f"{writer}.ring.part").write_bytes(bytes(100))
    named = [remark for remark in check_trace(tmp_path).remarks if ".ring.part: unused copy of a ring" in remark]
    assert [remark.partition(".ring.part")[0] for remark in named] == [str(tmp_path / "w"), str(tmp_path / "x")]
    assert take_in_rings(tmp_path) == (["w"], [])
    assert [name for name in names(tmp_path) if "ring" in name] == ["v.ring", "v.ring.part"]
    alive.die()
    assert take_in_rings(tmp_path) == (["v"], [])
    assert not list(tmp_path.glob("*.ring*"))


def test_a_damaged_batch_keeps_its_ring_and_is_named(tmp_path: Path) -> None:
    rings.killed(tmp_path, rings.Run().play(100, 100, 100, open_end=True), written=2)
    flip(tmp_path / "w.000000.gtb.part", 70)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    done, (problem,) = take_in_rings(tmp_path)
    assert done == []
    assert "the ring of w stays as it is" in problem
    assert "repair" in problem
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


VICTIM = """
import sys, time
sys.path.insert(0, {tests!r})
from numbered_lanes import *
env = make_vector_env("sync", vector.AutoresetMode.{mode}, True, SPACES["box"], SPACES["discrete"])
env = TraceRecordingVectorWrapper(env, {place!r}, record_infos=True, flush_seconds={flush})
env.reset(seed=11)
for number, action in enumerate(batched_actions(env, 100000)):
    env.step(action)
    if number == {steps}:
        print("ready", flush=True)
        time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(gymnasium.vector, "AutoresetMode"), reason="needs gymnasium 1.1")
@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
@pytest.mark.parametrize("steps", [3, 300, 3000] if LONG else [300])
def test_the_ring_of_a_killed_vector_environment_is_taken_in(tmp_path: Path, mode: str, steps: int) -> None:
    words = {"tests": HELPERS, "mode": mode, "place": str(tmp_path / "t"), "flush": 10.0}
    script = VICTIM.format(**words, steps=steps)
    with forked_python.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    before = held(tmp_path / "t")
    done, problems = take_in_rings(tmp_path / "t")
    assert (len(done), problems) == (1, [])
    assert held(tmp_path / "t") == before
    assert check_trace(tmp_path / "t").damages == []
