"""The files of a LeRobot data set, of which the next one begins when one is large enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

CHUNK = 1000  # files in a directory
DATA_MB = 100  # about how large a file of tables gets
VIDEO_MB = 200


class Place:
    """Which file is written: file_index of chunk_index."""

    def __init__(self) -> None:
        self.chunk, self.file = 0, 0

    def advance(self) -> None:
        self.chunk, self.file = (self.chunk, self.file + 1) if self.file + 1 < CHUNK else (self.chunk + 1, 0)

    def path(self, root: Path, template: str, **names: str) -> Path:
        return root / template.format(chunk_index=self.chunk, file_index=self.file, **names)


class Tables:
    """Parquet files with the same columns, one after the other."""

    def __init__(self, root: Path, template: str, schema: pa.Schema, plain: list[str]):
        """plain: columns of values that seldom repeat, or are compressed already."""
        self.place, self._root, self._template, self._schema = Place(), root, template, schema
        self._plain = plain
        self._sink: Any = None
        self._writer: Any = None

    @property
    def is_large(self) -> bool:
        return self._sink is not None and self._sink.tell() >= DATA_MB << 20

    def write(self, columns: dict[str, Any]) -> None:
        """Writes rows as one group of them."""
        if self._writer is None:
            path = self.place.path(self._root, self._template)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._sink = pa.OSFile(str(path), "wb")
            repeating = [name for name in self._schema.names if name not in self._plain]
            self._writer = pq.ParquetWriter(
                self._sink, self._schema, compression="zstd", use_dictionary=repeating, store_schema=True
            )
        table = pa.Table.from_arrays([_cast(columns[field.name], field) for field in self._schema], schema=self._schema)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))

    def next_file(self) -> None:
        """Start another file."""
        self.close()
        self.place.advance()

    def close(self) -> None:
        """Makes the file whole. Raises OSError."""
        if self._writer is not None:
            self._writer.close()
            self._sink.close()
            self._writer = self._sink = None

    def drop(self) -> None:
        """Close an incomplete file."""
        writer, sink, self._writer, self._sink = self._writer, self._sink, None, None
        if writer is not None:
            writer.is_open = False  # or it would try once more to make it whole
        if sink is not None:
            sink.close()


def _cast(column: Any, field: pa.Field) -> pa.Array:
    array = column if isinstance(column, pa.Array) else pa.array(column, field.type)
    return array if array.type == field.type else array.cast(field.type)


def write_tasks(path: Path, tasks: list[str]) -> None:
    """The table of tasks, whose index pandas, which LeRobot reads it with, finds in the schema."""
    names = [("task_index", "int64", "int64"), ("task", "unicode", "object")]
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
        for name, kind, numpy in names
    ]
    index = {"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object"}
    said = {
        "index_columns": ["task"],
        "column_indexes": [{**index, "metadata": {"encoding": "UTF-8"}}],
        "columns": columns,
        "pandas_version": "2.2.0",
    }
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks, pa.string())})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(said)}), path)
