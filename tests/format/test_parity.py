"""Damaged bytes of a sealed batch are read as they were recorded, by its parity; never as anything else."""

from __future__ import annotations

import warnings
import zlib
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from longer import LONG
from telltale import record

from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.errors import TraceError
from gym_trace.format.batch_reader import BatchReader
from gym_trace.format.batch_writer import copy_batch
from gym_trace.format.parity import HealedReader, Shape, Stored, heal, parity_of, shape_for, stored_parity
from gym_trace.storage.local import LocalStorage
from gym_trace.storage.memory import MemoryReader


def contents(directory: Path) -> list[Any]:
    """Return all that the episodes of a trace say; warnings of healed damage are left out."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*by its parity", UserWarning)
        return [
            (
                episode.episode_id, episode.outcome, episode.seed, episode.start_time, repr(episode.infos),
                *(getattr(episode, name).tobytes() for name in ("observations", "actions", "rewards", "terminations")),
            )
            for episode in open_trace(directory)
        ]  # fmt: skip


def shape_of(batch: Path) -> Shape:
    with LocalStorage(batch.parent).open(batch.name) as file:
        stored = stored_parity(file, BatchReader(LocalStorage(batch.parent), batch.name).header.file_id)
    assert stored is not None
    return stored.shape


@pytest.mark.parametrize("covered", [1, 63, 64, 65, 300, 4_000, 40_000, 400_000, 5 << 20, 64 << 20])
def test_parity_takes_a_few_per_cent_and_covers_everything(covered: int) -> None:
    shape = shape_for(covered)
    assert shape.is_plausible(covered + shape.stripe + 4 * shape.blocks)
    assert shape.blocks * shape.block >= covered
    assert shape.groups <= shape.blocks
    if covered >= 40_000:
        assert shape.stripe + 4 * shape.blocks < (0.023 if covered > 1 << 22 else 0.05) * covered
        assert shape.stretch >= min(covered // 64, 12_000)


@given(size=st.one_of(st.integers(1, 3000), st.integers(1, 300_000)), seed=st.integers(0, 1 << 32), many=st.booleans())
def test_one_damaged_stretch_is_restored_and_nothing_is_made_up(size: int, seed: int, many: bool) -> None:
    chance = np.random.default_rng(seed)
    data, shape = chance.bytes(size), shape_for(size)
    stored = Stored(shape, parity_of(MemoryReader(data), shape), b"")
    damaged = bytearray(data)
    for _ in range(20 if many else 1):
        length = int(chance.integers(1, min(size, shape.stretch) + 1))
        at = int(chance.integers(0, size - length + 1))
        damaged[at : at + length] = bytes(length) if chance.random() < 0.3 else chance.bytes(length)
    healed = heal(MemoryReader(bytes(damaged)), stored)
    for offset, block in healed.blocks.items():
        assert block == data[offset : offset + shape.block]
    if not many:
        assert healed.hopeless == []
    if not healed.hopeless:
        reader = HealedReader(MemoryReader(bytes(damaged)), healed.blocks)
        assert reader.read(0, size) == data
        begin, end = sorted(chance.integers(0, size + 1, 2).tolist())
        room = bytearray(end - begin)
        assert reader.read(begin, end - begin) == data[begin:end]
        assert reader.read_into(begin, memoryview(room)) == end - begin
        assert room == data[begin:end]


def test_no_flipped_byte_loses_anything(tmp_path: Path) -> None:
    batch = record(tmp_path / "t", parity=True)
    data, expected = batch.read_bytes(), contents(tmp_path / "t")
    for at in range(0, len(data), 1 if LONG else 23):
        batch.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        assert contents(tmp_path / "t") == expected, at


def test_a_damaged_stretch_anywhere_in_the_file_loses_nothing(tmp_path: Path) -> None:
    batch = record(tmp_path / "t", parity=True)
    data, expected, shape = batch.read_bytes(), contents(tmp_path / "t"), shape_of(batch)
    chance = np.random.default_rng(4)
    for at in range(0, len(data), 5 if LONG else 97):
        end = min(len(data), at + shape.stretch)
        for stretch in (bytes(end - at), chance.bytes(end - at)):
            batch.write_bytes(data[:at] + stretch + data[end:])
            assert contents(tmp_path / "t") == expected, at


class Noise(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(0, 255, (120, 160), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.np_random.integers(0, 256, (120, 160), np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.np_random.integers(0, 256, (120, 160), np.uint8), 1.0, False, False, {}


def frames(directory: Path, steps: int) -> Path:
    """Record frames of noise, whose batch is as large as they are."""
    with TraceRecordingWrapper(Noise(), directory, uid="w", record_infos=True) as env:
        env.reset(seed=1)
        for _ in range(steps):
            env.step(0)
    return directory / "w.000000.gtb"


@pytest.mark.parametrize("damages", [1, 3, 300])
def test_random_damage_gives_the_recorded_values_or_an_error(tmp_path: Path, damages: int) -> None:
    batch = frames(tmp_path / "t", 300 if LONG else 60)
    data, expected, shape = batch.read_bytes(), contents(tmp_path / "t"), shape_of(batch)
    chance, lost = np.random.default_rng(damages), 0
    for _ in range(200 if LONG else 8):
        damaged = bytearray(data)
        for _ in range(damages):
            length = int(chance.integers(1, 4097))
            at = int(chance.integers(0, len(data) - length))
            damaged[at : at + length] = bytes(length) if chance.random() < 0.3 else chance.bytes(length)
        batch.write_bytes(damaged)
        try:
            assert contents(tmp_path / "t") == expected
        except TraceError:
            lost += 1
    assert shape.stretch > 4096
    assert lost == 0 or damages > 1


def test_healed_damage_is_reported_once_and_not_as_damage_of_the_trace(tmp_path: Path) -> None:
    batch = record(tmp_path / "t", parity=True)
    data = bytearray(batch.read_bytes())
    data[len(data) // 2] ^= 1
    batch.write_bytes(data)
    with pytest.warns(UserWarning, match=r"w\.000000\.gtb: damaged.*repair --in-place") as caught:
        read = [(trace := open_trace(tmp_path / "t")), *trace, *trace]
    assert len(read) == 11
    assert len(caught) == 1
    assert trace.damage == []


def test_without_parity_a_flipped_byte_is_an_error(tmp_path: Path) -> None:
    batch = record(tmp_path / "t", parity=False)
    data = bytearray(batch.read_bytes())
    at = int(BatchReader(LocalStorage(tmp_path / "t"), batch.name).chunks["offset"][1])
    data[at + 70] ^= 1
    batch.write_bytes(data)
    with pytest.raises(TraceError):
        contents(tmp_path / "t")


@pytest.mark.parametrize("number", [0, 7])
def test_a_copy_under_another_number_has_parity_of_its_own(tmp_path: Path, number: int) -> None:
    original = record(tmp_path / "t", parity=True)
    source, target = LocalStorage(tmp_path / "t"), LocalStorage(tmp_path / "copy")
    target.make()
    name = f"w.{number:06d}.gtb"
    batch = BatchReader(source, original.name)
    crc = copy_batch(batch, None, target, name, number)
    data = (tmp_path / "copy" / name).read_bytes()
    assert crc == zlib.crc32(data)
    assert len(data) == batch.size
    expected = contents(tmp_path / "copy")
    for at in (3, 70, 200, len(data) // 2):
        (tmp_path / "copy" / name).write_bytes(data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :])
        assert contents(tmp_path / "copy") == expected
        with target.open(name) as file:
            stored = stored_parity(file, batch.header.file_id)
            assert stored is not None
            assert heal(file, stored).blocks.popitem()[1] in data
