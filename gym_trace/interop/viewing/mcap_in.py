"""MCAP that gym-trace has exported, as a trace."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import zstandard
from mcap.records import Channel, Chunk, Message, Metadata
from mcap.stream_reader import StreamReader, breakup_chunk

from gym_trace.errors import CorruptTrace, UnreadableRecording
from gym_trace.format.manifest import json_of
from gym_trace.interop.foreign import Values, begins_with, is_plausible
from gym_trace.interop.identity import KEY
from gym_trace.interop.imported import Imported, NewEpisode, imported
from gym_trace.interop.steps.untagged import array_from, untagged
from gym_trace.interop.viewing.images import pixels
from gym_trace.interop.viewing.leaves import parts_of, writers_of
from gym_trace.interop.viewing.mcap_out import EPISODE
from gym_trace.model.schema import Layouts
from gym_trace.model.values import Array, dtype_from, objects

_KIND = "MCAP"
_MAGIC = b"\x89MCAP0\r\n"
_LARGEST = 256 << 20  # bytes of a record, of a chunk, and of messages that wait for others of their step
_MOST_PART = 8 << 20  # bytes of messages that had better be taken
_MOST_TEXT = 100  # characters of a number of an episode


class McapImporter:
    """MCAP files that gym-trace has exported; other ones do not say what is an action, or a reward."""

    name: ClassVar[str] = "mcap"
    extra: ClassVar[str] = "mcap"

    def recognises(self, path: Path) -> bool:
        return begins_with(path, _MAGIC)

    def read(self, path: Path) -> Imported:
        """Raises UnreadableRecording."""
        with path.open("rb") as file:
            about = next((told for told in _records(file, path) if isinstance(told, (Metadata, Message))), None)
        if not isinstance(about, Metadata) or about.name != KEY or "about" not in about.metadata:
            raise UnreadableRecording(
                f"{path}: was not exported by gym-trace, and MCAP does not say what of it is an observation, an action "
                "or a reward"
            )
        schema, layouts = writers_of(about.metadata["about"], str(path))
        names = about.metadata.get("columns", "")
        try:
            columns = [str(name) for name in json_of(names)] if len(names) <= _LARGEST else []
        except (ValueError, TypeError, RecursionError) as error:
            raise UnreadableRecording(f"{path}: what gym-trace has said of its columns is malformed") from error
        return imported(_KIND, _Reader(path, layouts, columns).episodes(), schema, about.metadata["about"])


def _records(file: IO[bytes], path: Path) -> Iterator[Any]:
    """What is in a file, in its order. Raises UnreadableRecording."""
    try:
        for record in StreamReader(file, emit_chunks=True, validate_crcs=True, record_size_limit=_LARGEST).records:
            if not isinstance(record, Chunk):
                yield record
                continue
            size, stored = record.uncompressed_size, len(record.data)
            if record.compression == "zstd":
                size = max(size, zstandard.frame_content_size(record.data))
            if size > _LARGEST or not is_plausible(size, stored):
                raise UnreadableRecording(f"{path}: a chunk of {stored} bytes expands to {size}, more than is read")
            if record.compression not in ("", "zstd"):
                raise UnreadableRecording(f"{path}: compressed with {record.compression!r:.40}; recompress it as zstd")
            yield from breakup_chunk(record, validate_crc=True)
    except UnreadableRecording:
        raise
    except Exception as error:  # of what is malformed the package raises many kinds, struct.error among them
        raise UnreadableRecording(f"{path}: is damaged: {error or 'it is cut off'}") from error


class _Rows:
    """The messages of a channel that were not asked for yet."""

    def __init__(self) -> None:
        self.waiting: deque[bytes] = deque()
        self.form: tuple[np.dtype[Any], tuple[int, ...]] | None = None


class _Reader:
    """Makes episodes of the messages, in their order in the file."""

    def __init__(self, path: Path, layouts: Layouts, columns: list[str]):
        self._path, self._layouts = path, layouts
        self._others = [name for name in columns if name == "info" or name.startswith("annotations/")]
        self._rows: dict[str, _Rows] = {}
        self._by_channel: dict[int, _Rows] = {}
        self._waiting = 0  # bytes of messages
        self._episodes: deque[dict[str, str]] = deque()
        self._records: Iterator[Any] = iter(())

    def episodes(self) -> Iterator[NewEpisode]:
        """Raises UnreadableRecording, also while the steps of an episode are read."""
        with self._path.open("rb") as file:
            self._records = _records(file, self._path)
            while True:
                while not self._episodes and (record := next(self._records, None)) is not None:
                    self._take(record)
                if not self._episodes:
                    return
                said = self._episodes.popleft()
                steps = self._count(said)
                parts = parts_of(self._layouts, self._others, self, steps)
                yield NewEpisode(steps, parts, identity=said.get("identity", ""))

    def _count(self, said: dict[str, str]) -> int:
        text = said.get("steps", "")
        if not text.isdecimal() or len(text) > 18:
            raise self._malformed(f"an episode of {text[:_MOST_TEXT]!r} steps")
        return int(text)

    def _take(self, record: Any) -> None:
        if isinstance(record, Metadata) and record.name == EPISODE:
            self._episodes.append(record.metadata)
        elif isinstance(record, Channel) and record.id not in self._by_channel:
            rows = self._by_channel[record.id] = self._rows.setdefault(record.topic.removeprefix("/"), _Rows())
            rows.form = self._form(record)
        elif isinstance(record, Message) and record.channel_id in self._by_channel:
            self._by_channel[record.channel_id].waiting.append(record.data)
            self._waiting += len(record.data)
            if self._waiting > _LARGEST:
                raise self._malformed("what belongs to one step lies too far apart")

    def _form(self, channel: Channel) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
        if "dtype" not in channel.metadata:
            return None
        try:
            shape = tuple(int(size) for size in json_of(channel.metadata.get("shape", "[]")))
            return dtype_from(channel.metadata["dtype"]), shape
        except (CorruptTrace, ValueError, TypeError, RecursionError) as error:
            raise self._malformed(f"of the channel {channel.topic:.60} a form that is none") from error

    @property
    def is_much(self) -> bool:
        return self._waiting > _MOST_PART

    def ready(self, name: str) -> int:
        return len(self._rows[name].waiting) if name in self._rows else 0

    def read_on(self) -> None:
        record = next(self._records, None)
        if record is None:
            raise self._malformed("fewer messages than its episodes have steps")
        self._take(record)

    def take(self, name: str, count: int) -> Any:
        rows = self._rows.get(name)
        if rows is None:
            return []
        data = [rows.waiting.popleft() for _ in range(count)]
        self._waiting -= sum(map(len, data))
        try:
            values = Values()
            messages = [values.json(one) for one in data]
            if not all(isinstance(message, dict) for message in messages):
                raise ValueError("a message that is no object")
            return _values(messages, rows.form)
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, CorruptTrace) as error:
            raise self._malformed(f"a message of /{name:.60} that is malformed ({error!r:.100})") from error

    def _malformed(self, problem: str) -> UnreadableRecording:
        return UnreadableRecording(f"{self._path}: {problem}")


def _values(messages: list[dict[str, Any]], form: tuple[np.dtype[Any], tuple[int, ...]] | None) -> Array:
    """The rows of messages."""
    if form is None:
        return objects([untagged(message.get("value")) for message in messages])
    dtype, shape = form
    if messages and "data" in messages[0]:
        images = [pixels(base64.b64decode(message["data"], validate=True), shape) for message in messages]
        return np.array(images, np.uint8).reshape(len(images), *shape)
    plain = [message["value"] for message in messages]
    if any(isinstance(value, str) for value in plain) and shape:  # base64
        rows = [array_from(value, dtype.str, shape) for value in plain]
        return np.array(rows, dtype).reshape(len(rows), *shape)
    return array_from(plain, dtype.str, (len(plain), *shape))
