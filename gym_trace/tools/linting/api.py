"""lint_trace: all rules over a trace, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np

from gym_trace.errors import CorruptTrace
from gym_trace.format.batch_reader import Damage
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.scan import OMITTED, Scan
from gym_trace.playback.trace import Trace, TraceLike, as_trace
from gym_trace.tools.linting.findings import SEVERITIES, Finding, Sighting, finding_of
from gym_trace.tools.linting.rules import DAMAGED, Rule, all_kinds, all_rules, chosen_codes, merged_thresholds


def lint_trace(
    trace: TraceLike,
    *,
    select: Collection[str] = (),
    ignore: Collection[str] = (),
    notes: bool = False,
    thresholds: Mapping[str, float] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[Finding]:
    """Find problems in recorded data. Yields findings, errors first, each once with a count and a first position.

    Reads each chunk once, in bounded memory, and never runs the environment. Damaged chunks are skipped and reported
    (T001). The codes are in docs/guides/lint.md, and `gym-trace lint --rules` lists them.

    Args:
        trace: a trace, a view, or a directory.
        select: codes, or beginnings of codes such as "T1", to look for, notes included; empty: all but notes.
        ignore: codes, or beginnings of codes, to skip.
        notes: also yield notes, which are normal in many environments.
        thresholds: numbers in place of the defaults, by name.
        on_progress: called as ``on_progress(steps done, total steps)``.

    Raises:
        TraceNotFound.
        InvalidOption: an unknown code or threshold, or an invalid rule of another package.

    Examples:
        >>> for finding in gym_trace.lint_trace("traces/cartpole", notes=True):
        ...     print(finding.code, finding.severity, finding.what)
        T301 note rewards that are the same in the whole trace
    """
    rules = all_rules()
    codes = chosen_codes(all_kinds(rules), select, ignore, notes)
    merged = merged_thresholds(rules, thresholds or {})
    trace = as_trace(trace)
    chosen = [rule for rule in rules if codes & {kind.code for kind in rule.kinds}]
    return _findings(trace, chosen, codes, merged, on_progress)


def _findings(
    trace: Trace,
    rule_types: list[type[Rule]],
    codes: set[str],
    thresholds: Mapping[str, float],
    on_progress: Callable[[int, int], None] | None,
) -> Iterator[Finding]:
    rules = [rule_type(trace, thresholds) for rule_type in rule_types]
    damage = dict.fromkeys(trace.damage)
    _read(trace, rules, damage, on_progress)
    sightings = [sighting for rule in rules for sighting in rule.findings()]
    if damage:
        message = f"{DAMAGED.what}; first: {next(iter(damage)).error().problem}"
        sightings.append(Sighting(DAMAGED, message, len(damage), "place", shown_by=("check",)))
    findings = [finding_of(sighting, trace) for sighting in sightings if sighting.kind.code in codes]
    yield from sorted(findings, key=lambda found: (SEVERITIES.index(found.severity), found.code, found.column or ""))


def _read(
    trace: Trace, rules: list[Rule], damage: dict[Damage, None], on_progress: Callable[[int, int], None] | None
) -> None:
    """Pass every block of steps to the rules that need steps."""
    of_steps = [rule for rule in rules if rule.columns]
    roots = frozenset(name for rule in of_steps for name in rule.columns)
    if not of_steps:
        return
    total, done = int(index_of(trace)["steps"].sum()), 0

    def on_damage(found: Damage) -> None:
        damage[found] = None

    for number in range(len(index_of(trace).readers)):
        own = np.flatnonzero(index_of(trace)["writer"] == number)
        try:
            for block in Scan(index_of(trace), roots, own, finals=OMITTED, on_damage=on_damage):
                for rule in of_steps:
                    rule.add(block)
                done += block.size
                if on_progress is not None:
                    on_progress(min(done, total), total)
        except CorruptTrace as error:  # missing or malformed schema
            on_damage(Damage(error.path or str(trace.directory), 0, 0, error.problem))
