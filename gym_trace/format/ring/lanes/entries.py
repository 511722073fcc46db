"""Pack and unpack the entries in the log of a slab of lanes (docs/FORMAT.md, section 8).

Payloads are MessagePack. Malformed ones raise CorruptTrace, LookupError, TypeError, ValueError or AttributeError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.layout import Leaf
from gym_trace.data.packing import pack, unpack
from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace
from gym_trace.format.ring.chunk_builder import joined_rows
from gym_trace.format.ring.lanes.layout import LaneLayout
from gym_trace.format.ring.segment import ColumnRows

NOTHING = pack({})  # an empty row of the column "starts"
_START = b"\x81" + pack("reset_info")

OddRows = Mapping[int, ColumnRows]  # rows that do not fit their column, by the number of the leaf

# The state of a lane.
LANE = np.dtype(
    [
        ("open", "?"),  # an episode is open
        ("pending", "?"),  # the next step is a reset
        ("skipped", "?"),  # the episode is not recorded
        ("running", "?"),  # the next kept step continues the current run of steps
        ("reserved", "?"),
        ("episode", "<i8"),
        ("steps", "<i8"),  # steps of the episode so far, including skipped ones
        ("utc", "<i8"),  # start of the episode
        ("monotonic", "<i8"),
        ("seed", "<i8"),  # as in the fragment table
    ]
)


def start_with_info(info: bytes) -> bytes:
    """Return a row of the column "starts" with only the packed info of a reset."""
    return _START + pack(info)


def rows_at(rows: ColumnRows, indices: Array) -> ColumnRows:
    """Return the rows at these indices."""
    return rows.take(indices, axis=0) if isinstance(rows, np.ndarray) else [rows[i] for i in indices.tolist()]


class End(NamedTuple):
    """The end of all open episodes."""

    outcome: int | None  # None: a step or reset raised, and the state of the lanes is unknown
    utc: int
    monotonic: int


class Reset(NamedTuple):
    """A reset of some or all lanes. Arrays and lists have one entry per reset lane."""

    lanes: Array
    observations: list[ColumnRows]  # one entry per leaf
    seeds: Array  # as in the fragment table
    starts: list[bytes]  # rows of the column "starts"
    ids: Array | None  # with filters: episode ids; -1: not recorded
    utc: int
    monotonic: int

    def packed(self, count: int) -> bytes:
        """Pack the reset. count: number of all lanes."""
        parts: dict[str, Any] = {"observations": self.observations, "seeds": self.seeds}
        if len(self.lanes) != count:
            parts["lanes"] = self.lanes
        if any(start != NOTHING for start in self.starts):
            parts["starts"] = self.starts
        if self.ids is not None:
            parts["ids"] = self.ids
        return pack(parts)

    @classmethod
    def unpacked(cls, payload: bytes | memoryview, layout: LaneLayout, utc: int, monotonic: int) -> Reset:
        parts = unpack(payload)
        lanes = _lanes(parts["lanes"], layout.lanes) if "lanes" in parts else np.arange(layout.lanes)
        return cls(
            lanes,
            _all_rows(parts["observations"], len(lanes), layout.observation_leaves),
            _typed(parts["seeds"], "<i8", len(lanes)),
            _values(parts["starts"], len(lanes)) if "starts" in parts else [NOTHING] * len(lanes),
            _typed(parts["ids"], "<i8", len(lanes)) if "ids" in parts else None,
            utc,
            monotonic,
        )


class StepExtras(NamedTuple):
    """The data of a step of all lanes that is not in the columns."""

    observations: OddRows = MappingProxyType({})  # rows that do not fit the columns
    rewards: ColumnRows | None = None  # if they do not fit the column
    finals: tuple[Array, list[ColumnRows]] | None = None  # lanes reset in this step, and their last observations
    infos: list[bytes] | None = None  # infos of the steps, one per lane
    reset_infos: list[bytes] | None = None  # infos of the resets, one per lane
    annotations: Mapping[str, ColumnRows] = MappingProxyType({})  # annotations
    ids: Array | None = None  # with filters: id of the starting episode of each lane, or -1
    keep_mask: Array | None = None  # with filters: True for lanes whose step is kept

    def packed(self) -> bytes:
        """Pack the extras; return b"" without any."""
        parts: dict[str, Any] = {}
        if self.observations:
            parts["observations"] = dict(self.observations)
        if self.rewards is not None:
            parts["rewards"] = self.rewards
        if self.finals is not None:
            parts["finals"] = list(self.finals)
        if self.infos is not None:
            parts["infos"] = self.infos
            if self.reset_infos is not None and self.reset_infos is not self.infos:
                pairs = zip(self.infos, self.reset_infos)
                parts["reset_infos"] = {lane: other for lane, (info, other) in enumerate(pairs) if other is not info}
        if self.annotations:
            parts["annotations"] = dict(self.annotations)
        if self.ids is not None and self.keep_mask is not None:
            begun = np.flatnonzero(self.ids >= 0)
            parts["kept"], parts["begun"] = self.keep_mask, [begun, self.ids[begun]]
        return pack(parts) if parts else b""

    @classmethod
    def unpacked(cls, payload: bytes | memoryview, layout: LaneLayout) -> StepExtras:
        parts, count = unpack(payload), layout.lanes
        _demand(isinstance(parts, dict))
        finals = infos = reset_infos = ids = keep_mask = None
        if "finals" in parts:
            lanes, rows = parts["finals"]
            finals = _lanes(lanes, count), _all_rows(rows, len(lanes), layout.observation_leaves)
        if "infos" in parts:
            infos = reset_infos = _values(parts["infos"], count)
            if "reset_infos" in parts:
                reset_infos = list(infos)
                for lane, info in parts["reset_infos"].items():
                    reset_infos[_number(lane, count)] = bytes(info)
        if "kept" in parts:
            keep_mask, ids = _typed(parts["kept"], "|b1", count), np.full(count, -1)
            begun, episodes = parts["begun"]
            ids[_lanes(begun, count)] = _typed(episodes, "<i8", len(begun))
        return cls(
            _odd_rows(parts.get("observations", {}), count, layout.observation_leaves),
            _rows(parts["rewards"], count) if "rewards" in parts else None,
            finals,
            infos,
            reset_infos,
            {str(name): _rows(rows, count) for name, rows in parts.get("annotations", {}).items()},
            ids,
            keep_mask,
        )


NO_EXTRAS = StepExtras()


def packed_actions(odd: OddRows) -> bytes:
    """Pack actions that do not fit the columns."""
    return pack(odd) if odd else b""


def unpacked_actions(payload: bytes | memoryview, layout: LaneLayout) -> OddRows:
    return _odd_rows(unpack(payload), layout.lanes, layout.action_leaves) if len(payload) else {}


class Observed(NamedTuple):
    """The last observations of some lanes."""

    lanes: Array
    observations: list[ColumnRows]  # one entry per leaf, with one row per lane in lanes


class LaneState(NamedTuple):
    """State of the lanes between two events."""

    lanes: Array  # dtype LANE
    episodes: int  # episodes started so far
    recent: tuple[Observed, ...]  # last observations: of all lanes, then of lanes that were reset since

    @classmethod
    def initial(cls, count: int) -> LaneState:
        """Return the initial state, with all lanes unknown."""
        return cls(np.zeros(count, LANE), 0, ())

    def observed(self, lanes: Array) -> list[ColumnRows]:
        """Return the last observations of lanes."""
        positions, total = np.zeros(len(self.lanes), np.int64), 0
        for own, _ in self.recent:
            positions[own] = total + np.arange(len(own))
            total += len(own)
        columns = zip(*[observations for _, observations in self.recent])
        return [rows_at(joined_rows(column) if len(column) > 1 else column[0], positions[lanes]) for column in columns]

    def packed(self, with_observations: bool) -> bytes:
        """Pack the state. with_observations: later steps may start a run with the last observation."""
        parts: dict[str, Any] = {"lanes": self.lanes.tobytes(), "episodes": self.episodes}
        if self.recent and with_observations:
            parts["observations"] = self.observed(np.arange(len(self.lanes)))
        return pack(parts)

    @classmethod
    def unpacked(cls, payload: bytes | memoryview, layout: LaneLayout) -> LaneState:
        parts, count = unpack(payload), layout.lanes
        _demand(len(parts["lanes"]) == count * LANE.itemsize)
        lanes = np.frombuffer(parts["lanes"], LANE).copy()
        for name in ("open", "pending", "skipped", "running"):
            lanes[name] = lanes[name].view(np.uint8) != 0
        recent: tuple[Observed, ...] = ()
        if "observations" in parts:
            recent = (Observed(np.arange(count), _all_rows(parts["observations"], count, layout.observation_leaves)),)
        _demand(type(parts["episodes"]) is int and 0 <= parts["episodes"] < 1 << 62)
        return cls(lanes, parts["episodes"], recent)


# -- checks of unpacked values -----------------------------------------------------------------------------------------


def _malformed() -> CorruptTrace:
    return CorruptTrace("malformed ring log entry")


def _demand(holds: bool) -> None:
    if not holds:
        raise _malformed()


def _number(number: object, count: int) -> int:
    if type(number) is not int or not 0 <= number < count:
        raise _malformed()
    return number


def _typed(values: object, dtype: str, count: int) -> Array:
    if not (isinstance(values, np.ndarray) and values.dtype == dtype and values.shape == (count,)):
        raise _malformed()
    return values


def _lanes(lanes: Any, count: int) -> Array:
    """Check that lanes are valid, ascending and unique."""
    lanes = _typed(lanes, "<i8", len(lanes))
    _demand(not len(lanes) or (lanes[0] >= 0 and lanes[-1] < count and bool((lanes[1:] > lanes[:-1]).all())))
    return np.asarray(lanes)


def _values(values: Any, count: int) -> list[bytes]:
    _demand(isinstance(values, list) and len(values) == count and all(type(value) is bytes for value in values))
    return list(values)


def _rows(rows: Any, count: int) -> ColumnRows:
    if isinstance(rows, np.ndarray):
        _demand(type(rows) is np.ndarray and rows.dtype.kind in "biufc" and rows.shape[:1] == (count,))
        return rows
    return _values(rows, count)


def _all_rows(rows: Any, count: int, leaves: Sequence[Leaf]) -> list[ColumnRows]:
    _demand(isinstance(rows, list) and len(rows) == len(leaves))
    return [_rows(column, count) for column in rows]


def _odd_rows(odd: Any, count: int, leaves: Sequence[Leaf]) -> OddRows:
    _demand(isinstance(odd, dict))
    return {_number(leaf, len(leaves)): _rows(rows, count) for leaf, rows in odd.items()}
