"""Columns of episodes for the conditions of --where."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from gym_trace.data.episode import Episode
from gym_trace.data.selecting.columns import ALWAYS, ConditionColumn, NoSuchKey, factorized, numbers, times, words
from gym_trace.data.selecting.conditions import chosen_rows
from gym_trace.data.values import Array
from gym_trace.data.vocabulary import OUTCOMES, Outcome
from gym_trace.errors import InvalidOption
from gym_trace.format.facts import FLAGS, flags_of
from gym_trace.format.fragments import RowIndex
from gym_trace.playback.agent_returns import AgentReturns, agent_returns
from gym_trace.playback.episode_index import EpisodeIndex, RecordedEpisodes, index_of
from gym_trace.playback.episode_table import OUTCOME_CODE, Columns, outcome_codes
from gym_trace.playback.step_columns import STEP_NAMES
from gym_trace.playback.writer_reader import WriterReader
from gym_trace.printable import printable

COLUMNS = (
    *("index", "steps", "return", "outcome", "seed", "split", "writer", "lane", "start_time", "end_time"),
    *("duration", "episode_id", "first_step", "has_final_observation", "flag", "metadata", "options"),
)
MOST_OBJECTIVES = 64  # components of a reward; with more, there are no returns
_NO_SEED, _LARGE_SEED = -1, -2  # values of the column "seed" of the table
_NAMED = 8  # keys that an error names
_LARGEST_ID = np.iinfo(np.int64).max

Scan = Callable[..., Iterator[Episode]]


def episodes_where(trace: RecordedEpisodes, where: str | None = None, *, sort: str | None = None) -> Array:
    """Return the positions of selected episodes in a trace or a view, (n,) int64; see Trace.select()."""
    columns = EpisodeColumns(index_of(trace), trace.scan, lambda: trace.facts)
    return chosen_rows(columns, where, sort=sort, complete=columns.complete)


class EpisodeColumns:
    """The columns of the episodes of a trace or a view, computed on request.

    Args:
        scan: Trace.scan, for columns that are not in the index of the trace.
        facts: returns Trace.facts, which hold the flags.
    """

    def __init__(self, content: EpisodeIndex, scan: Scan, facts: Callable[[], Mapping[str, Any]] = dict):
        self._content, self._scan, self._facts = content, scan, facts

    def __len__(self) -> int:
        return len(self._content)

    def column(self, path: tuple[Any, ...]) -> ConditionColumn:
        """Return a column; see Trace.select for the names. Raises InvalidOption, CorruptTrace."""
        name, *keys = path
        if name == "metadata":
            return self._metadata(keys)
        if name == "options":
            return self._options(keys)
        if name not in COLUMNS:
            near = difflib.get_close_matches(str(name), COLUMNS, n=1, cutoff=0.6)
            instead = (
                f"did you mean {near[0]!r}?"
                if near
                else f"there are {', '.join(COLUMNS)}; find_steps() has the columns of steps"
            )
            if name == "length":
                instead = "use steps"
            elif name in OUTCOMES:
                instead = f'write "{name}" in quotes if you mean the outcome'
            elif name in STEP_NAMES:
                instead = "it is a column of steps; use gym-trace cat --steps-where, or find_steps()"
            raise InvalidOption(f"no column {name!r}; {instead}")
        if name == "return" and len(keys) == 1 and self._agents.names:
            return self._agent_return(keys[0])
        if name == "return" and len(keys) == 1 and isinstance(keys[0], int):
            return self._objective_return(keys[0])
        if keys:
            raise InvalidOption(f"{name} is a single value without {keys[0]!r}")
        return self._table_column(str(name))

    def complete(self) -> Array:
        """Return True for each complete episode; see complete_rows."""
        return complete_rows(self._content, self._content.readers)

    def _table_column(self, name: str) -> ConditionColumn:
        content = self._content
        if name == "index":
            return numbers(np.arange(len(content)) if content.chosen is None else content.chosen)
        if name == "outcome":
            return words(content[OUTCOME_CODE], OUTCOMES, "text")
        if name == "writer":
            return words(content["writer"].astype(np.int64), [writer.writer for writer in content.readers], "text")
        if name == "split":
            splits = [writer.about_or_empty.split for writer in content.readers]
            return words(content["writer"].astype(np.int64), splits, "text")
        if name == "flag":
            return words(self.flags(), [None, *FLAGS])
        if name == "seed":
            return self._seeds(content["seed"])
        if name == "return" and self._are_several():
            raise NoSuchKey("the rewards here are several numbers each; write return[0], return[1] and so on")
        if name in ("start_time", "end_time"):
            return times(np.ascontiguousarray(content[name]))
        if name == "duration":
            return numbers(content["duration"] / 1e9, ~np.isnat(content["end_time"]))
        data = content[name]
        if data.dtype == np.bool_:
            return ConditionColumn("condition", data, ALWAYS)
        return numbers(data.astype(np.float64 if data.dtype.kind == "f" else np.int64))

    def flags(self) -> Array:
        """Return the flag of each episode: 0 without one, otherwise its index in FLAGS plus 1."""
        codes, flags = np.zeros(len(self), np.int64), flags_of(self._facts())
        if not flags:
            return codes
        writers, episodes = self._content["writer"], self._content["episode_id"]
        for number, writer in enumerate(self._content.readers):
            if given := flags.get(writer.writer):
                mine = np.flatnonzero(writers == number)
                ids = np.array(sorted(one for one in given if one <= _LARGEST_ID), np.int64)
                positions = np.minimum(np.searchsorted(ids, episodes[mine]), len(ids) - 1)
                found = ids[positions] == episodes[mine] if len(ids) else np.zeros(len(mine), bool)
                known = np.array([FLAGS.index(given[one]) + 1 for one in ids.tolist()], np.int64)
                codes[mine[found]] = known[positions[found]]
        return codes

    def _seeds(self, seeds: Array) -> ConditionColumn:
        """Return the seeds. Seeds that are too large for the table are read from the reset records."""
        large = np.flatnonzero(seeds == _LARGE_SEED)
        if not len(large):
            return numbers(seeds, seeds != _NO_SEED)
        exact, known = seeds.astype(object), seeds != _NO_SEED
        for index, seed in zip(large.tolist(), self._reset_values("seed", large)):
            exact[index], known[index] = (seed, True) if isinstance(seed, int) else (0, False)
        return numbers(exact, known)

    def _objective_return(self, index: int) -> ConditionColumn:
        found = self._objectives
        if found is None:
            if not len(self):
                return numbers(np.empty(0))
            raise NoSuchKey("the rewards here are single numbers; write return without an index")
        if not 0 <= index < found.shape[1]:
            raise NoSuchKey(f"no objective {index}; use 0 to {found.shape[1] - 1}")
        return numbers(found[:, index])

    @cached_property
    def _agents(self) -> AgentReturns:
        return agent_returns(self._content, self._scan)

    def _agent_return(self, name: Any) -> ConditionColumn:
        names = self._agents.names
        if name not in names:
            raise NoSuchKey(printable(f"no agent {name!r}; there are {', '.join(map(repr, names[:_NAMED]))}"))
        values = self._agents.values[:, names.index(name)]
        return numbers(np.where(np.isnan(values), 0.0, values), ~np.isnan(values))

    def _are_several(self) -> bool:
        """Return True if each reward has several numbers, so that no episode has a return. Checks one episode."""
        unknown, has_steps = np.isnan(self._content["return"]), self._content["steps"] > 0
        first = np.flatnonzero(unknown & has_steps)[:1]
        if not len(first) or np.any(~unknown & has_steps):
            return False
        return any(len(_sums(one.rewards)) for one in self._scan(("rewards",), episodes=first, on_damage="skip"))

    def _metadata(self, keys: list[Any]) -> ConditionColumn:
        given = [writer.about_or_empty.metadata for writer in self._content.readers]
        self._check_key(given, keys, "metadata")
        return words(self._content["writer"].astype(np.int64), [_value_under(value, keys) for value in given])

    def _options(self, keys: list[Any]) -> ConditionColumn:
        self._check_key(self._reset_options, keys, "options")
        return factorized(_value_under(value, keys) for value in self._reset_options)

    @cached_property
    def _reset_options(self) -> list[Any]:
        """The options of each reset."""
        return self._reset_values("options", np.arange(len(self)))

    def _reset_values(self, name: str, indices: Array) -> list[Any]:
        """Return a value from the reset record of each of these episodes; None if missing. Raises CorruptTrace."""
        return [start.get(name) for start in self._content.starts_of(indices)]

    @cached_property
    def _objectives(self) -> Array | None:
        return objective_returns(self._content, self._scan)

    def _check_key(self, given: list[Any], keys: list[Any], name: str) -> None:
        """Check that at least one episode has the first key. Raises InvalidOption."""
        if not keys or not len(self):
            return
        known = {str(key): None for value in given if isinstance(value, Mapping) for key in value}
        if keys[0] in known or any(_value_under(value, keys[:1]) is not None for value in given):
            return
        near = difflib.get_close_matches(str(keys[0]), known, n=1, cutoff=0.6)
        choices = ", ".join(list(known)[:_NAMED]) + (" …" if len(known) > _NAMED else "") or "none"
        instead = f"did you mean {near[0]!r}?" if near else f"choose from {choices}"
        raise NoSuchKey(printable(f"no {keys[0]!r} in the {name} here; {instead}"))


def complete_rows(
    table: Columns, readers: Sequence[WriterReader], rows: RowIndex = slice(None), lengths: Array | None = None
) -> Array:
    """Return True for episodes that count in mean returns: terminated or truncated, with at least one step.

    Imported episodes count as ended, because their outcome is rarely known.

    Args:
        table: columns of episodes.
        readers: the writers that the table refers to.
        rows: rows of the table to check.
        lengths: number of steps of each, if it differs from the table.
    """
    about, writers = [writer.about_or_empty for writer in readers], table["writer"][rows]
    if lengths is None:  # first_step is the length of a recording that has only statistics
        bare = np.array([it.has_only_statistics for it in about], bool)[writers]
        lengths = table["steps"][rows]
        lengths = np.where(bare, table["first_step"][rows], lengths) if bare.any() else lengths
    codes = outcome_codes(table)[rows]
    ended = (codes == Outcome.TERMINATED) | (codes == Outcome.TRUNCATED)
    ended |= np.array([it.is_imported for it in about], bool)[writers]
    complete: Array = ended & (lengths > 0)
    return complete


def objective_returns(table: Columns, scan: Scan) -> Array | None:
    """Return the sum of each component of the rewards, (episodes, objectives); None if rewards are single numbers.

    Reads only the episodes without a return in the index; a writer is skipped if its first one has rewards of one
    number. All other episodes are NaN. table, scan: of a trace or a view.
    """
    unknown = np.isnan(table["return"]) & (table["steps"] > 0)
    returns: Array | None = None
    for writer in np.unique(table["writer"][unknown]).tolist():
        width = 0
        episodes = unknown & (table["writer"] == writer)
        for episode in scan(columns=("rewards",), episodes=episodes, on_damage="skip"):
            total = _sums(episode.rewards)
            if not (width := width or len(total)):
                break
            if returns is None or returns.shape[1] < width:
                wider = np.full((len(table), width), np.nan)
                wider[:, : 0 if returns is None else returns.shape[1]] = np.nan if returns is None else returns
                returns = wider
            if len(total) == width:
                returns[episode.index, :width] = total
    return returns


def _sums(rewards: Array) -> Array:
    """Return the return of each objective; empty for scalar rewards."""
    if rewards.ndim < 2 or rewards.dtype.kind not in "biuf" or rewards[0].size > MOST_OBJECTIVES:
        return np.empty(0)
    with np.errstate(all="ignore"):  # rewards may be infinite
        sums: Array = rewards.reshape(len(rewards), -1).sum(axis=0, dtype=np.float64)
    return sums


def _value_under(value: Any, keys: list[Any]) -> Any:
    """Return the value under a path of keys and list indices; None if missing."""
    for key in keys:
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(key, int) and (isinstance(value, (list, tuple)) or np.ndim(value)):
            value = value[key] if -len(value) <= key < len(value) else None
        else:
            return None
    return value


def repeated_steps(table: Columns, readers: Sequence[WriterReader]) -> Array:
    """Return (episodes,) int64: number of steps at the start of each that repeat the episode it branched from."""
    prefixes = np.array([reader.about_or_empty.prefix for reader in readers], np.int64)
    if not prefixes.any():
        return np.zeros(len(table), np.int64)
    found: Array = np.clip(prefixes[table["writer"]] - table["first_step"], 0, table["steps"])
    return found
