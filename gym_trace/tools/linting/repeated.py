"""Find episodes that are recorded twice or begin the same, also in two splits, and splits of very different sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.playback.episode_columns import repeated_steps
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.scan import StepRuns
from gym_trace.playback.trace import Trace
from gym_trace.tools.linting.findings import ERROR, NOTE, WARNING, Kind, Sighting, environments_of
from gym_trace.tools.replay.fingerprints import CONTENT, content_hashes
from gym_trace.tools.replay.lanes import inseparable

_IN_TURN = Kind("T504", WARNING, "episodes of different seeds that begin the same, in turn")
_SAME_START = Kind("T505", NOTE, "different seeds, but the same first observation")
_TWICE = Kind("T601", WARNING, "episodes recorded twice: the same start, actions and results")
_SHARED = Kind("T602", ERROR, "episodes that two splits share")
_UNBALANCED = Kind("T603", WARNING, "a split with very few episodes")
_UNEQUAL = Kind("T604", WARNING, "the same seed and actions, but other results")

_MOST_CHANCE = 1e-4  # probability that random starts come in turn
_OPTIONS = b"options"
_MOST_BYTES = 256  # larger observations are compared only if all other values are equal
# Multipliers of hashes: the golden ratio, and two primes of xxHash.
_MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)
_MASK = (1 << 63) - 1


class _Hashes:
    """Sums of hashes of steps, one per episode of a writer: equal episodes have equal sums.

    Attributes:
        first: hashes of the first observations; 0: unknown, or options of the reset may have chosen it.
        has_floats: True if observations have floats, which are rarely equal by chance.
    """

    def __init__(self, episodes: int):
        self.actions = np.zeros(episodes, np.uint64)
        self.results = np.zeros(episodes, np.uint64)
        self.starts = np.zeros(episodes, np.int64)
        self.first = np.zeros(episodes, np.uint64)
        self.has_floats = False

    def add_first(self, block: StepRuns) -> None:
        """Hash the first observations of the episodes that begin in a block."""
        begins = block.has_initial & (block.first_step == 0) & (np.diff(block.observation_offsets) > 0)
        columns = [rows for path, rows in block.columns.items() if path[0] == "observations"]
        if not begins.any() or not columns or any(rows.dtype == object for rows in columns):
            return
        self.has_floats |= any(rows.dtype.kind == "f" for rows in columns)
        mixed = np.ones(np.count_nonzero(begins), np.uint64)
        for rows in columns:
            first = rows[block.observation_offsets[:-1][begins]]
            if first.itemsize * first[:1].size > _MOST_BYTES:
                first = np.array([hash(row.tobytes()) for row in first])
            mixed = _with_words(mixed, first)
        self.first[block.row[begins]] = mixed


class RepeatedRule:
    """Compares episodes by quick hashes of their steps, and then exactly where hashes are equal.

    Short episodes of small environments are alike by chance, unless their seeds differ. So episodes without a seed
    count only if they are long, and branched ones only if they have many steps of their own.
    """

    kinds: ClassVar[Sequence[Kind]] = (_IN_TURN, _SAME_START, _TWICE, _SHARED, _UNBALANCED, _UNEQUAL)
    columns: ClassVar[Collection[str]] = frozenset(("starts", "actions", "rewards", "observations"))
    thresholds: ClassVar[Mapping[str, float]] = {"repeated_steps": 20, "split_share": 0.01, "split_episodes": 100}

    def __init__(self, trace: Trace, thresholds: Mapping[str, float]):
        self._trace, self._thresholds = trace, thresholds
        self._hashes: dict[int, _Hashes] = {}
        self._is_branched = np.array(
            [bool(reader.about_or_empty.branch) for reader in index_of(trace).readers], np.bool_
        )
        self._environment = environments_of(trace)

    def add(self, block: StepRuns) -> None:
        if block.writer not in self._hashes:
            self._hashes[block.writer] = _Hashes(len(block.reader.parts))
        hashes = self._hashes[block.writer]
        for salt, (path, rows) in enumerate(block.columns.items()):
            if path[0] not in CONTENT or rows.dtype == object:
                continue
            if path[0] == "observations" and rows.itemsize * rows[:1].size > _MOST_BYTES:
                continue
            sums = hashes.actions if path[0] == "actions" else hashes.results
            sums[block.row] += _sums(block, path, rows, salt)
        hashes.add_first(block)
        for row, packed in block.starts.items():
            hashes.starts[row] = hash(packed) & _MASK
            if _OPTIONS in packed:
                hashes.first[row] = 0

    def findings(self) -> Iterator[Sighting]:
        yield from self._unbalanced_splits()
        other_starts: list[tuple[int, int]] = []  # episodes of the same seed, but another first observation
        for episodes, first, has_floats in self._seeded_starts():
            other_starts += _other_starts(episodes, index_of(self._trace)["seed"][episodes], first)
            yield from self._same_starts(episodes, first, has_floats)
        yield from self._repeated(other_starts)

    def _repeated(self, other_starts: list[tuple[int, int]]) -> Iterator[Sighting]:
        trace, groups = self._trace, self._probably_equal()
        try:
            indices = np.concatenate([np.empty(0, np.int64), *groups])
            content = content_hashes(trace, indices)
        except CorruptTrace:  # T001 names the damage; after a repair the episodes can be compared
            return
        splits = [writer.about_or_empty.split for writer in index_of(trace).readers]
        writers = index_of(trace)["writer"]
        twice: list[tuple[int, int]] = []
        shared: list[tuple[int, int]] = []
        unequal: list[tuple[int, int]] = []
        for group in groups:
            by_content: dict[bytes | None, dict[str, int]] = {}  # the first episode of each split
            for index in group.tolist():
                equal = by_content.setdefault(content[index], {})
                split = splits[writers[index]]
                if split in equal:
                    twice.append((equal[split], index))
                elif equal:
                    shared.append((next(iter(equal.values())), index))
                elif len(by_content) > 1 and self._seed_sets_start(index):
                    unequal.append((int(group[0]), index))
                equal.setdefault(split, index)
        known = {later for _, later in unequal}
        other_starts = [pair for pair in other_starts if pair[1] not in known]
        for kind, pairs in ((_TWICE, twice), (_SHARED, shared), (_UNEQUAL, unequal or other_starts)):
            if pairs:
                ordered = (sorted(pair, key=lambda index: int(index_of(trace).whole_indices[index])) for pair in pairs)
                pair = min(ordered, key=lambda pair: index_of(trace).whole_indices[pair].tolist())
                first, second = index_of(trace).whole_indices[pair].tolist()
                shown = "ls", "--episodes", f"{first},{second}"
                what = "the same seed, but another first observation" if pairs is other_starts else kind.what
                count = len(pairs) + len(other_starts) * (pairs is unequal)
                message = f"{what}; first: {first} and {second}"
                yield Sighting(kind, message, count, "episode", pair[1], shown_by=shown)

    def _seeded_starts(self) -> Iterator[tuple[Array, Array, bool]]:
        """Yield, for each environment, the episodes whose seed should set the start. first, has_floats: see _Hashes."""
        trace, table = self._trace, index_of(self._trace)
        writers, first = table["writer"].astype(np.int64), np.zeros(len(table), np.uint64)
        wanted = (table["seed"] >= 0) & (table["first_step"] == 0) & ~self._is_branched[writers]
        for number, reader in enumerate(index_of(trace).readers):
            own = np.flatnonzero(writers == number)
            if number in self._hashes and not inseparable(reader):
                first[own] = self._hashes[number].first[index_of(trace).rows[own]]
        for number in np.unique(self._environment):
            episodes = np.flatnonzero(wanted & (first != 0) & (self._environment[writers] == number))
            has_floats = any(self._hashes[int(one)].has_floats for one in np.unique(writers[episodes]))
            yield episodes, first[episodes], has_floats

    def _same_starts(self, episodes: Array, first: Array, has_floats: bool) -> Iterator[Sighting]:
        """Look for first observations that several seeds share. episodes: those of one environment."""
        trace, all_seeds = self._trace, index_of(self._trace)["seed"][episodes]
        once = np.sort(np.unique(all_seeds, return_index=True)[1])
        episodes, seeds = episodes[once], all_seeds[once]
        starts, earliest, start = np.unique(first[once], return_index=True, return_inverse=True)
        if len(starts) == len(seeds):
            return
        again = np.setdiff1d(np.arange(len(seeds)), earliest)[0]
        pair = index_of(trace).whole_indices[episodes[[earliest[start[again]], again]]].tolist()
        shown = "cat", "--episodes", f"{pair[0]},{pair[1]}", "--steps", "0:1", "--columns", "observations"
        about = len(seeds), "episode", int(episodes[0]), None, "observations", shown
        found = f"{len(seeds)} seeds begin with {len(starts)} first observation{'s'[: len(starts) > 1]}"
        by_count, by_seed = (_period(keys, start, earliest) for keys in (index_of(trace).rows[episodes], seeds))
        if (by_count or by_seed) and len(starts) ** -(len(seeds) - len(starts)) < _MOST_CHANCE:
            causes = ["a count of the episodes"] * bool(by_count) + [f"the seed modulo {by_seed}"] * bool(by_seed)
            yield Sighting(_IN_TURN, f"{found} in turn: {' or '.join(causes)} decides the start", *about)
        elif has_floats or len(starts) == 1:
            few = "the start is fixed" if len(starts) == 1 else "there are few starts"
            yield Sighting(_SAME_START, f"{found}: the seed does not decide the start, or {few}", *about)

    def _probably_equal(self) -> list[Array]:
        """Return groups of episodes with equal hashes, as indices of the trace."""
        trace, table = self._trace, index_of(self._trace)
        names = ("environment", "seed", "steps", "first_step", "start", "actions", "results")
        keys = np.zeros(len(table), [(name, "<u8") for name in names])
        wanted = (table["steps"] > 0) & (table["first_step"] == 0)
        writers = table["writer"]
        for number, reader in enumerate(index_of(trace).readers):
            own = np.flatnonzero(writers == number)
            rows = index_of(trace).rows[own]
            hashes = self._hashes.get(number)
            if hashes is None or reader.damage:
                wanted[own] = False
                continue
            keys["environment"][own] = self._environment[number]
            keys["start"][own], keys["actions"][own] = hashes.starts[rows], hashes.actions[rows]
            keys["results"][own] = hashes.results[rows]
        repeated = repeated_steps(table, index_of(trace).readers)
        is_seeded = (table["seed"] != wire.NO_SEED) & ~self._is_branched[writers]
        keys["seed"], keys["steps"] = table["seed"].astype(np.uint64), table["steps"]
        keys["results"][is_seeded] = 0  # so that other results of the same seed are found
        wanted &= is_seeded | (table["steps"] - repeated >= self._thresholds["repeated_steps"])
        indices = np.flatnonzero(wanted)
        order = indices[np.argsort(_mixed(keys[indices]), kind="stable")]
        if not len(order):
            return []
        same = keys[order][1:] == keys[order][:-1]
        in_group = np.append(False, same) | np.append(same, False)
        order, opens = order[in_group], ~np.append(False, same)[in_group]
        groups = np.split(order, np.flatnonzero(opens)[1:]) if len(order) else []
        return [np.sort(group) for group in groups]

    def _seed_sets_start(self, index: int) -> bool:
        """Return True if the seed of an episode determines its start: not if several lanes shared the seed."""
        table = index_of(self._trace)
        if table["seed"][index] == wire.NO_SEED or self._is_branched[table["writer"][index]]:
            return False
        return not inseparable(index_of(self._trace).locate(index)[0])

    def _unbalanced_splits(self) -> Iterator[Sighting]:
        names = [writer.about_or_empty.split for writer in index_of(self._trace).readers]
        counts = dict.fromkeys(names, 0)
        for number, count in enumerate(np.bincount(index_of(self._trace)["writer"], minlength=len(names)).tolist()):
            counts[names[number]] += count
        total = sum(counts.values())
        for name, count in counts.items():
            if total >= self._thresholds["split_episodes"] and count < self._thresholds["split_share"] * total:
                message = f"split {name!r} has {count} of {total} episodes"
                yield Sighting(_UNBALANCED, message, count, "episode", shown_by=("stats", "--by", "split"))


def _other_starts(episodes: Array, seeds: Array, first: Array) -> list[tuple[int, int]]:
    """Return pairs of episodes of the same seed, but another first observation. first: their hashes."""
    _, earliest, seed = np.unique(seeds, return_index=True, return_inverse=True)
    before = earliest[seed]
    differs = first != first[before]
    return list(zip(episodes[before[differs]].tolist(), episodes[differs].tolist()))


def _period(keys: Array, start: Array, earliest: Array) -> int:
    """Return p > 1 if key modulo p decides the start of an episode; otherwise 0.

    keys, start: key and number of the start of each episode. earliest: the first episode of each start.
    """
    period = int(np.gcd.reduce(np.abs(keys - keys[earliest][start])))
    return period if period > 1 and len(np.unique(keys % period)) == len(earliest) else 0


def _mixed(keys: Array) -> Array:
    """Return one hash per key; equal keys have equal hashes."""
    mixed = np.zeros(len(keys), np.uint64)
    for name in keys.dtype.names or ():
        mixed = (mixed ^ keys[name]) * _MULTIPLIERS[0]
        mixed ^= mixed >> np.uint64(29)
    return mixed


def _sums(block: StepRuns, path: tuple[str | int, ...], rows: Array, salt: int) -> Array:
    """Return the sum of the hashes of each run's rows; a hash depends on the value and on its step."""
    bounds = block.offsets(path)
    counts = np.diff(bounds)
    begin = block.first_step - (block.has_initial & (path[0] == "observations")) - bounds[:-1]
    steps = (np.repeat(begin, counts) + np.arange(len(rows))).astype(np.uint64)
    mixed = _with_words((steps + np.uint64(salt + 1)) * _MULTIPLIERS[1], rows)
    mixed *= _MULTIPLIERS[2]
    mixed ^= mixed >> np.uint64(29)
    sums = np.zeros(len(counts), np.uint64)
    runs = np.flatnonzero(counts)
    if len(runs):
        sums[runs] = np.add.reduceat(mixed, bounds[:-1][runs])
    return sums


def _with_words(mixed: Array, rows: Array) -> Array:
    """Return hashes, one per row, with the bytes of the rows mixed in."""
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    if flat.shape[1] % 8:
        flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 8)))
    for word in np.ascontiguousarray(flat).view(np.uint64).T:
        mixed = (mixed ^ word) * _MULTIPLIERS[0]
        mixed ^= mixed >> np.uint64(32)
    return mixed
