"""Parquet in several files, none of which gets large, so that Ray can read them in several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gym_trace.interop.identity import KEY

IDENTITIES = f"{KEY}.episodes"  # of the episodes that begin in a file, one a line
FIRST = "00000.parquet"  # which is always there
_FILE_BYTES = 128 << 20
_FILE_EPISODES = 10_000


class ShardWriter:
    """Writes tables to 00000.parquet, 00001.parquet …; to be used with ``with``."""

    def __init__(self, directory: Path, schema: pa.Schema, about: str):
        self._directory = directory
        self._schema = schema.with_metadata({KEY: about})
        self._writer: pq.ParquetWriter | None = None
        self._files = self._bytes = 0
        self._identities: list[str] = []

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: Any, *failure: Any) -> None:
        if kind is None:
            if not self._files:
                self._opened()
            self._close()
        elif self._writer is not None:
            self._writer.close()

    def write(self, columns: list[Any], identities: list[str] | None = None) -> None:
        """One row group. identities: of the episodes that begin in it, to be kept beside. Raises OSError."""
        table = pa.Table.from_arrays(columns, schema=self._schema)
        self._opened().write_table(table, row_group_size=max(1, table.num_rows))
        self._bytes += table.nbytes
        self._identities += identities or []
        if self._bytes > _FILE_BYTES or len(self._identities) > _FILE_EPISODES:
            self._close()

    def _opened(self) -> pq.ParquetWriter:
        if self._writer is None:
            path = self._directory / f"{self._files:05}.parquet"
            named = [field.name for field in self._schema if field.type == pa.string()]
            self._writer = pq.ParquetWriter(
                path,
                self._schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=named,
                write_statistics=named,
            )
            self._files += 1
        return self._writer

    def _close(self) -> None:
        if self._writer is not None:
            if self._identities:
                self._writer.add_key_value_metadata({IDENTITIES: "\n".join(self._identities)})
            self._writer.close()
        self._writer, self._bytes, self._identities = None, 0, []
