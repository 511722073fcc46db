"""Find episodes that are recorded twice, also in two splits, and splits of very different sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from gym_trace.data.packing import pack_lenient
from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.playback.episode_columns import repeated_steps
from gym_trace.playback.scan import StepRuns
from gym_trace.playback.trace import Trace
from gym_trace.tools.linting.findings import ERROR, WARNING, Kind, Sighting
from gym_trace.tools.replay.fingerprints import CONTENT, fingerprints_of
from gym_trace.tools.replay.lanes import inseparable

_TWICE = Kind("T601", WARNING, "episodes recorded twice: the same start, actions and results")
_SHARED = Kind("T602", ERROR, "episodes that two splits share")
_UNBALANCED = Kind("T603", WARNING, "a split with very few episodes")
_UNEQUAL = Kind("T604", WARNING, "the same seed and actions, but other results")

_MOST_BYTES = 256  # larger observations are compared only if all other values are equal
# Multipliers of hashes: the golden ratio, and two primes of xxHash.
_MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)
_MASK = (1 << 63) - 1


class _Hashes:
    """Sums of hashes of steps, one per episode of a writer: equal episodes have equal sums."""

    def __init__(self, episodes: int):
        self.actions = np.zeros(episodes, np.uint64)
        self.results = np.zeros(episodes, np.uint64)
        self.starts = np.zeros(episodes, np.int64)


class RepeatedRule:
    """Compares episodes by quick hashes of their steps, and then exactly where hashes are equal.

    Short episodes of small environments are alike by chance, unless their seeds differ. So episodes without a seed
    count only if they are long, and branched ones only if they have many steps of their own.
    """

    kinds: ClassVar[Sequence[Kind]] = (_TWICE, _SHARED, _UNBALANCED, _UNEQUAL)
    columns: ClassVar[Collection[str]] = frozenset(("starts", "actions", "rewards", "observations"))
    thresholds: ClassVar[Mapping[str, float]] = {"repeated_steps": 20, "split_share": 0.01, "split_episodes": 100}

    def __init__(self, trace: Trace, thresholds: Mapping[str, float]):
        self._trace, self._thresholds = trace, thresholds
        self._hashes: dict[int, _Hashes] = {}
        self._is_branched = np.array([bool(reader.about_or_empty.branch) for reader in trace.readers], np.bool_)

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
        for row, packed in block.starts.items():
            hashes.starts[row] = hash(packed) & _MASK

    def findings(self) -> Iterator[Sighting]:
        yield from self._unbalanced_splits()
        groups = self._probably_equal()
        if not len(groups):
            return
        trace = self._trace
        try:
            content = fingerprints_of(trace, np.concatenate(groups), CONTENT, only_content=True).content
        except CorruptTrace:  # T001 names the damage; after a repair the episodes can be compared
            return
        splits = [writer.about_or_empty.split for writer in trace.readers]
        writers = trace.content["writer"]
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
        for kind, pairs in ((_TWICE, twice), (_SHARED, shared), (_UNEQUAL, unequal)):
            if pairs:
                ordered = (sorted(pair, key=lambda index: int(trace.chosen[index])) for pair in pairs)
                pair = min(ordered, key=lambda pair: trace.chosen[pair].tolist())
                first, second = trace.chosen[pair].tolist()
                shown = "ls", "--episodes", f"{first},{second}"
                message = f"{kind.what}; first: {first} and {second}"
                yield Sighting(kind, message, len(pairs), "episode", pair[1], shown_by=shown)

    def _probably_equal(self) -> list[Array]:
        """Return groups of episodes with equal hashes, as indices of the trace."""
        trace, table = self._trace, self._trace.content
        names = ("environment", "seed", "steps", "first_step", "start", "actions", "results")
        keys = np.zeros(len(table), [(name, "<u8") for name in names])
        wanted = (table["steps"] > 0) & (table["first_step"] == 0)
        writers = table["writer"]
        described = [pack_lenient(writer.about_or_empty.environment)[0] for writer in trace.readers]
        for number, reader in enumerate(trace.readers):
            own = np.flatnonzero(writers == number)
            rows = trace.rows[own]
            hashes = self._hashes.get(number)
            if hashes is None or reader.damage:
                wanted[own] = False
                continue
            keys["environment"][own] = described.index(described[number])
            keys["start"][own], keys["actions"][own] = hashes.starts[rows], hashes.actions[rows]
            keys["results"][own] = hashes.results[rows]
        repeated = repeated_steps(table, trace.readers)
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
        table = self._trace.content
        if table["seed"][index] == wire.NO_SEED or self._is_branched[table["writer"][index]]:
            return False
        return not inseparable(self._trace.writer_of(index))

    def _unbalanced_splits(self) -> Iterator[Sighting]:
        names = [writer.about_or_empty.split for writer in self._trace.readers]
        counts = dict.fromkeys(names, 0)
        for number, count in enumerate(np.bincount(self._trace.content["writer"], minlength=len(names)).tolist()):
            counts[names[number]] += count
        total = sum(counts.values())
        for name, count in counts.items():
            if total >= self._thresholds["split_episodes"] and count < self._thresholds["split_share"] * total:
                message = f"split {name!r} has {count} of {total} episodes"
                yield Sighting(_UNBALANCED, message, count, "episode", shown_by=("stats", "--by", "split"))


def _mixed(keys: Array) -> Array:
    """Return one hash per key; equal keys have equal hashes."""
    mixed = np.zeros(len(keys), np.uint64)
    for name in keys.dtype.names or ():
        mixed = (mixed ^ keys[name]) * _MULTIPLIERS[0]
        mixed ^= mixed >> np.uint64(29)
    return mixed


def _sums(block: StepRuns, path: tuple[str | int, ...], rows: Array, salt: int) -> Array:
    """Return the sum of the hashes of each run's rows; a hash depends on the value and on its step."""
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    if flat.shape[1] % 8:
        flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 8)))
    words = np.ascontiguousarray(flat).view(np.uint64)
    bounds = block.offsets(path)
    counts = np.diff(bounds)
    begin = block.first_step - (block.has_initial & (path[0] == "observations")) - bounds[:-1]
    steps = (np.repeat(begin, counts) + np.arange(len(rows))).astype(np.uint64)
    mixed = (steps + np.uint64(salt + 1)) * _MULTIPLIERS[1]
    for word in words.T:
        mixed = (mixed ^ word) * _MULTIPLIERS[0]
        mixed ^= mixed >> np.uint64(32)
    mixed *= _MULTIPLIERS[2]
    mixed ^= mixed >> np.uint64(29)
    sums = np.zeros(len(counts), np.uint64)
    runs = np.flatnonzero(counts)
    if len(runs):
        sums[runs] = np.add.reduceat(mixed, bounds[:-1][runs])
    return sums
