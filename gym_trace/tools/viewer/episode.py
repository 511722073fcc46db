"""One episode for the viewer: its columns, curves, images and steps, read some rows at a time."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.agents import REWARDS, agents_key
from gym_trace.data.episode import Episode
from gym_trace.data.layout import Branch, Layout, Leaf, Path
from gym_trace.data.returns import number_of
from gym_trace.data.showing.pictures import is_picture, picture_of, picture_size, png
from gym_trace.data.showing.text import moment, number
from gym_trace.data.values import Array, Misfit
from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.leaf_rows import LeafRows
from gym_trace.playback.opened import ChunkCache
from gym_trace.playback.trace import Trace
from gym_trace.printable import integer, key_text
from gym_trace.tools.viewer.bins import Bins, CurveStore, binned
from gym_trace.tools.viewer.container import packed
from gym_trace.tools.viewer.microscope import NAMES, annotation, discount_of, returns_to_go
from gym_trace.tools.viewer.names import Names
from gym_trace.tools.viewer.values import MOST_NUMBERS, array_text, to_json

MOST_ITEMS = 64  # items of a column in one answer
_MOST_SAVED_ITEMS = 512
MOST_STEPS, MOST_FRAMES = 1024, 64
MOST_PIXELS = 8192
RENDERED = "render"  # name of the column of rendered images
LONG = 1 << 16  # bins of columns with at least this many rows are cached
_MOST_NUMBERS = 1 << 26  # numbers of a row; larger rows are only described: a space can declare them in a few bytes
_MOST_PLOTTED = 1 << 16  # numbers of a row that is plotted
_SMALLEST_PICTURE = 8  # pixels of its sides; smaller arrays of bytes are plotted
_BLOCK = 4 << 20  # bytes of rows that are decoded at once
_INFO_BYTES = 1024  # size estimate of a row of infos
_MOST_PICTURE_BYTES = 64 << 20  # decoded, in one answer
_SAMPLED = 8  # rows that show which kind of values a column has
_NAME = re.compile(r"[^\W\d]\w*", re.ASCII)
_FLAGS = {"terminated": "terminations", "truncated": "truncations"}
# Computed columns. Parts of rewards are the infos whose names begin with _PART, as those of MuJoCo environments.
_CRITIC, _ADVANTAGE, _PROBABILITY = "value, return to go", "advantage", "probability of the action"
_PARTS, _PART = "parts of the reward", "reward_"
_OPINIONS = "opinions"
Opinions = dict[tuple[str, int, int], dict[str, dict[str, Array]]]  # arrays by key of the episode, and by policy


class Encoding(NamedTuple):
    """A lossless format of pictures, which are uint8 of (H, W) or (H, W, C)."""

    mime: str
    encode: Callable[[Array], bytes]


FAST = Encoding("image/png", partial(png, level=1))


class ViewColumn(NamedTuple):
    """A column of an episode.

    Attributes:
        name: as in --steps-where: observations.position, actions[0].
        group: "observations", "actions", "rewards", "return", "parts", "agent", "opinions", "annotations", "infos" or
            "flags".
        kind: "numeric", "frames" or "text".
        path: path of the stored column; for infos ("infos", key, ...).
        dtype, shape: dtype and shape of one row; dtype is "" if rows are values of any type.
        rows: number of known rows.
    """

    name: str
    group: str
    kind: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    rows: int

    @property
    def items(self) -> int:
        """Number of numbers in a row."""
        return math.prod(self.shape) if self.kind == "numeric" else 0

    @property
    def row_bytes(self) -> int:
        """Approximate bytes of a decoded row."""
        return _INFO_BYTES if not self.dtype else max(1, math.prod(self.shape) * np.dtype(self.dtype).itemsize)

    def plain(self) -> dict[str, Any]:
        size = picture_size(np.dtype(self.dtype), self.shape) if self.kind == "frames" else None
        about = {"name": self.name, "group": self.group, "kind": self.kind, "shape": self.shape, "dtype": self.dtype}
        return {**about, "items": self.items, "rows": self.rows, "frame_shape": size}


class ViewedEpisode:
    """An episode of a trace as it is now; more of it may be recorded later.

    trace: a trace that does not change, such as a copy. index: index of the episode in it. opinions: of policies, also
    about other episodes. Raises IndexError.
    """

    def __init__(
        self, trace: Trace, index: int, cache: ChunkCache, curves: CurveStore, opinions: Opinions | None = None
    ):
        if not 0 <= index < len(trace):
            raise IndexError(f"no episode {index}; the trace has {len(trace)}")
        self.trace, self.index = trace, index
        self.episode: Episode = trace[index]
        self._writer, self._row = index_of(trace).locate(index)
        self._cache, self._curves = cache, curves
        self._opinions = dict((opinions or {}).get(self.key, {}))
        self._columns: dict[str, ViewColumn] | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Identity of the episode, the same after more was recorded."""
        return self._writer.key, self.episode.episode_id, self.episode.first_step

    @property
    def identity(self) -> str:
        """The key as a text for the page. Unlike the number of the episode, it stays the same after an edit."""
        return ":".join(map(str, self.key))

    @property
    def columns(self) -> dict[str, ViewColumn]:
        if self._columns is None:
            self._columns = {column.name: column for column in self._all_columns()}
        return self._columns

    def column(self, name: str, kind: str) -> ViewColumn:
        """Return a column of this kind. Raises LookupError."""
        found = self.columns.get(name)
        if found is None:
            raise LookupError(f"no column {name!r:.200} in this episode")
        if found.kind != kind:
            raise LookupError(f"{name}: is a column of {found.kind}, not {kind}")
        return found

    def plain_columns(self) -> list[dict[str, Any]]:
        """Return the descriptions of the columns, with the names of their numbers and values."""
        names = Names(self.trace.facts, self._writer.about_or_empty)
        plain: list[dict[str, Any]] = []
        for column in self.columns.values():
            is_action = column.group == _OPINIONS and column.path[1] == "actions"
            name, path = ("actions", ("actions",)) if is_action else (column.name, column.path)
            plain.append({**column.plain(), **names.plain(name, path, column.shape)})
        actions = next((one["values"] for one in plain if one["group"] == "actions" and one["values"]), {"count": 0})
        for one, column in zip(plain, self.columns.values()):
            if column.name == _PARTS:
                one |= {"labels": [str(key).removeprefix(_PART) for key in column.path[1:]], "stacked": True}
            elif column.name == _CRITIC:
                one |= {"labels": _CRITIC.split(", "), "note": discount_of(self.trace).note}
            elif column.path[1:2] and column.path[1] in NAMES["probabilities"] and column.items == actions["count"]:
                numbers = [str(actions["start"] + i) for i in range(column.items)]
                one |= {"labels": one["labels"] or actions["names"] or numbers, "stacked": True}
        return plain

    @property
    def fps(self) -> float | None:
        """Steps per second of the environment, as recorded; None if unknown."""
        fps = self._writer.about_or_empty.environment.get("render_fps")
        return float(fps) if isinstance(fps, (int, float)) and 0 < fps < math.inf else None

    @property
    def branch(self) -> dict[str, Any] | None:
        """Writer and id of the episode that this one branched from; None without one."""
        given = self._writer.about_or_empty.branch
        writer, number = given.get("writer"), given.get("episode_id")
        known = isinstance(writer, str) and type(number) is int
        return {"writer": writer, "episode_id": number} if known else None

    def facts(self) -> list[tuple[str, str]]:
        """Return labels and texts that describe the episode."""
        one, about = self.episode, self._writer.about_or_empty
        known = [("writer", one.writer), ("episode_id", str(one.episode_id)), ("split", one.split)]
        if one.first_step:
            known.append(("first_step", f"{one.first_step:,}"))
        if (begun := one.start_time) is not None:
            known.append(("start_time", f"{moment(np.datetime64(begun, 'ns'))} UTC"))
        if one.end_time is not None:
            known.append(("duration", f"{number(float(one._record['duration']) / 1e9)} s"))
        if not one.has_final_observation:
            known.append(("final observation", "not known"))
        try:
            known += [("seed", integer(one.seed))] if one.seed is not None else []
            known += [("options", json.dumps(to_json(one.options)))] if one.options else []
            if (pending := one.pending_action) is not None:
                known.append(("action without an answer", json.dumps(to_json(pending))))
        except CorruptTrace as error:
            known.append(("start", f"unreadable: {error.problem}"))
        return [*known, ("environment", str(about.environment.get("id") or "not known"))]

    def damage(self) -> list[str]:
        """Return the steps whose rewards cannot be read, with the problem, as texts."""
        runs = self._leaf(("rewards",)).parts(0, len(self.episode))
        lost = [(start, count, rows.problem) for start, count, rows in runs if isinstance(rows, CorruptTrace)]
        return [f"steps {start} to {start + count - 1}: {problem}" for start, count, problem in lost]

    # -- columns ------------------------------------------------------------------------------------------------------

    def _expect_samples(self) -> None:
        """Fetch together what _sampled() and _numbers_in_infos() read, from storages where a read is a round trip."""
        if not self._writer.files.storage.ahead:
            return
        paths = [("rewards",), *self._stored("annotations"), *self._stored("infos")]
        ranges = (range(start, start + _SAMPLED) for start in self._samples)
        rows = self._writer.rows_of(piece for steps in ranges for piece in self._writer.pieces(self._row, steps))
        with suppress(CorruptTrace):  # raised again where they are read
            self._writer.expect(rows, frozenset(paths))

    @property
    def _samples(self) -> list[int]:
        """First steps of the samples that show which kind of values a column has."""
        steps = len(self.episode)
        return sorted({0, steps // 2, max(0, steps - _SAMPLED)})

    def _all_columns(self) -> Iterator[ViewColumn]:
        self._expect_samples()
        steps, layouts = len(self.episode), self._writer.layouts
        seen = steps + 1 - (not self.episode.has_final_observation)
        for group, layout, rows in (("observations", layouts.observations, seen), ("actions", layouts.actions, steps)):
            for leaf in layout.leaves():
                kind = _kind_of(leaf)
                dtype = "" if leaf.dtype is None else leaf.dtype.str
                yield ViewColumn(name_of(leaf.path), group, kind, leaf.path, dtype, leaf.shape, rows)
        dtype, shape = self._sampled(("rewards",))
        shape = shape if dtype and 0 < math.prod((1, *shape)) <= _MOST_PLOTTED else ()
        yield ViewColumn("rewards", "rewards", "numeric", ("rewards",), dtype or "<f8", shape, steps)
        yield ViewColumn("return", "return", "numeric", ("rewards",), "<f8", shape, steps)
        if (of_agents := self._rewards_of_agents) is not None:
            yield ViewColumn("returns of agents", "return", "numeric", of_agents.path, "<f8", of_agents.shape, seen)
        yield from self._columns_of_agent(shape, steps)
        for path in self._stored("annotations"):
            dtype, shape = self._sampled(path)
            kind = "numeric" if dtype and 0 < math.prod((1, *shape)) <= _MOST_PLOTTED else "text"
            yield ViewColumn(name_of(path), "annotations", kind, path, dtype, shape if dtype else (), steps)
        if any(self._stored("infos")):
            keys = self._numbers_in_infos()
            if len(parts := [key for key in keys if key.startswith(_PART)]) > 1:
                yield ViewColumn(_PARTS, "parts", "numeric", ("infos", *parts), "", (len(parts),), steps)
            for key in keys:
                yield ViewColumn(name_of(("infos", key)), "infos", "numeric", ("infos", key), "", (), steps)
        for key in dict.fromkeys(key for arrays in self._opinions.values() for key in arrays):
            for label, array in ((label, arrays[key]) for label, arrays in self._opinions.items() if key in arrays):
                name, path, shape = f"{key} of {label}", (_OPINIONS, key, label), array.shape[1:]
                yield ViewColumn(name, _OPINIONS, "numeric", path, array.dtype.str, shape, len(array))
        for name, stored in _FLAGS.items():
            yield ViewColumn(name, "flags", "numeric", (stored,), "|b1", (), steps)

    def _columns_of_agent(self, reward_shape: tuple[int, ...], steps: int) -> Iterator[ViewColumn]:
        """Yield the columns that are computed from the agent's annotations."""
        stored = self._stored("annotations")
        kinds = {path: self._sampled(path) for path in stored}
        one_each = [path for path, (dtype, shape) in kinds.items() if dtype and math.prod(shape) == 1]
        value, logprob = annotation("value", one_each), annotation("logprob", one_each)
        if value is not None and reward_shape == ():
            yield ViewColumn(_CRITIC, "agent", "numeric", value, "<f8", (2,), steps)
            yield ViewColumn(_ADVANTAGE, "agent", "numeric", value, "<f8", (), steps)
        leaves = list(self._writer.layouts.actions.leaves())
        is_discrete = all(leaf.dtype is not None and leaf.dtype.kind in "iub" for leaf in leaves)
        if logprob is not None and is_discrete and annotation("probabilities", stored) is None:
            yield ViewColumn(_PROBABILITY, "agent", "numeric", logprob, "<f8", (), steps)

    @cached_property
    def _critic(self) -> Array:
        """The values, and the returns to go, (2, steps); NaN where unknown."""
        reward, value = self.columns["rewards"], self.columns[_ADVANTAGE]
        steps = len(self.episode)
        rewards = self._numbers(reward, 0, steps)[0][:, 0].astype(np.float64)
        values = self._numbers(self._annotated(value), 0, steps)[0][:, 0].astype(np.float64)
        terminated = np.array([self.episode.outcome == "terminated"])
        gamma = discount_of(self.trace).gamma
        return np.stack([values, returns_to_go(rewards, values, np.array([steps]), terminated, gamma)])

    def _annotated(self, computed: ViewColumn) -> ViewColumn:
        """Return the annotation that a column is computed from."""
        return self.columns[name_of(computed.path)]

    def _of_agent(self, column: ViewColumn, start: int, stop: int, items: slice) -> tuple[Array, Array | None]:
        if column.name == _PROBABILITY:
            logs, missing = self._numbers(self._annotated(column), start, stop)
            return np.exp(logs), missing
        value, to_go = self._critic[:, start:stop]
        rows = np.stack([value, to_go] if column.name == _CRITIC else [to_go - value], axis=1)[:, items]
        return rows, np.isnan(rows)

    @property
    def _rewards_of_agents(self) -> Leaf | None:
        """Return the column of the agents' rewards, one number each; None in an episode of one agent."""
        key = agents_key(self._writer.about_or_empty.agents.get("names") or ())
        path = ("observations", key, REWARDS)
        return next((leaf for leaf in self._writer.layouts.observations.leaves() if leaf.path == path), None)

    def _stored(self, root: str) -> list[Path]:
        return list(dict.fromkeys(p for batch in self._writer.read_batches for p in batch.totals if p[0] == root))

    def _leaf(self, path: Path) -> LeafRows:
        return LeafRows(self._writer, self._row, path, self._cache)

    def _sampled(self, path: Path) -> tuple[str, tuple[int, ...]]:
        """Return dtype and shape of the numbers in a column of undeclared type; dtype "" if it has other values."""
        for start in self._samples:
            for _, _, rows in self._leaf(path).parts(start, start + _SAMPLED):
                if isinstance(rows, CorruptTrace):
                    continue
                if rows.dtype != object:
                    return (rows.dtype.str, rows.shape[1:]) if rows.dtype.kind in "biuf" else ("", ())
                known = [np.asarray(row) for row in rows if row is not None and not isinstance(row, (str, dict, list))]
                if known:
                    return ("<f8", known[0].shape) if known[0].dtype.kind in "biuf" else ("", ())
        return "", ()

    def _numbers_in_infos(self) -> list[str]:
        """Return the keys of infos that hold one number each, in the first and the last steps."""
        keys: dict[str, None] = {}
        for start in sorted({self._samples[0], self._samples[-1]}):
            for _, _, rows in self._leaf(("infos",)).parts(start, start + _SAMPLED):
                for info in () if isinstance(rows, CorruptTrace) else rows:
                    for key, value in info.items() if isinstance(info, dict) else ():
                        if isinstance(key, str) and len(keys) < MOST_ITEMS and not math.isnan(number_of(value)):
                            keys[key] = None
        return list(keys)

    # -- curves -------------------------------------------------------------------------------------------------------

    def plot(self, name: str, begin: int, end: int, pixels: int, items: slice | None = None) -> bytes:
        """Return rows begin to end of a column of numbers: each row, or the min and max of bins of rows.

        Bins are at most as wide as a pixel; their width is a power of two of rows, and they begin at multiples of it.

        Raises LookupError, InvalidOption.
        """
        column = self.column(name, "numeric")
        return self._plot(column, begin, end, pixels, self._items(column, items, end - begin))

    def _plot(self, column: ViewColumn, begin: int, end: int, pixels: int, chosen: slice) -> bytes:
        begin, end = max(0, begin), min(end, column.rows)
        head: dict[str, Any] = {"rows": column.rows, "decimated": False, "bin": 1}
        if column.name == _ADVANTAGE and column.rows < LONG and np.isfinite(self._critic).all(axis=0).any():
            head["peak"] = int(np.nanargmax(np.abs(self._critic[1] - self._critic[0])))
        if end - begin <= 2 * pixels:
            values, missing = self._numbers(column, begin, end, chosen)
            bins = binned(values, missing, 1)
            x = np.arange(begin, begin + len(values), dtype=np.int32)
            return packed(head | _oddities(bins), [("x", x), ("y", values.T), ("odd", _is_odd(bins))])
        width = 1 << int(math.log2((end - begin) / pixels))
        start, end = begin // width * width, min(-(-end // width) * width, column.rows)
        bins = self._bins(column, start, end, width).of_items(chosen)
        head |= {"decimated": True, "bin": width, **_oddities(bins)}
        x = np.arange(start, start + len(bins) * width, width, dtype=np.int32)
        return packed(head, [("x", x), ("low", bins.low.T), ("high", bins.high.T), ("odd", _is_odd(bins))])

    def whole(self, name: str) -> bytes:
        """Return all rows of a column of numbers, as plot() does. Raises LookupError."""
        column = self.column(name, "numeric")
        items = min(column.items, _MOST_SAVED_ITEMS)
        return self._plot(column, 0, column.rows, max(1, column.rows), slice(0, items))

    def _items(self, column: ViewColumn, items: slice | None, rows: int) -> slice:
        most = MOST_ITEMS if rows > MOST_FRAMES else _MOST_PLOTTED  # few rows are shown as pictures
        chosen = items or slice(0, min(MOST_ITEMS, column.items))
        if not 0 <= chosen.start <= chosen.stop or chosen.stop - chosen.start > most:
            raise InvalidOption(f"items: pass up to {most} items, such as 0:16")
        return chosen

    def _bins(self, column: ViewColumn, start: int, end: int, width: int) -> Bins:
        cached = self._cached_column(column)
        base = self._curves.base(cached.rows, cached.items)
        if column.rows >= LONG and width >= base:
            key = *self.key, cached.name
            all_bins = self._curves.bins(key, cached.rows, base, lambda a, b: self._read(cached, a, b, base))
            bins = all_bins.cut(start // base, -(-end // base)).merged(width // base)
            if cached is column:
                return bins
            item = self._info_keys.index(str(column.path[1]))
            return bins.of_items(slice(item, item + 1))
        narrow = min(width, self._block(column))
        return self._read(column, start, end, narrow).merged(width // narrow)

    def _cached_column(self, column: ViewColumn) -> ViewColumn:
        """Return the column whose bins are cached: for an info, all numbers of infos, which are decoded together."""
        if column.group != "infos":
            return column
        return column._replace(name="infos", path=("infos",), shape=(len(self._info_keys),))

    @property
    def _info_keys(self) -> list[str]:
        return [str(column.path[1]) for column in self.columns.values() if column.group == "infos"]

    def _block(self, column: ViewColumn) -> int:
        """Return the number of rows to read at once, a power of two."""
        return 1 << int(math.log2(max(1, _BLOCK // column.row_bytes)))

    def _read(self, column: ViewColumn, start: int, end: int, width: int) -> Bins:
        """Return bins of rows; start is a multiple of their width."""
        block = max(width, self._block(column))
        blocks = range(start, end, block)
        return Bins.joined([binned(*self._numbers(column, at, min(at + block, end)), width) for at in blocks])

    def _numbers(
        self, column: ViewColumn, start: int, stop: int, items: slice = slice(None)
    ) -> tuple[Array, Array | None]:
        """Return rows of a column as numbers, (rows, items), and a mask of missing ones; None: none is missing.

        A value is missing, and NaN, if it cannot be read, was not recorded or is not a number.
        """
        if column.group == "return":
            rewards, unknown = self._numbers(column._replace(group="rewards"), 0, stop, items)
            sums = np.cumsum(rewards.astype(np.float64), axis=0)[start:]
            return sums, None if unknown is None else np.logical_or.accumulate(unknown, axis=0)[start:]
        if column.group == _OPINIONS:
            opinion = self._opinions[str(column.path[2])][str(column.path[1])]
            return opinion.reshape(len(opinion), -1)[start:stop, items].astype(_plotted(opinion.dtype)), None
        if column.group == "agent":
            return self._of_agent(column, start, stop, items)
        path = column.path[:1] if column.path[0] == "infos" else column.path
        count_of = len(range(column.items)[items])
        parts = [np.empty((0, count_of), _plotted(np.dtype(column.dtype or "<f8")))]
        missing = [np.zeros((0, count_of), bool)]
        for _, count, rows in self._leaf(path).parts(start, min(stop, column.rows)):
            if isinstance(rows, CorruptTrace):
                parts.append(np.full((count, count_of), np.nan, np.float32))
                missing.append(np.ones((count, count_of), bool))
            elif column.path[0] == "infos":
                keys = list(map(str, column.path[1:])) or self._info_keys
                given = [[info.get(key) for key in keys] for info in map(_as_info, rows)]
                values = [[number_of(value) for value in row] for row in given]
                parts.append(np.array(values, np.float64).reshape(count, len(keys))[:, items])
                is_there = [[_is_number(value) for value in row] for row in given]
                missing.append(~np.array(is_there, bool).reshape(count, len(keys))[:, items])
            else:
                some, lost = _as_numbers(rows, column.shape, items)
                parts.append(some)
                missing.append(lost)
        lost = np.concatenate(missing)
        return np.concatenate(parts), lost if lost.any() else None

    # -- pictures -----------------------------------------------------------------------------------------------------

    def frames(self, name: str, start: int, count: int, scale: int = 1, encoding: Encoding = FAST) -> bytes:
        """Return lossless images by row, without rows that cannot be read.

        scale: return only every n-th pixel. Raises LookupError.
        """
        column = self.column(name, "frames")
        count = max(1, min(count, MOST_FRAMES, _MOST_PICTURE_BYTES // column.row_bytes))
        found = []
        for first, _, rows in self._leaf(column.path).parts(start, min(start + count, column.rows)):
            for row, picture in enumerate(() if isinstance(rows, CorruptTrace) else rows, first):
                if isinstance(picture, np.ndarray) and is_picture(picture.dtype, picture.shape):
                    found.append((str(row), encoding.encode(picture_of(picture)[::scale, ::scale])))
        return packed({"mime": encoding.mime, "rows": column.rows}, found)

    # -- steps --------------------------------------------------------------------------------------------------------

    def steps(self, start: int, count: int) -> dict[str, Any]:
        """Return positions of the episode as JSON: observation, action, and the results of the action."""
        steps, layouts = len(self.episode), self._writer.layouts
        start = max(0, start)
        stop = min(start + min(count, MOST_STEPS), steps + 1)
        positions: list[dict[str, Any]] = [{"step": self.episode.first_step + p} for p in range(start, stop)]
        last_known = steps - (not self.episode.has_final_observation)
        seen = self._rows_as_json(layouts.observations, start, min(stop, last_known + 1))
        for position in range(start, stop):
            positions[position - start]["observation"] = seen[position - start] if position <= last_known else None
        done = positions[: max(0, min(stop, steps) - start)]
        end = start + len(done)
        columns = {
            "action": self._rows_as_json(layouts.actions, start, end),
            "reward": self._as_json(("rewards",), start, end),
        }
        columns |= {name: self._as_json((stored,), start, end) for name, stored in _FLAGS.items()}
        if any(self._stored("infos")):
            columns["infos"] = self._as_json(("infos",), start, end)
        notes = {str(path[1]): self._as_json(path, start, end) for path in self._stored("annotations")}
        for i, one in enumerate(done):
            one |= {name: values[i] for name, values in columns.items()}
            if notes:
                one["annotations"] = {name: values[i] for name, values in notes.items()}
        if not start and positions and not self.episode.first_step:
            with suppress(CorruptTrace):
                info = self.episode.reset_info
                positions[0] |= {} if info is None else {"reset_info": to_json(info)}
        return {"steps": positions}

    def _rows_as_json(self, layout: Layout, start: int, stop: int) -> list[Any]:
        """Return rows of a space as JSON."""
        leaves = list(layout.leaves())
        columns = [self._as_json(leaf.path, start, stop, leaf) for leaf in leaves]
        if isinstance(layout, Leaf):
            return columns[0]
        rows = zip(*columns) if columns else [()] * max(0, stop - start)
        return [_named(layout, iter(row)) for row in rows]

    def _as_json(self, path: Path, start: int, stop: int, leaf: Leaf | None = None) -> list[Any]:
        """Return rows of a column as JSON. Large arrays are not read."""
        if leaf is not None and leaf.dtype is not None and math.prod(leaf.shape) > MOST_NUMBERS:
            return [array_text(leaf.dtype, leaf.shape)] * max(0, stop - start)
        found: list[Any] = []
        for _, count, rows in self._leaf(path).parts(start, stop):
            found += [f"unreadable: {rows.problem}"] * count if isinstance(rows, CorruptTrace) else map(to_json, rows)
        return found


class Difference(ViewedEpisode):
    """An episode minus another one: its numbers, at each position that both have."""

    def __init__(self, one: ViewedEpisode, other: ViewedEpisode):
        self._one, self._other = one, other
        super().__init__(one.trace, one.index, one._cache, one._curves)
        self._opinions = one._opinions

    @property
    def key(self) -> tuple[Any, ...]:
        return *super().key, *self._other.key

    def column(self, name: str, kind: str) -> ViewColumn:
        column, other = super().column(name, kind), self._other.column(name, kind)
        if column.shape != other.shape:
            raise LookupError(f"{name}: has shape {column.shape} here and {other.shape} in the other episode")
        return column._replace(rows=min(column.rows, other.rows))

    def _cached_column(self, column: ViewColumn) -> ViewColumn:
        return column

    def _numbers(
        self, column: ViewColumn, start: int, stop: int, items: slice = slice(None)
    ) -> tuple[Array, Array | None]:
        given = [of._numbers(of.columns[column.name], start, stop, items) for of in (self._one, self._other)]
        one, other = (values.astype(np.float64) for values, _ in given)
        missing = [mask for _, mask in given if mask is not None]
        with np.errstate(invalid="ignore"):  # infinity less infinity is NaN
            return one - other, np.logical_or.reduce(missing) if missing else None


def _as_info(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def name_of(path: Path) -> str:
    """Return the name of a column in conditions: observations.position, infos["a key"], actions[0]."""
    parts = [str(path[0])]
    for key in path[1:]:
        if isinstance(key, int):
            parts.append(f"[{key}]")
        else:
            parts.append(f".{key}" if _NAME.fullmatch(key) else f"[{json.dumps(key)}]")
    return "".join(parts)


def _kind_of(leaf: Leaf) -> str:
    if leaf.dtype is None or leaf.dtype.kind not in "biuf" or not 0 < math.prod(leaf.shape) <= _MOST_NUMBERS:
        return "text"
    size = picture_size(leaf.dtype, leaf.shape)
    if size is None or min(size) < _SMALLEST_PICTURE:
        return "numeric" if math.prod(leaf.shape) <= _MOST_PLOTTED else "text"
    return "frames"


def _plotted(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a curve, which JavaScript reads without loss of range."""
    if dtype.kind == "b":
        return np.dtype(np.uint8)
    if dtype.kind == "f":
        return np.dtype(np.float32 if dtype.itemsize <= 4 else np.float64)
    return dtype if dtype.itemsize <= 4 else np.dtype(np.float64)


def _as_numbers(rows: Array, shape: tuple[int, ...], chosen: slice) -> tuple[Array, Array]:
    """Return numbers, (rows, chosen items), and a mask of missing ones: NaN for rows without numbers of this shape."""
    items = math.prod(shape)
    count_of = len(range(items)[chosen])
    if rows.dtype != object and rows.shape[1:] == shape and rows.dtype.kind in "biuf":
        values = rows.reshape(len(rows), items)[:, chosen].astype(_plotted(rows.dtype))
        return values, np.zeros((len(rows), count_of), bool)
    found, missing = np.full((len(rows), count_of), np.nan), np.ones((len(rows), count_of), bool)
    for i, row in enumerate(rows):
        if row is None or isinstance(row, (str, bytes, dict, Misfit)):
            continue
        if not shape:
            found[i], missing[i] = number_of(row), not _is_number(row)
        elif isinstance(row, np.ndarray) and row.shape == shape and row.dtype.kind in "biuf":
            found[i], missing[i] = row.ravel()[chosen], False
    return found, missing


def _is_number(value: Any) -> bool:
    """Return True for a value that number_of() converts to a number, which may be NaN."""
    if isinstance(value, np.ndarray):
        return value.shape == () and value.dtype.kind in "biuf"
    return isinstance(value, (float, np.floating)) or not math.isnan(number_of(value))


def _oddities(bins: Bins) -> dict[str, int]:
    """Return the numbers of values that are NaN, infinite or missing."""
    return {name: int(getattr(bins, name).sum()) for name in ("nan", "infinite", "missing")}


def _is_odd(bins: Bins) -> Array:
    """Return 1 for bins with NaN or infinite values."""
    return np.asarray(((bins.nan > 0) | (bins.infinite > 0)).any(axis=1), np.uint8)


def _named(layout: Layout, values: Iterator[Any]) -> Any:
    """Return one value per leaf in the structure of a space, with keys as text."""
    if not isinstance(layout, Branch):
        return next(values)
    parts = {key_text(key): _named(child, values) for key, child in layout.parts()}
    return list(parts.values()) if layout.keys is None else parts
