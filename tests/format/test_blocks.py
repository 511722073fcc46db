"""Columns in blocks: the index lists them, and readers read only the blocks that they need."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from batch_forgery import replace_batch, taken_apart
from hypothesis import given
from hypothesis import strategies as st

from gym_trace import Trace, TraceWriter, check_trace, edit, open_trace, repair_trace
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.batch_reader import BatchReader, RowRanges
from gym_trace.format.column_table import StoredColumns
from gym_trace.format.columns import Blocks
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.scan import EPISODE, Scan
from gym_trace.storage.local import LocalStorage


def noise(directory: Path, steps: int = 6000) -> np.ndarray:
    """Record an episode of noise; return its observations."""
    observations = np.random.default_rng(0).normal(size=(steps + 1, 5))
    with TraceWriter(directory, uid="w") as trace:
        trace.begin(observations[0])
        for step in range(steps):
            trace.step(0, observations[step + 1], 1.0, terminated=step == steps - 1)
            if step == steps // 2:
                trace.flush()
    return observations


def batch_in(directory: Path) -> BatchReader:
    return BatchReader(LocalStorage(directory), "w.000000.gtb")


def test_the_index_lists_the_blocks_of_each_chunk(tmp_path: Path) -> None:
    noise(tmp_path)
    batch = batch_in(tmp_path)
    assert batch.columns is not None
    for number in range(len(batch.chunks)):
        with batch.open() as file:
            stored = batch.stored_chunk(file, number)
        listed = [column for column, _ in batch.columns.columns_in(number)]
        assert listed == stored.columns
        assert [column.name for column in listed if column.blocks is not None] == ["observations"]


@pytest.mark.parametrize(
    "change",
    [
        lambda table, forms, blocks: (table, forms, blocks[:-1]),
        lambda table, forms, blocks: (table, forms, blocks[:0]),
        lambda table, forms, blocks: (table, forms, np.append(blocks, blocks)),
        lambda table, forms, blocks: (table, [form[:3] for form in forms], blocks),
        lambda table, forms, blocks: (table, [[*form[:3], 0] for form in forms], blocks),
        lambda table, forms, blocks: (table, [[*form[:3], "9"] for form in forms], blocks),
        lambda table, forms, blocks: (table, [[*form[:3], 1 << 40] for form in forms], blocks),
        lambda table, forms, blocks: (table, forms, blocks[::-1].copy()),
    ],
)
def test_a_malformed_table_of_blocks_raises(tmp_path: Path, change: Any) -> None:
    noise(tmp_path)
    batch = batch_in(tmp_path)
    assert batch.columns is not None
    known = batch.columns
    forms: Any = known._forms
    table, forms, blocks = change(known._table, forms, known._blocks)
    with pytest.raises(CorruptTrace, match="malformed"):
        StoredColumns(table, forms, batch.chunks, blocks.astype(wire.BLOCK)).columns_in(0)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[BatchReader, np.ndarray]:
    """Return a batch whose second chunk has observations in seven blocks, and these observations."""
    directory = tmp_path_factory.mktemp("recorded")
    observations = noise(directory, steps=10_000)
    batch = batch_in(directory)
    rows = batch.chunks["observation_rows"].tolist()
    return batch, observations[rows[0] :]


def read(batch: BatchReader, *ranges: tuple[int, int]) -> np.ndarray:
    return batch.read_chunk(1, {("observations",)}.__contains__, RowRanges(ranges, ())).array(("observations",))


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 900)), min_size=1, max_size=4))
def test_rows_are_read_with_their_blocks_alone(
    recorded: tuple[BatchReader, np.ndarray], wanted: list[tuple[int, int]]
) -> None:
    batch, observations = recorded
    ranges = [(begin, min(begin + count, len(observations))) for begin, count in wanted]
    (column,) = (it for it in batch.read_chunk(1, lambda _: False).described if it.blocks is not None)
    assert column.blocks is not None
    assert column.blocks.total == 7
    rows = read(batch, *ranges)
    for begin, end in ranges:
        assert np.array_equal(rows[begin:end], observations[begin:end])
    blocks = {at // column.blocks.rows for begin, end in ranges for at in range(begin, end)}
    spans = batch.spans({1: RowRanges(ranges, ())}, {("observations",)}.__contains__)
    if len(blocks) > 3:  # most of the column: it is read as a whole
        assert [span.length for span in spans] == [column.stored]
    else:
        ends = [0, *(column.blocks.before(number)[0] for number in range(1, 8))]
        assert sum(span.length for span in spans) == sum(ends[number + 1] - ends[number] for number in blocks)


def test_damage_of_a_block_concerns_its_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observations = noise(tmp_path, steps=10_000)
    monkeypatch.setattr(BatchReader, "heal", lambda self: False)
    (span,) = batch_in(tmp_path).spans({0: RowRanges([(900, 901)], ())}, {("observations",)}.__contains__)
    path = tmp_path / "w.000000.gtb"
    data = bytearray(path.read_bytes())
    data[span.offset + span.length // 2] ^= 1
    path.write_bytes(data)
    batch = batch_in(tmp_path)
    some = {("observations",)}.__contains__
    rows = batch.read_chunk(0, some, RowRanges([(0, 800), (2000, 2100)], ())).array(("observations",))
    assert np.array_equal(rows[:800], observations[:800])
    for ranges in (RowRanges([(900, 901)], ()), RowRanges([(0, 4000)], ()), None):
        with pytest.raises(CorruptTrace, match="checksum mismatch in column observations"):
            batch.read_chunk(0, some, ranges)


@pytest.mark.parametrize("place", [0, 1])
def test_check_reports_a_table_of_blocks_that_does_not_fit_the_blocks(tmp_path: Path, place: int) -> None:
    observations = noise(tmp_path / "t")
    path = tmp_path / "t" / "w.000000.gtb"
    batch = taken_apart(path)
    chunk = batch.chunks[0]
    column = chunk.columns[("observations",)]
    rows, table = chunk.metadata["columns"][column][8]
    changed = np.frombuffer(table, wire.BLOCK).copy()
    changed["end"][0] -= 8 * place  # the checksum is right for the other end
    changed["crc"][0] = crc32(chunk.blobs[column][: changed["end"][0]]) ^ (not place)
    chunk.metadata["columns"][column][8] = [rows, changed.tobytes()]
    replace_batch(path, batch)
    assert np.array_equal(
        open_trace(tmp_path / "t")[0].observations, observations
    )  # whole columns do not need the table
    (damage,) = check_trace(tmp_path / "t").damages
    assert "column" in damage.problem
    repair_trace(tmp_path / "t", tmp_path / "new", salvage=True)
    assert not check_trace(tmp_path / "new").damages
    assert np.array_equal(open_trace(tmp_path / "new")[0].observations, observations)


@pytest.mark.parametrize("ends", [(1, 1), (2, 1), (0, 1 << 31)])
def test_a_table_of_blocks_whose_ends_do_not_ascend_raises(
    recorded: tuple[BatchReader, np.ndarray], monkeypatch: pytest.MonkeyPatch, ends: tuple[int, int]
) -> None:
    monkeypatch.setattr(Blocks, "before", lambda self, block: (ends[block > 3], 0))
    with pytest.raises(CorruptTrace, match="malformed blocks of column observations"):
        read(recorded[0], (3000, 3001))


@pytest.fixture
def episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Trace, list[np.ndarray]]:
    """Return a trace of 20 episodes in one chunk, whose observations are in 25 blocks; and these observations."""
    monkeypatch.setattr("gym_trace.playback.writer_reader._DECODED_WHOLE", 0)
    random = np.random.default_rng(0)
    observations = [random.normal(size=(1001, 5)) for _ in range(20)]
    with TraceWriter(tmp_path / "t", uid="w") as writer:
        for rows in observations:
            writer.begin(rows[0])
            for step in range(1000):
                writer.step(step, rows[step + 1], 1.0, terminated=step == 999)
    edit.compact(tmp_path / "t", tmp_path / "compacted")
    (column,) = batch_in(tmp_path / "compacted").read_chunk(0, {("observations",)}.__contains__).columns.values()
    assert column.blocks is not None
    assert column.blocks.total == 25
    return open_trace(tmp_path / "compacted"), observations


@pytest.fixture
def blocks_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of blocks of observations in each read from now on, 25 where the column is read as a whole."""
    read: list[int] = []
    read_chunk = BatchReader._read_chunk

    def counted(self: Any, number: int, wanted: Callable[[Any], bool], rows: Any) -> Any:
        chunk = read_chunk(self, number, wanted, rows)
        if ("observations",) in chunk:
            _, blob = chunk._blobs["observations",]
            read.append(sum(map(len, blob)) if isinstance(blob, dict) else 25)
        return chunk

    monkeypatch.setattr(BatchReader, "_read_chunk", counted)
    return read


def test_an_episode_is_decoded_from_its_blocks_alone(
    episodes: tuple[Trace, list[np.ndarray]], blocks_read: list[int]
) -> None:
    trace, observations = episodes
    for index in (7, 7, 15):
        assert np.array_equal(trace[index].observations, observations[index])
    assert blocks_read[0] == 2
    assert len(blocks_read) == 2
    assert trace[7].actions.tolist() == list(range(1000))


def test_episodes_one_after_the_other_take_few_reads(
    episodes: tuple[Trace, list[np.ndarray]], blocks_read: list[int]
) -> None:
    trace, observations = episodes
    for index, rows in enumerate(observations):
        assert np.array_equal(trace[index].observations, rows)
    assert len(blocks_read) <= 5


def test_threads_that_read_the_same_chunk_get_equal_episodes(episodes: tuple[Trace, list[np.ndarray]]) -> None:
    trace, observations = episodes

    def wrong(seed: int) -> list[int]:
        order = np.random.default_rng(seed).permutation(20).tolist()
        return [index for index in order if not np.array_equal(trace[index].observations, observations[index])]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(wrong, range(16))) == [[]] * 16


@pytest.mark.parametrize("columns", [None, ("observations",)])
def test_a_view_is_scanned_from_the_blocks_of_its_episodes(
    episodes: tuple[Trace, list[np.ndarray]], blocks_read: list[int], columns: Any
) -> None:
    trace, observations = episodes
    found = [episode.observations for episode in trace[[3, 12]].scan(columns)]
    assert all(map(np.array_equal, found, (observations[3], observations[12])))
    assert blocks_read == [4]


def test_a_scan_in_another_order_reads_the_blocks_of_each_episode(
    episodes: tuple[Trace, list[np.ndarray]], blocks_read: list[int]
) -> None:
    trace, observations = episodes
    scan = Scan(index_of(trace), ("observations",), np.array([12, 3]), order=EPISODE)
    found = [block.columns["observations",] for block in scan]
    assert all(map(np.array_equal, found, (observations[12], observations[3])))
    assert sum(blocks_read) < 12
