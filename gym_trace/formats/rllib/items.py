"""The values of Parquet files that RLlib's episodes are in, by their number, and which of them make up an episode."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from gymnasium import Space, spaces

from gym_trace.errors import CorruptTrace, UnreadableRecording
from gym_trace.formats.parquet.tables import parquet_file
from gym_trace.model.packing import Containers
from gym_trace.model.values import Array, is_plain_dtype


def unpacked(data: bytes) -> Any:
    """The value in MessagePack that may come from anybody. Raises UnreadableRecording."""
    try:
        known = Containers()
        return msgpack.unpackb(
            data,
            list_hook=known.list_hook,
            object_hook=lambda found: _decoded(known.object_hook(found)),
            strict_map_key=True,
        )
    except UnreadableRecording:
        raise
    except CorruptTrace as error:
        raise UnreadableRecording(f"no episode that is read: {error.problem}") from error
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError, msgpack.UnpackException) as error:
        raise UnreadableRecording(f"no MessagePack of an episode: {error!r:.100}") from error


def _decoded(found: dict[Any, Any]) -> Any:
    if b"nd" in found:
        return _array(found)
    if b"complex" in found:
        return complex(str(found[b"data"]))
    return found


def _array(found: dict[Any, Any]) -> Any:
    if found.get(b"kind") == b"O":
        raise UnreadableRecording(
            "an array of Python objects, which is pickled; unpickling runs whatever is in a file, so it is not done"
        )
    text, data = found[b"type"], found[b"data"]
    if not is_plain_dtype(text) or not isinstance(data, bytes):
        raise UnreadableRecording(f"an array of dtype {text!r:.60}")
    dtype = np.dtype(text)
    if found[b"nd"] is not True:
        return np.frombuffer(data, dtype)[0]
    shape = tuple(found[b"shape"])
    if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise UnreadableRecording(f"an array of shape {shape!r:.60} that has {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(shape)


_MOST_OF_ARRAY = 64 << 20
_DEEPEST = 32


def space_told(told: Any) -> Space[Any] | None:
    """The space that RLlib has told; None where it told none, or one that is not known here.

    Raises UnreadableRecording if what it told is malformed.
    """
    try:
        return _space(told, 0)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError, zlib.error) as error:
        raise UnreadableRecording(f"malformed space: {error!r:.100}") from error


def _space(told: Any, depth: int) -> Space[Any] | None:
    if told is None:
        return None
    if depth > _DEEPEST:
        raise ValueError("nested too deep")
    kind = told["space"]
    if kind == "dict":
        members: dict[str, Any] = {key: _space(member, depth + 1) for key, member in told["spaces"].items()}
        return None if None in members.values() else spaces.Dict(members)
    if kind == "tuple":
        parts: list[Any] = [_space(part, depth + 1) for part in told["spaces"]]
        return None if None in parts else spaces.Tuple(parts)
    made = _MADE.get(kind)
    return None if made is None else made(told)


def _told_box(told: dict[str, Any]) -> Space[Any]:
    dtype = np.dtype(told["dtype"])
    if dtype.kind not in "biuf":
        raise ValueError(f"a Box of {dtype}")
    low, high = (np.broadcast_to(_array_told(told[name]), told["shape"]) for name in ("low", "high"))
    return spaces.Box(low.astype(dtype), high.astype(dtype), tuple(told["shape"]), dtype.type)


_MADE: dict[str, Any] = {
    "box": _told_box,
    "discrete": lambda told: spaces.Discrete(told["n"], start=told.get("start", 0)),
    "multi-binary": lambda told: spaces.MultiBinary(told["n"]),
    "multi-discrete": lambda told: spaces.MultiDiscrete(_array_told(told["nvec"]), dtype=np.dtype(told["dtype"]).type),
    "text": lambda told: spaces.Text(told["max_length"], min_length=told["min_length"], charset=told["charset"]),
}


def _array_told(text: str) -> Array:
    packed = base64.b64decode(text, validate=True)
    unpacker = zlib.decompressobj()
    raw = unpacker.decompress(packed, _MOST_OF_ARRAY)
    if unpacker.unconsumed_tail:
        raise ValueError("an array that is too large")
    return np.lib.format.read_array(io.BytesIO(raw))  # which reads no objects


COLUMN = "item"
_MOST_BYTES = 1 << 31  # of the values of a row group
_KEY, _STARTED = 0, 1


def is_episodes(path: Path) -> bool:
    """Return True for Parquet with a column of episodes."""
    try:
        return bool(_opened(path))
    except UnreadableRecording:
        return False


class Header(NamedTuple):
    """Header of the state of an episode, or of a piece of one: its id, its steps, and a hash of all of it."""

    key: int
    started: int
    steps: int
    digest: int


class Items:
    """The values of a list of files, whose row groups are read when they are asked for; one is kept."""

    def __init__(self, files: list[Path]):
        """Raises UnreadableRecording."""
        self.files = files
        self._groups: list[tuple[int, int]] = []  # file, number in it
        counts = []
        for number, path in enumerate(files):
            metadata = _opened(path, parquet_file).metadata
            for group in range(metadata.num_row_groups):
                self._groups.append((number, group))
                counts.append(metadata.row_group(group).num_rows)
        self._firsts = np.cumsum([0, *counts])
        self._kept: tuple[int, Any] = -1, None

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def path_of(self, number: int) -> Path:
        """The file that a value is in."""
        return self.files[self._groups[self._group_of(number)][0]]

    def __getitem__(self, number: int) -> bytes:
        """Raises UnreadableRecording."""
        group = self._group_of(number)
        if self._kept[0] != group:
            self._kept = -1, None
            self._kept = group, self._read(*self._groups[group])
        value = self._kept[1][number - int(self._firsts[group])].as_py()
        if not isinstance(value, bytes):
            raise UnreadableRecording(f"{self.path_of(number)}: a row of {COLUMN!r} is empty, or no binary value")
        return value

    def _group_of(self, number: int) -> int:
        return int(np.searchsorted(self._firsts, number, "right")) - 1

    def _read(self, file: int, group: int) -> Any:
        path = self.files[file]
        opened = _opened(path)
        columns = opened.metadata.row_group(group)
        size = sum(columns.column(i).total_uncompressed_size for i in range(columns.num_columns))
        if not 0 <= size <= _MOST_BYTES:
            raise UnreadableRecording(f"{path}: row group {group} says that it has {size} bytes, more than are read")
        try:
            return opened.read_row_group(group, columns=[COLUMN]).column(0)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _damaged(path, error) from error


def _opened(path: Path, opening: Callable[..., pq.ParquetFile] = pq.ParquetFile) -> pq.ParquetFile:
    try:
        opened = opening(path, read_dictionary=[COLUMN])  # what many rows share takes memory once
    except KeyError:  # there is no such column to be read as a dictionary
        opened = opening(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, error) from error
    schema = opened.schema_arrow
    if COLUMN not in schema.names or not _is_binary(schema.field(COLUMN).type):
        raise UnreadableRecording(f"{path}: no episodes of RLlib; it has no column {COLUMN!r} of binary values")
    return opened


def _is_binary(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _damaged(path: Path, error: Exception) -> UnreadableRecording:
    return UnreadableRecording(f"{path}: no Parquet that can be read: {' '.join(str(error).split()):.200}")


def header_of(item: bytes) -> Header:
    """Read the header of the state of an episode, without its steps. Raises UnreadableRecording."""
    told: dict[Any, Any] = {}
    known = Containers()
    unpacker = msgpack.Unpacker(max_buffer_size=len(item) + 1, list_hook=known.list_hook, object_hook=known.object_hook)
    try:
        unpacker.feed(item)
        for _ in range(unpacker.read_map_header()):
            key = unpacker.unpack()
            if key in ("id_", "agent_id", "t", "t_started"):
                told[key] = unpacker.unpack()
            else:
                unpacker.skip()
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException, CorruptTrace) as error:
        raise UnreadableRecording(f"no MessagePack of an episode: {error!r:.100}") from error
    started, time = told.get("t_started"), told.get("t")
    if type(started) is not int or type(time) is not int or not 0 <= started <= time < 1 << 62 or "id_" not in told:
        raise UnreadableRecording("no state of a SingleAgentEpisode: it does not say which steps it has")
    name = repr((told["id_"], told.get("agent_id"))).encode(errors="replace")
    return Header(_hash(name), started, time - started, _hash(item))


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


def pieces_of_episodes(headers: Array) -> tuple[Array, Array]:
    """The numbers of all items, ordered so that the pieces of an episode follow one another, and how many each has.

    headers: (items, 4), of Headers. Episodes come in the order of the first of their items. Where a piece of an episode
    is missing, another one begins. Of items that are the same only the first counts: env runners write what they have
    sampled again with each sample, unless output_max_rows_per_file is set.
    """
    order = np.sort(np.unique(headers, axis=0, return_index=True)[1])
    order = order[np.lexsort((order, headers[order, _STARTED], headers[order, _KEY]))]
    key, started, steps, _ = headers[order].T
    follows = (key[1:] == key[:-1]) & (started[1:] == started[:-1] + steps[:-1]) & (started[1:] > 0)
    begins = np.concatenate([[0], np.flatnonzero(~follows) + 1])
    counts = np.diff(begins, append=len(order))
    firsts = np.repeat(np.minimum.reduceat(order, begins), counts)
    places = np.lexsort((np.arange(len(order)), firsts))
    return order[places], counts[np.argsort(firsts[begins], kind="stable")]
