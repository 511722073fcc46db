"""Observations, actions and rewards as these libraries have them: a few arrays of numbers, or one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.interop.contract import Loss
from gym_trace.interop.losses import losses
from gym_trace.interop.source import Source, leaves_of
from gym_trace.model.layout import Layout, Leaf, Path
from gym_trace.model.values import Array
from gym_trace.printable import printable
from gym_trace.reading.forms import Form

_TEXTS = 1024  # that are made at a time


class Part(NamedTuple):
    """Arrays of one form: a leaf of the observations, or all of them.

    name: "state/image" is observation["state"]["image"]; "" where there is only one.
    """

    path: Path
    name: str
    form: Form


class Observations(NamedTuple):
    """What of the observations is exported, and which leaves are not: others (no arrays), unwanted (not chosen)."""

    layout: Layout
    parts: list[Part]
    others: list[str]
    unwanted: list[str]

    @property
    def is_one(self) -> bool:
        """Whether they are one array, not a dict or tuple of some."""
        return isinstance(self.layout, Leaf) or len(self.parts) == 1

    def rows(self, tree: Any) -> list[Array]:
        """The rows of each part, of a column of a window. Raises InvalidOption."""
        found = {leaf.path: rows for leaf, rows in leaves_of(self.layout, tree)}
        return [as_form(found[part.path], part.form) for part in self.parts]

    def lost(self) -> Iterator[Loss]:
        """What is left out, and what is not as it was recorded."""
        if self.unwanted:
            names = ", ".join(printable(name) for name in self.unwanted)
            yield Loss("structure", f"observations are {printable(self.parts[0].name)!r} alone; left out are {names}")
        for name in self.others:
            yield Loss("text", f"observations of {printable(name)!r} are left out, which are text, or no arrays")
        yield from _widened(self.parts)


def observations_of(source: Source, only: str = "") -> Observations:
    """only: the name of a leaf, to have that alone. Raises InvalidOption: nothing, or no such leaf, can be exported."""
    layout = source.layouts.observations
    parts, others, unwanted = [], [], []
    for leaf in layout.leaves():
        name, form = "/".join(map(str, leaf.path[1:])), source.forms[leaf.path]
        if only and name != only:
            unwanted.append(name)
        elif leaf.dtype is None:
            others.append(name)
        else:
            parts.append(Part(leaf.path, name, _numbers(form, f"observations {name}".rstrip())))
    if only and not parts:
        names = ", ".join(printable("/".join(map(str, leaf.path[1:]))) for leaf in layout.leaves() if leaf.dtype)
        raise InvalidOption(f"observation={only!r}: there is no such array in the observations; there are {names}")
    if not parts:
        raise InvalidOption("the observations are text, or of another kind that is no array; they cannot be exported")
    return Observations(layout, parts, others, unwanted)


class Actions(NamedTuple):
    """The actions: arrays of one form. space: theirs, of gymnasium."""

    space: Any
    form: Form

    @property
    def kind(self) -> str:
        """Such as "Discrete"."""
        return type(self.space).__name__

    def rows(self, tree: Any) -> Array:
        return as_form(np.asarray(tree), self.form)

    def lost(self) -> Iterator[Loss]:
        return _widened([Part(("actions",), "actions", self.form)])


def actions_of(source: Source, kinds: Sequence[str], library: str) -> Actions:
    """kinds: of spaces that the library has. Raises InvalidOption: they are of another one."""
    space = source.action_space
    if type(space).__name__ not in kinds:
        told, found = f"{', '.join(kinds[:-1])} or {kinds[-1]}", printable(source.plain_spaces[1]["type"])
        raise InvalidOption(f"{library} takes actions of {told}; these are of {found}, and cannot be exported")
    return Actions(space, _numbers(source.forms[("actions",)], "actions"))


def reward_form(source: Source, library: str) -> Form:
    """Of the rewards, one number each. Raises InvalidOption: they are several, or there are none."""
    if not source.steps:
        raise InvalidOption(
            f"no episode of {source.trace.directory} has a step, so that {library} has nothing to train on"
        )
    form = _numbers(source.forms[("rewards",)], "rewards")
    if int(np.prod(form.shape)) != 1:
        raise InvalidOption(f"{library} takes one number as a reward; these are of shape {form.shape}")
    return form


def narrowed_rewards(source: Source, form: Form) -> Iterator[Loss]:
    """What there is to say where rewards become float32."""
    if form.dtype == np.float32:
        return
    with np.errstate(over="ignore"):
        rounded = any(
            not np.array_equal(rewards.astype(np.float32), rewards, equal_nan=rewards.dtype.kind == "f")
            for rewards in (np.asarray(episode.rewards) for episode in source.trace.scan(columns=("rewards",)))
        )
    yield Loss("dtype", f"rewards become float32, which {'rounds them' if rounded else 'holds those that there are'}")


def lost_flags(source: Source) -> Iterator[Loss]:
    """The loss there is where an episode has one flag, of whether it was terminated."""
    found = list(losses(source, "flags"))
    ends = source.trace.scan(columns=("terminations", "truncations"))
    both = sum(bool(len(e) and e.terminations[-1] and e.truncations[-1]) for e in ends)
    if both and not found:
        told = "episode was" if both == 1 else "episodes were"
        found = [Loss("flags", f"{both:,} {told} terminated and truncated at once, and are read as terminated")]
    yield from found


def identities_of(source: Source) -> Iterator[list[str]]:
    """What is known of each episode that has steps beside these, some of them at a time."""
    places = np.flatnonzero(source.episodes["steps"] > 0)
    for start in range(0, len(places), _TEXTS):
        yield source.identities(places[start : start + _TEXTS])


def as_form(rows: Array, form: Form) -> Array:
    """Rows of what may be several dtypes as one array."""
    if rows.dtype == object:
        return np.array(list(rows), form.dtype).reshape((len(rows), *form.shape))
    return rows.astype(form.dtype, copy=False)


def _numbers(form: Form | None, what: str) -> Form:
    if form is None:
        raise InvalidOption(f"{printable(what)}: rows are not all arrays of one shape, and cannot be exported")
    if form.dtype.kind not in "biuf" or form.dtype.itemsize > 8:
        raise InvalidOption(f"{printable(what)}: arrays of {form.dtype} cannot be exported")
    return form


def _widened(parts: list[Part]) -> Iterator[Loss]:
    for part in parts:
        if part.form.mixed:
            name = printable(part.name) or "observations"
            yield Loss("dtype", f"{name}: rows of several dtypes become {part.form.dtype}, which holds all of them")
