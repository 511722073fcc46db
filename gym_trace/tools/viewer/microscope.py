"""The agent under the microscope: its values against what came after them, and its versions.

It reads annotations with the names of most trainers: value, logprob, entropy, probabilities, version.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.layout import Path
from gym_trace.data.returns import numbers_of
from gym_trace.data.values import Array
from gym_trace.data.vocabulary import OUTCOMES
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.episode_table import outcome_codes
from gym_trace.playback.scan import Scan
from gym_trace.playback.trace import Trace
from gym_trace.storage.local import open_regular
from gym_trace.tools.integrity.scan import Progress

NAMES = {
    "value": ("value", "values", "vf_preds"),
    "logprob": ("logprob", "log_prob", "logp", "action_logp"),
    "entropy": ("entropy",),
    "probabilities": ("probabilities", "probs", "action_probs"),
    "version": ("version",),
}
_SCANNED = 1 << 17  # steps whose columns are in memory together
_NEGLIGIBLE = 1e-17  # discount of a reward that no longer counts
_MOST_BYTES = 1 << 20  # read from a file beside the trace
_MOST_CHARACTERS = 2000
VERSION, VALUE_ERROR = "version", "value error"
_OF = {VERSION: "version", VALUE_ERROR: "value", "entropy": "entropy"}  # figures, and the annotation of each


def annotation(kind: str, stored: Iterable[Path]) -> Path | None:
    """Return the path of the annotation of this kind: one of NAMES. None: not recorded."""
    return next((path for name in NAMES[kind] for path in stored if path == ("annotations", name)), None)


class Discount(NamedTuple):
    """Discount of the returns. note: where it is from, as a text."""

    gamma: float
    note: str


def discount_of(trace: Trace) -> Discount:
    """Return the discount that the fact "gamma" of the trace, or the settings of its run name; otherwise 1."""
    settings = _beside(trace, "run.json").get("settings")
    of_run = settings.get("gamma") if isinstance(settings, dict) else None
    for gamma, source in ((trace.facts.get("gamma"), ""), (of_run, ", that of the run")):
        if isinstance(gamma, (int, float)) and not isinstance(gamma, bool) and 0 <= gamma <= 1:
            return Discount(gamma, f"discount {gamma:g}{source}")
    return Discount(1.0, "no discount: none is known")


class Proved(NamedTuple):
    """Number of versions that were learned again, of all; and the first difference, "" without one."""

    versions: int
    of: int
    differs: str


def proved_versions(trace: Trace) -> Proved | None:
    """Return what verified.json beside the run says: the output of a proof with --json. None without one."""
    match _beside(trace, "verified.json"):
        case {"versions": int(versions), "of": int(of), "differs": str(differs)}:
            return Proved(versions, of, differs[:_MOST_CHARACTERS])
    return None


def _beside(trace: Trace, name: str) -> dict[str, Any]:
    """Return a JSON file of the run or the log of updates beside a trace; {} if it is missing or unreadable.

    Its content is untrusted.
    """
    directory = trace.directory
    run = directory.parent if directory.name == "trace" else directory.with_name(f"{directory.name}.proof")
    try:
        with open(open_regular(run / name, os.O_RDONLY), "rb") as file:
            found = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def returns_to_go(rewards: Array, values: Array, ends: Array, terminated: Array, gamma: float) -> Array:
    """Return (steps,) float64: the discounted rewards from each step to the end of its episode.

    The value of the last step stands for what would have come after an episode that was not terminated. Unlike
    gym_trace.targets.returns_to_go(), this takes as many passes as the longest episode has binary digits.

    Args:
        rewards, values: (steps,) float64, of episodes one after the other.
        ends: (episodes,) int64, where each ends. terminated: (episodes,) bool.
        gamma: the discount.
    """
    found = rewards.copy()
    lengths = np.diff(ends, prepend=0)
    cut = ends[~terminated & (lengths > 0)] - 1
    found[cut] = values[cut]
    left = np.repeat(ends, lengths) - np.arange(len(found))
    later, reach = np.flatnonzero(left > 1), 1  # each element has the rewards of `reach` steps
    while len(later) and (weight := gamma**reach) > _NEGLIGIBLE:
        found[later] += weight * found[later + reach]
        reach *= 2
        later = later[left[later] > reach]
    return found


class Figures:
    """Numbers of the episodes of a trace, (len(trace),) float64 each; NaN where unknown.

    Args:
        trace: a trace that does not change.
        before: figures of an earlier state of the trace: only what has changed since is read.
        on_progress: called before each part that is read.

    Attributes:
        columns: "version": policy version that acted in the last step; "value error": mean distance of the values from
            the returns to go; "entropy": mean entropy of the policy. Those that are not recorded are left out.
    """

    def __init__(self, trace: Trace, before: Figures | None = None, on_progress: Progress | None = None):
        self.trace = trace
        self._paths = _figures_of(trace)
        self.columns = {name: np.full(len(trace), np.nan) for name in self._paths}
        if not self.columns:
            return
        self._gamma = discount_of(trace).gamma
        missing = np.ones(len(trace), bool)
        if before is not None and before.columns.keys() == self.columns.keys() and before._gamma == self._gamma:
            missing = self._kept(before)
        table = trace.episodes
        steps = table["steps"].astype(np.int64)
        wanted = np.flatnonzero(missing & (steps > 0))
        for part in np.split(wanted, np.flatnonzero(np.diff(np.cumsum(steps[wanted]) // _SCANNED)) + 1):
            if len(part):
                if on_progress is not None:
                    on_progress(int(part[0]), len(trace))
                self._read(part, steps[part], table["first_step"][part].astype(np.int64))

    def _kept(self, before: Figures) -> Array:
        """Take over the figures of episodes that have not changed; return True for the others."""
        numbers = {reader.writer: number for number, reader in enumerate(index_of(self.trace).readers)}
        both = np.concatenate([_identities(trace, numbers) for trace in (before.trace, self.trace)])
        order, count = np.lexsort(both.T), len(before.trace)  # stable: an earlier state stays first
        old, new = order[:-1], order[1:]
        is_same = (both[old] == both[new]).all(axis=1) & (old < count) & (new >= count)
        old, new = old[is_same], new[is_same] - count
        for name, values in self.columns.items():
            values[new] = before.columns[name][old]
        missing = np.ones(len(self.trace), bool)
        missing[new] = False
        return missing

    def _read(self, rows: Array, steps: Array, first: Array) -> None:
        """Read the columns of some episodes, and set their figures."""
        ends = np.cumsum(steps)
        begin_of = np.zeros(len(self.trace), np.int64)
        begin_of[rows] = ends - steps - first
        paths: dict[str, Path] = {"rewards": ("rewards",), **self._paths}
        columns = {name: np.full(ends[-1], np.nan) for name in paths}
        for block in Scan(index_of(self.trace), set(paths.values()), rows, on_damage=lambda damage: None):
            places = np.repeat(begin_of[block.episode] + block.first_step - block.step_offsets[:-1], block.lengths)
            places += np.arange(block.size)
            for name, path in paths.items():
                if path in block.columns:
                    columns[name][places] = _numbers(block.columns[path])
        terminated = outcome_codes(self.trace.episodes[rows]) == OUTCOMES.index("terminated")
        with np.errstate(invalid="ignore", over="ignore"):
            if (values := columns.get(VALUE_ERROR)) is not None:
                to_go = returns_to_go(columns["rewards"], values, ends, terminated, self._gamma)
                columns[VALUE_ERROR] = np.abs(values - to_go)
            for name, figures in self.columns.items():
                means = np.add.reduceat(columns[name], ends - steps) / steps
                figures[rows] = columns[name][ends - 1] if name == VERSION else means


def available(trace: Trace) -> list[str]:
    """Return the figures that the episodes of a trace have."""
    return list(_figures_of(trace))


def _figures_of(trace: Trace) -> dict[str, Path]:
    stored = {
        path: None for reader in index_of(trace).readers for batch in reader.read_batches for path in batch.totals
    }
    found = {figure: annotation(kind, stored) for figure, kind in _OF.items()}
    return {figure: path for figure, path in found.items() if path is not None}


def _identities(trace: Trace, numbers: Mapping[str, int]) -> Array:
    """Return (episodes, 5) int64: what identifies each episode, and what it has so far. numbers: of the writers."""
    table = trace.episodes
    writers = np.array([numbers.get(reader.writer, -1) for reader in index_of(trace).readers], np.int64)[
        table["writer"]
    ]
    names = ("episode_id", "first_step", "steps", "end_time")
    return np.stack([writers, *(table[name].astype(np.int64) for name in names)], axis=1)


def _numbers(rows: Array) -> Array:
    """Return (rows,) float64; NaN for rows that are not one number each."""
    one_each = rows.dtype != object and rows[:1].size == 1
    return numbers_of(rows.reshape(len(rows)) if one_each else rows).astype(np.float64)
