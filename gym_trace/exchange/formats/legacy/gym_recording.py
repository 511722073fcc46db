"""Directories of OpenAI's gym_recording: a manifest, JSON files of episodes, and binary files of arrays."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from gym_trace.data.layout import PlainSpace
from gym_trace.data.values import Array, densified, is_plain_dtype
from gym_trace.errors import UnreadableRecording
from gym_trace.exchange.formats.foreign import widest
from gym_trace.exchange.formats.imported import Imported, NewEpisode, NewSteps, imported, new_schema
from gym_trace.exchange.formats.legacy.old_files import OldDirectory, malformed, plain_name
from gym_trace.exchange.formats.rows import custom, step_ranges
from gym_trace.format import wire

# -- arrays -----------------------------------------------------------------------------------------------------------

_NPY = b"\x93NUMPY"
_NPY_HEADER = 1 << 12  # bytes that hold the header of any record of np.save that is an array of plain elements
_DTYPE = re.compile(r"[<>|=]?[A-Za-z]{1,12}\d{0,7}(\[[0-9A-Za-z]{1,12}\])?")
_MAX_DIMENSIONS = 32
_MAX_ROW = wire.MAX_COLUMN // 4


def stored_array(directory: OldDirectory, reference: dict[str, Any], json_path: Path) -> Array:
    """Return the array of a JSON object with "__type": "ndarray", mapped into memory; never unpickled.

    Later versions of gym_recording wrote only the elements, with "order" and "size" in the JSON; earlier ones wrote
    records of np.save. json_path: the file with the object. Raises UnreadableRecording, also if the array is truncated.
    """
    name, offset = plain_name(reference.get("npyfile"), json_path), reference.get("npyoff")
    raw = directory.mapped(name)
    if type(offset) is not int or not 0 <= offset <= len(raw):
        raise malformed(json_path, f"array offset {offset!r:.40} exceeds the {len(raw)} bytes of {name}")
    order: Literal["C", "F"] = "C"
    record = None
    if "size" not in reference and "order" not in reference:
        record = _npy_header(raw[offset : offset + _NPY_HEADER], directory.path / name, offset)
    if record is None:
        (dtype, shape), begin = _declared(reference, json_path), offset
    else:
        dtype, shape, order, size = record
        begin = offset + size
        if any(key in reference for key in ("dtype", "shape")) and (dtype, shape) != _declared(reference, json_path):
            raise malformed(json_path, f"wrong array at byte {offset} of {name}")
    row_size = dtype.itemsize * math.prod(shape[1:])
    size = row_size * shape[0] if shape else row_size
    if reference.get("size", size) != size:
        raise malformed(json_path, f"an array of {size} bytes declares {reference['size']!r:.40}")
    if begin + size > len(raw):
        raise UnreadableRecording(
            f"{directory.path / name}: truncated: {len(raw)} bytes, but {json_path.name} has an array up to byte "
            f"{begin + size}; import from a good copy"
        )
    if shape and row_size > _MAX_ROW:
        raise UnreadableRecording(f"{json_path}: one array row exceeds {_MAX_ROW} bytes")
    directory.count_bytes(size, json_path)
    try:
        return np.ndarray(shape, dtype, raw, begin, order=order)
    except ValueError as error:  # too many rows for NumPy, even without elements
        raise malformed(json_path, f"invalid array shape {shape!r:.60}") from error


def _declared(reference: dict[str, Any], json_path: Path) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype and shape of an array as declared in the JSON."""
    if reference.get("order", "C") != "C":
        raise malformed(json_path, f"unknown array order {reference['order']!r:.40}")
    text, dtype = reference.get("dtype"), None
    with contextlib.suppress(TypeError, ValueError, SyntaxError):
        dtype = np.dtype(text) if isinstance(text, str) and _DTYPE.fullmatch(text) else None
    return _checked(dtype, repr(text), json_path), _shape(reference.get("shape"), json_path)


def _checked(dtype: np.dtype[Any] | None, text: str, json_path: Path) -> np.dtype[Any]:
    if dtype is not None and dtype.hasobject:
        raise UnreadableRecording(
            f"{json_path}: has a pickled array of Python objects; unpickling can run code, so gym-trace never does "
            "it. If you trust the file, load it with NumPy and save plain arrays"
        )
    if dtype is None or dtype.itemsize == 0 or not is_plain_dtype(dtype.str):
        raise malformed(json_path, f"unsupported array dtype {text:.60}")
    return dtype


def _shape(shape: Any, json_path: Path) -> tuple[int, ...]:
    is_sequence = isinstance(shape, (list, tuple)) and len(shape) <= _MAX_DIMENSIONS
    if not is_sequence or not all(type(n) is int and 0 <= n < 1 << 62 for n in shape):
        raise malformed(json_path, f"invalid array shape {shape!r:.60}")
    return tuple(shape)


def _npy_header(
    raw: bytes, path: Path, offset: int
) -> tuple[np.dtype[Any], tuple[int, ...], Literal["C", "F"], int] | None:
    """Return the dtype, shape, order and header size of a record of np.save; None for other bytes."""
    head = io.BytesIO(raw)
    if not raw.startswith(_NPY):
        return None
    try:
        version = np.lib.format.read_magic(head)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        with warnings.catch_warnings():  # NumPy warns of headers that Python 2 wrote
            warnings.simplefilter("ignore")
            shape, fortran, dtype = read(head)
    except Exception as error:  # NumPy raises many types for malformed headers
        reason = " ".join(str(error).split())
        raise UnreadableRecording(f"{path}: not a NumPy array at byte {offset} ({reason:.100})") from error
    return _checked(dtype, str(dtype), path), _shape(shape, path), "F" if fortran else "C", head.tell()


# -- rows  ----------------------------------------

Content = Any  # an array, or a list of JSON values with arrays in them
_MOST_MEMBERS = 64  # per Tuple or Dict space, as each leaf becomes a column; larger spaces become custom
_DEEPEST = 8
_VALUE_BYTES = 64  # estimate per value


def _row_size(content: Content) -> int:
    """Estimate the bytes of the largest row."""
    return _size(content[:1]) if isinstance(content, np.ndarray) else max(map(_size, content), default=0)


def _size(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, (list, dict)):
        return _VALUE_BYTES + sum(map(_size, value.values() if isinstance(value, dict) else value))
    return _VALUE_BYTES + (len(value) if isinstance(value, str) else 0)


def _space_of(content: Content) -> PlainSpace:
    """Return the widest space of these rows, as plain data (docs/FORMAT.md, section 5)."""
    if isinstance(content, np.ndarray):
        return _box(content.dtype, content.shape[1:])
    return _space_of_values(content, 0)


def _space_of_values(values: list[Any], depth: int) -> PlainSpace:
    if not values:
        return custom("nothing")
    first: Any = values[0]
    if isinstance(first, np.ndarray):
        are_alike = all(isinstance(v, np.ndarray) and (v.dtype, v.shape) == (first.dtype, first.shape) for v in values)
        return _box(first.dtype, first.shape) if are_alike else custom("arrays of several kinds")
    if depth < _DEEPEST and all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        if 0 < len(first) <= _MOST_MEMBERS:
            members = [[key, _space_of_values([value[key] for value in values], depth + 1)] for key in first]
            return {"type": "Dict", "spaces": members}
    elif depth < _DEEPEST and all(isinstance(value, list) and len(value) == len(first) for value in values):
        if 0 < len(first) <= _MOST_MEMBERS:
            return {"type": "Tuple", "spaces": [_space_of_values(list(column), depth + 1) for column in zip(*values)]}
    elif (numbers := densified(values)) is not None:
        return _box(numbers.dtype, ())
    return custom("values of several kinds")


def _box(dtype: np.dtype[Any], shape: tuple[int, ...]) -> PlainSpace:
    return widest(dtype, shape) if dtype.kind in "biuf" else custom(f"arrays of {dtype.name}, shape {shape}")


# -- recordings -------------------------------------------------------------------------------------------------------

_MANIFESTS, _PICKLES = "openaigym.trace.*.manifest.json", "openaigym.trace.*.pkl"
_SUFFIX = ".manifest.json"
_KIND = "gym_recording"
_MOST_LISTED_FILES = 1000  # in the metadata

NOTE = (
    "imported from gym_recording, which stores no environment, spaces or outcomes: the spaces are as wide as the "
    "arrays allow, and an episode is the steps between two resets"
)


class BatchFile(NamedTuple):
    """A file of episodes. first: id of its first episode. episodes: their number. None: unknown."""

    name: str
    first: int | None
    episodes: int | None


class OldEpisode(NamedTuple):
    """The rows of an episode; observations have one row more than actions and rewards."""

    observations: Content
    actions: Content
    rewards: Content
    steps: int


def find_recordings(directory: OldDirectory) -> list[GymRecording]:
    """Find the recordings of gym_recording in a directory. Raises UnreadableRecording if some of it is pickled."""
    pickled = fnmatch.filter(directory.names, _PICKLES)
    if pickled:
        raise UnreadableRecording(
            f"{directory.path / pickled[0]}: a pickled recording; unpickling runs whatever is in a file, so it is "
            "never done here. Where you trust it, load it with the program that wrote it and replay it into a "
            "recorder; to import what else is in the directory, move its .pkl files away"
        )
    return [GymRecording(directory, name) for name in fnmatch.filter(directory.names, _MANIFESTS)]


def is_recording(name: str) -> bool:
    """Return True if gym_recording has files of this name."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in (_MANIFESTS, _PICKLES))


class GymRecording:
    """The files of one recorder of gym_recording.

    Attributes:
        name: of its files, with the numbers of the recorder and of its process.
        batches: its files of episodes, in order.
    """

    def __init__(self, directory: OldDirectory, manifest: str):
        self.name = manifest.removesuffix(_SUFFIX)
        self._directory, self._done = directory, 0
        self._manifest = manifest
        path = directory.path / manifest
        content = directory.json(manifest)
        entries = content.get("batches")
        if not isinstance(entries, list):
            raise malformed(path, "no batches in the manifest")
        self.batches: list[BatchFile] = []
        for entry in entries:
            if not isinstance(entry, dict):
                raise malformed(path, "malformed batch in the manifest: not an object")
            first, count = entry.get("first"), entry.get("len")
            if not all(number is None or (type(number) is int and 0 <= number < 1 << 62) for number in (first, count)):
                raise malformed(path, "invalid first episode or number of episodes in a batch")
            self.batches.append(BatchFile(plain_name(entry.get("fn"), path), first, count))

    def imported(self) -> Imported:
        """Return the recording as the content of one writer. Progress counts files of episodes."""
        files = [batch.name for batch in self.batches[:_MOST_LISTED_FILES]]
        metadata = {"imported_from": _KIND, "manifest": self._manifest, "files": files}
        schema = new_schema(_KIND, *self._spaces(), {"note": NOTE}, metadata)
        content = imported(_KIND, self._new_episodes(), schema, warnings=[NOTE], writer=self.name)
        content.total, content.done = len(self.batches), lambda: self._done
        return content

    def _spaces(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the spaces of observations and actions of the first episode with a step."""
        observations: Content = []
        for batch in self.batches:
            for episode in self._episodes(batch):
                if episode.steps:
                    return _space_of(episode.observations), _space_of(episode.actions)
                observations = observations or episode.observations
        return _space_of(observations), _space_of([])

    def _new_episodes(self) -> Iterator[NewEpisode]:
        number = 0
        for batch in self.batches:
            number = max(number, batch.first or 0)  # some versions filtered episodes, which leaves gaps
            for episode in self._episodes(batch):
                yield NewEpisode(episode.steps, _parts(episode), "cut", number=number)
                number += 1
            self._done += 1

    def _episodes(self, batch: BatchFile) -> Iterator[OldEpisode]:
        path = self._directory.path / batch.name

        def decode(item: dict[str, Any]) -> Any:
            return stored_array(self._directory, item, path) if item.get("__type") == "ndarray" else item

        content = self._directory.json(batch.name, decode)
        episodes = content.get("episodes")
        if not isinstance(episodes, list):
            raise malformed(path, "a batch without a list of episodes")
        if batch.episodes is not None and batch.episodes != len(episodes):
            raise malformed(
                path, f"a batch of {len(episodes)} episodes, but {self._manifest} declares {batch.episodes}"
            )
        for number, episode in enumerate(episodes):
            try:
                yield _episode_of(episode)
            except ValueError as error:
                raise malformed(path, f"episode {number} of the file: {error}") from error


def _episode_of(episode: Any) -> OldEpisode:
    """Return the rows of an episode. Raises ValueError."""
    if not isinstance(episode, dict):
        raise ValueError("not an object")
    contents = []
    for name in ("observations", "actions", "rewards"):
        content = episode.get(name)
        if not isinstance(content, list) and not (isinstance(content, np.ndarray) and content.shape):
            raise ValueError(f"has no {name}")
        contents.append(content)
    observations, actions, rewards = contents
    steps = 0 if _is_empty(rewards) else len(rewards)
    counts = len(observations), 0 if not steps and _is_empty(actions) else len(actions)
    if counts != (steps + 1, steps):
        raise ValueError(
            f"{counts[0]} observations and {counts[1]} actions for {steps} rewards; there should be {steps + 1} and "
            f"{steps}"
        )
    if steps and isinstance(rewards, np.ndarray) and not rewards[:1].nbytes:
        raise ValueError("rewards without elements")
    return OldEpisode(observations, actions, rewards, steps)


def _is_empty(content: Content) -> bool:
    """Return True without rows, which gym_recording stored as an array of shape (1, 0)."""
    return not len(content) or (isinstance(content, np.ndarray) and content.shape == (1, 0))


def _parts(episode: OldEpisode) -> Iterator[NewSteps]:
    """Yield the steps of an episode, some at a time."""
    size = _row_size(episode.observations) + _row_size(episode.actions)
    for begin, end in step_ranges(episode.steps, size):
        yield NewSteps(
            episode.observations[begin + (begin > 0) : end + 1], episode.actions[begin:end], episode.rewards[begin:end]
        )
