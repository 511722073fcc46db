"""Compare two traces: equal episodes, and the first difference of the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from gym_trace.data.episode import Episode, infos_of
from gym_trace.data.packing import pack_lenient
from gym_trace.data.trees import cut
from gym_trace.data.values import Array, distinct, row_of
from gym_trace.data.vocabulary import Outcome
from gym_trace.errors import InvalidOption
from gym_trace.playback.episode_index import index_of, whole_of
from gym_trace.playback.episode_table import outcome_codes
from gym_trace.playback.trace import Trace, TraceLike, as_trace
from gym_trace.playback.writer_reader import WriterReader
from gym_trace.tools.replay.compare import Comparison, Difference, EpisodeComparison
from gym_trace.tools.replay.equal_pairs import equal_pairs, same
from gym_trace.tools.replay.fingerprints import CONTENT, content_hashes

_EPISODE_VALUES = ("seed", "options", "first_step", "outcome", "has_final_observation")
_COLUMNS = ("observations", "actions", "rewards", "terminations", "truncations", "infos", "annotations")
DIFFABLE = _COLUMNS + _EPISODE_VALUES
# Fields of the table of episodes that distinguish most episodes, and the column of each.
_DISTINGUISHING = {"steps": "actions", "return": "rewards", "seed": "seed"}
# Fields of the fragment table that must be equal; times of recording may differ.
_FIELDS = ("episode", "first_step", "steps", "lane", "flags", "outcome", "reward_sum", "seed")
_WINDOW = 1024  # steps compared together
_ROOTS = frozenset(("starts", "observations", "actions", "rewards", "infos", "annotations"))


@dataclass(frozen=True)
class EpisodeDifference:
    """A comparison of two episodes. index: in the first trace. difference: the first one, None if they are equal.

    Examples:
        >>> twice = {"rewards": lambda episode: 2 * episode.rewards}
        >>> _ = gym_trace.edit.map("traces/cartpole", twice, "traces/rewards-again")
        >>> pair = next(gym_trace.diff_traces("traces/cartpole", "traces/rewards-again"))
        >>> pair.index, pair.steps, pair.difference is None
        (0, 12, False)
    """

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

    Episodes of the same recording, as after an edit, are matched by writer, id and first step. Episodes of different
    recordings are matched by seed, if each has its own; episodes that were left incomplete and recorded again are
    skipped. Without such seeds they are matched by index, if the traces line up. If not, episodes with the same
    observations, actions and rewards are matched first; the rest by seed, and then by index. So runs of several
    processes, with episodes in any order, can be compared. Yields one result per pair, in the order of the first trace.
    Running episodes are compared as far as they have been recorded.

    If episodes are matched by their contents, both traces are read once before the first result, to get one hash per
    episode.

    In a Difference, "recorded" is the value in the first trace and "seen" the value in the second one. If one episode
    is shorter, column is "steps".

    Args:
        first, second: traces, views, or directories.
        atol, rtol, tolerances: tolerances of numbers, as for verify_trace(); both 0: bit for bit.
        ignore: columns and values that are not compared: "observations", "actions", "rewards", "terminations",
            "truncations", "infos", "annotations", "seed", "options", "first_step", "outcome" or
            "has_final_observation".

    Raises:
        TraceNotFound, CorruptTrace, InvalidOption

    Examples:
        >>> trace = gym_trace.open_trace("traces/cartpole")
        >>> {pair.difference for pair in gym_trace.diff_traces(trace, trace)}  # all are the same
        {None}
    """
    if unknown := set(ignore) - set(DIFFABLE):
        raise InvalidOption(f"ignore: unknown column {sorted(unknown)[0]!r}; choose from {', '.join(DIFFABLE)}")
    comparison = Comparison(atol, rtol, set(ignore) & set(Comparison.COLUMNS), tolerances)
    return _differences(as_trace(first), as_trace(second), comparison, frozenset(DIFFABLE) - set(ignore))


def compare_episodes(first: Trace, index: int, second: Trace, other_index: int) -> Difference | None:
    """Return the first difference of any two episodes, bit for bit and step by step; None if their steps are equal.

    Their seeds, options and outcomes are not compared. Memory does not grow with the episodes. In the Difference,
    "recorded" is the value in the first episode. Its step is None at the reset; its column is "steps" if one episode
    is shorter.

    Raises IndexError, CorruptTrace.
    """
    one, other = first[index], second[other_index]
    layouts, compared = index_of(first).locate(index)[0].layouts, frozenset(_COLUMNS)
    for start in range(0, max(1, min(len(one), len(other))), _WINDOW):
        a, b = one[start : start + _WINDOW], other[start : start + _WINDOW]
        if len(a) == len(b) and all(same(_column(a, name), _column(b, name)) for name in _COLUMNS):
            continue
        comparer = EpisodeComparison(Comparison(), a, layouts, all_infos=True)
        found = _first_difference(comparer, a, b, compared)
        if found is not None and found.column != "steps":
            return found if found.step is None else found._replace(step=found.step + start)
        if found is None:
            return _difference_of_columns(a, b, _COLUMNS, start or None)
    if len(one) != len(other):
        return Difference(min(len(one), len(other)), "steps", (), len(one), len(other), None)
    return None


def _differences(a: Trace, b: Trace, comparison: Comparison, compared: frozenset[str]) -> Iterator[EpisodeDifference]:
    same_bytes = _same_bytes(a, b)
    if same_bytes is None:
        yield from _compared_pairs(a, b, comparison, compared)
        return
    steps, end = index_of(a)["steps"], 0
    for is_same, group in groupby(same_bytes):
        begin, end = end, end + sum(1 for _ in group)
        if is_same:
            for index in range(begin, end):
                yield EpisodeDifference(index, int(steps[index]), None)
        else:
            indices = np.arange(begin, end)
            yield from _in_any_order(a, b, indices, indices, comparison, compared)


def _compared_pairs(
    a: Trace, b: Trace, comparison: Comparison, compared: frozenset[str]
) -> Iterator[EpisodeDifference]:
    writers, others = (
        {(writer.writer, writer.about_or_empty.created) for writer in index_of(t).readers} for t in (a, b)
    )
    if common_writers := {writer for writer, _ in writers & others}:
        yield from _in_any_order(a, b, *_pairs_by_identity(a, b, common_writers), comparison, compared)
        return
    whole, other_whole = _not_repeated(a), _not_repeated(b)
    seeds, other_seeds = index_of(a)["seed"][whole], index_of(b)["seed"][other_whole]
    seeds_are_unique = all(len(distinct(s)) == len(s) and (s >= 0).all() for s in (seeds, other_seeds))
    common = np.arange(min(len(a), len(b)))
    distinguishing = [name for name, column in _DISTINGUISHING.items() if column in compared]
    must_equal = ["seed"] if seeds_are_unique else ["writer", *distinguishing]
    if all(index_of(a)[name][common].tobytes() == index_of(b)[name][common].tobytes() for name in must_equal):
        pairs = common, common
    elif seeds_are_unique:
        _, left, right = np.intersect1d(seeds, other_seeds, assume_unique=True, return_indices=True)
        pairs = whole[left], other_whole[right]
    else:
        pairs = _pairs_by_content(a, b, compared)
    yield from _in_any_order(a, b, *pairs, comparison, compared)


def _in_any_order(
    a: Trace, b: Trace, left: Array, right: Array, comparison: Comparison, compared: frozenset[str]
) -> Iterator[EpisodeDifference]:
    """Compare pairs of episodes, at these indices in a and b, in the order of the first trace: columns of many pairs at
    once, then the episodes that are not equal."""
    order = np.argsort(left, kind="stable")
    left, right = left[order], right[order]
    steps, end = index_of(a)["steps"], 0
    for equal in equal_pairs(index_of(a), index_of(b), left, right, compared):
        begin, end = end, end + len(equal)
        others = a.scan(episodes=left[begin:end][~equal])
        for one, other, is_equal in zip(left[begin:end].tolist(), right[begin:end].tolist(), equal.tolist()):
            if is_equal:
                yield EpisodeDifference(one, int(steps[one]), None)
            else:
                yield _compared(a, next(others), b[other], comparison, compared)


def _pairs_by_content(a: Trace, b: Trace, compared: frozenset[str]) -> tuple[Array, Array]:
    """Return the indices of corresponding episodes in both traces: as many pairs as the shorter one has episodes.

    Pairs are formed by equal content, then by equal seed, then in order within the writers of the same number, and then
    in order.
    """
    left: list[int] = []
    right: list[int] = []
    unpaired, other_unpaired = (dict.fromkeys(range(len(trace))) for trace in (a, b))
    contents = _hashes_of_similar(a, b, compared)
    seeds = [[(seed if seed >= 0 else None) for seed in index_of(trace)["seed"].tolist()] for trace in (a, b)]
    writers = [index_of(trace)["writer"].tolist() for trace in (a, b)]
    everything = [[0] * len(trace) for trace in (a, b)]
    keys: list[list[list[Any]]] = [contents, seeds, writers, everything]
    for key_of, other_key_of in keys:
        candidates: dict[Any, list[int]] = {}
        for other in reversed(other_unpaired):
            candidates.setdefault(other_key_of[other], []).append(other)
        for index in list(unpaired):
            if key_of[index] is not None and (others := candidates.get(key_of[index])):
                left.append(index)
                right.append(others.pop())
                del unpaired[left[-1]], other_unpaired[right[-1]]
    return np.array(left, np.int64), np.array(right, np.int64)


def _hashes_of_similar(a: Trace, b: Trace, compared: frozenset[str]) -> list[list[bytes | None]]:
    """Return hashes of contents in both traces; None for episodes whose table rows match none of the other trace."""
    names = [name for name, column in _DISTINGUISHING.items() if column in compared and name != "seed"]
    keys = [
        list(zip(*(index_of(trace)[name].view(np.int64).tolist() for name in ["steps", *names]))) for trace in (a, b)
    ]
    common = set(keys[0]) & set(keys[1])
    similar = [np.array([index for index, key in enumerate(own) if key in common], np.int64) for own in keys]
    columns = [name for name in CONTENT if name in compared]
    return [content_hashes(trace, indices, columns) for trace, indices in zip((a, b), similar)]


def _pairs_by_identity(a: Trace, b: Trace, writers: set[str]) -> tuple[Array, Array]:
    """Return the indices in both traces of the same recorded episodes of these writers."""
    candidates: dict[tuple[str, int, int], list[int]] = {}
    for other, key in enumerate(_identities(b)):
        candidates.setdefault(key, []).append(other)
    pairs = []
    for index, key in enumerate(_identities(a)):
        if key[0] in writers and candidates.get(key):
            pairs.append((index, candidates[key].pop(0)))
    left, right = np.array(pairs, np.int64).reshape(-1, 2).T
    return left, right


def _identities(trace: Trace) -> Iterator[tuple[str, int, int]]:
    table, names = index_of(trace), trace.writers
    numbers = (table[name].tolist() for name in ("writer", "episode_id", "first_step"))
    return ((names[writer], episode, step) for writer, episode, step in zip(*numbers))


def _not_repeated(trace: Trace) -> Array:
    """Return the indices of episodes, without incomplete ones that a later run has probably recorded again."""
    outcomes, seeds = outcome_codes(index_of(trace)), index_of(trace)["seed"]
    complete = np.isin(outcomes, (Outcome.TERMINATED, Outcome.TRUNCATED))
    is_repeated = (outcomes == Outcome.CLOSED) & np.isin(seeds, seeds[complete])
    return np.flatnonzero(~np.isin(outcomes, (Outcome.LOST, Outcome.RUNNING)) & ~is_repeated)


def _compared(
    trace: Trace, one: Episode, other: Episode, comparison: Comparison, compared: frozenset[str]
) -> EpisodeDifference:
    for name in _EPISODE_VALUES:
        values = getattr(one, name), getattr(other, name)
        if name in compared and not same(*values):
            return EpisodeDifference(one.index, len(one), Difference(None, name, (), *values, None))
    columns = [name for name in _COLUMNS if name in compared]
    if len(one) == len(other) and all(same(_column(one, name), _column(other, name)) for name in columns):
        return EpisodeDifference(one.index, len(one), None)
    layouts = next(writer for writer in index_of(trace).readers if writer.writer == one.writer).layouts
    comparer = EpisodeComparison(comparison, one, layouts, all_infos=True)
    difference = _first_difference(comparer, one, other, compared)
    if difference is None and comparer.exact:
        difference = _difference_of_columns(one, other, columns)
    return EpisodeDifference(one.index, len(one), difference)


def _first_difference(
    comparer: EpisodeComparison, one: Episode, other: Episode, compared: frozenset[str]
) -> Difference | None:
    difference = comparer.reset(row_of(other.observations, 0), other.reset_info or {})
    infos, annotations = infos_of(other), (one.annotations, other.annotations)
    for step in range(min(len(one), len(other))):
        if difference is None and "actions" in compared:
            difference = comparer.value(step, "actions", row_of(one.actions, step), row_of(other.actions, step))
        flags = other.terminations[step], other.truncations[step]
        if difference is None:
            observation = row_of(other.observations, step + 1)
            difference = comparer.step(step, observation, other.rewards[step], *flags, infos[step] if infos else {})
        for name in dict.fromkeys([*annotations[0], *annotations[1]]) if "annotations" in compared else ():
            if difference is None:
                values = (row_of(rows[name], step) if name in rows else None for rows in annotations)
                difference = comparer.value(step, f"annotations/{name}", *values)
        if difference is not None:
            return difference
    if difference is None and len(one) != len(other):
        return Difference(min(len(one), len(other)), "steps", (), len(one), len(other), None)
    return difference


def _difference_of_columns(a: Episode, b: Episode, names: Iterable[str], step: int | None = None) -> Difference:
    """Return the difference of episodes whose steps are equal, but not the dtypes or the existence of a column."""
    name = next(name for name in names if not same(_column(a, name), _column(b, name)))
    return Difference(step, name, (), _type_text(_column(a, name)), _type_text(_column(b, name)), None)


def _type_text(column: Any) -> str:
    if isinstance(column, np.ndarray):
        return f"{column.dtype} of shape {column.shape}"
    return "none" if column is None or (isinstance(column, tuple) and None in column) else type(column).__name__


def _column(episode: Episode, name: str) -> Any:
    if name == "observations" and not episode.has_final_observation:
        return cut(episode.observations, 0, -1)
    return (episode.reset_info, infos_of(episode)) if name == "infos" else getattr(episode, name)


# -- episodes that are stored in the same bytes need not be decoded ---------------------------------------------------


def _same_bytes(a: Trace, b: Trace) -> Iterator[bool] | None:
    """Yield for each episode True if all its values are the same bytes in both traces; nothing is decoded.

    Returns None if the traces are divided into chunks differently, or damaged. Raises CorruptTrace.
    """
    pairs = list(zip(index_of(a).readers, index_of(b).readers))
    whole = all(np.array_equal(index_of(trace).whole_indices, np.arange(len(whole_of(trace)))) for trace in (a, b))
    if (
        not whole
        or len(index_of(a).readers) != len(index_of(b).readers)
        or not all(_are_alike(*pair) for pair in pairs)
    ):
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
    last = parts.fragments[parts.first[1:] - 1]  # ascending: episodes come in the order of their ends
    differs: Array = parts.starts > last  # the start of such an episode is stored after its end
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
