"""Columns of a record: descriptors, encoding and decoding (docs/FORMAT.md, section 3). Stored columns are untrusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import zstandard

from gym_trace.data.deltas import DeltaRows
from gym_trace.data.packing import MAX_CONTAINERS, Containers, unpack
from gym_trace.data.values import Array, dtype_from, objects
from gym_trace.errors import CorruptTrace, UnstorableValue, UnsupportedTrace
from gym_trace.format import kernels, transforms, wire
from gym_trace.format.encodings import (
    BLOCKS,
    CHANGES,
    CONSTANT,
    DICTIONARY,
    ENCODINGS,
    KNOWN_BITS,
    PLAIN,
    SHUFFLE,
    ZSTD,
    Encoding,
    encoding_of,
)

MSGPACK = "msgpack"
_TABLES = {f"|V{dtype.itemsize}" for dtype in (wire.FRAGMENT, wire.CHUNK_ENTRY, wire.COLUMN_ENTRY, wire.BLOCK)}
STEP_COLUMNS = ("actions", "rewards", "infos", "annotations", "states")  # roots of the columns with one row per step
_NUMBER_LIMIT = 1 << 32  # numbers in a descriptor are smaller; a checksum has 32 bits
_MAX_WINDOW = 128 << 20  # bytes that zstd may look back
_SAMPLE_BYTES = 256 << 10  # sample on which encodings are tried
_FEW_BYTES, _FEW_ROWS = 64 << 10, 2048  # sizes of the sample if few rows are distinct; the larger one counts
_LARGE_SAMPLE = 1 << 20  # same for large rows; larger, so that the first row, which is stored whole, does not dominate
_LITTLE = 1024  # bytes; large rows with at most this many changed bytes get a higher zstd level
_HARDER = 3  # zstd levels added for such rows
_LITTLE_CHUNK = 256 << 10  # bytes, size hint for chunks of such rows: zstd uses less memory and searches harder
_QUICK = -1  # zstd level several times faster than level 1
_QUICK_SIZE = 1.03  # size ratio up to which _QUICK replaces level 1
# For noise: bytes of few values that hardly repeat. Level 1 spends its time on short matches, which save nothing.
_RARE_MATCHES = {"strategy": 1, "min_match": 7, "hash_log": 6, "chain_log": 6, "search_log": 1, "window_log": 17}
_RARE_SIZE = 0.995  # size ratio from which _RARE_MATCHES replaces level 1; it is then faster, too
_LEAST_QUICK_SAMPLE = 16 << 10  # bytes; smaller samples do not predict that ratio
_WORTHWHILE = 0.98  # large rows with a worse compression ratio stay uncompressed
_BLOCK_BYTES = 32 << 10  # bytes of rows that are encoded by themselves in a column that readers access at random
_BLOCKS_AT_ONCE = 256 << 10  # bytes of blocks that are decompressed together
_LEAST_IN_BLOCKS = 40 << 10  # bytes of a column in blocks
_BLOCKS_SIZE = 1.02  # size ratio up to which a column is stored in blocks
_LEAST_BLOCKS_SIZE = 0.5  # a column with a better compression ratio is small, and is not stored in blocks
_LEAST_BYTES = 256  # smaller columns stay uncompressed: compressing hands the interpreter lock to the user's loop
_SAVING = 0.02  # part of the size that each transform must save, because it costs time
_LEAST_TABLE = 1 << 10  # bytes; a larger table of a dictionary is compressed apart from the codes
_LEAST_ROWS = 2  # fewer large rows are not a sample
_RETRY_AFTER = 64  # chunks between trials of the encodings

Path = tuple[str | int, ...]
Buffer = bytes | memoryview
StoredBlocks = dict[range, Buffer]  # bytes of runs of blocks, by their numbers


class Blocks(NamedTuple):
    """Blocks of rows that are encoded and compressed by themselves, so that a reader can decode some of them.

    Attributes:
        rows: number of rows of a block; the last one may have fewer.
        table: entries of wire.BLOCK, one per block: its end in the stored bytes, and the CRC of all bytes up to there.
    """

    rows: int
    table: bytes

    @property
    def total(self) -> int:
        return len(self.table) // wire.BLOCK.itemsize

    def runs(self, ranges: Iterable[tuple[int, int]]) -> list[range]:
        """Return the numbers of the blocks with rows in these ranges (begin, end), as runs in ascending order."""
        found = list[range]()
        for begin, end in sorted(ranges):
            first, last = begin // self.rows, min(-(-end // self.rows), self.total)
            if begin >= end or first >= last:
                continue
            if found and first <= found[-1].stop:
                found[-1] = range(found[-1].start, max(found[-1].stop, last))
            else:
                found.append(range(first, last))
        return found

    def before(self, block: int) -> tuple[int, int]:
        """Return the offset of a block in the stored bytes, and the CRC of the bytes before it."""
        end, crc = np.frombuffer(self.table, wire.BLOCK)[block - 1].tolist() if block else (0, 0)
        return end, crc


class ColumnDescriptor(NamedTuple):
    """Descriptor of one column in a record (docs/FORMAT.md)."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    rows: int
    encoding: int
    stored: int
    raw: int
    crc: int
    blocks: Blocks | None = None

    def descriptor(self) -> list[Any]:
        """Return the stored form: lists, because MessagePack would store a tuple as an extension type."""
        blocks = [] if self.blocks is None else [list(self.blocks)]
        return [list(self.path), self.dtype, list(self.shape), *self[3:8], *blocks]

    @property
    def name(self) -> str:
        return "/".join(map(str, self.path))

    @property
    def row_size(self) -> int:
        return math.prod(self.shape) * item_size(self.dtype)

    @property
    def is_delta_encoded(self) -> bool:
        """True if the column stores the changes of each row: a range of its rows can be decoded alone."""
        encoding = encoding_of(self.encoding)
        return encoding is not None and encoding.decode_rows is not None

    @property
    def encoded_rows(self) -> int:
        """Number of stored rows: one if all are equal."""
        return min(self.rows, 1) if self.encoding & CONSTANT else self.rows

    @property
    def full_size(self) -> int:
        """Bytes of all decoded rows; for a msgpack column, bytes of all packed values."""
        if self.dtype != MSGPACK:
            return self.rows * self.row_size
        return self.rows * self.raw if self.encoding & CONSTANT else self.raw


EncodedColumn = tuple[ColumnDescriptor, Sequence[Buffer]]  # with its bytes in pieces


def is_path(path: tuple[Any, ...]) -> bool:
    """Return True if path is a valid column path: strings and integers of up to 64 bits."""
    return bool(path) and all(type(p) is str or (type(p) is int and p.bit_length() <= 64) for p in path)


@lru_cache(maxsize=256)
def item_size(dtype: str) -> int:
    return int(dtype[2:]) if dtype.startswith("|V") else dtype_from(dtype).itemsize


def parse_column(descriptor: Any) -> ColumnDescriptor:
    """Parse a descriptor read from a file and check every field. Raises CorruptTrace."""
    try:
        path, dtype, shape, rows, encoding, stored, raw, crc, *blocks = descriptor
        blocks = [Blocks(*some) for some in blocks]
        column = ColumnDescriptor(tuple(path), dtype, tuple(shape), rows, encoding, stored, raw, crc, *blocks)
        numbers = (*column.shape, rows, encoding, stored, raw, crc)
    except (TypeError, ValueError) as error:
        raise CorruptTrace("malformed column descriptor") from error
    if type(dtype) is not str:
        raise CorruptTrace("malformed column descriptor")
    if not all(type(number) is int and 0 <= number < _NUMBER_LIMIT for number in numbers):
        raise CorruptTrace("number out of range in a column descriptor")
    if not is_path(column.path):
        raise CorruptTrace("malformed column path")
    if len(column.shape) > wire.MAX_DIMENSIONS:
        dimensions = f"{len(column.shape)} dimensions a row"
        raise CorruptTrace(f"column {column.name} has {dimensions}; the limit is {wire.MAX_DIMENSIONS}")
    if rows > wire.MAX_ROWS:
        raise CorruptTrace(f"column {column.name} declares {rows} rows; the limit is {wire.MAX_ROWS}")
    if encoding & ~KNOWN_BITS:
        raise UnsupportedTrace(f"column {column.name} has the unknown encoding {encoding:#x}; upgrade gym-trace")
    known = encoding_of(encoding)
    if known is None or (not encoding & ZSTD and stored != raw):
        raise CorruptTrace("malformed column encoding")
    if dtype == MSGPACK:
        is_plain = known is PLAIN and not encoding & BLOCKS
        if not is_plain or (not encoding & CONSTANT and raw < rows * wire.LENGTH.itemsize):
            raise CorruptTrace("malformed msgpack column")
        size = rows * wire.VALUE_SIZE + (rows if encoding & CONSTANT else 1) * raw
        if raw > wire.MAX_VALUES or size > 2 * wire.MAX_VALUES:
            raise CorruptTrace(f"msgpack column {column.name} declares {raw} bytes; the limit is {wire.MAX_VALUES}")
    else:
        is_table = dtype in _TABLES
        if is_table and rows > wire.MAX_TABLE:
            raise CorruptTrace(f"table declares {rows} rows; the limit is {wire.MAX_TABLE}")
        if not is_table and (dtype_from(dtype).kind not in "biufc" or dtype.startswith(">")):
            raise CorruptTrace(f"invalid column dtype: {dtype}")
        size = rows * column.row_size
        if known in (CHANGES, DICTIONARY) and encoding & CONSTANT:
            raise CorruptTrace("malformed column encoding")
        if not known.fits(raw, column.encoded_rows, column.row_size):
            raise CorruptTrace("the size of a column does not match its rows")
        if encoding & BLOCKS and not (_has_valid_blocks(column) and known.in_blocks and not is_table):
            raise CorruptTrace(f"malformed blocks of column {column.name}")
    if bool(encoding & BLOCKS) != (column.blocks is not None):
        raise CorruptTrace("malformed column encoding")
    if max(size, raw) > wire.MAX_COLUMN:
        raise CorruptTrace(f"column {column.name} declares {max(size, raw)} bytes; the limit is {wire.MAX_COLUMN}")
    return column


def _has_valid_blocks(column: ColumnDescriptor) -> bool:
    """Return True if the table of blocks fits the column."""
    blocks = column.blocks
    if blocks is None or type(blocks.rows) is not int or type(blocks.table) is not bytes:
        return False
    is_valid = bool(column.encoding & ZSTD) and not column.encoding & CONSTANT
    is_valid &= 0 < column.row_size < wire.LARGE_ROW and 0 < blocks.rows < column.rows
    last = np.array((column.stored, column.crc), wire.BLOCK).tobytes()
    count = -(-column.rows // blocks.rows) if is_valid else 0
    return is_valid and len(blocks.table) == count * len(last) and blocks.table.endswith(last)


# -- decoding ---------------------------------------------------------------------------------------------------------


def decode(column: ColumnDescriptor, blob: Buffer | StoredBlocks, into: Array | None = None) -> Array:
    """Return the rows of a column as a writable array; for a msgpack column, an array of objects.

    The array of an unencoded column shares the memory of blob, if blob is writable. Of blocks, only their rows are
    decoded; the others are undefined.

    into: the array, if other blocks were decoded before.

    Raises CorruptTrace. Memory is bounded by the limits of parse_column.
    """
    try:
        if isinstance(blob, dict) or column.dtype != MSGPACK:
            return _decode_typed(column, blob, into)
        data, bounds = _value_bounds(column, blob)
        return _values((data[a:b] for a, b in bounds), column.full_size)
    except MemoryError as error:
        raise memory_error(column) from error


def memory_error(column: ColumnDescriptor) -> CorruptTrace:
    return CorruptTrace(f"column {column.name} declares {column.full_size} bytes, more than the available memory")


def decode_rows(column: ColumnDescriptor, blob: bytes | memoryview, begin: int, out: Array) -> None:
    """Decode rows of a delta-encoded column, starting at begin, into out, (rows, *row shape). Raises CorruptTrace."""
    decode_range = _encoding(column).decode_rows
    assert decode_range is not None
    decode_range(_inflated(column, blob), column.rows, begin, transforms.as_bytes(out))


def packed_values(column: ColumnDescriptor, blob: bytes | memoryview) -> list[bytes]:
    """Return the packed rows of a msgpack column. Raises CorruptTrace."""
    data, bounds = _value_bounds(column, blob)
    return [data[a:b] for a, b in bounds]


def unpacked(packed: Sequence[bytes]) -> Array:
    """Return rows of a msgpack column as an array of objects. Raises CorruptTrace."""
    return _values(packed, sum(map(len, packed)))


def _values(packed: Iterable[bytes], size: int) -> Array:
    """Unpack rows of `size` bytes. Equal texts are one object; other equal values must not share memory."""
    containers = Containers() if size > MAX_CONTAINERS else None
    values: list[Any] = []
    texts: dict[bytes, str] = {}
    for row in packed:
        value = texts.get(row)
        if value is None:
            value = unpack(row, containers)
            if type(value) is str:
                texts[row] = value
        values.append(value)
    return objects(values)


def _encoding(column: ColumnDescriptor) -> Encoding:
    """Return the encoding of a column that parse_column accepted."""
    encoding = encoding_of(column.encoding)
    assert encoding is not None
    return encoding


def _decode_typed(column: ColumnDescriptor, blob: Buffer | StoredBlocks, into: Array | None) -> Array:
    encoding, rows, row_size = _encoding(column), column.rows, column.row_size
    if isinstance(blob, dict) or column.blocks is not None:
        flat = _decode_blocks(column, blob, into)
    else:
        data, shape = _inflated(column, blob), (column.encoded_rows, row_size)
        flat = data.reshape(shape) if encoding.in_place else np.empty(shape, np.uint8)
        encoding.decode(data, flat, item_size(column.dtype), 0)
    if column.encoding & CONSTANT:
        row, flat = flat, np.empty((rows, row_size), np.uint8)
        transforms.widest(flat)[:] = transforms.widest(row)
    dtype = np.dtype(column.dtype) if column.dtype.startswith("|V") else dtype_from(column.dtype)
    return flat.reshape(-1).view(dtype).reshape(rows, *column.shape)


def _decode_blocks(column: ColumnDescriptor, stored: Buffer | StoredBlocks, into: Array | None) -> Array:
    """Return the rows of blocks, (rows, row size); other rows are undefined. into: see decode(). Raises CorruptTrace.

    Decodes some blocks at a time, whose bytes stay in the processor's cache.
    """
    assert column.blocks is not None
    encoding, item, together = _encoding(column), item_size(column.dtype), column.blocks.rows
    step = together * max(1, _BLOCKS_AT_ONCE // (together * column.row_size))
    flat = np.empty((column.rows, column.row_size), np.uint8) if into is None else transforms.as_bytes(into)
    scratch = np.empty(0 if encoding.in_place else min(step, column.rows) * column.row_size, np.uint8)
    decompressor = _decompressor()
    try:
        for run, blob in (stored if isinstance(stored, dict) else {range(column.blocks.total): stored}).items():
            out = flat[run.start * together : run.stop * together]
            reader = decompressor.stream_reader(blob, read_across_frames=True)
            for begin in range(0, len(out), step):
                some = out[begin : begin + step]
                data = some.reshape(-1) if encoding.in_place else scratch[: some.size]
                _read_exactly(reader, data, begin + step >= len(out))
                encoding.decode(data, some, item, together)
    except zstandard.ZstdError as error:
        raise CorruptTrace(f"decompressing a column failed: {error}") from error
    return flat


def _decompressor() -> zstandard.ZstdDecompressor:
    return zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)


def _read_exactly(reader: Any, out: Array, is_last: bool) -> None:
    """Fill out. is_last: nothing may follow. Raises CorruptTrace."""
    target, filled = out.data, 0
    # A truncated frame ends early without an error, so count the bytes.
    while filled < len(out) and (found := reader.readinto(target[filled:])):
        filled += found
    if filled != len(out) or (is_last and reader.read(1)):
        raise CorruptTrace("wrong size of a compressed column")


def _inflated(column: ColumnDescriptor, blob: bytes | memoryview) -> Array:
    """Decompress blob to exactly the declared size, into a writable array."""
    (whole,) = inflated_pieces(column, blob, 1)
    return whole


def inflated_pieces(column: ColumnDescriptor, blob: bytes | memoryview, count: int) -> Iterator[Array]:
    """Decompress blob to exactly the declared size; yield pieces of equal size, all in the same memory.

    Raises CorruptTrace.
    """
    if not column.encoding & ZSTD:
        stored = np.frombuffer(blob, np.uint8)
        yield from (stored if stored.flags.writeable else stored.copy()).reshape(count, -1)
        return
    try:
        if zstandard.frame_content_size(blob) not in (column.raw, -1):  # -1: unknown
            raise CorruptTrace("wrong size of a compressed column")
        reader = _decompressor().stream_reader(blob)
        out = np.empty(column.raw // count, np.uint8)
        for number in range(count):
            _read_exactly(reader, out, number == count - 1)
            yield out
    except zstandard.ZstdError as error:
        raise CorruptTrace(f"decompressing a column failed: {error}") from error


def _value_bounds(column: ColumnDescriptor, blob: bytes | memoryview) -> tuple[bytes, list[tuple[int, int]]]:
    """Return the decompressed bytes of a msgpack column, and the begin and end of each row in them."""
    raw = _inflated(column, blob)
    data = raw.tobytes()
    if column.encoding & CONSTANT:
        return data, [(0, len(raw))] * column.rows
    lengths = raw[: column.rows * wire.LENGTH.itemsize].view(wire.LENGTH)
    ends = lengths.astype(np.int64).cumsum() + lengths.nbytes
    if (ends[-1] if column.rows else 0) != len(raw):
        raise CorruptTrace("the values of a column do not match its size")
    return data, list(zip((ends - lengths).tolist(), ends.tolist()))


# -- encoding ---------------------------------------------------------------------------------------------------------


def is_large(rows: Array) -> bool:
    """Return True if the rows should be encoded in pieces."""
    return len(rows) > 0 and _is_large(rows.nbytes // len(rows))


def _is_large(row_size: int) -> bool:
    return row_size >= wire.LARGE_ROW


@dataclass(frozen=True)
class LargeRows:
    """Large rows of one dtype and shape, in parts that are encoded one after the other and never joined.

    as_before: the column has another chunk of the same slab, which may not be encoded yet: use its encoding.
    """

    parts: list[Array | DeltaRows]
    as_before: bool = False


class Workspace:
    """Compressors shared by column encoders that run in turn, in one thread."""

    def __init__(self, level: int):
        self.level = level or 3  # zstd takes 0 as 3
        self.compressor = zstandard.ZstdCompressor(level=self.level)
        self.compress: Callable[[Any], bytes] = self.compressor.compress
        self.for_small_rows = [self.compress]  # each may be the best one for a column
        if level == 1:
            parameters = zstandard.ZstdCompressionParameters(**_RARE_MATCHES)
            quick, rare = zstandard.ZstdCompressor(_QUICK), zstandard.ZstdCompressor(compression_params=parameters)
            self.for_small_rows += [quick.compress, rare.compress]
        self._for_large_rows: dict[bool, zstandard.ZstdCompressor] = {}
        self._for_blocks: dict[tuple[int, bool], zstandard.ZstdCompressor] = {}

    def compressor_of(self, encoding: Encoding, number: int, row_size: int) -> Callable[[Any], bytes]:
        """Return the function that compresses small rows. number: index into for_small_rows."""
        return partial(self._compress_dictionary, row_size) if encoding is DICTIONARY else self.for_small_rows[number]

    def _compress_dictionary(self, row_size: int, encoded: Array) -> bytes:
        """A large table gets blocks of its own, because the codes are distributed differently."""
        table = transforms.table_end(encoded, row_size)
        if table < _LEAST_TABLE:
            return self.compress(encoded)
        stream = self.compressor.compressobj(size=len(encoded))
        pieces = [stream.compress(encoded[:table].data), stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
        return b"".join([*pieces, stream.compress(encoded[table:].data), stream.flush()])

    def for_large_rows(self, little: bool) -> zstandard.ZstdCompressor:
        """Return the compressor of a stream; end a stream before the next one. little: few bytes change per row."""
        if little not in self._for_large_rows:
            level = min(22, self.level + _HARDER * little) or 1  # zstd takes 0 as 3
            size = _LITTLE_CHUNK if little else 0  # 0: unknown
            parameters = zstandard.ZstdCompressionParameters.from_level(level, source_size=size)
            self._for_large_rows[little] = zstandard.ZstdCompressor(compression_params=parameters)
        return self._for_large_rows[little]

    def for_blocks(self, item_size: int, quick: bool) -> zstandard.ZstdCompressor:
        """Return the compressor of blocks with elements of this size. quick: of rows for which _QUICK was chosen.

        Its window has the size of a plane: the bytes at one position of all elements, which are alike. zstd
        compresses as many bytes together as fit into the window, so each plane gets codes of its own.
        """
        window = (_BLOCK_BYTES // item_size).bit_length() - 1
        if (window, quick) not in self._for_blocks:
            if self.level == 1 and not quick:
                parameters = zstandard.ZstdCompressionParameters(**{**_RARE_MATCHES, "window_log": window})
            else:
                parameters = zstandard.ZstdCompressionParameters.from_level(
                    _QUICK if quick else self.level, source_size=_BLOCK_BYTES, window_log=window
                )
            self._for_blocks[window, quick] = zstandard.ZstdCompressor(compression_params=parameters)
        return self._for_blocks[window, quick]


class _Choice:
    """The best encoding so far for the small or the large rows of a column."""

    def __init__(self) -> None:
        self.encoding = PLAIN
        self.fallback = PLAIN  # encoding of chunks that `encoding` declines
        self.compressible = True
        self.compressor = 0  # index into Workspace.for_small_rows
        self.in_blocks = False
        self.patience = 0  # chunks between trials; 0 before the first one
        self.until_trial = 0


class ColumnEncoder:
    """Encodes one column, chunk by chunk, with the encoding that compresses its rows best."""

    def __init__(self, path: Path, workspace: Workspace):
        self._path = path
        self._workspace = workspace
        self._choices = (_Choice(), _Choice())  # for small rows, for large rows
        self._changes_little = False  # True if few bytes change per row, as the last chunks and a sample say
        self._last: list[bool] = []  # the same of the last chunk with large rows, once it is encoded

    def encode(self, rows: Array | list[bytes] | LargeRows) -> tuple[ColumnDescriptor, bytes]:
        """Encode a column; see prepared()."""
        column, pieces = self.prepared(rows)(self._workspace)
        return column, b"".join(pieces)

    def prepared(self, rows: Array | list[bytes] | LargeRows) -> Callable[[Workspace], EncodedColumn]:
        """Choose how to encode a column; return the function that does it, in any thread, with its Workspace.

        rows: a C-contiguous array (rows, *row shape) of a plain little-endian or void dtype, one MessagePack value per
            row, or large rows. Do not modify them until they are encoded. Unless large rows are as_before, those of the
            last chunk must be encoded.
        """
        if isinstance(rows, list):
            return partial(self._encode_values, rows)
        if isinstance(rows, LargeRows) or is_large(rows):
            return self._prepared_large(rows if isinstance(rows, LargeRows) else LargeRows([rows]))
        is_same = len(rows) > 1 and rows.size > 0 and rows.strides[0] == 0  # see events.Steps.rows()
        flat = transforms.as_bytes(rows[:1] if is_same else rows)
        if is_same or (len(flat) > 1 and flat.shape[1] > 0 and _all_rows_equal(flat)):
            return partial(self._encode, rows, flat[:1], PLAIN, PLAIN, 0)
        encoding, _ = self._choice(rows, flat.shape[1])
        choice = self._choices[False]
        if choice.in_blocks and flat.size >= _LEAST_IN_BLOCKS:
            return partial(self._encode_blocks, rows, flat, encoding, choice.compressor == 1)
        return partial(self._encode, rows, flat, encoding, choice.fallback, choice.compressor)

    def _prepared_large(self, rows: LargeRows) -> Callable[[Workspace], EncodedColumn]:
        if not rows.as_before and self._last:
            (changed_little,) = self._last
            if self._changes_little and not changed_little:  # the rows are different now: try encodings again
                self._choices[True].until_trial = 0
            self._changes_little = changed_little
        first = rows.parts[0]
        shape = first.shape if isinstance(first, DeltaRows) else first.shape[1:]
        row_size = first.row_size if isinstance(first, DeltaRows) else first.nbytes // len(first)
        encoding, compressed = self._choice(first, row_size, rows.as_before)
        little = encoding is CHANGES and self._changes_little
        self._last = result = list[bool]()

        def encode(workspace: Workspace) -> EncodedColumn:
            compressor = workspace.for_large_rows(little) if compressed else None
            stream = _ColumnStream(compressor, first.dtype, shape, encoding)
            for part in rows.parts:
                stream.feed(part)
            pieces = stream.finish()
            result.append(stream.changes_little)
            return self._column(first.dtype.str, shape, stream.rows, stream.bits, stream.raw, pieces), pieces

        return encode

    def _encode(
        self, rows: Array, flat: Array, encoding: Encoding, fallback: Encoding, compressor: int, workspace: Workspace
    ) -> EncodedColumn:
        """Encode small rows. flat: their bytes, or those of the first row if all are equal."""
        encoded = _encoded(flat, encoding, rows.dtype.itemsize)
        if encoded is None:
            encoding, encoded = fallback, _encoded(flat, fallback, rows.dtype.itemsize)
            assert encoded is not None
        blob, bits = _squeezed(
            encoded, flat, encoding.bits, workspace.compressor_of(encoding, compressor, flat.shape[1])
        )
        dtype = f"|V{rows.dtype.itemsize}" if rows.dtype.names else rows.dtype.str
        bits |= CONSTANT * (len(flat) < len(rows))
        return self._column(dtype, rows.shape[1:], len(rows), bits, _size(encoded), [blob]), [blob]

    def encode_shuffled(self, planes: Array, dtype: np.dtype[Any]) -> tuple[ColumnDescriptor, bytes]:
        """Encode the rows of a table that is shuffled already: (row size, rows)."""
        blob, bits = _squeezed(planes, planes.T, SHUFFLE.bits, self._workspace.compress)
        rows = planes.shape[1]
        return self._column(f"|V{dtype.itemsize}", (), rows, bits, planes.size, [blob]), blob

    def _encode_blocks(
        self, rows: Array, flat: Array, encoding: Encoding, quick: bool, workspace: Workspace
    ) -> EncodedColumn:
        """Encode small rows in blocks."""
        pieces = list(_compressed_blocks(flat, encoding, rows.dtype.itemsize, workspace, quick))
        ends = list(accumulate(map(len, pieces)))
        if ends[-1] >= flat.size:
            return self._encode(rows, flat, encoding, encoding, 0, workspace)
        crcs = list(accumulate(pieces, lambda crc, piece: kernels.crc32(piece, crc), initial=0))[1:]
        blocks = Blocks(_block_rows(flat.shape[1]), np.array(list(zip(ends, crcs)), wire.BLOCK).tobytes())
        described = (
            rows.dtype.str,
            rows.shape[1:],
            len(rows),
            encoding.bits | ZSTD | BLOCKS,
            ends[-1],
            flat.size,
            crcs[-1],
        )
        return ColumnDescriptor(self._path, *described, blocks), [b"".join(pieces)]

    def _encode_values(self, packed: list[bytes], workspace: Workspace) -> EncodedColumn:
        constant = len(packed) > 1 and packed.count(packed[0]) == len(packed)
        if constant and len(packed) * (wire.VALUE_SIZE + len(packed[0])) <= wire.MAX_VALUES:
            raw = packed[0]
        else:
            constant = False
            raw = np.fromiter(map(len, packed), wire.LENGTH, len(packed)).tobytes() + b"".join(packed)
        if len(raw) > wire.MAX_VALUES:
            raise UnstorableValue(
                f"{'/'.join(map(str, self._path))}: {len(raw)} bytes in one chunk; the limit is {wire.MAX_VALUES}"
            )
        blob, bits = _squeezed(raw, raw, PLAIN.bits, workspace.compress)
        return self._column(MSGPACK, (), len(packed), bits | CONSTANT * constant, len(raw), [blob]), [blob]

    def _column(
        self, dtype: str, shape: tuple[int, ...], rows: int, bits: int, raw: int, pieces: Sequence[Buffer]
    ) -> ColumnDescriptor:
        crc = 0
        for piece in pieces:
            crc = kernels.crc32(piece, crc)
        return ColumnDescriptor(self._path, dtype, shape, rows, bits, sum(map(len, pieces)), raw, crc)

    def _choice(self, rows: Array | DeltaRows, row_size: int, as_before: bool = False) -> tuple[Encoding, bool]:
        """Return the encoding that was smallest on a sample, and True to compress. Try again from time to time."""
        large = _is_large(row_size)
        choice = self._choices[large]
        if large and len(rows) < _LEAST_ROWS:
            return (choice.encoding, choice.compressible) if choice.patience else (CHANGES, True)
        if large and isinstance(rows, DeltaRows):
            self._changes_little = rows.changed <= _LITTLE * len(rows)
        if large and self._changes_little and (isinstance(rows, DeltaRows) or choice.encoding is CHANGES):
            return CHANGES, True  # clearly the best: skip the trials
        if rows.dtype.names and not large:  # a table: SHUFFLE needs half the time for at most 10 % more space
            return SHUFFLE, True
        choice.until_trial -= not as_before
        if choice.until_trial < 0 and len(rows) * row_size:
            tried = max(8, (_LARGE_SAMPLE if large else _SAMPLE_BYTES) // row_size)
            sample = next(rows.arrays(tried)) if isinstance(rows, DeltaRows) else transforms.as_bytes(rows[:tried])
            self._try(choice, sample, rows.dtype.itemsize)
            # The first rows of a column may not be typical: try again soon.
            choice.patience = min(_RETRY_AFTER, 8 * choice.patience + 7)
            choice.until_trial = choice.patience
        return choice.encoding, choice.compressible

    def _try(self, choice: _Choice, sample: Array, item_size: int) -> None:
        """Choose the encoding that makes the sample smallest, and for small rows the compressor."""
        sizes: dict[Encoding, int] = {}
        few = sample[: max(_FEW_ROWS, _FEW_BYTES // max(1, sample.shape[1]))]
        for candidate in ENCODINGS:
            if not candidate.applies(sample.shape[1], item_size):
                continue
            size = self._size_under(candidate, few if candidate is DICTIONARY else sample, item_size)
            if size is None:
                continue
            if candidate is DICTIONARY:
                sample = few  # it is enough for the other encodings, too
            sizes[candidate] = size
            if candidate is CHANGES and self._changes_little:  # clearly the best
                break
        ranked = sorted(sizes, key=lambda c: sizes[c] * (1 + _SAVING * c.bits.bit_count()))
        choice.compressible = sizes[ranked[0]] < _WORTHWHILE * sample.nbytes
        choice.encoding = ranked[0] if choice.compressible else PLAIN
        choice.fallback = next(c for c in ranked if c is not DICTIONARY) if choice.compressible else PLAIN
        if not _is_large(sample.shape[1]):
            self._try_compressors(choice, sample, item_size, sizes[ranked[0]])

    def _try_compressors(self, choice: _Choice, sample: Array, item_size: int, smallest: int) -> None:
        """Choose the compressor of small rows, and whether they are stored in blocks. smallest: size of the sample."""
        compressors = self._workspace.for_small_rows
        encoded = _encoded(sample, choice.fallback, item_size)
        assert encoded is not None
        planes = _view(encoded)
        if choice.encoding is DICTIONARY and len(compressors[-1](planes)) <= smallest:
            choice.encoding = choice.fallback
        if choice.encoding is DICTIONARY:
            choice.compressor = 0  # chunks that get the fallback are not like the sample
        elif len(compressors) > 1 and sample.nbytes >= _LEAST_QUICK_SAMPLE:
            # Plane by plane: planes of a whole chunk are larger than a block of zstd, those of a sample are not.
            size = len(planes) // (item_size if choice.fallback.bits & SHUFFLE.bits else 1)
            parts = [planes[begin : begin + size] for begin in range(0, len(planes), size)]
            usual, quick, rare = (sum(map(len, map(compress, parts))) for compress in compressors)
            if quick <= _QUICK_SIZE * min(usual, rare):
                choice.compressor = 1
            else:
                choice.compressor = 2 if rare < _RARE_SIZE * usual else 0
            smallest = (usual, quick, rare)[choice.compressor]
        choice.in_blocks = sample.nbytes >= _LEAST_IN_BLOCKS and choice.encoding.in_blocks
        if choice.in_blocks:
            blocks = _compressed_blocks(sample, choice.encoding, item_size, self._workspace, choice.compressor == 1)
            choice.in_blocks = _LEAST_BLOCKS_SIZE * sample.nbytes <= sum(map(len, blocks)) <= _BLOCKS_SIZE * smallest

    def _size_under(self, encoding: Encoding, sample: Array, item_size: int) -> int | None:
        """Return the size of the encoded sample; None if the encoding declines it."""
        workspace = self._workspace
        if not _is_large(sample.shape[1]):
            encoded = _encoded(sample, encoding, item_size)
            if encoded is None:
                return None
            return min(_size(encoded), len(workspace.compressor_of(encoding, 0, sample.shape[1])(encoded)))
        dtype, shape = np.dtype(f"V{item_size}"), (sample.shape[1] // item_size,)
        stream = _ColumnStream(workspace.compressor, dtype, shape, encoding)
        stream.feed(sample)
        if encoding is CHANGES:
            self._changes_little = stream.changes_little
        return sum(map(len, stream.finish()))


def _squeezed(
    encoded: Array | bytes, plain: Array | bytes, bits: int, compress: Callable[[Any], bytes]
) -> tuple[bytes, int]:
    """Return the bytes to store for small rows, compressed if that is smaller, and their encoding bits."""
    size = _size(encoded)
    if _size(plain) >= _LEAST_BYTES:
        blob = compress(encoded)
        if len(blob) < size:
            return blob, bits | ZSTD
    stored, bits = (encoded, bits) if size < _size(plain) else (plain, 0)
    return stored.tobytes() if isinstance(stored, np.ndarray) else stored, bits


def _size(data: Array | bytes) -> int:
    return data.nbytes if isinstance(data, np.ndarray) else len(data)


def _all_rows_equal(flat: Array) -> bool:
    if flat[0].tobytes() != flat[-1].tobytes() or flat[0].tobytes() != flat[len(flat) // 2].tobytes():
        return False
    return bool((transforms.widest(flat[1:]) == transforms.widest(flat[:-1])).all())


def _encoded(flat: Array, encoding: Encoding, item_size: int, together: int = 0) -> Array | bytes | None:
    """Encode all rows of a chunk at once; None if the encoding declines them.

    together: size of its blocks; 0: it has none.
    """
    return encoding.encode(flat, np.zeros(flat.shape[1], np.uint8), np.empty_like(flat), item_size, together)


def _block_rows(row_size: int) -> int:
    return _BLOCK_BYTES // row_size


def _compressed_blocks(
    flat: Array, encoding: Encoding, item_size: int, workspace: Workspace, quick: bool
) -> Iterator[bytes]:
    """Encode all rows in blocks; yield the compressed blocks."""
    together, compress = _block_rows(flat.shape[1]), workspace.for_blocks(item_size, quick).compress
    encoded = _encoded(flat, encoding, item_size, together)
    assert encoded is not None
    view = _view(encoded)
    for begin in range(0, flat.size, together * flat.shape[1]):
        yield compress(view[begin : begin + together * flat.shape[1]])


def _view(data: Array | bytes) -> memoryview:
    return memoryview(data if isinstance(data, bytes) else data.data).cast("B")


class _ColumnStream:
    """Large rows of one chunk, encoded and compressed as they arrive. compressor: None to store uncompressed."""

    def __init__(
        self,
        compressor: zstandard.ZstdCompressor | None,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        encoding: Encoding,
    ):
        self.dtype, self.shape, self._encoding = dtype, shape, encoding
        row_size = dtype.itemsize * math.prod(shape)
        self.rows = self.raw = 0
        self.bits = encoding.bits | ZSTD * (compressor is not None)
        self._object = None if compressor is None else compressor.compressobj()
        self._pieces: list[Buffer] = []
        self._step = max(1, encoding.piece_bytes // row_size)
        self._scratch = np.empty((self._step, row_size), np.uint8)
        self._before = np.zeros(row_size, np.uint8)

    def feed(self, rows: Array | DeltaRows) -> None:
        if isinstance(rows, DeltaRows):
            self._feed_deltas(rows)
        else:
            self._feed(transforms.as_bytes(rows))

    def _feed(self, flat: Array) -> None:
        if self.rows == 0 and self._encoding.decode_rows is not None:  # the first row is stored whole
            self._add(flat[0])
            self._before[:] = flat[0]
            self.rows, flat = 1, flat[1:]
        for i in range(0, len(flat), self._step):
            piece = flat[i : i + self._step]
            encoded = self._encoding.encode(piece, self._before, self._scratch, self.dtype.itemsize, 0)
            assert encoded is not None
            self._add(encoded)
            self._before[:] = piece[-1]
        self.rows += len(flat)

    def _feed_deltas(self, frames: DeltaRows) -> None:
        if self._encoding is not CHANGES:
            for piece in frames.arrays(self._step):
                self._feed(piece)
            return
        skip = self.rows == 0
        if skip:
            (first,) = next(frames.arrays(1))
            self._add(first)
        slots = frames.slots[skip:]
        whole = sum(isinstance(slot, bytes) for slot in slots)
        # Whole rows with their positions take up to 8 times their size.
        step = self._step if whole > self._step else len(slots)
        for i in range(0, len(slots), step or 1):
            self._add(transforms.packed_changes(slots[i : i + step], frames.row_size))
        self.rows += len(frames)

    def _add(self, data: Array | bytes) -> None:
        raw = _view(data)
        self.raw += len(raw)
        if self._object is not None:
            self._pieces.append(self._object.compress(raw))
        else:  # an encoded piece may lie in scratch memory, which is used again
            self._pieces.append(raw if self._encoding is PLAIN else bytes(raw))

    @property
    def changes_little(self) -> bool:
        """True if rows are stored as changes, and few bytes change."""
        return self._encoding is CHANGES and self.rows > 1 and self.raw - len(self._before) <= _LITTLE * self.rows

    def finish(self) -> list[Buffer]:
        if self._object is not None:
            self._pieces.append(self._object.flush())
        return self._pieces
