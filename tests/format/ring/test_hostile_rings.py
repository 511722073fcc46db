"""Rings with damaged or malicious bytes give a TraceError or less data, quickly."""

import random
import shutil
from pathlib import Path

import pytest
import rings
from fuzz_reader import read_everything, seed_rings
from hypothesis import given, settings
from hypothesis import strategies as st
from long_tests import LONG
from ring_mutations import mutated_ring

from gym_trace import check_trace, errors, open_trace


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, bytes]]:
    """Killed recordings with their rings."""
    place = tmp_path_factory.mktemp("rings")
    run = rings.Run().play(3, 40, 40, open_end=True)
    run.slab.ask(3)
    rings.killed(place / "small", run, written=1)
    directories = [place / "small", *seed_rings(place / "seeds")]
    return [(directory, (directory / "w.ring").read_bytes()) for directory in directories]


@settings(max_examples=settings().max_examples * 4 // 5)
@given(seed=st.integers(0, 1 << 40))
def test_any_ring_gives_trace_errors_or_less_data(
    seed: int, killed: list[tuple[Path, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    chance = random.Random(seed)
    directory, data = chance.choice(killed)
    place = tmp_path_factory.mktemp("hostile")
    shutil.copytree(directory, place / "t")
    (place / "t" / "w.ring").write_bytes(mutated_ring(chance, data))
    read_everything(place / "t", place / "repaired", thoroughly=True)
    shutil.rmtree(place)


@settings(max_examples=settings().max_examples * 4 // 5)
@given(slab=st.binary(min_size=200, max_size=4096), rows=st.integers(0, 5))
def test_any_slab_gives_trace_errors_or_less_data(
    slab: bytes, rows: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("slabs")
    full = rings.Slab(1)
    for _ in range(rows):
        full.record_initial([1, 2, 3])
    memory = bytearray(full.memory)
    memory[64 : 64 + len(slab)] = slab[: len(memory) - 64]
    writer = rings.Writer(place)
    writer.put(rings.ring([bytes(memory)]))
    writer.die()
    read_everything(place, place.with_name(place.name + "-repaired"), thoroughly=True)
    shutil.rmtree(place)


@pytest.mark.parametrize(
    "fields",
    [
        {"slabs": 17},
        {"slabs": (1 << 32) - 1},
        {"slab_bytes": 1 << 31},
        {"slab_bytes": 1 << 62},
        {"slab_bytes": 64},
        {"slab_bytes": 0},
        {"first": 0},
        {"first": (1 << 64) - 1},
        {"length": (1 << 32) - 1},
        {"length": 1},
        {"crc": 0},
        {"magic": b"\x89GTRNG\r\r"},
    ],
)
def test_a_ring_with_an_impossible_header_is_damage(tmp_path: Path, fields: dict[str, object]) -> None:
    rings.killed(tmp_path, rings.Run().play(3), **fields)
    trace = open_trace(tmp_path)
    assert [damage.path for damage in trace.damage] == [str(tmp_path / "w.ring")]
    with pytest.raises(errors.CorruptTrace, match=r"w\.ring"):
        list(trace)
    assert [damage.path for damage in check_trace(tmp_path).damages] == [str(tmp_path / "w.ring")]


@pytest.mark.parametrize("fields", [{"major": 2}, {"features": 1}, {"kind": 9}])
def test_a_ring_of_a_newer_version_raises(tmp_path: Path, fields: dict[str, int]) -> None:
    rings.killed(tmp_path, rings.Run().play(3), **fields)
    with pytest.raises(errors.UnsupportedTrace, match=r"w\.ring.*upgrade gym-trace"):
        open_trace(tmp_path)


def test_a_truncated_ring_loses_only_its_own_steps(tmp_path: Path) -> None:
    run = rings.Run(size=1024).play(2, 5, open_end=True)
    rings.killed(tmp_path, run)
    data = (tmp_path / "w.ring").read_bytes()
    for size in range(len(data)):
        if size > (300 if LONG else 80) and size % (13 if LONG else 61) and size not in (4096, 5120, 6144):
            continue
        (tmp_path / "w.ring").write_bytes(data[:size])
        trace = open_trace(tmp_path)
        assert len(trace) == 0
        assert bool(trace.damage) == (size > 0)
    (tmp_path / "w.ring").write_bytes(data)
    assert [len(episode) for episode in open_trace(tmp_path)] == [2, 5]
