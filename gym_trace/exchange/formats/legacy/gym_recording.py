"""Directories of OpenAI's gym_recording: JSON that names batches, JSON of episodes, and arrays in binary files."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import math
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.layout import Layout, Leaf, PlainSpace, taken_apart
from gym_trace.data.packing import pack
from gym_trace.data.schema import Layouts, WriterSchema
from gym_trace.data.values import Array, densified, is_plain_dtype
from gym_trace.data.vocabulary import Outcome
from gym_trace.errors import UnreadableRecording
from gym_trace.exchange.formats.foreign import widest
from gym_trace.exchange.formats.legacy.old_files import NewWriter, OldDirectory, OldFile, malformed, plain_name
from gym_trace.format import wire
from gym_trace.format.ring.segment import Columns, Segment, size_of

# -- arrays -----------------------------------------------------------------------------------------------------------

_NPY = b"\x93NUMPY"
_NPY_HEADER = 1 << 12  # bytes that hold the header of any record of np.save that is an array of plain elements
_DTYPE = re.compile(r"[<>|=]?[A-Za-z]{1,12}\d{0,7}(\[[0-9A-Za-z]{1,12}\])?")
_MAX_DIMENSIONS = 32
_MAX_ROW = wire.MAX_COLUMN // 4
_MOST_KEPT = 8  # arrays in Fortran order, whose rows lie apart


@dataclass(frozen=True, eq=False, slots=True)
class StoredArray:
    """An array that is read on demand, whole or in part.

    There were two eras. The later one wrote the bare elements, at a multiple of 8 bytes, and says "order" and "size";
    the earlier one wrote whole records of np.save. Neither is ever unpickled.
    """

    directory: OldDirectory
    name: str
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def row_size(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def size(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.size

    def whole(self) -> Array:
        raw = self.directory.file(self.name).read(self.offset, self.size)
        return np.frombuffer(raw, self.dtype).reshape(self.shape, order="F" if self.fortran else "C")

    def rows(self, begin: int, end: int) -> Array:
        if self.fortran:
            kept = self.directory.kept
            if self not in kept:
                kept.pop(next(iter(kept)) if len(kept) >= _MOST_KEPT else None, None)
                kept[self] = self.whole()
            return np.ascontiguousarray(kept[self][begin:end])
        raw = self.directory.file(self.name).read(self.offset + begin * self.row_size, (end - begin) * self.row_size)
        return np.frombuffer(raw, self.dtype).reshape(end - begin, *self.shape[1:])


def stored_array(directory: OldDirectory, reference: dict[str, Any], said_in: FilePath) -> StoredArray:
    """Return the array of a JSON object with "__type": "ndarray". Reads only its header.

    Raises UnreadableRecording, also if the array is truncated.
    """
    name, offset = plain_name(reference.get("npyfile"), said_in), reference.get("npyoff")
    file = directory.file(name)
    if type(offset) is not int or not 0 <= offset <= file.size:
        raise malformed(said_in, f"array offset {offset!r:.40} exceeds the {file.size} bytes of {name}")
    is_bare = "size" in reference or "order" in reference
    record = None if is_bare else _npy_header(file, offset)
    if record is None:
        found = StoredArray(directory, name, offset, *_as_said(reference, said_in), fortran=False)
    else:
        begin, dtype, shape, fortran = record
        if any(key in reference for key in ("dtype", "shape")) and (dtype, shape) != _as_said(reference, said_in):
            raise malformed(said_in, f"wrong array at byte {offset} of {name}")
        found = StoredArray(directory, name, begin, dtype, shape, fortran)
    if reference.get("size", found.size) != found.size:
        raise malformed(said_in, f"an array of {found.size} bytes declares {reference['size']!r:.40}")
    if found.end > file.size:
        raise UnreadableRecording(
            f"{file.path}: truncated: {file.size} bytes, but {said_in.name} has an array up to byte {found.end}; "
            "import from a good copy"
        )
    if found.shape and found.row_size > _MAX_ROW:
        raise UnreadableRecording(f"{said_in}: one array row exceeds {_MAX_ROW} bytes")
    return found


def _as_said(reference: dict[str, Any], said_in: FilePath) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype and shape of an array as the JSON has them."""
    if reference.get("order", "C") != "C":
        raise malformed(said_in, f"unknown array order {reference['order']!r:.40}")
    text, dtype = reference.get("dtype"), None
    with contextlib.suppress(TypeError, ValueError, SyntaxError):
        dtype = np.dtype(text) if isinstance(text, str) and _DTYPE.fullmatch(text) else None
    return _checked(dtype, repr(text), said_in), _shape(reference.get("shape"), said_in)


def _checked(dtype: np.dtype[Any] | None, text: str, said_in: FilePath) -> np.dtype[Any]:
    if dtype is not None and dtype.hasobject:
        raise UnreadableRecording(
            f"{said_in}: has a pickled array of Python objects; unpickling can run code, so gym-trace never does "
            "it. If you trust the file, load it with NumPy and save plain arrays"
        )
    if dtype is None or dtype.itemsize == 0 or not is_plain_dtype(dtype.str):
        raise malformed(said_in, f"unsupported array dtype {text:.60}")
    return dtype


def _shape(shape: Any, said_in: FilePath) -> tuple[int, ...]:
    plain = isinstance(shape, (list, tuple)) and len(shape) <= _MAX_DIMENSIONS
    if not plain or not all(type(n) is int and 0 <= n < 1 << 62 for n in shape):
        raise malformed(said_in, f"invalid array shape {shape!r:.60}")
    return tuple(shape)


def _npy_header(file: OldFile, offset: int) -> tuple[int, np.dtype[Any], tuple[int, ...], bool] | None:
    """(where the elements begin, dtype, shape, whether in Fortran order) of a record of np.save; None if it is none."""
    head = io.BytesIO(file.read(offset, min(_NPY_HEADER, file.size - offset)))
    if head.read(len(_NPY)) != _NPY:
        return None
    head.seek(0)
    try:
        version = np.lib.format.read_magic(head)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        with warnings.catch_warnings():  # that Python 2 wrote it
            warnings.simplefilter("ignore")
            shape, fortran, dtype = read(head)
    except Exception as error:  # numpy says in many ways that it does not like what it is given
        what = " ".join(str(error).split())
        raise UnreadableRecording(f"{file.path}: not a NumPy array at byte {offset} ({what:.100})") from error
    return offset + head.tell(), _checked(dtype, str(dtype), file.path), _shape(shape, file.path), bool(fortran)


# -- rows as columns of a trace: lists of whatever JSON has, with arrays in it ----------------------------------------

Content = StoredArray | list[Any]
_MOST_MEMBERS = 64  # of what is taken for a Tuple or Dict space; each of its leaves becomes a column
_DEEPEST = 8
_VALUE_SIZE = 64  # bytes that a value counts, whatever it is


def _row_size(content: Content) -> int:
    """Bytes that a row takes at most, about."""
    return content.row_size if isinstance(content, StoredArray) else max(map(_size, content), default=0)


def _size(value: Any) -> int:
    if isinstance(value, StoredArray):
        return value.row_size * len(value) if value.shape else value.dtype.itemsize
    if isinstance(value, (list, dict)):
        return _VALUE_SIZE + sum(map(_size, value.values() if isinstance(value, dict) else value))
    return _VALUE_SIZE + (len(value) if isinstance(value, str) else 0)


def _space_of(content: Content) -> PlainSpace:
    """The widest space that rows like these can be of, as plain data (docs/FORMAT.md, section 5)."""
    if isinstance(content, StoredArray):
        return _box(content.dtype, content.shape[1:])
    return _space_of_values(content, 0)


def _space_of_values(values: list[Any], depth: int) -> PlainSpace:
    if not values:
        return _values_of("nothing")
    first: Any = values[0]
    if isinstance(first, StoredArray):
        alike = all(isinstance(v, StoredArray) and (v.dtype, v.shape) == (first.dtype, first.shape) for v in values)
        return _box(first.dtype, first.shape) if alike else _values_of("arrays of several kinds")
    if depth < _DEEPEST and all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        if 0 < len(first) <= _MOST_MEMBERS:
            members = [[key, _space_of_values([value[key] for value in values], depth + 1)] for key in first]
            return {"type": "Dict", "spaces": members}
    elif depth < _DEEPEST and all(isinstance(value, list) and len(value) == len(first) for value in values):
        if 0 < len(first) <= _MOST_MEMBERS:
            return {"type": "Tuple", "spaces": [_space_of_values(list(column), depth + 1) for column in zip(*values)]}
    elif (numbers := densified(values)) is not None:
        return _box(numbers.dtype, ())
    return _values_of("values of several kinds")


def _box(dtype: np.dtype[Any], shape: tuple[int, ...]) -> PlainSpace:
    return widest(dtype, shape) if dtype.kind in "biuf" else _values_of(f"arrays of {dtype.name}, shape {shape}")


def _values_of(what: str) -> PlainSpace:
    return {"type": "custom", "class": "", "repr": what}


def _columns_of(layout: Layout, content: Content, begin: int, end: int) -> Columns:
    """Return the rows from begin to end, one column per leaf of the layout."""
    rows = content.rows(begin, end) if isinstance(content, StoredArray) else _resolved(content[begin:end])
    if isinstance(layout, Leaf):
        return {layout.path: _column(layout, rows)}
    leaves = list(layout.leaves())
    split = zip(*(taken_apart(layout, row) for row in rows))
    return {leaf.path: _column(leaf, list(values)) for leaf, values in zip(leaves, split)}


def _resolved(value: Any) -> Any:
    """value with the arrays in it read."""
    if isinstance(value, StoredArray):
        return value.whole()
    if isinstance(value, list):
        return [_resolved(item) for item in value]
    if isinstance(value, dict):
        return {key: _resolved(item) for key, item in value.items()}
    return value


def _column(leaf: Leaf, rows: Array | list[Any]) -> Array | list[bytes]:
    """Return typed rows, with their own dtype and shape, if the leaf and the rows allow it; else one value per row."""
    array = rows if isinstance(rows, np.ndarray) else densified(rows)
    if leaf.dtype is not None and array is not None and array.dtype.kind in "biufc" and array.dtype.isnative:
        return np.ascontiguousarray(array)
    values = [pack(row) for row in rows]
    if sum(map(len, values)) > wire.MAX_VALUES:
        raise UnreadableRecording(f"{'/'.join(map(str, leaf.path))}: a row takes more than {wire.MAX_VALUES} bytes")
    return values


# -- recordings -------------------------------------------------------------------------------------------------------

_MANIFESTS, _PICKLES = "openaigym.trace.*.manifest.json", "openaigym.trace.*.pkl"
_SUFFIX = ".manifest.json"
_PIECE_BYTES, _PIECE_ROWS = 4 << 20, 8192  # of an episode are read at a time
_REWARDS = Leaf(("rewards",), np.dtype("<f8"), ())
_MOST_NAMED = 1000  # files that the metadata lists

NOTE = (
    "imported from gym_recording, which kept neither environment nor spaces nor how episodes ended: the spaces are the "
    "widest that the arrays can be of, and each episode is what lay between two resets"
)


class Batch(NamedTuple):
    """A file of episodes: its name, the id of the first episode and their number, or None if unknown."""

    name: str
    first: int | None
    episodes: int | None


class Episode(NamedTuple):
    """The rows of an episode: one more of observations than of actions and rewards."""

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
        name: that of its files, which has the number of the recorder and of its process.
        batches: its files of episodes, in order.
    """

    kind = "gym_recording"

    def __init__(self, directory: OldDirectory, manifest: str):
        self.name = manifest.removesuffix(_SUFFIX)
        self._directory = directory
        self._manifest = manifest
        path = directory.path / manifest
        content = directory.json(manifest)
        entries = content.get("batches")
        if not isinstance(entries, list):
            raise malformed(path, "no batches in the manifest")
        self.batches: list[Batch] = []
        for entry in entries:
            if not isinstance(entry, dict):
                raise malformed(path, "malformed batch in the manifest: not an object")
            first, count = entry.get("first"), entry.get("len")
            if not all(number is None or (type(number) is int and 0 <= number < 1 << 62) for number in (first, count)):
                raise malformed(path, "invalid first episode or number of episodes in a batch")
            self.batches.append(Batch(plain_name(entry.get("fn"), path), first, count))

    @property
    def files(self) -> int:
        """Number of episode files."""
        return len(self.batches)

    def writers(self, on_file: Callable[[], None]) -> Iterator[NewWriter]:
        """The writer of a trace that it becomes. on_file: called when a file of episodes is done."""
        observations, actions = self._spaces()
        schema = {
            "split": "",
            "observation_space": observations,
            "action_space": actions,
            "environment": {"id": None, "note": NOTE},
            "versions": {},
            "recorder": {},
            "metadata": {
                "imported_from": self.kind,
                "manifest": self._manifest,
                "files": [batch.name for batch in self.batches[:_MOST_NAMED]],
            },
        }
        yield NewWriter(self.name, schema, self._segments(WriterSchema.of(schema).layouts, on_file))

    def _spaces(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the spaces of observations and actions of the first episode with a step."""
        observations: Content = []
        for batch in self.batches:
            for episode in self._episodes(batch):
                if episode.steps:
                    return _space_of(episode.observations), _space_of(episode.actions)
                observations = observations or episode.observations
        return _space_of(observations), _space_of([])

    def _segments(self, layouts: Layouts, on_file: Callable[[], None]) -> Iterator[Segment]:
        next_id = 0
        for batch in self.batches:
            next_id = max(next_id, batch.first or 0)  # filters of some versions left episodes out
            for episode in self._episodes(batch):
                yield from _pieces(next_id, episode, layouts)
                next_id += 1
            on_file()

    def _episodes(self, batch: Batch) -> Iterator[Episode]:
        path = self._directory.path / batch.name

        def decode(read: dict[str, Any]) -> Any:
            if read.get("__type") != "ndarray":
                return read
            found = stored_array(self._directory, read, path)
            self._directory.count_bytes(found.size, path)
            return found

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


def _episode_of(episode: Any) -> Episode:
    """Return the rows of an episode. Raises ValueError."""
    if not isinstance(episode, dict):
        raise ValueError("not an object")
    contents = []
    for name in ("observations", "actions", "rewards"):
        content = episode.get(name)
        if not isinstance(content, list) and not (isinstance(content, StoredArray) and content.shape):
            raise ValueError(f"has no {name}")
        contents.append(content)
    observations, actions, rewards = contents
    steps = 0 if _is_nothing(rewards) else len(rewards)
    counts = len(observations), 0 if not steps and _is_nothing(actions) else len(actions)
    if counts != (steps + 1, steps):
        raise ValueError(
            f"{counts[0]} observations and {counts[1]} actions for {steps} rewards; there should be one observation "
            "more, and as many actions"
        )
    if steps and isinstance(rewards, StoredArray) and not rewards.row_size:
        raise ValueError("rewards without elements")
    return Episode(observations, actions, rewards, steps)


def _is_nothing(content: Content) -> bool:
    """Return True for the rows of no steps, which gym_recording stored as an array of shape (1, 0)."""
    return not len(content) or (isinstance(content, StoredArray) and content.shape == (1, 0))


def _pieces(number: int, episode: Episode, layouts: Layouts) -> Iterator[Segment]:
    """The segments of an episode, none of them large."""
    size = _row_size(episode.observations) + _row_size(episode.actions)
    rows = max(1, min(_PIECE_ROWS, _PIECE_BYTES // max(1, size)))
    for begin in range(0, max(1, episode.steps), rows):
        end = min(begin + rows, episode.steps)
        table = np.zeros(1, wire.FRAGMENT)
        table["episode"], table["first_step"], table["steps"] = number, begin, end - begin
        lead = 1 if begin else 0
        columns = _columns_of(layouts.observations, episode.observations, begin + lead, end + 1)
        if end > begin:
            columns |= _columns_of(layouts.actions, episode.actions, begin, end)
            columns |= _columns_of(_REWARDS, episode.rewards, begin, end)
        if begin == 0:
            table["flags"] |= wire.LEADS
        if end == episode.steps:
            table["flags"] |= wire.STOPS | wire.ENDS
            table["outcome"] = Outcome.CUT
        yield Segment(table, columns, table.nbytes + sum(map(size_of, columns.values())))
