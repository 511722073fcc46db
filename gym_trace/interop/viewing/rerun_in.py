"""An .rrd file of Rerun that gym-trace has exported, as a trace."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from rerun.chunk import RrdReader

from gym_trace.errors import CorruptTrace, UnreadableRecording
from gym_trace.format.manifest import json_of
from gym_trace.interop.foreign import begins_with
from gym_trace.interop.identity import KEY
from gym_trace.interop.imported import Imported, NewEpisode, imported
from gym_trace.interop.rlds.values import all_from_json, unpacked
from gym_trace.interop.viewing.images import pixels
from gym_trace.interop.viewing.leaves import parts_of, writers_of
from gym_trace.interop.viewing.rerun_out import EXACT, entity_of
from gym_trace.model.schema import Layouts
from gym_trace.model.values import Array, dtype_from, objects

_KIND = "Rerun"
_MAGIC = b"RRF"
_LARGEST = 512 << 20  # bytes of rows that wait for others of their step
_PROPERTIES = f"/__properties/{KEY}"
_READ_ALL = """
import sys
sys.path[:] = filter(None, sys.path)  # or what lies in the working directory would be run
from rerun.chunk import RrdReader
for chunk in RrdReader(sys.argv[1]).stream():
    chunk.to_record_batch()
"""
_DAMAGE = (pa.ArrowException, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, CorruptTrace)
_Form = tuple[np.dtype[Any], tuple[int, ...]] | None


class RerunImporter:
    """Rerun files that gym-trace has exported; other ones do not say what is an action, or a reward."""

    name: ClassVar[str] = "rerun"
    extra: ClassVar[str] = "rerun"

    def recognises(self, path: Path) -> bool:
        return begins_with(path, _MAGIC)

    def read(self, path: Path) -> Imported:
        """Raises UnreadableRecording."""
        _check(path)
        properties = next((batch for name, batch in _chunks(path) if name == _PROPERTIES), None)
        if properties is None or not {"about", "forms"} <= set(properties.schema.names):
            raise UnreadableRecording(
                f"{path}: was not exported by gym-trace, and Rerun does not say what of it is an observation, an "
                "action or a reward"
            )
        try:
            about, told = (properties.column(name).to_pylist()[0][0] for name in ("about", "forms"))
            forms = {str(name): _form(form) for name, form in json_of(told).items()}
        except (*_DAMAGE, RecursionError, AttributeError) as error:
            raise UnreadableRecording(f"{path}: what gym-trace has said of its columns is malformed") from error
        schema, layouts = writers_of(str(about), str(path))
        return imported(_KIND, _Reader(path, layouts, forms).episodes(), schema, str(about))


def _check(path: Path) -> None:
    """Raises UnreadableRecording if the file is damaged.

    Read by another process: of damaged files Rerun's reader ends the process that it is in.
    """
    done = subprocess.run([sys.executable, "-c", _READ_ALL, path], capture_output=True, text=True, errors="replace")
    if done.returncode:
        told = [line for line in done.stderr.splitlines() if "panicked" in line or "Error" in line]
        raise UnreadableRecording(f"{path}: is damaged: {' '.join(told[-1:])[:300] or 'Rerun cannot read it'}")


def _form(told: Any) -> _Form:
    if told is None:
        return None
    dtype, shape = told
    return dtype_from(dtype), tuple(int(size) for size in shape)


def _chunks(path: Path) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The chunks of a file, with the entities that they are of. Raises UnreadableRecording."""
    try:
        for chunk in RrdReader(path).stream():
            yield chunk.entity_path, chunk.to_record_batch()
    except (ValueError, RuntimeError, OSError, pa.ArrowException) as error:
        raise UnreadableRecording(f"{path}: is damaged: {' '.join(str(error).split()):.300}") from error


class _Reader:
    """Makes episodes of the chunks, in their order in the file."""

    def __init__(self, path: Path, layouts: Layouts, forms: dict[str, _Form]):
        self._path, self._layouts, self._forms = path, layouts, forms
        self._others = [name for name in forms if name == "info" or name.startswith("annotations/")]
        self._names = {entity_of(name).lstrip("/"): name for name in ("episode", *forms)}
        self._blocks: dict[str, deque[Any]] = defaultdict(deque)
        self._waiting = 0
        self._chunks: Iterator[tuple[str, pa.RecordBatch]] = iter(())

    is_much = False  # rows come by the thousand

    def episodes(self) -> Iterator[NewEpisode]:
        """Raises UnreadableRecording, also while the steps of an episode are read."""
        self._chunks = _chunks(self._path)
        told: deque[tuple[int, str]] = deque()
        while True:
            while not told and not self._blocks["episode"] and self._read_chunk():
                pass
            if not told and not self._blocks["episode"]:
                return
            if not told:
                told.extend(self._blocks["episode"].popleft())
            steps, identity = told.popleft()
            parts = parts_of(self._layouts, self._others, self, steps)
            yield NewEpisode(steps, parts, identity=identity)

    def read_on(self) -> None:
        if not self._read_chunk():
            raise self._malformed("fewer rows than its episodes have steps")

    def ready(self, name: str) -> int:
        return sum(map(len, self._blocks[name]))

    def take(self, name: str, count: int) -> Any:
        found: list[Array] = []
        blocks = self._blocks[name]
        while count > 0 and blocks:
            block = blocks.popleft()
            found.append(block[:count])
            if len(block) > count:
                blocks.appendleft(block[count:])
            count -= len(found[-1])
        self._waiting -= sum(rows.nbytes for rows in found)
        if found:
            return np.concatenate(found)
        form = self._forms.get(name)
        return objects([]) if form is None else np.empty((0, *form[1]), form[0])

    def _read_chunk(self) -> bool:
        chunk = next(self._chunks, None)
        if chunk is None:
            return False
        name, batch = self._names.get(chunk[0].lstrip("/"), ""), chunk[1]
        try:
            if name == "episode" and "identity" in batch.schema.names:
                steps = _firsts(batch, "steps").to_pylist()
                identities = _firsts(batch, "identity").to_pylist()
                self._blocks[name].append([(int(count), str(text)) for count, text in zip(steps, identities)])
            elif name in self._forms:
                rows = _rows(batch, name, self._forms[name])
                self._blocks[name].append(rows)
                self._waiting += rows.nbytes
        except _DAMAGE as error:
            raise self._malformed(f"rows of /{name:.60} that are malformed ({error!r:.100})") from error
        if self._waiting > _LARGEST:
            raise self._malformed("what belongs to one step lies too far apart")
        return True

    def _malformed(self, problem: str) -> UnreadableRecording:
        return UnreadableRecording(f"{self._path}: {problem}")


def _firsts(batch: pa.RecordBatch, component: str) -> pa.Array:
    """The only value that each row has of a component. Raises ValueError."""
    column = batch.column(component)
    values = column.flatten()
    if len(values) != len(column) or values.null_count:
        raise ValueError(f"rows without {component}")
    return values


def _rows(batch: pa.RecordBatch, name: str, form: _Form) -> Array:
    """The rows of a chunk."""
    names = batch.schema.names
    if form is None:
        texts = [text.encode() for text in _firsts(batch, "TextLog:text").to_pylist()]
        return objects(all_from_json(texts) if name == "info" else list(unpacked(texts)))
    dtype, shape = form
    if "EncodedImage:blob" in names:
        blobs = _firsts(batch, "EncodedImage:blob")
        images = [pixels(blob.values.to_numpy().tobytes(), shape) for blob in blobs]
        return np.array(images, np.uint8).reshape(len(images), *shape)
    if EXACT in names:
        raw = b"".join(_firsts(batch, EXACT).to_pylist())
        return np.frombuffer(raw, dtype).reshape(batch.num_rows, *shape)
    scalars = batch.column("Scalars:scalars").flatten().to_numpy()
    if len(scalars) != batch.num_rows * math.prod(shape):
        raise ValueError("scalars of another number")
    with np.errstate(all="ignore"):
        found: Array = scalars.astype(dtype).reshape(batch.num_rows, *shape)
    return found
