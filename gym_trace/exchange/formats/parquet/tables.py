"""Read untrusted Parquet files from the first row to the last, in bounded memory."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace, TraceError, UnreadableRecording
from gym_trace.exchange.formats.foreign import are_plausible_rows, is_plausible
from gym_trace.printable import printable

_TEXT_BYTES = 1024  # estimate per text
_MOST_ROWS, _MOST_BYTES = 8192, 8 << 20  # decoded at a time; bytes of numbers, and again of text
_FEW_ROWS = 64  # decoded at a time where equal texts take memory again
_LARGEST_GROUP = 2 << 30  # uncompressed bytes
_MOST_FILES = 1 << 20


@contextlib.contextmanager
def located(path: Path) -> Iterator[None]:
    """Name the file in errors that malformed contents cause. Raises UnreadableRecording."""
    try:
        yield
    except (CorruptTrace, OSError, pa.ArrowException, ValueError, LookupError, TypeError) as error:
        if isinstance(error, TraceError) and not isinstance(error, CorruptTrace):
            raise
        problem = printable(" ".join(str(error).split()))
        raise UnreadableRecording(f"{path}: cannot be read: {problem:.200}") from error


def parquet_files(path: Path, most: int = _MOST_FILES) -> list[Path]:
    """Return the Parquet files below a directory, in the order of their paths; or the file itself."""
    if path.is_file():
        return [path]
    files: list[Path] = []
    for folder, folders, names in os.walk(path):
        folders.sort()
        files += [Path(folder, name) for name in sorted(names) if name.endswith(".parquet")]
        if len(files) >= most:
            break
    return files[:most]


class Table:
    """A table: files with the same columns. path: of all. schema: of each. rows: total number."""

    def __init__(self, path: Path, files: list[Path]):
        """Raises UnreadableRecording."""
        self.path, self._files, self.rows = path, files, 0
        if not files:
            raise self.fault("has no Parquet files")
        self.schema: pa.Schema = pa.schema([])
        for file in files:
            with located(file), parquet_file(file) as opened:
                self.rows += opened.metadata.num_rows
                if file is files[0]:
                    self.schema = opened.schema_arrow
                elif not self.schema.equals(opened.schema_arrow):
                    problem = f"has other columns than {files[0].name}; import one table at a time"
                    raise UnreadableRecording(f"{file}: {problem}")

    def fault(self, problem: str) -> UnreadableRecording:
        """Return an error about the table."""
        return UnreadableRecording(f"{self.path}: {problem}")

    def batches(self, columns: list[str], row_bytes: int = 0) -> Iterator[pa.RecordBatch]:
        """Yield some rows of these columns at a time. row_bytes: 0: estimated from the schema.

        Raises UnreadableRecording.
        """
        most = rows_at_a_time(row_bytes or self.row_bytes(columns))
        for file in self._files:
            with located(file):
                yield from batches(file, most, columns)

    def row_bytes(self, columns: list[str]) -> int:
        """Estimate the bytes of a row of these columns from the schema."""
        return sum(row_size(self.schema.field(name).type) for name in columns)


def rows_at_a_time(row_bytes: int) -> int:
    """Return the number of rows to decode at a time."""
    return max(1, min(_MOST_ROWS, _MOST_BYTES // max(1, row_bytes)))


def parquet_file(path: Path, **options: Any) -> pq.ParquetFile:
    """Open a Parquet file; reject it if a row group is too large. options: of ParquetFile.

    Raises UnreadableRecording, OSError, pyarrow.ArrowException.
    """
    opened = pq.ParquetFile(path, **options)
    try:
        metadata, stored = opened.metadata, path.stat().st_size
        _check_columns(path)
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        sizes = [group.total_byte_size for group in groups]
        values = max((group.column(i).num_values for group in groups for i in range(group.num_columns)), default=0)
        if (
            not are_plausible_rows(metadata.num_rows, stored)
            or not is_plausible(values, stored)
            or not all(size <= _LARGEST_GROUP and is_plausible(size, stored) for size in sizes)
        ):
            raise UnreadableRecording(
                f"{path}: {metadata.num_rows} rows, and row groups of {max(sizes, default=0)} bytes and {values} "
                f"values, which take too much memory for a file of {stored} bytes"
            )
    except BaseException:
        opened.close()
        raise
    return opened


def _check_columns(path: Path) -> None:
    """Raise OSError for malformed metadata of a column, for which group.column() would crash the process."""
    with pq.ParquetFile(path, memory_map=True) as opened:
        columns = [*range(opened.metadata.num_columns)]
        for group in range(opened.metadata.num_row_groups):
            for _ in opened.reader.iter_batches(0, [group], column_indices=columns, use_threads=False):
                pass  # no rows are decoded


def batches(file: Path, most: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Yield at most `most` rows of these columns at a time, with limited text. Texts are dictionary-encoded.

    Raises OSError, pyarrow.ArrowException.
    """
    with parquet_file(file) as opened:
        schema = opened.schema_arrow
    texts = [path for name in columns for path in _texts_in(schema.field(name), name)]
    done = 0
    try:
        with pq.ParquetFile(file, read_dictionary=texts) as opened:
            for batch in opened.iter_batches(most, columns=columns, use_threads=False):
                for part in _with_limited_text(batch):
                    done += len(part)
                    yield part
    except pa.ArrowNotImplementedError:  # too many texts in a struct for a dictionary: continue without, few at a time
        with pq.ParquetFile(file, read_dictionary=[name for name in texts if name in columns]) as opened:
            for batch in opened.iter_batches(min(most, _FEW_ROWS), columns=columns, use_threads=False):
                rest = batch.slice(done)
                done = max(0, done - len(batch))
                yield from _with_limited_text(rest) if len(rest) else ()


def _texts_in(field: pa.Field, path: str) -> Iterator[str]:
    """Yield the paths of the text columns in a field; dictionary-encoded, equal texts take memory once."""
    if pa.types.is_string(field.type) or pa.types.is_binary(field.type):
        yield path
    elif pa.types.is_struct(field.type):
        for part in field.type:
            yield from _texts_in(part, f"{path}.{part.name}")


def row_size(kind: pa.DataType) -> int:
    """Estimate the bytes of a row of a column."""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_struct(kind):
        return sum(row_size(part.type) for part in kind)
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * row_size(kind.value_type)
    try:
        return max(1, int(kind.bit_width) // 8)
    except ValueError:  # text, bytes, or a list of any length
        return _TEXT_BYTES


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind))


def dtype_of(kind: pa.DataType) -> np.dtype[Any]:
    """Return the dtype of a type of numbers; to_pandas_dtype() needs pandas."""
    empty: Array = pa.array([], kind).to_numpy(zero_copy_only=False)
    return empty.dtype


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def numbers_in(array: pa.Array, shape: tuple[int, ...] | None = None) -> Array | None:
    """Return a column of numbers, or of lists of them, as (rows, *shape); None for other values or shapes.

    shape: None: that of the lists.
    """
    values = array.storage if isinstance(array, pa.ExtensionArray) else array
    sizes: list[Any] = []
    while is_list(values.type):
        lengths = pc.min_max(pc.list_value_length(values)).as_py()
        if values.null_count or lengths["min"] != lengths["max"]:
            return None
        sizes.append(lengths["min"])
        values = values.flatten()
    shape = tuple(size or 0 for size in sizes) if shape is None else shape
    is_flat = len(sizes) != len(shape)  # rows of a tensor type are stored flat
    if values.null_count or not is_number(values.type) or len(values) != len(array) * math.prod(shape):
        return None
    if len(array) and not is_flat and tuple(sizes) != shape:
        return None
    rows: Array = values.to_numpy(zero_copy_only=False).reshape(len(array), *shape)
    return rows


def _with_limited_text(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield a batch in parts of about _MOST_BYTES of text."""
    lengths = np.zeros(batch.num_rows, np.int64)
    for column in batch.columns:
        lengths += _text_bytes(column)
    begin = 0
    while begin < batch.num_rows:
        total = np.cumsum(lengths[begin:])
        count = max(1, int(np.searchsorted(total, _MOST_BYTES, side="right")))
        yield batch.slice(begin, count)
        begin += count


def _text_bytes(array: pa.Array) -> Array:
    """Return the bytes of text of each row."""
    lengths = np.zeros(len(array), np.int64)
    if pa.types.is_struct(array.type):
        for number in range(array.type.num_fields):
            lengths += _text_bytes(array.field(number))
    elif pa.types.is_dictionary(array.type) and len(array.dictionary):
        text_lengths = pc.binary_length(array.dictionary).to_numpy(zero_copy_only=False)
        lengths += text_lengths[array.indices.fill_null(0).to_numpy(zero_copy_only=False)]
    return lengths
