"""The compiled inner loops give the results of their twins in Python, for any input."""

import os
import subprocess
import sys
import zlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gym_trace.errors import CorruptTrace
from gym_trace.format import kernels, transforms, wire
from gym_trace.format.ring import log

compiled = pytest.importorskip("gym_trace.format._kernels", reason="the C modules were not compiled")

SEEDS = st.integers(0, 1 << 32)


@given(data=st.binary(max_size=400), value=st.integers(0, (1 << 32) - 1), begin=st.integers(0, 20))
@example(data=bytes(range(256)) * 300, value=0, begin=1)
def test_checksums_are_those_of_zlib(data: bytes, value: int, begin: int) -> None:
    assert kernels.crc32(data, value) == zlib.crc32(data, value)
    assert kernels.crc32(memoryview(data)[begin:]) == zlib.crc32(data[begin:])


@given(
    rows=st.integers(1, 70),
    item=st.sampled_from([1, 2, 3, 4, 8, 16, 32, 80]),
    width=st.one_of(st.integers(1, 40), st.sampled_from([511, 512, 513, 1024, 4096])),
    together=st.integers(0, 40),
    seed=SEEDS,
)
def test_shuffling_and_xor_are_undone_like_in_python(
    rows: int, item: int, width: int, together: int, seed: int
) -> None:
    flat = np.random.default_rng(seed).integers(0, 256, (rows, item * width), np.uint8)
    planes = transforms.shuffle(flat, item, together)
    assert np.array_equal(kernels.shuffle(flat, item, together), planes)
    for undo in (kernels.undo_shuffle, transforms.undo_shuffle):
        out = np.empty_like(flat)
        undo(planes, out, item, together=together)
        assert np.array_equal(out, flat)
    before = np.zeros(flat.shape[1], np.uint8)
    for group in (0, together) if flat.shape[1] < wire.LARGE_ROW else (0,):  # large rows have no groups
        differences = transforms.xor(flat, before, np.empty_like(flat), group)
        planes = transforms.shuffle(differences, item, group)
        for undo in (kernels.undo_shuffle, transforms.undo_shuffle):
            out = np.empty_like(flat)
            undo(planes, out, item, True, group)
            assert np.array_equal(out, flat)
        again = differences.copy()
        kernels.undo_xor(differences, group)
        transforms.undo_xor(again, group)
        assert np.array_equal(differences, flat)
        assert np.array_equal(again, flat)


def changing(chance: np.random.Generator, rows: int, row_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows with few changes, and their changes, packed in several groups."""
    flat = np.repeat(chance.integers(0, 256, (1, row_size), np.uint8), rows, 0)
    for row in range(1, rows):
        flat[row] = flat[row - 1]
        count = int(chance.integers(0, 9))
        flat[row, chance.integers(0, row_size, count)] = chance.integers(0, 256, count)
    cuts = sorted({1, rows, *chance.integers(1, rows + 1, 2).tolist()})
    scratch = np.empty(flat.size, np.bool_)
    groups = [transforms.changes(flat[a:b], flat[a - 1], scratch) for a, b in pairwise(cuts)]
    return flat, np.frombuffer(flat[0].tobytes() + b"".join(groups), np.uint8).copy()


ROW_SIZES = [4096, 4098, 4100, 4101, 66_000, 66_000 * 8, 70_001]  # words of 8, 2, 4 and 1 bytes, gaps of 2 and 4


@pytest.mark.parametrize("row_size", ROW_SIZES)
@given(seed=SEEDS)
def test_changes_are_undone_from_any_row_on(row_size: int, seed: int) -> None:
    chance = np.random.default_rng(seed)
    rows = int(chance.integers(1, 7))
    flat, data = changing(chance, rows, row_size)
    begin = int(chance.integers(0, rows))
    out = np.empty((int(chance.integers(0, rows - begin + 1)), row_size), np.uint8)
    kernels.undo_changes(data, rows, begin, out)
    assert np.array_equal(out, flat[begin : begin + len(out)])


@pytest.mark.parametrize("row_size", ROW_SIZES[:4])
@given(seed=SEEDS)
def test_damaged_changes_raise_the_same_error_or_give_the_same_rows(row_size: int, seed: int) -> None:
    chance = np.random.default_rng(seed)
    rows = int(chance.integers(2, 7))
    _, data = changing(chance, rows, row_size)
    at = int(chance.integers(row_size - 4, len(data)))
    if chance.random() < 0.3:
        data = data[:at]
    else:
        data[at : at + 4] = chance.choice([0, 1, 255, int(chance.integers(256))])
    found = []
    for undo in (kernels.undo_changes, transforms.undo_changes):
        out = np.empty((rows, row_size), np.uint8)
        try:
            undo(data, rows, 0, out)
        except CorruptTrace as error:
            found.append(error.problem)
        else:
            found.append(out.tobytes())
    assert found[0] == found[1]


DISTINCT = st.sampled_from([1, 2, 3, 4, 5, 16, 17, 256, 257, 400])


def few_rows(chance: np.random.Generator, row_size: int, distinct: int, rows: int) -> np.ndarray:
    """Return rows, of which at most `distinct` differ, some of them in their last byte alone."""
    table = chance.integers(0, 256, (distinct, row_size), np.uint8)
    table[distinct // 2 :, :-1] = table[: distinct - distinct // 2, :-1]
    return table[chance.integers(0, distinct, rows)]


@given(
    row_size=st.sampled_from([1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 63, 64, 65, 147, 4095]),
    distinct=DISTINCT,
    rows=st.sampled_from([1, 2, 7, 8, 9, 255, 256, 257, 800]),
    most=st.one_of(DISTINCT, st.integers(0, 900)),
    seed=SEEDS,
)
def test_dictionaries_are_those_of_python(row_size: int, distinct: int, rows: int, most: int, seed: int) -> None:
    flat = few_rows(np.random.default_rng(seed), row_size, distinct, rows)
    out, other = np.empty(flat.size, np.uint8), np.empty(flat.size, np.uint8)
    size = kernels.dictionary(flat, out, most)
    assert size == transforms.dictionary(flat, other, most)
    assert np.array_equal(out[:size], other[:size])
    found = len(np.unique(flat, axis=0))
    if found > most:
        assert size == 0
    if size:
        for undo in (kernels.undo_dictionary, transforms.undo_dictionary):
            rows_again = np.empty_like(flat)
            undo(out[:size], rows_again)
            assert np.array_equal(rows_again, flat)


@pytest.mark.parametrize("distinct", [1 << 16, (1 << 16) + 1])
def test_a_dictionary_has_at_most_65536_rows(distinct: int) -> None:
    flat = np.tile(np.arange(distinct, dtype=np.uint32), 3).view(np.uint8).reshape(-1, 4)
    out, again = np.empty(flat.size, np.uint8), np.empty_like(flat)
    size = kernels.dictionary(flat, out, transforms.MOST_DISTINCT)
    assert size == (4 + 4 * distinct + 2 * len(flat) if distinct == 1 << 16 else 0)
    if size:
        kernels.undo_dictionary(out[:size], again)
        assert np.array_equal(again, flat)


def test_rows_made_to_collide_are_declined() -> None:
    inverse = pow(0x9E3779B97F4A7C15, -1, 1 << 64)
    rows = np.array([i * inverse % (1 << 64) for i in range(1, 1000)] * 3, np.uint64)
    flat, out = rows.view(np.uint8).reshape(-1, 8), np.empty(rows.nbytes, np.uint8)
    assert compiled.dictionary(flat, out, 8, 1400) == 0
    assert transforms.dictionary(flat, out, 1400) > 0
    assert compiled.dictionary(flat[:100], out, 8, 100) > 0


@given(distinct=DISTINCT, row_size=st.sampled_from([1, 3, 8, 147]), seed=SEEDS)
def test_damaged_dictionaries_raise_the_same_error_or_give_the_same_rows(
    distinct: int, row_size: int, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    flat = few_rows(chance, row_size, distinct, 900)
    out = np.empty(flat.size + 900, np.uint8)
    data = out[: transforms.dictionary(flat, out, 900)].copy()
    if chance.random() < 0.3:
        data = data[: int(chance.integers(0, len(data)))]
    else:
        at = int(chance.choice([0, 1, len(data) - 1, int(chance.integers(len(data)))]))
        data[at] = chance.choice([0, 1, 255, int(chance.integers(256))])
    found = []
    for undo in (kernels.undo_dictionary, transforms.undo_dictionary):
        rows = np.empty_like(flat)
        try:
            undo(data, rows)
        except CorruptTrace as error:
            found.append(error.problem)
        else:
            found.append(rows.tobytes())
    assert found[0] == found[1]


@given(counts=st.lists(st.integers(0, 9), max_size=20), dtype=st.sampled_from(["i1", "(3,)f4", "O"]), seed=SEEDS)
def test_runs_of_rows_are_copied_like_in_python(counts: list[int], dtype: str, seed: int) -> None:
    chance, sizes = np.random.default_rng(seed), np.array(counts, np.int64)
    rows = np.empty(40, dtype)
    rows[...] = chance.integers(0, 99, rows.shape)
    begins = chance.integers(0, 30, len(sizes))
    order = chance.permutation(len(sizes))
    targets = np.empty(len(sizes), np.int64)
    targets[order] = np.cumsum(sizes[order]) - sizes[order]
    out = np.empty((sum(counts), *rows.shape[1:]), rows.dtype)
    kernels.copy_runs(rows, out, begins, targets, sizes)
    for begin, target, count in zip(begins.tolist(), targets.tolist(), counts):
        assert np.array_equal(out[target : target + count], rows[begin : begin + count])


def test_runs_outside_the_memory_are_refused() -> None:
    rows, out = np.arange(4, dtype=np.int64), np.empty(4, np.int64)
    for begin, target, count in ((0, 0, 5), (1, 0, 4), (0, 1, 4), (-1, 0, 1), (0, -1, 1), (0, 0, -1), (1 << 62, 0, 2)):
        with pytest.raises(ValueError, match="outside the memory"):
            compiled.copy_runs(rows, out, *(np.array([n], np.int64) for n in (begin, target, count)), 8)


def test_wrong_sizes_raise() -> None:
    room, one = np.empty(8, np.uint8), np.ones(1, np.int64)
    for call in (
        lambda: compiled.undo_shuffle(bytes(7), room, 8, 1, False, 0, False),
        lambda: compiled.undo_shuffle(bytes(8), room, 8, 3, False, 0, False),
        lambda: compiled.shuffle(bytes(8), room, 0, 1, 0),
        lambda: compiled.undo_xor(room, 3, 0),
        lambda: compiled.undo_xor(room, 8, -1),
        lambda: compiled.undo_changes(bytes(8), 1, 1, room, 8),
        lambda: compiled.undo_changes(bytes(8), 1, -1, room, 8),
        lambda: compiled.undo_changes(bytes(8), 1, 0, room, -8),
        lambda: compiled.dictionary(bytes(8), room, 3, 1),
        lambda: compiled.dictionary(bytes(8), room, 0, 1),
        lambda: compiled.dictionary(bytes(8), room, 1, (1 << 16) + 1),
        lambda: compiled.undo_dictionary(bytes(8), room, 3),
        lambda: compiled.undo_dictionary(bytes(3), room, 1),
        lambda: compiled.copy_runs(room, room, one, one, np.ones(2, np.int64), 8),
        lambda: compiled.copy_runs(room, room, one, one, one, 0),
        lambda: compiled.hash_blocks(bytearray(64), bytes(129), 128, 0, 0),
        lambda: compiled.hash_blocks(bytearray(65), bytes(128), 128, 0, 0),
        lambda: compiled.hash_blocks(bytearray(64), bytes(127), 128, 0, 1),
        lambda: compiled.hash_blocks(bytearray(64), bytes(64), 64, 0, 0),
        lambda: compiled.hash_blocks(bytearray(64), b"", 128, 0, 0),
    ):
        with pytest.raises(ValueError, match=r"size|rows"):
            call()


def test_gym_trace_pure_selects_the_functions_in_python() -> None:
    code = "from gym_trace.format import kernels as k, transforms as t; print(k.COMPILED, k.undo_xor is t.undo_xor)"
    for pure, said in (("1", "False True"), ("", "True False")):
        environ = {**os.environ, "GYM_TRACE_PURE": pure}
        ran = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == said


@given(lengths=st.lists(st.integers(0, 40), max_size=200), cut=st.integers(0, 400), seed=SEEDS, wrong=st.booleans())
def test_logs_are_walked_and_cut_like_in_python(lengths: list[int], cut: int, seed: int, wrong: bool) -> None:
    memory, at, sequence = memoryview(bytearray(16 + sum(map(log.size_of, lengths)) + log.ENTRY.size)), 16, 3
    for number, length in enumerate(lengths):
        at = log.put(memory, at, (sequence << 32) + number + 1, number, 6, bytes(length), 0, 0, 0, 0, 0, 0)
    if wrong:
        noise = np.random.default_rng(seed).integers(0, len(memory), 3)
        for place in noise.tolist():
            memory[place] ^= 0x55
    end = max(16, len(memory) - cut)
    found = log.entry_offsets(memory, 16, end, sequence)
    assert found.tolist() == log._entry_offsets(memory, 16, end, sequence)
    begins = found + log.ENTRY.size
    ends = begins + log.headers(memory, found)["length"]
    assert compiled.slices(memory, begins, ends) == [bytes(memory[a:b]) for a, b in zip(begins.tolist(), ends.tolist())]


def test_a_slice_or_a_log_outside_the_memory_is_refused() -> None:
    one, far = np.array([1], np.int64), np.array([9], np.int64)
    for begins, ends in ((one, far), (far, one), (-one, one), (one, np.zeros(2, np.int64))):
        with pytest.raises(ValueError, match=r"outside the memory|differ in size"):
            compiled.slices(b"12345678", begins, ends)
    for begin, end in ((-1, 8), (0, 9)):
        with pytest.raises(ValueError, match="outside the memory"):
            compiled.entry_offsets(b"12345678", begin, end, 1)
