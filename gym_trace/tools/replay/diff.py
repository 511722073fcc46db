"""Compare two traces: equal episodes, and the first difference of the others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from gym_trace.data.episode import Episode, infos_of
from gym_trace.data.packing import pack_lenient
from gym_trace.data.trees import cut
from gym_trace.data.values import Array, row_of
from gym_trace.data.vocabulary import Outcome
from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.playback.episode_table import outcome_codes
from gym_trace.playback.trace import Trace, TraceLike, as_trace
from gym_trace.playback.writer_reader import WriterReader
from gym_trace.tools.replay.compare import Comparison, Difference, EpisodeComparison
from gym_trace.tools.replay.fingerprints import Fingerprints, fingerprints_of

_OF_THE_EPISODE = ("seed", "options", "first_step", "outcome", "has_final_observation")
_COLUMNS = ("observations", "actions", "rewards", "terminations", "truncations", "infos", "annotations")
DIFFABLE = _COLUMNS + _OF_THE_EPISODE
# Fields of the table of episodes that distinguish most episodes, and the column of each.
_DISTINGUISHING = {"steps": "actions", "return": "rewards", "seed": "seed"}
# Fields of the fragment table that must be equal; times of recording may differ.
_FIELDS = ("episode", "first_step", "steps", "lane", "flags", "outcome", "reward_sum", "seed")
_WINDOW = 1024  # steps that are compared together
_ROOTS = frozenset(("starts", "observations", "actions", "rewards", "infos", "annotations"))


@dataclass(frozen=True)
class EpisodeDifference:
    """A comparison of two episodes. index: in the first trace. difference: the first one, None if they are equal."""

    index: int
    steps: int
    difference: Difference | None


def diff_traces(
    first: TraceLike,
    second: TraceLike,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    tolerances: Mapping[str, float] | None = None,
    ignore: Collection[str] = (),
) -> Iterator[EpisodeDifference]:
    """Compare corresponding episodes one at a time, in bounded memory.

    If both have episodes of one recording, as after an edit, episodes are matched by writer, id and first step.
    Otherwise by seed, if every episode of both traces has its own, except those that were left incomplete and recorded
    again; or by index, if the traces line up. If they do not, episodes with the same observations, actions and rewards
    are matched first; the rest by seed, and then by index. So runs of several processes, with episodes in any order,
    can be compared. Yields one result per pair, in the order of the first trace. Running episodes are compared as far
    as they have been recorded.

    If the episodes are in another order, both traces are read once before the first result, and a hash per episode is
    kept. Only episodes with different hashes are read again.

    In a Difference, "recorded" is the value of the first trace and "seen" that of the second one. If an episode is
    shorter than the other, column is "steps".

    Args:
        first, second: traces, views of some, or their directories.
        atol, rtol, tolerances: of numbers, as for verify_trace(); both 0: bit for bit.
        ignore: columns and values that are not compared: "observations", "actions", "rewards", "terminations",
            "truncations", "infos", "annotations", "seed", "options", "first_step", "outcome" or
            "has_final_observation".

    Raises:
        TraceNotFound, CorruptTrace, InvalidOption
    """
    if unknown := set(ignore) - set(DIFFABLE):
        raise InvalidOption(f"ignore: unknown column {sorted(unknown)[0]!r}; choose from {', '.join(DIFFABLE)}")
    comparison = Comparison(atol, rtol, set(ignore) & set(Comparison.COLUMNS), tolerances)
    return _differences(as_trace(first), as_trace(second), comparison, frozenset(DIFFABLE) - set(ignore))


def compare_episodes(first: Trace, index: int, second: Trace, other_index: int) -> Difference | None:
    """Return the first difference of any two episodes, bit for bit and step by step; None if their steps are equal.

    Their seeds, options and outcomes are not compared. Memory does not grow with the episodes. In the Difference,
    "recorded" is the value of the first one; if it has no step, it is at the reset; if one of them is shorter, its
    column is "steps".

    Raises IndexError, CorruptTrace.
    """
    one, other = first[index], second[other_index]
    layouts, compared = first.writer_of(index).layouts, frozenset(_COLUMNS)
    for start in range(0, max(1, min(len(one), len(other))), _WINDOW):
        a, b = one[start : start + _WINDOW], other[start : start + _WINDOW]
        if len(a) == len(b) and all(_same(_column(a, name), _column(b, name)) for name in _COLUMNS):
            continue
        seen = EpisodeComparison(Comparison(), a, layouts, all_infos=True)
        found = _first(seen, a, b, compared)
        if found is not None and found.column != "steps":
            return found if found.step is None else found._replace(step=found.step + start)
        if found is None:  # no step of its own, but a dtype, or a column that only one of them has
            name = next(name for name in _COLUMNS if not _same(_column(a, name), _column(b, name)))
            return Difference(start or None, name, (), _told(_column(a, name)), _told(_column(b, name)), None)
    if len(one) != len(other):
        return Difference(min(len(one), len(other)), "steps", (), len(one), len(other), None)
    return None


def _differences(a: Trace, b: Trace, comparison: Comparison, compared: frozenset[str]) -> Iterator[EpisodeDifference]:
    same = _same_bytes(a, b)
    if same is None:
        yield from _compared_pairs(a, b, comparison, compared)
        return
    steps, end = a.content["steps"], 0
    for is_same, group in groupby(same):
        begin, end = end, end + sum(1 for _ in group)
        if is_same:
            for index in range(begin, end):
                yield EpisodeDifference(index, int(steps[index]), None)
        else:
            pairs = zip(a.scan(episodes=slice(begin, end)), b.scan(episodes=slice(begin, end)))
            yield from (_compared(a, one, other, comparison, compared) for one, other in pairs)


def _compared_pairs(
    a: Trace, b: Trace, comparison: Comparison, compared: frozenset[str]
) -> Iterator[EpisodeDifference]:
    ours, known = ({(writer.writer, writer.about_or_empty.created) for writer in t.readers} for t in (a, b))
    if ours & known:
        places = _places_by_identity(a, b, {writer for writer, _ in ours & known})
        yield from _in_any_order(a, b, *places, comparison, compared)
        return
    whole, others = _whole(a), _whole(b)
    mine, theirs = a.content["seed"][whole], b.content["seed"][others]
    each_one = all(len(np.unique(seeds)) == len(seeds) and (seeds >= 0).all() for seeds in (mine, theirs))
    common = slice(min(len(a), len(b)))
    told = [name for name, column in _DISTINGUISHING.items() if column in compared]
    lined_up = ["seed"] if each_one else ["writer", *told]
    if all(a.content[name][common].tobytes() == b.content[name][common].tobytes() for name in lined_up):
        for one, other in zip(a.scan(episodes=common), b.scan(episodes=common)):
            yield _compared(a, one, other, comparison, compared)
    elif each_one:
        _, left, right = np.intersect1d(mine, theirs, assume_unique=True, return_indices=True)
        yield from _in_any_order(a, b, whole[left], others[right], comparison, compared)
    else:
        prints = _prints_of_similar(a, b, compared)
        places = _places_by_content(a, b, prints)
        yield from _in_any_order(a, b, *places, comparison, compared, prints)


def _in_any_order(
    a: Trace,
    b: Trace,
    left: Array,
    right: Array,
    comparison: Comparison,
    compared: frozenset[str],
    prints: list[Fingerprints] | None = None,
) -> Iterator[EpisodeDifference]:
    """Compare pairs of episodes, in the order of the first trace. Reads both, then those with different fingerprints.

    left, right: their places in a and b. prints: None: computed here.
    """
    order = np.argsort(left)
    left, right = left[order], right[order]
    if prints is None:
        prints = [_prints(a, left, compared), _prints(b, right, compared)]
    ours, theirs = (one.whole for one in prints)
    pairs = list(zip(left.tolist(), right.tolist()))
    is_same = [ours[one] is not None and ours[one] == theirs[other] for one, other in pairs]
    closer, steps = a.scan(episodes=left[np.logical_not(is_same)]), a.content["steps"]
    for same, (one, other) in zip(is_same, pairs):
        yield (
            EpisodeDifference(one, int(steps[one]), None)
            if same
            else _compared(a, next(closer), b[other], comparison, compared)
        )


def _prints(trace: Trace, places: Array, compared: frozenset[str], for_pairs: bool = False) -> Fingerprints:
    """Return fingerprints of these episodes; for damaged ones, only fingerprints that pairs need.

    _compared() raises at other damage, after the episodes before it. Raises CorruptTrace.
    """
    try:
        return fingerprints_of(trace, places, compared)
    except CorruptTrace:
        if for_pairs:
            return fingerprints_of(trace, places, compared, only_content=True)
        return Fingerprints.none(len(trace))


def _places_by_content(a: Trace, b: Trace, prints: list[Fingerprints]) -> tuple[Array, Array]:
    """Return the indices of corresponding episodes in both traces: as many as the shorter one has.

    First those with the same content, then those of the same seed, then by position among those of the writer with the
    same number, then by position.
    """
    left: list[int] = []
    right: list[int] = []
    alone = [dict.fromkeys(range(len(trace))) for trace in (a, b)]  # episodes without a partner
    contents = [found.content for found in prints]
    seeds = [[(seed if seed >= 0 else None) for seed in trace.content["seed"].tolist()] for trace in (a, b)]
    writers = [trace.content["writer"].tolist() for trace in (a, b)]
    everything = [[0] * len(trace) for trace in (a, b)]
    keys: list[list[list[Any]]] = [contents, seeds, writers, everything]
    for ours, theirs in keys:
        there: dict[Any, list[int]] = {}
        for place in reversed(alone[1]):
            there.setdefault(theirs[place], []).append(place)
        for place in list(alone[0]):
            if ours[place] is not None and (places := there.get(ours[place])):
                left.append(place)
                right.append(places.pop())
                del alone[0][left[-1]], alone[1][right[-1]]
    return np.array(left, np.int64), np.array(right, np.int64)


def _prints_of_similar(a: Trace, b: Trace, compared: frozenset[str]) -> list[Fingerprints]:
    """Return fingerprints of both traces, without episodes whose table rows match none of the other trace."""
    names = [name for name, column in _DISTINGUISHING.items() if column in compared and name != "seed"]
    told = [list(zip(*(trace.content[name].view(np.int64).tolist() for name in ["steps", *names]))) for trace in (a, b)]
    both = set(told[0]) & set(told[1])
    similar = [np.array([place for place, key in enumerate(keys) if key in both], np.int64) for keys in told]
    return [_prints(trace, places, compared, for_pairs=True) for trace, places in zip((a, b), similar)]


def _places_by_identity(a: Trace, b: Trace, writers: set[str]) -> tuple[Array, Array]:
    """Return the indices in both traces of the episodes of one recording, of these writers."""
    theirs: dict[tuple[str, int, int], list[int]] = {}
    for place, key in enumerate(_identities(b)):
        theirs.setdefault(key, []).append(place)
    pairs = []
    for place, key in enumerate(_identities(a)):
        if key[0] in writers and theirs.get(key):
            pairs.append((place, theirs[key].pop(0)))
    left, right = np.array(pairs, np.int64).reshape(-1, 2).T
    return left, right


def _identities(trace: Trace) -> Iterator[tuple[str, int, int]]:
    table, names = trace.content, trace.writers
    numbers = (table[name].tolist() for name in ("writer", "episode_id", "first_step"))
    return ((names[writer], episode, step) for writer, episode, step in zip(*numbers))


def _whole(trace: Trace) -> Array:
    """Drop episodes that a killed or interrupted process left incomplete and that were recorded again."""
    outcomes, seeds = outcome_codes(trace.content), trace.content["seed"]
    complete = np.isin(outcomes, (Outcome.TERMINATED, Outcome.TRUNCATED))
    anew = (outcomes == Outcome.CLOSED) & np.isin(seeds, seeds[complete])
    return np.flatnonzero(~np.isin(outcomes, (Outcome.LOST, Outcome.RUNNING)) & ~anew)


def _compared(
    trace: Trace, one: Episode, other: Episode, comparison: Comparison, compared: frozenset[str]
) -> EpisodeDifference:
    for name in _OF_THE_EPISODE:
        values = getattr(one, name), getattr(other, name)
        if name in compared and not _same(*values):
            return EpisodeDifference(one.index, len(one), Difference(None, name, (), *values, None))
    columns = [name for name in _COLUMNS if name in compared]
    if len(one) == len(other) and all(_same(_column(one, name), _column(other, name)) for name in columns):
        return EpisodeDifference(one.index, len(one), None)
    layouts = next(writer for writer in trace.readers if writer.writer == one.writer).layouts
    seen = EpisodeComparison(comparison, one, layouts, all_infos=True)
    difference = _first(seen, one, other, compared)
    if difference is None and seen.exact:  # no step of its own, but a dtype, or a column that only one of them has
        name = next(name for name in columns if not _same(_column(one, name), _column(other, name)))
        difference = Difference(None, name, (), _told(_column(one, name)), _told(_column(other, name)), None)
    return EpisodeDifference(one.index, len(one), difference)


def _first(seen: EpisodeComparison, one: Episode, other: Episode, compared: frozenset[str]) -> Difference | None:
    difference = seen.reset(row_of(other.observations, 0), other.reset_info or {})
    infos, notes = infos_of(other), (one.annotations, other.annotations)
    for step in range(min(len(one), len(other))):
        if difference is None and "actions" in compared:
            difference = seen.value(step, "actions", row_of(one.actions, step), row_of(other.actions, step))
        flags = other.terminations[step], other.truncations[step]
        if difference is None:
            observation = row_of(other.observations, step + 1)
            difference = seen.step(step, observation, other.rewards[step], *flags, infos[step] if infos else {})
        for name in dict.fromkeys([*notes[0], *notes[1]]) if "annotations" in compared else ():
            if difference is None:
                values = (row_of(note[name], step) if name in note else None for note in notes)
                difference = seen.value(step, f"annotations/{name}", *values)
        if difference is not None:
            return difference
    if difference is None and len(one) != len(other):
        return Difference(min(len(one), len(other)), "steps", (), len(one), len(other), None)
    return difference


def _told(column: Any) -> str:
    """Return a word for a special property of a column."""
    if isinstance(column, np.ndarray):
        return f"{column.dtype} of shape {column.shape}"
    return "none" if column is None or (isinstance(column, tuple) and None in column) else type(column).__name__


def _column(episode: Episode, name: str) -> Any:
    if name == "observations" and not episode.has_final_observation:
        return cut(episode.observations, 0, -1)
    return (episode.reset_info, infos_of(episode)) if name == "infos" else getattr(episode, name)


def _same(a: Any, b: Any) -> bool:
    """Return True if two columns or values are equal bit for bit, including dtypes and shapes."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype != object and b.dtype != object:
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and all(map(_same, a.tolist(), b.tolist()))
    return bool(pack_lenient(a)[0] == pack_lenient(b)[0])


# -- episodes that are stored in the same bytes need not be decoded ---------------------------------------------------


def _same_bytes(a: Trace, b: Trace) -> Iterator[bool] | None:
    """Yield for each episode True if all its values are the same bytes in both traces; nothing is decoded.

    Returns None if the traces are divided into chunks differently, or damaged. Raises CorruptTrace.
    """
    pairs = list(zip(a.readers, b.readers))
    whole = all(np.array_equal(trace.chosen, np.arange(len(trace.whole))) for trace in (a, b))
    if not whole or len(a.readers) != len(b.readers) or not all(_are_alike(*pair) for pair in pairs):
        return None
    return (is_same for pair in pairs for is_same in _same_episodes(*pair))


def _are_alike(x: WriterReader, y: WriterReader) -> bool:
    if x.damage or y.damage or not np.array_equal(x.chunk_bounds, y.chunk_bounds):
        return False
    if not np.array_equal(x.parts.fragments, y.parts.fragments) or not np.array_equal(x.parts.first, y.parts.first):
        return False
    if not all(x.fragments[name].tobytes() == y.fragments[name].tobytes() for name in _FIELDS):
        return False
    spaces = [[w.schema.get(name) for name in ("observation_space", "action_space")] for w in (x, y) if w.chunk_count]
    return not spaces or pack_lenient(spaces[0])[0] == pack_lenient(spaces[1])[0]


def _same_episodes(x: WriterReader, y: WriterReader) -> Iterator[bool]:
    parts = x.parts
    last = parts.fragments[parts.first[1:] - 1]  # these ascend: episodes come in the order of their ends
    differs: Array = parts.starts > last  # its start is stored after its end
    by_start = np.argsort(parts.starts, kind="stable")
    starts, done = parts.starts[by_start], 0
    for number in range(x.chunk_count):
        begin, end = x.chunk_bounds[number : number + 2].tolist()
        if not _is_same_chunk(x, y, number):
            rows = parts.of_fragment[begin:end]
            differs[rows[rows >= 0]] = True
            differs[by_start[slice(*np.searchsorted(starts, (begin, end)).tolist())]] = True
        complete = int(np.searchsorted(last, end))
        yield from (~differs[done:complete]).tolist()
        done = complete


def _is_same_chunk(x: WriterReader, y: WriterReader, number: int) -> bool:
    one, other = x.chunk(number, _ROOTS), y.chunk(number, _ROOTS)
    if one.columns != other.columns:  # dtypes, shapes, encodings and checksums
        return False
    return all(one.encoded(path)[1] == other.encoded(path)[1] for path in one.columns)
