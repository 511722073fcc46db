"""The Protocol of a rule, and the rules of gym-trace and of other packages.

A package adds a rule with an entry point of the group gym_trace.lint_rules, which names its class:

    [project.entry-points."gym_trace.lint_rules"]
    torque = "my_package.rules:TorqueRule"
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar, Protocol

from gym_trace.errors import InvalidOption
from gym_trace.playback.scan import StepRuns
from gym_trace.playback.trace import Trace
from gym_trace.plugins import entry_points
from gym_trace.printable import printable
from gym_trace.tools.linting.ends import EndsRule
from gym_trace.tools.linting.findings import SEVERITIES, Kind, Sighting
from gym_trace.tools.linting.infos import InfosRule
from gym_trace.tools.linting.motion import ActionMotionRule, ObservationMotionRule
from gym_trace.tools.linting.outliers import OutliersRule
from gym_trace.tools.linting.repeated import RepeatedRule
from gym_trace.tools.linting.rewards import RewardsRule
from gym_trace.tools.linting.starts import StartsRule
from gym_trace.tools.linting.values import ValuesRule

_GROUP = "gym_trace.lint_rules"


class Rule(Protocol):
    """Looks for kinds of findings in one pass over a trace, in bounded memory. Entry points name its class.

    Attributes:
        kinds: kinds of its findings. Codes begin with letters of your own; T is in use.
        columns: columns that it reads: any of "observations", "actions", "rewards", "infos", "annotations"; empty: only
            the table of episodes, trace.episodes.
        thresholds: names and defaults of the numbers that users can set.

    Examples:
        >>> class Idle:  # a Rule
        ...     kinds = (gym_trace.linting.Kind("MY1", "warning", "always the same action"),)
        ...     columns, thresholds = ("actions",), {}
        ...
        ...     def __init__(self, trace, thresholds):
        ...         self._seen = set()
        ...
        ...     def add(self, block):
        ...         self._seen |= set(block.columns["actions",].tolist())
        ...
        ...     def findings(self):
        ...         if len(self._seen) == 1:
        ...             yield gym_trace.linting.Sighting(self.kinds[0], "one action", 1)
    """

    kinds: ClassVar[Sequence[Kind]]
    columns: ClassVar[Collection[str]]
    thresholds: ClassVar[Mapping[str, float]]

    def __init__(self, trace: Trace, thresholds: Mapping[str, float]):
        """thresholds: all thresholds, by name."""

    def add(self, block: StepRuns) -> None:
        """Examine steps. Called for each block, in file order; never called if columns is empty."""

    def findings(self) -> Iterable[Sighting]:
        """Return the findings, after the last block."""


_OWN: tuple[type[Rule], ...] = (
    ValuesRule,
    ObservationMotionRule,
    ActionMotionRule,
    RewardsRule,
    EndsRule,
    StartsRule,
    RepeatedRule,
    InfosRule,
    OutliersRule,
)
DAMAGED = Kind("T001", "error", "damaged data, which was skipped")


def all_rules() -> list[type[Rule]]:
    """Return the rules of gym-trace and of installed packages. Raises InvalidOption if one of these is invalid.

    Examples:
        >>> rules = gym_trace.linting.all_rules()
        >>> all(rule.kinds for rule in rules)
        True
    """
    rules, codes = list(_OWN), {DAMAGED.code: "gym-trace"} | {k.code: "gym-trace" for it in _OWN for k in it.kinds}
    for entry in entry_points(_GROUP):
        package = "another package" if entry.dist is None else entry.dist.name
        try:
            rule: type[Rule] = entry.load()
            kinds = [Kind(*kind) for kind in rule.kinds]
            thresholds, _ = dict(rule.thresholds), frozenset(rule.columns)
        except Exception as error:  # code of another package
            raise InvalidOption(printable(f"lint rule {entry.name} of {package}: cannot be loaded: {error}")) from error
        for kind in kinds:
            if kind.code in codes or kind.severity not in SEVERITIES or not kind.code.isalnum():
                problem = f"{codes[kind.code]} has this code" if kind.code in codes else "invalid code or severity"
                raise InvalidOption(printable(f"lint rule {entry.name} of {package}: {kind.code}: {problem}"))
            codes[kind.code] = package
        if in_use := thresholds.keys() & {name for other in rules for name in other.thresholds}:
            names = ", ".join(sorted(in_use))
            raise InvalidOption(printable(f"lint rule {entry.name} of {package}: threshold {names}: exists; rename it"))
        rules.append(rule)
    return rules


def all_kinds(rules: Sequence[type[Rule]]) -> list[Kind]:
    """Return the kinds of findings of these rules, by code.

    Examples:
        >>> kinds = gym_trace.linting.all_kinds(gym_trace.linting.all_rules())
        >>> kinds[0].code, kinds[0].severity
        ('T001', 'error')
    """
    return sorted([DAMAGED, *(kind for rule in rules for kind in rule.kinds)])


def chosen_codes(kinds: Iterable[Kind], select: Collection[str], ignore: Collection[str], notes: bool) -> set[str]:
    """Return the codes to look for. select, ignore: codes or beginnings of codes; no select: all but notes.

    Raises InvalidOption for an element that is not the beginning of a code.
    """
    kinds = list(kinds)
    codes = [kind.code for kind in kinds]
    for prefix in (*select, *ignore):
        if not any(prefix and code.startswith(prefix) for code in codes):
            near = difflib.get_close_matches(prefix, codes, n=1, cutoff=0.5)
            instead = f"did you mean {near[0]}?" if near else f"use one of {', '.join(codes)}"
            raise InvalidOption(f"{prefix!r}: no rule has this code; {instead}")
    wanted = {kind.code for kind in kinds if notes or kind.severity != "note"}
    if select:
        wanted = {code for code in codes if code.startswith(tuple(select))}
    return {code for code in wanted if not (ignore and code.startswith(tuple(ignore)))}


def merged_thresholds(rules: Sequence[type[Rule]], given: Mapping[str, float]) -> dict[str, float]:
    """Return all thresholds: the given ones, and defaults. Raises InvalidOption.

    Examples:
        >>> thresholds = gym_trace.linting.merged_thresholds(gym_trace.linting.all_rules(), {})
        >>> sorted(thresholds)[:2]
        ['at_limit', 'clipped_actions']
    """
    merged = {name: default for rule in rules for name, default in rule.thresholds.items()}
    for name, value in given.items():
        if name not in merged:
            near = difflib.get_close_matches(name, merged, n=1, cutoff=0.5)
            instead = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(sorted(merged))}"
            raise InvalidOption(f"{name!r}: no threshold has this name; {instead}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise InvalidOption(f"{name}={value!r}: pass a number of 0 or more")
        merged[name] = value
    return merged
