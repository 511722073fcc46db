"""Build the table of episodes of a writer from its fragments."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from gym_trace.data.showing.html import table as html_table
from gym_trace.data.showing.text import aligned, count, moment, number, seed_of
from gym_trace.data.values import Array
from gym_trace.data.vocabulary import OUTCOMES, Outcome
from gym_trace.format import wire
from gym_trace.format.fragments import Fragments, RowIndex
from gym_trace.format.kernels import ranges
from gym_trace.format.ring.pending import Pending

EPISODE = np.dtype(
    [
        ("index", "<i8"),
        ("episode_id", "<i8"),
        ("writer", "<u4"),
        ("lane", "<u4"),
        ("first_step", "<i8"),
        ("steps", "<i8"),
        ("return", "<f8"),
        ("outcome", "<U10"),
        ("seed", "<i8"),
        ("start_time", "<M8[ns]"),
        ("end_time", "<M8[ns]"),
        ("clock_offset", "<i8"),
        ("duration", "<i8"),
        ("has_final_observation", "|b1"),
    ]
)

_EPISODE_WITH_INTEGERS = np.dtype([(it[0], it[1].replace("<M8[ns]", "<i8")) for it in EPISODE.descr])
_HEADINGS = ("index", "steps", "return", "outcome", "seed", "start_time (UTC)")
_SHOWN = 5  # episodes shown from the begin, and from the end
_OUTCOMES = np.array(OUTCOMES, "<U10")
_BEGINNINGS = np.array(OUTCOMES, "<U2").view(np.uint64)  # the first two letters distinguish all outcomes
_ALL = slice(None)
_NAT = np.iinfo(np.int64).min  # NaT, as an integer
OUTCOME_CODE = "outcome_code"  # name of a computed column: the index of the outcome in OUTCOMES
ROWS_AT_ONCE = 2048
_MOST_GAPS = 4  # ratio of the range of ids to their number, up to which a lookup table is used
_UNKNOWN = {"seed": wire.NO_SEED, "clock_offset": 0}


class EpisodeTable(np.ndarray[Any, Any]):
    """A structured array of episodes whose repr shows the first and the last ones. Its columns are plain arrays."""

    def __getitem__(self, key: Any) -> Any:
        item = super().__getitem__(key)
        return item.view(np.ndarray) if isinstance(item, EpisodeTable) and item.dtype != EPISODE else item

    def __str__(self) -> str:
        return repr(self)

    def __repr__(self) -> str:
        if self.dtype != EPISODE or self.ndim != 1:
            return repr(self.view(np.ndarray))
        lines = aligned(_HEADINGS, self._rows()) if len(self) else []
        return "<" + "\n  ".join([f"table of {count(len(self), 'episode')}", *lines]) + ">"

    def _repr_html_(self) -> str | None:
        """Return HTML for a notebook."""
        return html_table(_HEADINGS, self._rows()) if self.dtype == EPISODE and self.ndim == 1 else None

    def _rows(self) -> list[list[str]]:
        head = [_row(self[i]) for i in range(min(len(self), _SHOWN))]
        tail = [_row(self[i]) for i in range(max(_SHOWN, len(self) - _SHOWN), len(self))]
        between = [["…"] * len(_HEADINGS)] if len(self) > 2 * _SHOWN else []
        return [*head, *between, *tail]


def _row(row: Any) -> list[str]:
    numbers = [str(row[name]) for name in ("index", "steps")]
    return [*numbers, number(row["return"]), str(row["outcome"]), seed_of(row), moment(row["start_time"])]


class Columns(Protocol):
    """The columns of episodes, by the names of EPISODE: a table, or an object that computes them on request."""

    def __len__(self) -> int: ...

    def __getitem__(self, name: str, /) -> Any: ...


class EpisodeRecords(dict[str, Any]):
    """Rows of a table of episodes, column by column: lists, or arrays of times. They are computed on first use."""

    def __init__(self, column: Callable[[str], Array], **known: Array):
        """column: returns a column. known: columns that it does not return."""
        self._of = column
        self._known = known

    def __missing__(self, name: str) -> Any:
        column = self._known[name] if name in self._known else self._of(name)
        self[name] = values = column if column.dtype.kind == "M" else column.tolist()
        return values


class EpisodeRecord:
    """A row of EpisodeRecords. Pickling makes it a row of a table."""

    __slots__ = ("_i", "_records")

    def __init__(self, records: EpisodeRecords, i: int):
        self._records, self._i = records, i

    def __getitem__(self, name: str) -> Any:
        return self._records[name][self._i]

    def __reduce__(self) -> Any:
        (row,) = np.array([tuple(self[name] for name in EPISODE.names or ())], EPISODE)
        return row.__reduce__()


class EpisodeRuns:
    """The episodes of one writer, or parts of them, in the order in which their last fragments were stored.

    ``parts["steps"]`` computes a column of their table from the fragments; len(parts) is the number of rows.

    Attributes:
        fragments: the fragments of row i are fragments[first[i]:first[i + 1]], in order.
        first: (rows + 1,) see fragments.
    """

    def __init__(self, stored: Fragments, alive: bool, among: Array | None, order: Array | None, first: Array):
        """stored, alive, among: see episode_runs(). order: the fragments; None: all of stored, as they are."""
        self._stored, self._alive, self._among, self._order = stored, alive, among, order
        self.first = first

    def __len__(self) -> int:
        return len(self.first) - 1

    def __getitem__(self, name: str) -> Array:
        return self.column(name)

    @cached_property
    def fragments(self) -> Array:
        return np.arange(len(self._stored)) if self._order is None else self._order

    @property
    def last(self) -> Array:
        """The last fragment of each row."""
        return self.last_of(_ALL)

    @cached_property
    def of_fragment(self) -> Array:
        """The row of each fragment; -1 for a fragment without steps or observations."""
        rows = np.full(len(self._stored), -1)
        rows[self.fragments] = np.repeat(np.arange(len(self)), np.diff(self.first))
        return rows

    @cached_property
    def first_step_lost(self) -> Array:
        """Rows whose first observation is missing, so that their first step is skipped: bool."""
        return self._first_step_lost(_ALL)

    @cached_property
    def starts(self) -> Array:
        """The fragment with the start of each row's episode; -1 if it is missing."""
        return self._fragment_with(wire.STARTS)

    @cached_property
    def _ends(self) -> Array:
        """The fragment with the end of each row's episode; -1 if it is missing."""
        return self._fragment_with(wire.ENDS)

    @cached_property
    def _episode_ids(self) -> Array:
        return self.column("episode_id")

    def first_of(self, rows: RowIndex) -> Array:
        """The first fragment of these rows."""
        found: Array = self.first[:-1][rows]
        return found if self._order is None else self._order[found]

    def last_of(self, rows: RowIndex) -> Array:
        """The last fragment of these rows."""
        found: Array = self.first[1:][rows] - 1
        return found if self._order is None else self._order[found]

    def fragments_of(self, rows: RowIndex) -> Array:
        """The fragments of these rows, one row after the other."""
        begins, ends = self.first[:-1][rows], self.first[1:][rows]
        if isinstance(rows, slice):
            return self.fragments[int(begins[0]) : int(ends[-1])] if len(begins) else begins
        return self.fragments[ranges(begins, ends - begins)]

    def opens(self, rows: Array, begin: int) -> Array:
        """Return True for each fragment, from begin on, that is the first one of its row. rows: their rows."""
        opens: Array = self.first_of(rows) == begin + np.arange(len(rows))
        return opens

    def share(self, stored: Fragments, begin: int, first: int, last: int) -> EpisodeRuns:
        """Return rows first to last as those of another writer. stored: its fragments, which begin here with begin."""
        bounds = self.first[first : last + 1]
        own = self.fragments[int(bounds[0]) : int(bounds[-1])] - begin
        return EpisodeRuns(stored, self._alive, None, own, bounds - bounds[0])

    def row_of(self, episode_id: int, first_step: int) -> int | None:
        """Return the row of the part of an episode that starts with this step; None if missing or ambiguous."""
        mine = np.flatnonzero(self._episode_ids == episode_id)
        mine = mine[self.column("first_step", mine) == first_step]
        return int(mine[0]) if len(mine) == 1 else None

    def row_of_pending(self, action: Pending) -> int:
        """Return the row of the part that ends with an action without a result: the last of its episode; -1 if missing.

        If several parts end with the same step, the last one is the one that begins last: it has no steps.
        """
        mine = np.flatnonzero(self._episode_ids == action.episode)
        first = self.column("first_step", mine)
        ends = first + self.column("steps", mine)
        last = np.lexsort((first, ends))[-1:]
        return int(mine[last[0]]) if len(last) and action.step == ends[last[0]] else -1

    # -- columns ------------------------------------------------------------------------------------------------------

    def column(self, name: str, rows: RowIndex = _ALL) -> Array:
        """Return a column of EPISODE, or OUTCOME_CODE, at these rows. "writer" is always 0."""
        stored = self._stored
        if name == "index":
            return np.arange(*rows.indices(len(self))) if isinstance(rows, slice) else np.arange(len(self))[rows]
        if name == "writer":
            return np.zeros(len(self.first[1:][rows]), np.uint32)
        if name == "episode_id":
            return stored.column("episode", self.first_of(rows)).astype(np.int64)
        if name == "lane":
            return stored.column("lane", self.first_of(rows))
        if name == "first_step":
            return stored.column("first_step", self.first_of(rows)).astype(np.int64) + self._first_step_lost(rows)
        if name == "steps":
            return self._sums(stored.steps, np.dtype(np.int64), rows) - self._first_step_lost(rows)
        if name == "return":
            with np.errstate(all="ignore"):  # rewards may be infinite
                returns = self._sums(None, np.dtype(np.float64), rows)
            returns[self._first_step_lost(rows)] = np.nan  # the reward of the skipped step is unknown
            return returns
        if name == "has_final_observation":
            has_final: Array = stored.flags[self.last_of(rows)] & wire.PLACEHOLDER == 0
            return has_final
        if name == "outcome":
            return _OUTCOMES[self.column(OUTCOME_CODE, rows)]
        if name == OUTCOME_CODE:
            codes = np.minimum(self._values_in(self._ends, "outcome", 0, rows), Outcome.CLOSED)
            return np.where(self._ends[rows] < 0, Outcome.RUNNING if self._alive else Outcome.LOST, codes)
        if name in ("start_time", "end_time"):
            return self._time(name, rows).view("<M8[ns]")
        if name == "duration":
            return self._values_in(self._ends, "duration", 0, rows)
        return self._values_in(self.starts, name, _UNKNOWN[name], rows)

    def table(self, rows: RowIndex = _ALL) -> Array:
        """Return these rows of the table, as EPISODE."""
        numbers = np.arange(len(self))[rows]
        table = np.empty(len(numbers), EPISODE)
        for begin in range(0, len(table), ROWS_AT_ONCE):
            some = numbers[begin : begin + ROWS_AT_ONCE]
            fill(table[begin : begin + ROWS_AT_ONCE], lambda name, some=some: self.column(name, some))  # type: ignore[misc]
        return table

    def _first_step_lost(self, rows: RowIndex) -> Array:
        first_step_lost: Array = self._stored.flags[self.first_of(rows)] & wire.HAS_INITIAL == 0
        return first_step_lost

    def _sums(self, values: Array | None, dtype: np.dtype[Any], rows: RowIndex) -> Array:
        """Sum a number of each fragment, by row. values: None: the sums of rewards."""
        own, sizes = self.fragments_of(rows), self.first[1:][rows] - self.first[:-1][rows]
        found = self._stored.column("reward_sum", own) if values is None else values[own]
        found = found.astype(dtype)
        return found if len(found) == len(sizes) else np.add.reduceat(found, np.cumsum(sizes) - sizes)

    def _values_in(self, fragments: Array, name: str, unknown: int, rows: RowIndex) -> Array:
        """Return a field of one fragment per row. fragments: its index, or -1 where the field is unknown."""
        chosen = fragments[rows]
        found = chosen >= 0
        if found.all():
            return self._stored.column(name, chosen).astype(np.int64)
        column = np.full(len(chosen), unknown, np.int64)
        column[found] = self._stored.column(name, chosen[found])
        return column

    def _time(self, name: str, rows: RowIndex) -> Array:
        start = self._values_in(self.starts, "start_time", _NAT, rows)
        if name == "start_time":
            return start
        elapsed = self._values_in(self._ends, "duration", 0, rows) + self._values_in(self._ends, "clock_drift", 0, rows)
        return np.where((self.starts[rows] < 0) | (self._ends[rows] < 0), _NAT, start + elapsed)

    def _fragment_with(self, flag: int) -> Array:
        """Return the first fragment of each row's episode that has a flag; -1 without one."""
        among = self._among
        flagged = np.flatnonzero((self._stored.flags if among is None else self._stored.flags[among]) & flag)
        flagged = flagged if among is None else among[flagged]
        ids, edge = self._episode_ids, self.first_of(_ALL) if flag == wire.STARTS else self.last_of(_ALL)
        if np.array_equal(flagged, edge) and bool((ids[1:] > ids[:-1]).all()):  # usually, each row has its own
            return edge
        known = self._stored["episode"][flagged].astype(np.int64)
        found = _first_among(known, ids)
        return np.where(found < 0, -1, flagged[found]) if len(flagged) else found


def episode_runs(fragments: Fragments, alive: bool, among: Array | None = None) -> EpisodeRuns:
    """Return the parts of episodes that a writer's fragments, in file order, make up.

    Args:
        alive: True if the writer is recording: episodes without an end are then running, otherwise lost.
        among: ascending indices of the fragments to use; None: all.
    """
    opens = fragments.narrow("flags") & wire.HAS_INITIAL > 0  # a part begins here
    others = np.flatnonzero(~opens)
    order: Array | None = None  # indices of the fragments to use, in order; None: all, as stored
    if among is not None or not (fragments.column("steps", others) > 0).all():
        carries = opens | (fragments.steps > 0)
        order = np.flatnonzero(carries) if among is None else among[carries[among]]
    episode = fragments.narrow("episode") if order is None else fragments.column("episode", order)
    is_in_order = bool((episode[1:] >= episode[:-1]).all())
    if not is_in_order:
        by_episode = _stable_order(episode)
        order, episode = by_episode if order is None else order[by_episode], episode[by_episode]
    if order is not None:
        opens = opens[order]
        others = np.flatnonzero(~opens)
    before = others[others > 0] - 1
    opens[others] = True
    if len(before):
        one, next_one = (at if order is None else order[at] for at in (before, before + 1))
        ends = fragments.column("first_step", one).astype(np.int64) + fragments.column("steps", one)
        begins = fragments.column("first_step", next_one).astype(np.int64)
        opens[before + 1] = (episode[before] != episode[before + 1]) | (begins != ends)
    first = np.flatnonzero(np.append(opens, True))
    if is_in_order or order is None:
        return EpisodeRuns(fragments, alive, among, order, first)
    # A part comes where its last fragment lies, which is the order in which a scan has all of it.
    at = np.full(len(fragments), -1)
    at[order[first[1:] - 1]] = np.arange(len(first) - 1)
    rank = at[at >= 0]
    sizes = np.diff(first)[rank]
    begins = np.append(0, np.cumsum(sizes))
    return EpisodeRuns(fragments, alive, among, order[ranges(first[rank], sizes)], begins)


def with_start_dropped(fragments: Fragments) -> Array:
    """Return True for each fragment of an episode without a start."""
    episodes = fragments["episode"]
    return ~np.isin(episodes, episodes[fragments.flags & wire.STARTS > 0])


def fill(table: Array, column: Callable[[str], Array]) -> None:
    """Set the columns of a table; column(name) returns each. Rows are wide: pass at most ROWS_AT_ONCE of them."""
    integers = table.view(_EPISODE_WITH_INTEGERS)
    for name in EPISODE.names or ():
        values = column(name)
        integers[name] = values.view(np.int64) if values.dtype.kind == "M" else values


def outcome_codes(table: Columns) -> Array:
    """Return the index in OUTCOMES of the outcome of each episode."""
    if not isinstance(table, np.ndarray):
        known: Array = table[OUTCOME_CODE]
        return known
    beginnings, codes = table["outcome"].astype("<U2").view(np.uint64), np.zeros(len(table), np.int64)
    for code, beginning in enumerate(_BEGINNINGS.tolist()):
        codes[beginnings == beginning] = code
    return codes


def _stable_order(values: Array) -> Array:
    """Like np.argsort(values, kind="stable"), but three times as fast if the range of values is small."""
    low, bits = values.min(), len(values).bit_length()
    if int(values.max()) - int(low) >= 1 << (64 - bits):
        return np.argsort(values, kind="stable")
    keys = (values - low) << np.uint64(bits) | np.arange(len(values), dtype=np.uint64)
    keys.sort()
    order: Array = (keys & np.uint64((1 << bits) - 1)).astype(np.int64)
    return order


def _first_among(known: Array, wanted: Array) -> Array:
    """Return the first index of each wanted value in known; -1 if it is missing."""
    if not len(known):
        return np.full(len(wanted), -1)
    low, high = int(known.min()), int(known.max())
    if high - low > _MOST_GAPS * len(known):
        order = np.argsort(known, kind="stable")
        nearest = order[np.minimum(np.searchsorted(known, wanted, sorter=order), len(known) - 1)]
        return np.where(known[nearest] == wanted, nearest, -1)
    at = np.full(high - low + 1, -1)
    at[known[::-1] - low] = np.arange(len(known))[::-1]  # the last assignment wins: the first of equal ids
    inside = (wanted >= low) & (wanted <= high)
    return np.where(inside, at[np.where(inside, wanted - low, 0)], -1)


def step_offsets(steps: Array, flags: Array) -> tuple[Array, Array]:
    """Return the offsets of the observations, and of the steps, of each fragment of a chunk, and their ends."""
    found = np.zeros(len(steps) + 1, np.int64), np.zeros(len(steps) + 1, np.int64)
    np.cumsum(steps + (flags & wire.HAS_INITIAL > 0), out=found[0][1:])
    np.cumsum(steps, out=found[1][1:])
    return found
