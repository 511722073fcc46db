"""Column encodings: each round-trips bit for bit, and invalid input raises."""

from itertools import pairwise
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from scripted_env import bits

from gym_trace.data.deltas import DeltaRows
from gym_trace.data.packing import pack
from gym_trace.errors import CorruptTrace, UnstorableValue, UnsupportedTrace
from gym_trace.format import wire
from gym_trace.format.columns import (
    MSGPACK,
    Blocks,
    ColumnDescriptor,
    ColumnEncoder,
    LargeRows,
    Workspace,
    decode,
    packed_values,
    parse_column,
)
from gym_trace.format.records import verify

ZSTD, SHUFFLE, XOR, CONSTANT, CHANGES, DICTIONARY, BLOCKS = 1, 2, 4, 8, 16, 32, 64
DTYPES = ["<f4", "<i8", "|u1", "|b1", "<c8", "<f2", "<u2", "<c16", "<f16"]


def rows_of(dtype: str, count: int, shape: tuple[int, ...], seed: int, smooth: bool) -> np.ndarray:
    random = np.random.default_rng(seed)
    size = count * int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size, np.uint8) if smooth else np.frombuffer(random.bytes(size), np.uint8).copy()
    if smooth and size:
        raw[:: max(1, size // 7)] = 1
    if dtype == "|b1":
        raw &= 1
    return raw.view(dtype).reshape(count, *shape)


def by_the_document(rows: np.ndarray, encoding: int) -> tuple[ColumnDescriptor, bytes]:
    """Encode a column byte by byte, as docs/FORMAT.md specifies."""
    width = int(np.prod(rows.shape[1:])) * rows.dtype.itemsize
    kept = [bytearray(row.tobytes()) for row in (rows[:1] if encoding & CONSTANT else rows)]
    if encoding & XOR:
        kept = kept[:1] + [bytearray(a ^ b for a, b in zip(row, before)) for before, row in pairwise(kept)]
    raw = b"".join(kept)
    if encoding & DICTIONARY:
        distinct = list(dict.fromkeys(map(bytes, kept)))
        table = distinct[:1] + [bytes(a ^ b for a, b in zip(row, before)) for before, row in pairwise(distinct)]
        width_of_codes = next(bits for bits in (1, 2, 4, 8, 16) if len(distinct) <= 2**bits)
        codes = sum(distinct.index(bytes(row)) << width_of_codes * i for i, row in enumerate(kept))
        sizes = len(distinct).to_bytes(4, "little"), codes.to_bytes(-(-len(kept) * width_of_codes // 8), "little")
        raw = sizes[0] + b"".join(table) + sizes[1]
    if encoding & SHUFFLE:
        w = rows.dtype.itemsize
        group = width if width >= 4096 else len(raw)
        groups = [raw[i : i + group] for i in range(0, len(raw), group or 1)]
        raw = b"".join(bytes(g[i * w + j] for j in range(w) for i in range(len(g) // w)) for g in groups)
    blob = zstandard.ZstdCompressor().compress(raw) if encoding & ZSTD else raw
    assert encoding & DICTIONARY or len(raw) == len(kept) * width
    return ColumnDescriptor(
        ("a",), rows.dtype.str, rows.shape[1:], len(rows), encoding, len(blob), len(raw), crc32(blob)
    ), blob


def in_blocks(rows: np.ndarray, encoding: int, together: int) -> tuple[ColumnDescriptor, bytes]:
    """Encode a column in blocks, as docs/FORMAT.md specifies."""
    column, blob, table = by_the_document(rows, ZSTD)[0], b"", b""
    for begin in range(0, len(rows), together):
        blob += by_the_document(rows[begin : begin + together], encoding | ZSTD)[1]
        table += len(blob).to_bytes(4, "little") + crc32(blob).to_bytes(4, "little")
    bits, blocks = encoding | ZSTD | BLOCKS, Blocks(together, table)
    return column._replace(encoding=bits, stored=len(blob), crc=crc32(blob), blocks=blocks), blob


@given(
    st.sampled_from(DTYPES),
    st.sampled_from([0, SHUFFLE, XOR, SHUFFLE | XOR]),
    st.integers(2, 60),
    st.integers(1, 59),
    st.sampled_from([(), (3,), (7, 5)]),
    st.integers(0, 9),
)
def test_blocks_decode_as_the_document_says(
    dtype: str, encoding: int, count: int, together: int, shape: tuple[int, ...], seed: int
) -> None:
    rows = rows_of(dtype, count, shape, seed, smooth=False)
    column, blob = in_blocks(rows, encoding, min(together, count - 1))
    assert bits(decode(parse_column(column.descriptor()), blob)) == bits(rows)


@pytest.mark.parametrize("level", [-1, 1, 3])
@given(st.sampled_from(["<f4", "<f8"]), st.integers(1, 3000), st.sampled_from([(), (3,), (17,)]))
def test_noise_is_stored_in_blocks_and_round_trips(level: int, dtype: str, count: int, shape: tuple[int, ...]) -> None:
    rows = np.random.default_rng(count).normal(size=(count, *shape)).astype(dtype)
    encoder = ColumnEncoder(("a",), Workspace(level))
    for some in (rows, rows[: count // 2]):  # the second chunk may be too small for blocks
        column, blob = encoder.encode(some)
        parsed = parse_column(column.descriptor())
        assert bits(decode(parsed, blob)) == bits(some)
        if some.nbytes < 40 << 10 or some.nbytes > 100 << 10:  # in between, the size decides
            assert (parsed.blocks is None) == (some.nbytes < 40 << 10)


def test_rows_that_compress_well_have_no_blocks() -> None:
    rows = np.random.default_rng(0).integers(0, 3, (40_000, 4))
    assert ColumnEncoder(("a",), Workspace(1)).encode(rows)[0].blocks is None


def test_malformed_blocks_raise() -> None:
    column, blob = in_blocks(rows_of("<f4", 100, (10,), 1, smooth=False), SHUFFLE, 30)
    good, (rows, table) = column.descriptor(), column.blocks or (0, b"")
    parse_column(good)
    for blocks in (
        *([], [[rows]], [None], [[rows, table, 1]], [[rows, table], 1], [[0, table]], [[-1, table]], [["30", table]]),
        *(
            [[True, table]],
            [[rows, table[:-8]]],
            [[rows, table + table[-8:]]],
            [[rows, bytes(32)]],
            [[100, table[-8:]]],
        ),
        *([[20, table]], [[rows, table.decode("latin-1")]], [[1 << 40, table]]),
    ):
        with pytest.raises(CorruptTrace):
            parse_column([*good[:8], *blocks])
    for place, value in (
        (4, SHUFFLE | BLOCKS),
        (4, ZSTD),
        (4, ZSTD | CONSTANT | BLOCKS),
        (4, DICTIONARY | ZSTD | BLOCKS),
        (1, {}),
        (1, ["<f4"]),
    ):
        with pytest.raises(CorruptTrace):
            parse_column([*good[:place], value, *good[place + 1 :]])
    with pytest.raises(CorruptTrace):
        parse_column([["a"], "|V80", [], 100, ZSTD | BLOCKS, len(blob), 8000, crc32(blob), [30, table]])
    for bad in (blob[:-1], blob + blob[:40], b"", blob[::-1]):
        with pytest.raises(CorruptTrace):
            decode(column, bad)


@pytest.mark.parametrize("encoding", [*range(16), DICTIONARY, DICTIONARY | ZSTD])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_encoding_decodes_as_the_document_says(dtype: str, encoding: int) -> None:
    for count, shape in ((1, ()), (5, (3,)), (4, (2, 5)), (9, (80,)), (3, (0,)), (0, (2,)), (3, (4096,))):
        rows = rows_of(dtype, count, shape, seed=count, smooth=False)
        if encoding & CONSTANT and count:
            rows = np.repeat(rows[:1], count, axis=0)
        if encoding & DICTIONARY:
            if not 0 < rows.nbytes < 4096 * count:
                continue
            rows = np.concatenate([rows, rows[::2], rows[:1]])
        column, blob = by_the_document(rows, encoding)
        decoded = decode(parse_column(column.descriptor()), blob)
        assert bits(decoded) == bits(rows)
        assert decoded.flags.writeable


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.sampled_from([(), (1,), (3,), (7, 5), (0,), (600,)]),
    st.integers(0, 9),
    st.booleans(),
)
def test_encoded_columns_round_trip(
    dtype: str, counts: list[int], shape: tuple[int, ...], seed: int, smooth: bool
) -> None:
    encoder = ColumnEncoder(("observations", "x", 1), Workspace(1))
    for i, count in enumerate(counts):
        rows = rows_of(dtype, count, shape, seed + i, smooth)
        column, blob = encoder.encode(rows)
        assert (column.stored, column.crc) == (len(blob), crc32(blob))
        assert column.full_size == rows.nbytes
        assert bits(decode(parse_column(column.descriptor()), blob)) == bits(rows)


NUMBERS_OF_DISTINCT_ROWS = [1, 2, 3, 4, 5, 16, 17, 256, 257, 300, 301]


@given(
    st.sampled_from(DTYPES),
    st.sampled_from([(), (1,), (3,), (7, 5), (40,)]),
    st.sampled_from(NUMBERS_OF_DISTINCT_ROWS),
    st.integers(0, 9),
)
def test_columns_with_few_distinct_rows_round_trip(
    dtype: str, shape: tuple[int, ...], distinct: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    rows = rows_of(dtype, distinct, shape, seed, smooth=False)[random.integers(0, distinct, 600)]
    column, blob = ColumnEncoder(("a",), Workspace(1)).encode(rows)
    assert bits(decode(parse_column(column.descriptor()), blob)) == bits(rows)


@pytest.mark.parametrize(
    ("distinct", "size"), [(2, 4 + 2 * 8 + 125), (3, 4 + 3 * 8 + 250), (16, 4 + 16 * 8 + 500), (17, 4 + 17 * 8 + 1000)]
)
def test_codes_of_distinct_rows_take_as_few_bits_as_needed(distinct: int, size: int) -> None:
    rows = np.random.default_rng(0).integers(0, 1 << 60, distinct)[np.random.default_rng(1).integers(0, distinct, 1000)]
    column, blob = ColumnEncoder(("a",), Workspace(1)).encode(rows)
    assert column.encoding & ~ZSTD == DICTIONARY
    assert column.raw == size
    assert len(blob) <= size


def test_rows_that_outgrow_a_dictionary_get_the_next_best_encoding() -> None:
    random = np.random.default_rng(0)
    few, many = random.integers(0, 9, (4, 20))[random.integers(0, 4, 2000)], random.integers(0, 9, (2000, 20))
    encoder, other = ColumnEncoder(("a",), Workspace(1)), ColumnEncoder(("a",), Workspace(1))
    assert encoder.encode(few)[0].encoding & DICTIONARY
    column, blob = encoder.encode(many)
    assert column.encoding == SHUFFLE | ZSTD
    assert len(blob) <= 1.02 * len(other.encode(many)[1])
    assert bits(decode(column, blob)) == bits(many)


def test_encoding_more_chunks_leaves_earlier_blobs_unchanged() -> None:
    encoder = ColumnEncoder(("a",), Workspace(1))
    pieces = [np.cumsum(rows_of("<i8", 3000, (4,), seed, True), axis=0) for seed in range(4)]
    encoded = [encoder.encode(piece) for piece in pieces]
    for piece, (column, blob) in zip(pieces, encoded):
        assert bits(decode(column, blob)) == bits(piece)


def test_equal_numbers_with_different_bits_are_not_stored_as_constant() -> None:
    for values in ([0.0, -0.0, 0.0], [0.0, 0.0, -0.0, 0.0, 0.0], [np.nan, np.float32(-np.nan), np.nan]):
        rows = np.array(values, np.float32)
        column, blob = ColumnEncoder(("a",), Workspace(1)).encode(rows)
        assert bits(decode(column, blob)) == bits(rows)


@pytest.mark.parametrize("count", [1, 2, 3, 1000])
def test_equal_rows_are_stored_once(count: int) -> None:
    rows = np.full((count, 50), 3.25)
    column, blob = ColumnEncoder(("a",), Workspace(1)).encode(rows)
    assert bits(decode(column, blob)) == bits(rows)
    assert len(blob) <= 400
    if count > 1:
        assert column.encoding & CONSTANT


def test_a_faster_compressor_is_used_only_if_the_column_hardly_grows() -> None:
    random = np.random.default_rng(0)
    even, normal = random.random((20_000, 8), np.float32), random.standard_normal((20_000, 8), np.float32)
    dice, walk = random.integers(0, 6, (6250, 8), np.uint8), random.integers(-9, 9, (40_000, 8)).cumsum(axis=0)
    for rows, used, limit in ((even, 1, 1.03), (normal, 2, 1), (dice, 2, 1), (walk, 0, 1)):
        encoder, patient = ColumnEncoder(("a",), Workspace(1)), ColumnEncoder(("a",), Workspace(1))
        del patient._workspace.for_small_rows[1:]
        (column, blob), (_, usual) = encoder.encode(rows), patient.encode(rows)
        assert encoder._choices[0].compressor == used
        assert len(blob) <= limit * len(usual)
        assert bits(decode(column, blob)) == bits(rows)


def test_small_samples_do_not_choose_a_faster_compressor() -> None:
    random = np.random.default_rng(0)
    workspace, patient = Workspace(1), Workspace(1)
    del patient.for_small_rows[1:]
    tiny = ColumnEncoder(("a",), workspace)
    tiny.encode(random.integers(0, 6, 20, np.uint8))
    dice = random.integers(0, 6, (1 << 15, 8), np.uint8)
    assert tiny.encode(dice)[1] == ColumnEncoder(("a",), patient).encode(dice)[1]
    typed = ColumnEncoder(("a",), workspace)
    typed.encode(random.normal(size=(4000, 8)).cumsum(axis=0))
    values = [pack({"lives": int(lives), "frame": i}) for i, lives in enumerate(random.integers(0, 4, 5000))]
    assert typed.encode(values)[1] == ColumnEncoder(("a",), workspace).encode(values)[1]


def still_frames(random: np.random.Generator, count: int) -> DeltaRows:
    slots = [(np.array([i], np.uint32).tobytes(), random.bytes(8)) for i in range(count - 1)]
    return DeltaRows(np.dtype("<f4"), (1024,), [random.bytes(4096), *slots], None)


def all_of(frames: DeltaRows) -> np.ndarray:
    return np.concatenate(list(frames.arrays(8))).view(frames.dtype).reshape(-1, *frames.shape)


@given(
    st.sampled_from([-7, -3, 0, 1, 12]),
    st.lists(st.sampled_from(["still", "noisy", "smooth", "small", "few", "values"]), min_size=2, max_size=6),
)
def test_a_column_round_trips_when_its_kind_of_rows_changes(level: int, kinds: list[str]) -> None:
    random = np.random.default_rng(len(kinds))
    encoder = ColumnEncoder(("observations",), Workspace(level))
    for kind in kinds:
        if kind == "values":
            values = [pack(int(i)) for i in random.integers(0, 4, 200)]
            column, blob = encoder.encode(values)
            assert packed_values(parse_column(column.descriptor()), blob) == values
            continue
        if kind == "still":
            frames = still_frames(random, 20)
            column, blob = encoder.encode(LargeRows([frames]))
            rows = all_of(frames)
        else:
            rows = {
                "noisy": lambda: random.integers(0, 256, (20, 4096), np.uint8),
                "smooth": lambda: random.normal(size=(20, 1024)).cumsum(axis=1).astype("<f4"),
                "small": lambda: random.integers(0, 5, (300, 3), np.uint8),
                "few": lambda: random.normal(size=(1, 1024)),
            }[kind]()
            column, blob = encoder.encode(rows)
        assert bits(decode(parse_column(column.descriptor()), blob)) == bits(rows)


def test_still_frames_do_not_change_the_encoding_of_moving_frames() -> None:
    random = np.random.default_rng(0)
    encoder = ColumnEncoder(("observations",), Workspace(1))
    moving = [random.normal(size=1024).cumsum().astype("<f4").tobytes() for _ in range(60)]

    def encoding_of(frames: DeltaRows) -> int:
        return encoder.encode(LargeRows([frames]))[0].encoding

    usual = encoding_of(DeltaRows(np.dtype("<f4"), (1024,), moving, None))
    assert usual & SHUFFLE
    assert encoding_of(still_frames(random, 20)) == CHANGES | ZSTD
    assert encoding_of(DeltaRows(np.dtype("<f4"), (1024,), moving, None)) == usual


@given(st.lists(st.one_of(st.binary(max_size=40), st.integers(), st.just("same")), max_size=30))
def test_msgpack_columns_decode_to_one_value_per_row(values: list[Any]) -> None:
    column, blob = ColumnEncoder(("a",), Workspace(1)).encode([pack(value) for value in values])
    decoded = decode(parse_column(column.descriptor()), blob)
    assert decoded.dtype == object
    assert [bits(value) for value in decoded] == [bits(value) for value in values]


def test_rows_with_equal_values_share_no_memory() -> None:
    column, blob = ColumnEncoder(("a",), Workspace(1)).encode([pack({"a": [1]})] * 5)
    decoded = decode(column, blob)
    decoded[0]["a"].append(2)
    assert [row["a"] for row in decoded] == [[1, 2], [1], [1], [1], [1]]


def test_a_msgpack_column_beyond_the_size_limit_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_VALUES", 1000)
    with pytest.raises(UnstorableValue, match="the limit is 1000"):
        ColumnEncoder(("infos",), Workspace(1)).encode([pack(str(i) * 100) for i in range(20)])


GOOD: list[Any] = [["a"], "<f4", [2], 3, 0, 24, 24, 0]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, []), (0, [1.5]), (0, None), (0, [["x"]]), (1, "|O"), (1, "f4"), (1, 3), (1, "|V80"), (1, "msgpack\0"),
        (1, ">f8"), (1, "|S8"), (1, "<M8"),
        (2, [3]), (2, [-2]), (2, "2"), (2, [2.0]), (2, [1] * 40), (2, [1 << 62, 4]), (2, [True]), (3, -1), (3, 4),
        (3, 1 << 40), (3, "3"), (3, True), (4, 16), (4, -1), (4, 8), (5, 23), (5, -1), (6, 25),
        (6, 1 << 40), (7, -1),
    ],
    ids=repr,
)  # fmt: skip
def test_an_inconsistent_column_descriptor_raises(place: int, value: Any) -> None:
    parse_column(GOOD)
    with pytest.raises(CorruptTrace):
        parse_column([*GOOD[:place], value, *GOOD[place + 1 :]])


def test_an_unknown_encoding_needs_a_newer_reader() -> None:
    with pytest.raises(UnsupportedTrace, match="unknown encoding 0x40000001; upgrade gym-trace"):
        parse_column([*GOOD[:4], 1 << 30 | ZSTD, *GOOD[5:]])


@pytest.mark.parametrize(
    "descriptor",
    [
        *(None, 1, [], GOOD[:7], [*GOOD, 1], "abcdefgh", {}),
        [["a"], "msgpack", [], 1 << 30, 8, 1, 1, 0],  # a row of one byte, a billion times
        [["a"], "msgpack", [], 3, 0, 4, 4, 0],  # no space for the lengths
        [["a"], "msgpack", [], 1, 4, 5, 5, 0],
        [["a"], "msgpack", [], 1, 1, 5, 1 << 30, 0],
        [["a"], "<f8", [1 << 20], 1 << 20, 8 | 1, 9, 1 << 23, 0],
    ],
    ids=repr,
)
def test_a_malformed_or_too_large_column_descriptor_raises(descriptor: Any) -> None:
    with pytest.raises(CorruptTrace):
        parse_column(descriptor)


def test_a_blob_of_the_wrong_size_raises() -> None:
    rows = rows_of("<f4", 100, (10,), 1, smooth=True)
    column, blob = by_the_document(rows, ZSTD)
    compress = zstandard.ZstdCompressor().compress
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress
    bombs = [b"", blob[:-1], blob[: len(blob) // 2], b"\0" * len(blob)]
    bombs += [compress(bytes(size)) for size in (column.raw - 1, column.raw + 1, 10**7)]
    bombs += [unsized(rows.tobytes()[:-1]), unsized(rows.tobytes() + b"\0")]
    for bomb in bombs:
        with pytest.raises(CorruptTrace):
            decode(column._replace(stored=len(bomb)), bomb)


@pytest.mark.parametrize("lengths", [[5, 5], [1, 1], [9, 0], [0xFFFFFFFF, 1], [3, 6]])
def test_value_lengths_that_do_not_match_the_column_raise(lengths: list[int]) -> None:
    raw = np.array(lengths, "<u4").tobytes() + b"\x01\x02\x03"
    column = ColumnDescriptor(("a",), "msgpack", (), len(lengths), 0, len(raw), len(raw), 0)
    with pytest.raises(CorruptTrace):
        decode(column, raw)


def test_the_first_of_many_invalid_values_is_reported() -> None:
    values = [b"\xdd" + length.to_bytes(4, "big") for length in range(1000, 1100)]  # lists without their items
    blob = np.full(len(values), 5, "<u4").tobytes() + b"".join(values)
    column = parse_column([["infos"], MSGPACK, [], len(values), 0, len(blob), len(blob), crc32(blob)])
    for read in (verify, decode):
        with pytest.raises(CorruptTrace, match="1000 exceeds"):
            read(column, blob)


def test_damaged_dictionaries_raise() -> None:
    rows = np.array([7, 9, 11, 7, 9, 7, 7], np.int32)
    column, blob = by_the_document(rows, DICTIONARY)
    assert decode(parse_column(column.descriptor()), blob).tolist() == rows.tolist()
    outside = blob[:-1] + b"\xff"  # codes have two bits, and the table three rows
    assert len(outside) == column.raw
    hostile = [outside, b"", blob[:3], blob[:-1], blob + b"\0"]
    hostile += [count.to_bytes(4, "little") + blob[4:] for count in (0, 2, 4, 8, 1 << 16, (1 << 32) - 1)]
    for data in hostile:
        with pytest.raises(CorruptTrace, match=r"dictionary|table|size"):
            decode(parse_column(column._replace(stored=len(data), raw=len(data)).descriptor()), data)


@pytest.mark.parametrize(
    "changes",
    [{"rows": 0}, {"shape": (0,)}, {"shape": (2000,)}, {"encoding": DICTIONARY | CONSTANT}, {"dtype": "msgpack"},
     {"encoding": DICTIONARY | SHUFFLE}, {"encoding": DICTIONARY | XOR}, {"raw": 4 + 7 * 4 + 15, "stored": 47}],
    ids=repr,
)  # fmt: skip
def test_a_dictionary_that_the_format_rules_out_raises(changes: dict[str, Any]) -> None:
    column, _ = by_the_document(np.arange(7, dtype=np.int32), DICTIONARY)
    with pytest.raises(CorruptTrace):
        parse_column(column._replace(**changes).descriptor())
