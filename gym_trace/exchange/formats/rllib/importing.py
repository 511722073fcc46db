"""RLlib's episodes, as its env runners write them, as a trace.

They are values of Parquet files, in MessagePack: each the state of an episode, or of a piece of one.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import math
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from gymnasium import Space, spaces

from gym_trace.data.layout import Branch, Layout, Leaf
from gym_trace.data.packing import Containers
from gym_trace.data.schema import Layouts, WriterSchema
from gym_trace.data.trees import cut, leaves_of, mapped
from gym_trace.data.values import Array, densified, is_plain_dtype
from gym_trace.errors import CorruptTrace, TraceError, UnreadableRecording
from gym_trace.exchange.formats.imported import Imported, NewEpisode, NewSteps, imported, new_schema
from gym_trace.exchange.formats.parquet.tables import located, parquet_file, parquet_files
from gym_trace.exchange.formats.rows import custom

COLUMN = "item"
_KIND = "RLlib episodes"
_UNKNOWN = custom("not told by RLlib")
_ANY = Leaf(("values",), None, ())
_NOT_TOLD = "RLlib keeps no seeds, options or times of episodes, nor what environment they are of"
_MAY_BE_SCALED = (
    "actions are as RLlib stores them: scaled to [-1, 1], unless it ran with normalize_actions=False, which its files "
    "do not say"
)
_PIECE_BYTES, _VALUE_BYTES = 4 << 20, 256
_MOST_OF_ARRAY = 64 << 20
_MOST_BYTES = 1 << 31  # of the values of a row group
_DEEPEST = 32
_NEEDED = {
    *("observations", "actions", "rewards", "infos", "extra_model_outputs"),
    *("is_terminated", "is_truncated", "_observation_space", "_action_space"),
}
# What malformed values cause in Python, NumPy, gymnasium and msgpack.
_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, CorruptTrace, LookupError, RecursionError, TypeError),
    *(ValueError, UnreadableRecording, msgpack.UnpackException, zlib.error),
)


class Header(NamedTuple):
    """Header of the state of an episode, or of a piece of one: its id, its steps, and a hash of all of it."""

    key: int
    started: int
    steps: int
    digest: int


_KEY, _STARTED, _STEPS = map(Header._fields.index, ("key", "started", "steps"))


class RLlibImporter:
    """RLlib: Parquet of episodes (output_write_episodes=True)."""

    name: ClassVar[str] = "rllib"

    def recognises(self, path: Path) -> bool:
        """Return True if the first Parquet file has a column of episodes."""
        found = parquet_files(path, most=1)
        return bool(found) and _is_episodes(found[0])

    def read(self, path: Path) -> Imported:
        """Pieces of one episode are joined. Reads the headers of all episodes first, then one episode after another."""
        files = parquet_files(path)
        if not files:
            raise UnreadableRecording(f"{path}: no Parquet files")
        items = Items(files)
        if not len(items):
            raise UnreadableRecording(f"{path}: no episodes")
        return _Reader(path, items).imported()


class _Reader:
    """Reads the episodes of some files."""

    def __init__(self, path: Path, items: Items):
        self._items, self._path = items, path
        self._headers = np.empty((len(items), len(Header._fields)), np.int64)
        for number in range(len(items)):
            with self._reading(number):
                self._headers[number] = _header_of(items[number])
        self._order, self._counts = _pieces_of_episodes(self._headers)
        first = self._state(0)
        with self._reading(0):
            found = (_space(first[name]) for name in ("_observation_space", "_action_space"))
            observations, actions = (_UNKNOWN if space is None else space for space in found)
        self._may_be_scaled = isinstance(actions, spaces.Box) and actions.dtype.kind == "f" and actions.is_bounded()
        self._schema = new_schema(_KIND, observations, actions, metadata={"path": path.name}, infos=True)
        self._layouts: Layouts = WriterSchema.of(self._schema).layouts

    def imported(self) -> Imported:
        """Return the content of the new trace."""
        steps = int(self._headers[self._order, _STEPS].sum())
        notes = [_NOT_TOLD, *[_MAY_BE_SCALED] * self._may_be_scaled]
        if again := len(self._headers) - len(self._order):
            notes.append(f"{again:,} repeated rows were read once")
        firsts = self._order[np.cumsum(self._counts) - self._counts]
        if late := int(np.count_nonzero(self._headers[firsts, _STARTED])):
            notes.append(f"the first steps of {late:,} episodes are missing")
        with self._reading(0):
            return imported(_KIND, self._read(), self._schema, notes=notes, steps=steps)

    def _read(self) -> Iterator[NewEpisode]:
        end = 0
        for count in self._counts.tolist():
            run, end = self._order[end : end + count], end + count
            first = self._state(int(run[0]))
            with self._reading(int(run[0])):
                infos = _infos(first)
            reset_info = infos[0] if infos and isinstance(infos[0], dict) else None
            states = chain([first], (self._state(int(number)) for number in run[1:]))
            steps = int(self._headers[run, _STEPS].sum())
            yield NewEpisode(steps, self._parts(states, run), reset_info=reset_info)

    def _parts(self, states: Iterator[dict[str, Any]], run: Array) -> Iterator[NewSteps]:
        """The steps of an episode, of which each piece has its states."""
        for piece, (state, number) in enumerate(zip(states, run.tolist())):
            with self._reading(number):
                yield from self._piece(
                    state, int(self._headers[number, _STEPS]), first=piece == 0, last=piece == len(run) - 1
                )

    def _piece(self, state: dict[str, Any], steps: int, first: bool, last: bool) -> Iterator[NewSteps]:
        observations = _tree(self._layouts.observations, state["observations"])
        actions = _tree(self._layouts.actions, state["actions"])
        rewards = _leaf(_rows(state["rewards"]))
        infos = _infos(state)
        outputs = state["extra_model_outputs"]
        notes = {name: _tree(_ANY, one) for name, one in outputs.items()} if isinstance(outputs, dict) else {}
        if len(rewards) != steps or _length(observations) != steps + 1 or len(infos) != steps + 1:
            raise UnreadableRecording(f"an episode of {steps} steps with other numbers of rows")
        flags = np.zeros((2, steps), np.bool_)
        if last and steps:
            flags[:, -1] = bool(state["is_terminated"]), bool(state["is_truncated"])
        size = max(1, _PIECE_BYTES // (_size(observations) // (steps + 1) + 1))
        for begin in range(0, max(steps, 1), size):
            end = min(begin + size, steps)
            yield NewSteps(
                cut(observations, begin + (begin > 0 or not first), end + 1),
                cut(actions, begin, end),
                rewards[begin:end],
                flags[0, begin:end],
                flags[1, begin:end],
                infos[1 + begin : 1 + end],
                {name: cut(rows, begin, end) for name, rows in notes.items()},
            )

    # -- items --------------------------------------------------------------------------------------------------------

    def _state(self, number: int) -> dict[str, Any]:
        with self._reading(number):
            state = unpacked(self._items[number])
            if not isinstance(state, dict) or not state.keys() >= _NEEDED:
                raise UnreadableRecording("not the state of a SingleAgentEpisode")
            return state

    @contextlib.contextmanager
    def _reading(self, number: int) -> Iterator[None]:
        """Says which episode it is that cannot be read."""
        try:
            yield
        except _ERRORS as error:
            where = self._items.path_of(number)
            if str(where) in str(error):
                raise
            told = error if isinstance(error, TraceError) else f"not an episode: {error!r:.100}"
            raise UnreadableRecording(f"{where}: row {number} of all: {told}") from error


# -- buffers ----------------------------------------------------------------------------------------------------------


def _rows(buffer: Any) -> Any:
    """Return the content of an InfiniteLookbackBuffer without lookback: a list, or arrays, in dicts and tuples."""
    data, lookback = buffer["data"], buffer["lookback"]
    if type(lookback) is not int or lookback < 0:
        raise UnreadableRecording(f"buffer with a lookback of {lookback!r:.40} steps")
    return _tail(data, lookback) if buffer["finalized"] else list(data)[lookback:]


def _tail(tree: Any, lookback: int) -> Any:
    if isinstance(tree, dict):
        return {key: _tail(part, lookback) for key, part in tree.items()}
    if isinstance(tree, list):
        return tuple(_tail(part, lookback) for part in tree)
    return tree[lookback:] if isinstance(tree, np.ndarray) else np.asarray(tree)


def _infos(state: dict[str, Any]) -> list[Any]:
    rows = _rows({**state["infos"], "finalized": False})
    return [{} if info is None else info for info in rows]


def _tree(layout: Layout, buffer: Any) -> Any:
    """The rows of a buffer as the space has them."""
    rows = _rows(buffer)
    return _split(layout, rows) if isinstance(rows, list) else mapped(_leaf, rows)


def _split(layout: Layout, rows: list[Any]) -> Any:
    """Return one array per leaf, with one value per row."""
    if not isinstance(layout, Branch):
        return _leaf(rows)
    if layout.keys is None:
        if all(isinstance(row, list) and len(row) == len(layout.children) for row in rows):
            return tuple(_split(child, [row[i] for row in rows]) for i, child in enumerate(layout.children))
    elif all(isinstance(row, dict) and row.keys() == set(layout.keys) for row in rows):
        return {key: _split(child, [row[key] for row in rows]) for key, child in zip(layout.keys, layout.children)}
    return rows


def _leaf(rows: Any) -> Any:
    if isinstance(rows, np.ndarray):
        return rows.tolist() if rows.dtype.kind == "U" else rows
    dense = densified(rows)
    return rows if dense is None else dense


def _length(tree: Any) -> int:
    lengths = {len(part) for part in leaves_of(tree)}
    return lengths.pop() if len(lengths) == 1 else -1


def _size(tree: Any) -> int:
    """Bytes that rows take, about."""
    return sum(part.nbytes if isinstance(part, np.ndarray) else _VALUE_BYTES * len(part) for part in leaves_of(tree))


# -- values -----------------------------------------------------------------------------------------------------------


def unpacked(data: bytes) -> Any:
    """Return the value of untrusted MessagePack. Raises UnreadableRecording."""
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
        raise UnreadableRecording(f"unsupported episode: {error.problem}") from error
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError, msgpack.UnpackException) as error:
        raise UnreadableRecording(f"not MessagePack of an episode: {error!r:.100}") from error


def _decoded(found: dict[Any, Any]) -> Any:
    if b"nd" in found:
        return _array(found)
    if b"complex" in found:
        return complex(str(found[b"data"]))
    return found


def _array(found: dict[Any, Any]) -> Any:
    if found.get(b"kind") == b"O":
        raise UnreadableRecording("a pickled array of Python objects; gym-trace never unpickles")
    text, data = found[b"type"], found[b"data"]
    if not is_plain_dtype(text) or not isinstance(data, bytes):
        raise UnreadableRecording(f"unsupported array dtype {text!r:.60}")
    dtype = np.dtype(text)
    if found[b"nd"] is not True:
        return np.frombuffer(data, dtype)[0]
    shape = tuple(found[b"shape"])
    if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise UnreadableRecording(f"an array of shape {shape!r:.60} has {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(shape)


def _space(told: Any, depth: int = 0) -> Space[Any] | None:
    """Return the space that RLlib stored; None if it is missing or unknown."""
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
        raise ValueError(f"unsupported Box dtype {dtype}")
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
        raise ValueError("array too large")
    return np.lib.format.read_array(io.BytesIO(raw))  # which reads no objects


# -- files ------------------------------------------------------------------------------------------------------------


def _is_episodes(path: Path) -> bool:
    """Return True for Parquet with a column of episodes."""
    try:
        return bool(_opened(path))
    except UnreadableRecording:
        return False


class Items:
    """The values of files by their number. Row groups are read when they are asked for, and one is kept.

    Raises UnreadableRecording.
    """

    def __init__(self, files: list[Path]):
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
        group = self._group_of(number)
        if self._kept[0] != group:
            self._kept = -1, None
            self._kept = group, self._read(*self._groups[group])
        value = self._kept[1][number - int(self._firsts[group])].as_py()
        if not isinstance(value, bytes):
            raise UnreadableRecording(f"{self.path_of(number)}: a row of {COLUMN!r} is empty or not binary")
        return value

    def _group_of(self, number: int) -> int:
        return int(np.searchsorted(self._firsts, number, "right")) - 1

    def _read(self, file: int, group: int) -> Any:
        path = self.files[file]
        opened = _opened(path)
        columns = opened.metadata.row_group(group)
        size = sum(columns.column(i).total_uncompressed_size for i in range(columns.num_columns))
        if not 0 <= size <= _MOST_BYTES:
            raise UnreadableRecording(f"{path}: row group {group} declares {size} bytes, over the limit")
        with located(path):
            return opened.read_row_group(group, columns=[COLUMN]).column(0)


def _opened(path: Path, opening: Callable[..., pq.ParquetFile] = pq.ParquetFile) -> pq.ParquetFile:
    with located(path):
        try:
            opened = opening(path, read_dictionary=[COLUMN])  # what many rows share takes memory once
        except KeyError:  # there is no such column to be read as a dictionary
            opened = opening(path)
    kind = opened.schema_arrow.field(COLUMN).type if COLUMN in opened.schema_arrow.names else pa.null()
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not pa.types.is_binary(kind) and not pa.types.is_large_binary(kind):
        raise UnreadableRecording(f"{path}: not RLlib episodes: no binary column {COLUMN!r}")
    return opened


def _header_of(item: bytes) -> Header:
    """Read the header of the state of an episode, without its steps. Raises _ERRORS."""
    told: dict[Any, Any] = {}
    known = Containers()
    unpacker = msgpack.Unpacker(max_buffer_size=len(item) + 1, list_hook=known.list_hook, object_hook=known.object_hook)
    unpacker.feed(item)
    for _ in range(unpacker.read_map_header()):
        key = unpacker.unpack()
        if key in ("id_", "agent_id", "t", "t_started"):
            told[key] = unpacker.unpack()
        else:
            unpacker.skip()
    started, time = told.get("t_started"), told.get("t")
    if type(started) is not int or type(time) is not int or not 0 <= started <= time < 1 << 62 or "id_" not in told:
        raise ValueError("no range of steps")
    name = repr((told["id_"], told.get("agent_id"))).encode(errors="replace")
    return Header(_hash(name), started, time - started, _hash(item))


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


def _pieces_of_episodes(headers: Array) -> tuple[Array, Array]:
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
