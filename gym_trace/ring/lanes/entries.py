"""Events of lanes as log entries: everything that is not in the columns, as MessagePack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gym_trace.errors import CorruptTrace
from gym_trace.model.layout import Leaf
from gym_trace.model.packing import pack, unpack
from gym_trace.model.values import Array
from gym_trace.ring.lanes.events import LANE, LaneState, Observed, Reset, Step
from gym_trace.ring.lanes.layout import LaneLayout
from gym_trace.ring.segment import Rows

NOTHING = pack({})  # an empty row of the column "starts"
_START = b"\x81" + pack("reset_info")

OddRows = dict[int, Rows]  # rows that do not fit the columns, by the number of their leaf


def start_with_info(info: bytes) -> bytes:
    """Return a row of the column "starts" with only the packed info of a reset."""
    return _START + pack(info)


# -- packing ----------------------------------------------------------------------------------------------------------


def packed_rows(odd: OddRows) -> bytes:
    """Pack rows that do not fit the columns."""
    return pack(odd)


def packed_step(step: Step, observations: OddRows, rewards: Rows | None) -> bytes:
    """Pack the parts of a step that are not in the columns; empty if the columns hold everything.

    Args:
        observations: observations that do not fit the columns.
        rewards: rewards, if they do not fit the column.
    """
    is_plain = not observations and rewards is None and step.finals is None and step.infos is None
    if is_plain and not step.notes and step.ids is None:
        return b""
    given: dict[str, Any] = {}
    if observations:
        given["observations"] = observations
    if rewards is not None:
        given["rewards"] = rewards
    if step.finals is not None:
        given["finals"] = list(step.finals)
    if step.infos is not None:
        given["infos"] = step.infos
        if step.reset_infos is not None and step.reset_infos is not step.infos:
            pairs = zip(step.infos, step.reset_infos)
            given["reset_infos"] = {lane: other for lane, (info, other) in enumerate(pairs) if other is not info}
    if step.notes:
        given["annotations"] = step.notes
    if step.ids is not None and step.kept is not None:
        begun = np.flatnonzero(step.ids >= 0)
        given["kept"], given["begun"] = step.kept, [begun, step.ids[begun]]
    return pack(given)


def packed_reset(reset: Reset, count: int) -> bytes:
    """Pack a reset. count: number of lanes."""
    given: dict[str, Any] = {"observations": reset.observations, "seeds": reset.seeds}
    if len(reset.lanes) != count:
        given["lanes"] = reset.lanes
    if any(start != NOTHING for start in reset.starts):
        given["starts"] = reset.starts
    if reset.ids is not None:
        given["ids"] = reset.ids
    return pack(given)


def packed_state(state: LaneState, with_observations: bool) -> bytes:
    """Pack the state of the lanes. with_observations: later steps may start a run with the last observation."""
    deferred = np.flatnonzero(state.lanes["deferred"])
    given: dict[str, Any] = {"lanes": state.lanes.tobytes(), "episodes": state.episodes}
    if len(deferred):
        given["starts"] = state.starts[deferred].tolist()
    if state.recent and (with_observations or len(deferred)):
        given["observations"] = state.observed(np.arange(len(state.lanes)))
    return pack(given)


# -- unpacking --------------------------------------------------------------------------------------------------------


def unpacked_rows(payload: bytes | memoryview, count: int) -> OddRows:
    """Unpack rows that do not fit the columns. count: number of lanes. Raises CorruptTrace."""
    if not len(payload):
        return {}
    odd = unpack(payload)
    _demand(isinstance(odd, dict))
    return {int(leaf): _rows(rows, count) for leaf, rows in odd.items()}


class UnpackedStep:
    """The parts of a step that are not in the columns. Raises CorruptTrace.

    Attributes: as in Step; observations and rewards are only those that do not fit the columns.
    """

    def __init__(self, payload: bytes | memoryview, layout: LaneLayout):
        given, count = unpack(payload), layout.lanes
        _demand(isinstance(given, dict))
        self.observations: OddRows = {
            int(leaf): _rows(rows, count) for leaf, rows in given.get("observations", {}).items()
        }
        self.rewards = _rows(given["rewards"], count) if "rewards" in given else None
        self.finals: tuple[Array, list[Rows]] | None = None
        if "finals" in given:
            lanes, rows = given["finals"]
            self.finals = (_lanes(lanes, count), _all_rows(rows, len(lanes), layout.observation_leaves))
        self.infos: list[bytes] | None = None
        self.reset_infos: list[bytes] | None = None
        if "infos" in given:
            self.infos = self.reset_infos = _values(given["infos"], count)
            if "reset_infos" in given:
                self.reset_infos = list(self.infos)
                for lane, info in given["reset_infos"].items():
                    self.reset_infos[_number(lane, count)] = bytes(info)
        self.notes = {str(name): _rows(rows, count) for name, rows in given.get("annotations", {}).items()}
        self.ids: Array | None = None
        self.kept: Array | None = None
        if "kept" in given:
            self.kept, self.ids = _typed(given["kept"], "|b1", count), np.full(count, -1)
            begun, ids = given["begun"]
            self.ids[_lanes(begun, count)] = _typed(ids, "<i8", len(begun))


def unpacked_reset(payload: bytes | memoryview, layout: LaneLayout, utc: int, monotonic: int) -> Reset:
    """Unpack a reset. Raises CorruptTrace."""
    given = unpack(payload)
    lanes = _lanes(given["lanes"], layout.lanes) if "lanes" in given else np.arange(layout.lanes)
    return Reset(
        lanes,
        _all_rows(given["observations"], len(lanes), layout.observation_leaves),
        _typed(given["seeds"], "<i8", len(lanes)),
        _values(given["starts"], len(lanes)) if "starts" in given else [NOTHING] * len(lanes),
        _typed(given["ids"], "<i8", len(lanes)) if "ids" in given else None,
        utc,
        monotonic,
    )


def unpacked_state(payload: bytes | memoryview, layout: LaneLayout) -> LaneState:
    """Unpack the state of the lanes. Raises CorruptTrace."""
    given, count = unpack(payload), layout.lanes
    _demand(len(given["lanes"]) == count * LANE.itemsize)
    lanes = np.frombuffer(given["lanes"], LANE).copy()
    for name in ("open", "pending", "skipped", "running", "deferred"):
        lanes[name] = lanes[name].view(np.uint8) != 0
    starts = np.full(count, NOTHING, object)
    deferred = np.flatnonzero(lanes["deferred"])
    if len(deferred):
        starts[deferred] = _values(given["starts"], len(deferred))
    recent: tuple[Observed, ...] = ()
    if "observations" in given:
        recent = (Observed(np.arange(count), _all_rows(given["observations"], count, layout.observation_leaves)),)
    _demand(type(given["episodes"]) is int and 0 <= given["episodes"] < 1 << 62)
    return LaneState(lanes, starts, given["episodes"], recent)


def _demand(holds: bool) -> None:
    if not holds:
        raise CorruptTrace("malformed ring log entry")


def _number(lane: object, count: int) -> int:
    _demand(type(lane) is int and 0 <= lane < count)
    return int(lane)  # type: ignore[call-overload, no-any-return]


def _typed(values: object, dtype: str, count: int) -> Array:
    _demand(isinstance(values, np.ndarray) and values.dtype == dtype and values.shape == (count,))
    return values  # type: ignore[return-value]


def _lanes(lanes: Any, count: int) -> Array:
    """Check that lanes are valid, ascending and unique."""
    lanes = _typed(lanes, "<i8", len(lanes))
    _demand(not len(lanes) or (lanes[0] >= 0 and lanes[-1] < count and bool((lanes[1:] > lanes[:-1]).all())))
    return np.asarray(lanes)


def _values(values: Any, count: int) -> list[bytes]:
    _demand(isinstance(values, list) and len(values) == count and all(type(value) is bytes for value in values))
    return list(values)


def _rows(rows: Any, count: int) -> Rows:
    if isinstance(rows, np.ndarray):
        _demand(type(rows) is np.ndarray and rows.dtype.kind in "biufc" and rows.shape[:1] == (count,))
        return rows
    return _values(rows, count)


def _all_rows(rows: Any, count: int, leaves: Sequence[Leaf]) -> list[Rows]:
    _demand(isinstance(rows, list) and len(rows) == len(leaves))
    return [_rows(column, count) for column in rows]
