"""From the fragments of a writer to its episodes: which runs of steps there are, and what is known of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gym_trace.format import wire
from gym_trace.model.values import Array
from gym_trace.model.vocabulary import OUTCOMES, Outcome
from gym_trace.ring.pending import Pending
from gym_trace.showing.html import table as html_table
from gym_trace.showing.words import aligned, count, moment, number, seed_of

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
_HEADINGS = ("index", "steps", "return", "outcome", "seed", "started (UTC)")
_SHOWN = 5  # episodes at either end
_OUTCOMES = np.array(OUTCOMES, "<U10")
_BEGINNINGS = np.array(OUTCOMES, "<U2").view(np.uint64)  # no two begin with the same letters
_ALL = slice(None)
_NAT = np.iinfo(np.int64).min  # as a time
_ROWS_AT_ONCE = 2048


class EpisodeTable(np.ndarray[Any, Any]):
    """A structured array of episodes that shows itself: the first and the last of them. Columns of it are plain."""

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


class Parts(NamedTuple):
    """The episodes, or parts of them, of one writer.

    table: EPISODE rows, in the order in which their last step came to disk.
    of_fragment: for each fragment the row of table it belongs to; -1 for one without steps or observations.
    fragments: the fragments of row i are fragments[first[i]:first[i + 1]], in order.
    trimmed: whether the first observation of a part is missing, so that its first step is skipped.
    starts: the fragment that says how the episode began; -1 where none does.
    """

    table: Array
    of_fragment: Array
    fragments: Array
    first: Array
    trimmed: Array
    starts: Array

    @property
    def last(self) -> Array:
        """The last fragment of each row."""
        found: Array = self.fragments[self.first[1:] - 1]
        return found

    def is_whole(self, row: int, count: int) -> bool:
        """Return True if this number of fragments completes a row; False for row -1."""
        return row >= 0 and bool(count == self.first[row + 1] - self.first[row])


def parts_of(fragments: Array, alive: bool) -> Parts:
    """The parts that a writer's fragments, in the order of the file, make up.

    alive: whether the writer is still at it; then episodes that have not ended are running, otherwise lost.
    """
    carries = (fragments["steps"] > 0) | (fragments["flags"] & wire.LEADS > 0)
    order = np.flatnonzero(carries)
    if not np.all(np.diff(fragments["episode"][order].astype(np.int64)) >= 0):
        order = order[np.argsort(fragments["episode"][order], kind="stable")]
    sorted_ = _taken(fragments, order)
    episode, first_step = sorted_["episode"], sorted_["first_step"].astype(np.int64)
    steps, flags = sorted_["steps"].astype(np.int64), sorted_["flags"]
    opens = np.ones(len(order), bool)  # whether a part begins here
    opens[1:] = (
        (episode[1:] != episode[:-1])
        | (flags[1:] & wire.LEADS > 0)
        | (first_step[1:] != first_step[:-1] + steps[:-1])
    )  # fmt: skip
    begin = np.flatnonzero(opens)
    bounds = np.append(begin, len(order))
    trimmed = flags[begin] & wire.LEADS == 0
    last = bounds[1:] - 1

    columns = {"episode_id": episode[begin].astype(np.int64), "lane": sorted_["lane"][begin]}
    columns["first_step"] = first_step[begin] + trimmed
    columns["steps"] = (np.add.reduceat(steps, begin) if len(begin) else steps) - trimmed
    with np.errstate(all="ignore"):  # rewards may be infinite
        columns["return"] = np.add.reduceat(sorted_["reward_sum"], begin) if len(begin) else np.empty(0)
    columns["has_final_observation"] = flags[last] & wire.PLACEHOLDER == 0
    columns["return"][trimmed] = np.nan  # the reward of the step that is left out is not known here
    starts = _join_episode_facts(columns, fragments, alive)

    # A part comes where its last fragment lies, which is the order in which a scan has all of it.
    rank = np.argsort(order[last], kind="stable")
    table = _table_of(columns, rank)
    columns.clear()  # which have the memory that is needed next

    sizes = np.diff(bounds)
    new_row = np.full(len(begin), -1)
    new_row[rank] = np.arange(len(rank))
    of_fragment = np.full(len(fragments), -1)
    of_fragment[order] = np.repeat(new_row, sizes)
    first = np.concatenate([[0], np.cumsum(sizes[rank])])
    places = np.repeat(bounds[:-1][rank] - first[:-1], sizes[rank]) + np.arange(first[-1])
    return Parts(table, of_fragment, order[places], first, trimmed[rank], starts[rank])


def row_of_pending(table: Array, action: Pending) -> int:
    """The row of the part at whose end an action was not answered: the last one of its episode; -1 if it is not there.

    Of parts that end with the same step the last one begins last: it has no steps.
    """
    mine = np.flatnonzero(table["episode_id"] == action.episode)
    first = table["first_step"][mine]
    ends = first + table["steps"][mine]
    last = np.lexsort((first, ends))[-1:]
    return int(mine[last[0]]) if len(last) and action.step == ends[last[0]] else -1


def outcome_codes(table: Array) -> Array:
    """Return the index in OUTCOMES of the outcome of each episode."""
    beginnings, codes = table["outcome"].astype("<U2").view(np.uint64), np.zeros(len(table), np.int64)
    for code, beginning in enumerate(_BEGINNINGS.tolist()):
        codes[beginnings == beginning] = code
    return codes


def _join_episode_facts(columns: dict[str, Array], fragments: Array, alive: bool) -> Array:
    """Adds what the first and the last fragment of an episode say, in all its parts; returns where the first is."""
    flags, known, wanted = fragments["flags"], fragments["episode"].astype(np.int64), columns["episode_id"]
    start, started = _found(known, flags & wire.STARTS > 0, wanted)
    end, ended = _found(known, flags & wire.ENDS > 0, wanted)

    def filled(value: int, where: Array | slice, found: Array) -> Array:
        if where is _ALL:
            return found.astype(np.int64, copy=False)
        column = np.full(len(wanted), value, np.int64)
        column[where] = found
        return column

    starts = filled(-1, started, start)
    for name, value in (("seed", wire.NO_SEED), ("clock_offset", 0), ("start_time", _NAT)):
        columns[name] = filled(value, started, fragments[name][start])
    outcome = Outcome.RUNNING if alive else Outcome.LOST
    columns["outcome"] = filled(outcome, ended, np.minimum(fragments["outcome"][end], Outcome.CLOSED))
    duration = fragments["duration"][end]
    columns["duration"] = filled(0, ended, duration)
    elapsed = duration + fragments["clock_drift"][end]
    columns["end_time"] = filled(_NAT, ended, columns["start_time"][ended] + elapsed)
    columns["end_time"][starts < 0] = _NAT
    return starts


def _table_of(columns: dict[str, Array], rank: Array) -> Array:
    """The rows at these places. Some at a time: rows are too wide to go over all of them for each column."""
    if not bool((rank[1:] > rank[:-1]).all()):
        columns = {name: column[rank] for name, column in columns.items()}
    table = np.empty(len(rank), EPISODE)
    table_of_integers = table.view(_EPISODE_WITH_INTEGERS)
    for begin in range(0, len(rank), _ROWS_AT_ONCE):
        rows = table_of_integers[begin : begin + _ROWS_AT_ONCE]
        for name, column in columns.items():
            part = column[begin : begin + _ROWS_AT_ONCE]
            rows[name] = _OUTCOMES[part] if name == "outcome" else part
        rows["index"], rows["writer"] = np.arange(begin, begin + len(rows)), 0
    return table


def _taken(table: Array, rows: Array) -> Array:
    """table[rows], each row once; mostly all of them in their order, which need not be copied."""
    if len(rows) == len(table) and bool((rows[1:] > rows[:-1]).all()):
        return table
    return table.take(rows)  # fancy indexing copies structured rows field by field


def _found(values: Array, among: Array, wanted: Array) -> tuple[Array, Array | slice]:
    """Which values of wanted are found in values[among], and, for these, where in values they come first."""
    places = np.flatnonzero(among)
    known = values[places]
    if np.array_equal(known, wanted) and bool((known[1:] > known[:-1]).all()):  # as a rule
        return places, _ALL
    if not len(places):
        return places, np.zeros(len(wanted), bool)
    order = np.argsort(known, kind="stable")
    nearest = order[np.minimum(np.searchsorted(known, wanted, sorter=order), len(known) - 1)]
    found = known[nearest] == wanted
    return places[nearest[found]], found


def step_offsets(fragments: Array) -> tuple[Array, Array]:
    """Return where the observations and the steps of each fragment of a chunk begin, with one more element each."""
    steps = fragments["steps"].astype(np.int64)
    rows = steps + (fragments["flags"] & wire.LEADS > 0)
    return np.concatenate([[0], np.cumsum(rows)]), np.concatenate([[0], np.cumsum(steps)])
