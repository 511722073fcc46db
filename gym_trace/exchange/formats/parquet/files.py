"""Write a table as Parquet files, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


class ParquetFiles:
    """Files of one schema. number: of the current one.

    path: returns the path of a file by its number. options: of pyarrow.parquet.ParquetWriter.
    """

    def __init__(self, path: Callable[[int], Path], schema: pa.Schema, **options: Any):
        self.schema, self.number = schema, 0
        self._path, self._options = path, {"compression": "zstd", **options}
        self._file: Any = None
        self._writer: pq.ParquetWriter | None = None

    def write(self, table: pa.Table) -> None:
        """Write rows as one row group. Raises OSError, as all methods."""
        if self._writer is None:
            path = self._path(self.number)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "wb")  # noqa: SIM115 - closed by close() and detach()
            self._writer = pq.ParquetWriter(self._file, self.schema, **self._options)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))

    def has_reached(self, size: int) -> bool:
        """Return True if the current file has at least this number of bytes."""
        return self._file is not None and self._file.tell() >= size

    def next_file(self) -> None:
        """Complete the file; write() begins another one."""
        self.close()
        self.number += 1

    def close(self) -> None:
        """Complete the file."""
        if self._writer is not None:
            self._writer.close()
            self._file.close()
            self._writer = self._file = None

    def detach(self) -> None:
        """Close an incomplete file as it is."""
        if self._writer is not None:
            self._writer.is_open = False  # or its destructor would try to complete the file
        if self._file is not None:
            self._file.close()
