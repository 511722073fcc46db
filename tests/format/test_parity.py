"""Damaged bytes of a sealed batch are read as they were recorded, by its parity; never as anything else."""

import warnings
import zlib
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import pytest
from damage import with_parity
from hypothesis import given
from hypothesis import strategies as st
from long_tests import LONG
from numbered_env import record
from scripted_env import Result, ToyEnv

from gym_trace import TraceRecordingWrapper, check_trace, edit, heal_trace, open_trace, repair_trace
from gym_trace.data.packing import pack
from gym_trace.errors import TraceError
from gym_trace.format import wire
from gym_trace.format.batch_reader import BatchReader
from gym_trace.format.batch_writer import copy_batch
from gym_trace.format.parity import HealedReader, Shape, StoredParity, group_digest, parity_of, shape_for, stored_parity
from gym_trace.format.records import columns_of, metadata_of
from gym_trace.format.restoring import heal
from gym_trace.storage.local import LocalStorage
from gym_trace.storage.memory import MemoryReader


def contents(directory: Path, on_damage: Literal["raise", "skip"] = "raise") -> list[Any]:
    """Return all that the episodes of a trace say; warnings of healed damage are left out."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(by its parity|contradicts|batch is missing)", UserWarning)
        return [
            (
                episode.episode_id, episode.outcome, episode.seed, episode.start_time, repr(episode.infos),
                *(getattr(episode, name).tobytes() for name in ("observations", "actions", "rewards", "terminations")),
            )
            for episode in open_trace(directory).scan(on_damage=on_damage)
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
    assert shape.stripe + 4 * shape.blocks < max(5_000, (0.023 if covered > 1 << 22 else 0.05) * covered)
    assert shape.stretch >= max(4_096, min(covered // 64, 12_000))


@given(
    size=st.integers(1, 5_000),
    block=st.sampled_from([64, 128, 192, 256, 512]),
    groups=st.integers(1, 11),
    seed=st.integers(0, 99),
)
def test_the_digest_of_a_group_is_the_blake2b_of_its_blocks(size: int, block: int, groups: int, seed: int) -> None:
    file, shape = MemoryReader(np.random.default_rng(seed).bytes(size)), Shape(size, block, groups)
    parity = parity_of(file, shape)
    assert [parity.digest(i) for i in range(groups)] == [group_digest(file, shape, i) for i in range(groups)]


@pytest.mark.parametrize("sector", [512, 4096])
@pytest.mark.parametrize("episodes", [0, 1, 40])
def test_a_bad_sector_of_a_small_batch_loses_nothing(tmp_path: Path, episodes: int, sector: int) -> None:
    with TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / "t", uid="w", record_infos=True) as env:
        env.reset(seed=1)
        for _ in range(episodes):
            while not any(env.step(env.action_space.sample())[2:4]):
                pass
            env.reset()
    batch = tmp_path / "t" / "w.000000.gtb"
    data, expected = batch.read_bytes(), contents(tmp_path / "t")
    assert len(data) < 40_000
    for at in range(0, len(data), sector // 2 if LONG else sector):
        batch.write_bytes(data[:at] + bytes(len(data[at : at + sector])) + data[at + sector :])
        assert contents(tmp_path / "t") == expected, at
        assert heal_trace(tmp_path / "t").hopeless == []
        assert batch.read_bytes() == data, at


def batch_of(column: bytes) -> bytes:
    """Return the header, the schema and one chunk of a batch, with these bytes as a column."""
    file_id = bytes(range(16))
    begin = wire.pack_file_header(file_id, 0) + b"".join(
        wire.pack_record(wire.SCHEMA, pack({"writer": "w"}), [], 64, 0, file_id)
    )
    described = pack({"columns": [[["x"], "|u1", [], len(column), 0, len(column), len(column), zlib.crc32(column)]]})
    return begin + b"".join(wire.pack_record(wire.CHUNK, described, [[column]], len(begin), 1, file_id))


@given(size=st.one_of(st.integers(1, 3000), st.integers(1, 300_000)), seed=st.integers(0, 1 << 32), many=st.booleans())
def test_one_damaged_stretch_is_restored_and_nothing_is_made_up(size: int, seed: int, many: bool) -> None:
    chance = np.random.default_rng(seed)
    data = batch_of(chance.bytes(size))
    size, shape = len(data), shape_for(len(data))
    footer = wire.pack_footer(0, size + 64, bytes(range(16)), shape)
    stored = StoredParity(shape, parity_of(MemoryReader(data), shape), footer)
    damaged = bytearray(data)
    for _ in range(20 if many else 1):
        length = int(chance.integers(1, min(size, shape.stretch) + 1))
        at = int(chance.integers(0, size - length + 1))
        damaged[at : at + length] = bytes(length) if chance.random() < 0.3 else chance.bytes(length)
    healed = heal(MemoryReader(bytes(damaged) + footer), stored)
    assert not healed.contradicts
    for offset, block in healed.blocks.items():
        assert block == data[offset : offset + len(block)]
    if not many:
        assert healed.hopeless == []
    if not healed.hopeless:
        reader = HealedReader(MemoryReader(bytes(damaged) + footer), healed.blocks)
        assert reader.read(0, size) == data
        begin, end = sorted(chance.integers(0, size + 1, 2).tolist())
        room = bytearray(end - begin)
        assert reader.read(begin, end - begin) == data[begin:end]
        assert reader.read_into(begin, memoryview(room)) == end - begin
        assert room == data[begin:end]


def test_no_flipped_byte_loses_anything(tmp_path: Path) -> None:
    batch = record(tmp_path / "t", parity=True)
    data, expected = batch.read_bytes(), contents(tmp_path / "t")
    for at in range(0, len(data), 1 if LONG else 83):
        batch.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        assert contents(tmp_path / "t") == expected, at


def test_a_damaged_stretch_anywhere_in_the_file_loses_nothing(tmp_path: Path) -> None:
    batch = record(tmp_path / "t", parity=True)
    data, expected, shape = batch.read_bytes(), contents(tmp_path / "t"), shape_of(batch)
    chance = np.random.default_rng(4)
    for at in range(0, len(data), 5 if LONG else 307):
        end = min(len(data), at + shape.stretch)
        for stretch in (bytes(end - at), chance.bytes(end - at)):
            batch.write_bytes(data[:at] + stretch + data[end:])
            assert contents(tmp_path / "t") == expected, at


class Noise(ToyEnv):
    observation_space = gymnasium.spaces.Box(0, 255, (120, 160), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def result(self, action: Any) -> Result:
        return Result(self.np_random.integers(0, 256, (120, 160), np.uint8))


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
    crc, _ = copy_batch(batch, None, target, name, number)
    data = (tmp_path / "copy" / name).read_bytes()
    assert crc == zlib.crc32(data)
    assert len(data) == batch.size
    expected = contents(tmp_path / "copy", "skip")  # batches before it are missing
    assert expected == contents(tmp_path / "t")
    for at in (3, 70, 200, len(data) // 2):
        (tmp_path / "copy" / name).write_bytes(data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :])
        assert contents(tmp_path / "copy", "skip") == expected
        with target.open(name) as file:
            stored = stored_parity(file, batch.header.file_id)
            assert stored is not None
            assert heal(file, stored).blocks.popitem()[1] in data


def place_of(batch: Path, chunk: int, column: str) -> int:
    """Return the offset of a column of a chunk."""
    reader = BatchReader(LocalStorage(batch.parent), batch.name)
    with reader.open() as file:
        header = reader.stored_chunk(file, chunk).header
        return next(at for c, at in columns_of(header, metadata_of(file, header)) if c.path == (column,))


def xored(data: bytes, at: int, pattern: bytes) -> bytes:
    changed = bytes(a ^ b for a, b in zip(data[at:], pattern))
    return data[:at] + changed + data[at + len(changed) :]


def recorded(tmp_path: Path, **options: Any) -> tuple[Path, bytes, list[Any]]:
    """Return a batch without a manifest, its bytes and what they mean."""
    batch = record(tmp_path / "t", parity=True, **options)
    (tmp_path / "t" / "w.manifest.jsonl").unlink()
    return batch, batch.read_bytes(), contents(tmp_path / "t")


def test_parity_that_contradicts_intact_data_changes_nothing(tmp_path: Path) -> None:
    batch, data, expected = recorded(tmp_path)
    forged = with_parity(data, xored(data, place_of(batch, 1, "rewards") + 2, b"\x40"))
    batch.write_bytes(forged)
    (said,) = check_trace(tmp_path / "t").damages
    assert "contradicts" in said.problem
    with pytest.warns(UserWarning, match="contradicts intact data"):
        edit.filter(open_trace(tmp_path / "t")[[0, 1, 3]], tmp_path / "some")
    assert contents(tmp_path / "t") == expected
    assert contents(tmp_path / "some") == [expected[number] for number in (0, 1, 3)]
    (healed,) = heal_trace(tmp_path / "t").healed
    assert "contradicted" in healed.problem
    assert batch.read_bytes() == data


@pytest.mark.parametrize("damaged", ["another column", "metadata", "header", "schema", "index"])
def test_parity_that_contradicts_intact_data_restores_nothing(tmp_path: Path, damaged: str) -> None:
    batch = record(tmp_path / "t", parity=True)
    data, expected = batch.read_bytes(), contents(tmp_path / "t")
    chunk = int(BatchReader(LocalStorage(batch.parent), batch.name).chunks["offset"][1])
    rewards = place_of(batch, 1, "rewards") + 2
    places = {"another column": place_of(batch, 5, "actions"), "metadata": chunk + 70, "header": chunk + 3}
    places |= {"schema": 150, "index": shape_of(batch).covered - 20}
    forged = with_parity(data, xored(data, rewards, b"\x40"))
    batch.write_bytes(xored(forged, places[damaged], b"\xff"))
    before = batch.read_bytes()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [episode.rewards.tolist() for episode in open_trace(tmp_path / "t").scan(on_damage="skip")]
    assert any("contradicts intact data" in str(warning.message) for warning in caught)
    assert found
    wanted = [np.frombuffer(episode[7]).tolist() for episode in expected]
    assert all(
        any(steps == one[at : at + len(steps)] for one in wanted for at in range(len(one) + 1)) for steps in found
    )
    problems = " ".join(damage.problem for damage in check_trace(tmp_path / "t").damages)
    assert "contradicts" in problems
    report = heal_trace(tmp_path / "t")
    assert report.healed == []
    assert all("contradicts" in damage.problem for damage in report.hopeless)
    assert report.hopeless
    assert batch.read_bytes() == before


# The polynomial of CRC-32 as bits of bytes: to XOR it with data changes no CRC.
NO_CRC_SEES = np.packbits([1, *map(int, f"{0x04C11DB7:032b}")], bitorder="little").tobytes()


def test_values_whose_checksums_were_made_to_fit_are_not_restored(tmp_path: Path) -> None:
    batch = frames(tmp_path / "t", 30)
    (tmp_path / "t" / "w.manifest.jsonl").unlink()
    data, expected, shape = batch.read_bytes(), contents(tmp_path / "t"), shape_of(batch)
    at = place_of(batch, 0, "observations") // shape.block * shape.block + 3 * shape.block + 100
    other = xored(data, at, NO_CRC_SEES)
    assert zlib.crc32(other) == zlib.crc32(data)
    digests = parity_of(MemoryReader(data), shape).digests
    damaged = xored(with_parity(data, other, digests=digests), at + 50, b"\x01")
    batch.write_bytes(damaged)
    with pytest.raises(TraceError):
        contents(tmp_path / "t")
    assert [damage.problem for damage in heal_trace(tmp_path / "t").hopeless]
    assert batch.read_bytes() == damaged
    batch.write_bytes(with_parity(data, other))  # and as long as nothing is damaged, its own digests betray it
    assert "contradicts" in check_trace(tmp_path / "t").damages[0].problem
    batch.write_bytes(xored(batch.read_bytes(), place_of(batch, 0, "actions"), b"\x01"))
    with pytest.raises(TraceError):
        contents(tmp_path / "t")
    batch.write_bytes(xored(with_parity(data, data), at, b"\x01"))
    assert contents(tmp_path / "t") == expected


@pytest.mark.parametrize("block", [64, 100, 4000, 4095])
@pytest.mark.parametrize("digests", [None, b""], ids=["digests", "no digests"])
def test_blocks_of_any_size_restore_damage(tmp_path: Path, block: int, digests: bytes | None) -> None:
    batch = frames(tmp_path / "t", 30)
    (tmp_path / "t" / "w.manifest.jsonl").unlink()
    data, expected = batch.read_bytes(), contents(tmp_path / "t")
    forged = with_parity(data, data, block, 300_000 // block, digests)
    batch.write_bytes(forged)
    assert check_trace(tmp_path / "t").damages == []
    batch.write_bytes(xored(forged, 200_000, bytes([255]) * 3 * block))
    assert contents(tmp_path / "t") == expected
    report = check_trace(tmp_path / "t")
    assert (report.damages, bool(report.healed)) == ([], True)
    assert repair_trace(tmp_path / "t", tmp_path / "new").losses == []
    assert contents(tmp_path / "new") == expected
    assert heal_trace(tmp_path / "t").hopeless == []
    assert batch.read_bytes() == forged
