"""Columns in blocks: the index lists them, and readers read only the blocks that they need."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gym_trace import TraceWriter
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.batch_reader import BatchReader
from gym_trace.format.column_table import StoredColumns
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
