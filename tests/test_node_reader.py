"""docs/FORMAT.md is enough to write a reader: one in Node.js, written from it alone, agrees on every column."""

import json
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import numbered_env
import numpy as np
import pytest
import rings
from column_hashes import describe_trace, in_order
from fuzz_reader import seed_rings

from gym_trace import TraceWriter, edit, open_trace
from gym_trace.format import encodings, wire
from gym_trace.format.batch_files import BatchFiles
from gym_trace.playback.episode_index import index_of
from gym_trace.storage.local import LocalStorage

HERE = Path(__file__).parent / "node_reader"
SAMPLES = Path(__file__).parent.parent / "sample_traces"
TRACES = sorted(path for path in SAMPLES.glob("format-*/*") if path.is_dir())


@pytest.fixture(scope="session")
def reader() -> Path:
    """Return the script. It runs the reader of the page of a static site, as it is built."""
    if shutil.which("node") is None:
        pytest.skip("needs node")
    return HERE / "read_trace.mjs"


def read(reader: Path, *traces: Path) -> list[list[dict[str, Any]]]:
    """The writers of each trace."""
    done = subprocess.run(["node", str(reader), *map(str, traces)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def as_described(writer: dict[str, Any]) -> dict[str, Any]:
    """Return the document of column_hashes."""
    kept = {name: writer[name] for name in ("writer", "split")}
    return {**kept, "damage": sorted(writer["damage"]), "episodes": in_order(writer["episodes"])}


def test_node_reader_agrees_on_every_column_of_the_samples(reader: Path) -> None:
    for trace, writers in zip(TRACES, read(reader, *TRACES), strict=True):
        assert [as_described(writer) for writer in writers] == describe_trace(trace), trace


def test_node_reader_agrees_with_the_journal(reader: Path) -> None:
    ((writer,),) = read(reader, SAMPLES / "format-1.0" / "cartpole")
    assert writer["closed"] == [50, sum(episode["steps"] for episode in writer["episodes"])]
    assert [batch["agrees"] for batch in writer["journal"]] == [True]


def test_node_reader_leaves_out_episodes_that_began_in_dropped_batches(
    reader: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_trace.recording.newest._LEAST_BATCH", 2000)
    with TraceWriter(tmp_path / "t", keep_bytes=10_000) as trace:
        for length in [*range(1, 40), 60]:
            trace.begin(np.zeros(4))
            for step in range(length):
                trace.step(0, np.random.default_rng(length).normal(size=4), 1.0, terminated=step == length - 1)
                if step % 16 == 7:
                    trace.flush()
    ((writer,),) = read(reader, tmp_path / "t")
    (known,) = index_of(open_trace(tmp_path / "t")).readers
    assert known.start_dropped.any()
    assert as_described(writer) == describe_trace(tmp_path / "t")[0]
    assert all(line["agrees"] for line in writer["journal"])


def test_node_reader_agrees_on_a_compacted_trace(reader: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    with TraceWriter(tmp_path / "t", uid="w") as trace:
        for length in (900, 1200, 1500, 1400):
            trace.begin(random.normal(size=4))
            for step in range(length):
                trace.step(step, random.normal(size=4), 1.0, terminated=step == length - 1)
            trace.flush()
    edit.compact(tmp_path / "t", tmp_path / "compacted")
    ((writer,),) = read(reader, tmp_path / "compacted")
    assert as_described(writer) == describe_trace(tmp_path / "t")[0]


def test_node_reader_agrees_on_interleaved_lanes(reader: Path, tmp_path: Path) -> None:
    lanes_trace(tmp_path)
    ((writer,),) = read(reader, tmp_path)
    assert as_described(writer) == describe_trace(tmp_path)[0]
    assert [(e["lane"], e["steps"], e["outcome"]) for e in in_order(writer["episodes"])] == [
        (0, 5, "terminated"),
        (1, 4, "truncated"),
        (0, 1, "lost"),
    ]


def test_node_reader_agrees_on_dictionaries_with_codes_of_every_size(reader: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    numbers = {name: random.integers(0, 1 << 60, (most, 3)) for name, most in zip("abcde", (2, 4, 16, 256, 300))}
    rows = {name: table[random.integers(0, len(table), 3000)] for name, table in numbers.items()}
    rows["f"] = random.integers(0, 256, (20, 7), np.uint8)[random.integers(0, 20, 3000)]
    with TraceWriter(tmp_path / "t") as trace:
        trace.begin({name: column[0] for name, column in rows.items()})
        for i in range(1, 3000):
            trace.step(i % 3, {name: column[i] for name, column in rows.items()}, 1.0, terminated=i == 2999)
    batch = index_of(open_trace(tmp_path / "t")).readers[0].batches[0]
    columns = batch.read_chunk(0, lambda path: path[0] == "observations").columns
    assert {column.encoding & ~encodings.ZSTD for column in columns.values()} == {encodings.DICTIONARY.bits}
    ((writer,),) = read(reader, tmp_path / "t")
    assert as_described(writer) == describe_trace(tmp_path / "t")[0]


def test_node_reader_reads_the_ring_of_a_killed_writer(reader: Path, tmp_path: Path) -> None:
    run = rings.Run().play(3, 7, 100, 60, 2, open_end=True)
    run.slab.ask(4)
    rings.killed(tmp_path, run, written=1)
    ((writer,),) = read(reader, tmp_path)
    assert as_described(writer) == describe_trace(tmp_path)[0]
    assert [(e["steps"], e["outcome"]) for e in in_order(writer["episodes"])][-2:] == [(60, "terminated"), (2, "lost")]
    (leaf,) = writer["pending"].pop("leaves")
    assert writer["pending"] == {"episode": 4, "step": 2}
    assert "0400000000000000" in leaf


def test_node_reader_reads_rings_as_they_are_recorded(reader: Path, tmp_path: Path) -> None:
    directories = seed_rings(tmp_path)[:2]
    for directory, (writer,) in zip(directories, read(reader, *directories), strict=True):
        assert as_described(writer) == describe_trace(directory)[0]
        assert len(writer["episodes"]) == 4


def test_node_reader_restores_damaged_bytes_by_parity(reader: Path, tmp_path: Path) -> None:
    batch = numbered_env.record(tmp_path / "intact", parity=True)
    data = batch.read_bytes()
    covered, block, groups = struct.unpack_from("<QII", data, len(data) - 64 + 40)
    stretch = (groups - 1) * block + 1
    ends = (0, covered - stretch, covered - stretch // 2, covered, len(data) - stretch)
    places = [(begin, begin + stretch) for begin in (*ends, *range(0, covered, 7 * block))]
    places += [(at, at + 1) for at in (*range(0, len(data), 251), len(data) - 1)]
    copies = []
    for number, (begin, end) in enumerate(places):
        copies.append(shutil.copytree(tmp_path / "intact", tmp_path / str(number)))
        damaged = bytearray(data)
        damaged[begin:end] = bytes(byte ^ 0xA5 for byte in data[begin:end])
        (copies[-1] / batch.name).write_bytes(damaged)
    expected = describe_trace(tmp_path / "intact")
    assert len(expected[0]["episodes"]) == len(numbered_env.LENGTHS)
    for (begin, end), (writer,) in zip(places, read(reader, *copies), strict=True):
        seen = as_described(writer)
        assert seen["episodes"] == expected[0]["episodes"], f"bytes {begin} to {end}"
        assert seen["damage"] == [] or end > covered, f"bytes {begin} to {end}"


def test_node_reader_restores_no_more_than_the_checksums_confirm(reader: Path, tmp_path: Path) -> None:
    batch = numbered_env.record(tmp_path, parity=True)
    data = bytearray(batch.read_bytes())
    _, block, groups = struct.unpack_from("<QII", data, len(data) - 64 + 40)
    begin = 3 * block
    for at in (begin, begin + groups * block):  # two blocks of one group, of the schema and of a chunk
        data[at] ^= 1
    batch.write_bytes(data)
    ((writer,),) = read(reader, tmp_path)
    assert as_described(writer) == describe_trace(tmp_path)[0]
    assert writer["damage"]


def test_node_reader_agrees_on_columns_in_blocks(reader: Path, tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t") as trace:
        observations = np.random.default_rng(0).normal(size=(5001, 3))
        trace.begin(observations[0])
        for step, observation in enumerate(observations[1:]):
            trace.step(0, observation, 1.0, terminated=step == 4999)
    (known,) = index_of(open_trace(tmp_path / "t")).readers
    assert any(column.blocks is not None for column in known.columns_of(0))
    ((writer,),) = read(reader, tmp_path / "t")
    assert as_described(writer) == describe_trace(tmp_path / "t")[0]


def lanes_trace(directory: Path) -> None:
    """Three episodes in two lanes, their fragments interleaved over two chunks and two batches."""
    box = {"type": "Box", "dtype": "<f4", "shape": [3]}
    schema = {
        "writer": "lanes",
        "split": "train",
        "observation_space": box,
        "action_space": {"type": "Discrete", "dtype": "<i8"},
    }
    writer = BatchFiles(LocalStorage(directory), schema, level=1, fsync=False)
    begins, ends = wire.STARTS | wire.HAS_INITIAL, wire.STOPS | wire.ENDS
    random = np.random.default_rng(0)
    for chunk in (
        [(0, 0, 3, 0, begins, 0), (1, 0, 2, 1, begins, 0)],
        [(1, 2, 2, 1, wire.TRUNCATED | ends, 2), (0, 3, 2, 0, wire.TERMINATED | ends, 1), (2, 0, 1, 0, begins, 0)],
    ):
        fragments = np.zeros(len(chunk), wire.FRAGMENT)
        for name, values in zip(("episode", "first_step", "steps", "lane", "flags", "outcome"), zip(*chunk)):
            fragments[name] = values
        steps = int(fragments["steps"].sum())
        leads = int(np.count_nonzero(fragments["flags"] & wire.HAS_INITIAL))
        columns: dict[Any, Any] = {
            ("starts",): [b"\x80"] * leads,
            ("observations",): random.random((steps + leads, 3), np.float32),
            ("actions",): random.integers(9, size=steps),
            ("rewards",): random.random(steps),
        }
        writer.write(fragments, columns)
        writer.seal()
    writer.close({})
