"""Plan the export to a Minari dataset, and check it before anything is written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from gymnasium.envs.registration import EnvSpec

from gym_trace.data.layout import Branch, Layout, Leaf, Path, PlainSpace, leaves_in
from gym_trace.data.values import is_utf8
from gym_trace.errors import InvalidOption
from gym_trace.exchange.formats.columns import Column, end_flags, observation_column, reward_column, value_column
from gym_trace.exchange.formats.contract import RESTORED, Loss, losses, mixed_dtypes
from gym_trace.exchange.formats.foreign import widest
from gym_trace.exchange.formats.infos import InfoColumns, info_columns, is_text
from gym_trace.exchange.formats.minari.spaces import index_in_hdf5, names_of, text_of, to_json, with_leaves
from gym_trace.exchange.formats.rows import named
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.format import wire
from gym_trace.playback.column_selection import name_of
from gym_trace.playback.row_types import RowType
from gym_trace.printable import printable

FILE = "metadata.json"
KINDS = ("hdf5", "arrow", "parquet")
_MOST_ROWS = 131_072  # per episode: pyarrow splits longer ones into batches, which Minari reads as episodes
_INTEGER_LIMIT = 1 << 64
_LARGEST_ATTRIBUTE = 32 << 10  # bytes


class MinariPlan(NamedTuple):
    """The columns of a Minari dataset.

    spaces: JSON of the observation and action space. columns: of leaves, rewards, flags and infos.
    groups: names of all Dicts and Tuples, with slashes. losses: see ExportPlan.
    """

    spaces: tuple[str, str]
    columns: list[Column]
    groups: list[str]
    infos: InfoColumns
    losses: list[Loss]


def plan_of(source: ExportSource, is_hdf5: bool) -> MinariPlan:
    """Plan the export of a trace to hdf5, or to arrow and parquet. Raises InvalidOption, CorruptTrace."""
    lost: list[Loss] = []
    columns: list[Column] = []
    groups, spaces = list[str](), []
    for root, plain, layout in zip(("observations", "actions"), source.plain_spaces, source.layouts):
        assert isinstance(layout, (Leaf, Branch))
        lost += _structure(layout, (root,), is_hdf5)
        column_of = observation_column if root == "observations" else value_column
        names, leaves = names_of(layout, (root,), index_in_hdf5 if is_hdf5 else str, groups), []
        for name, (path, space) in zip(names, leaves_in(plain, (root,))):
            leaf = _LeafPlanner(source, path, space, source.forms.get(path))
            form, leaf_space, leaf_losses = leaf.planned(is_hdf5)
            columns.append(column_of(name, form, path))
            leaves.append(leaf_space)
            lost += leaf_losses
        spaces.append(to_json(with_leaves(plain, iter(leaves))))
    rewards = reward_column(source)
    if not is_hdf5:
        _check_rows(source, rewards)
    columns += [rewards, *end_flags("terminations", "truncations")]
    infos = info_columns(source)
    lost += [*mixed_dtypes({column.name: column.form for column in columns}), *infos.losses()]
    if infos.missing:
        lost.append(Loss("reset_info", f"missing from some resets: NaN, 0, False or empty: {named(infos.missing)}"))
    lost += [*_reset_losses(source, is_hdf5), *losses(source, "outcome", "flags", "parts", restored=True)]
    if not is_hdf5:
        lost += losses(source, "empty_episode")
    for column in (info.column(has_reset=True) for info in infos.found):
        # Minari would convert values in structs to Python's types.
        name = column.name if is_hdf5 else (column.name[0], "/".join(column.name[1:]))
        columns.append(column._replace(name=name))
    return MinariPlan((spaces[0], spaces[1]), columns, groups, infos, lost)


def _check_rows(source: ExportSource, rewards: Column) -> None:
    """Raise InvalidOption for episodes and rewards that only hdf5 can hold."""
    longest = int(source.episodes["steps"].max())
    if longest >= _MOST_ROWS:
        raise InvalidOption(
            f"an episode has {longest:,} steps, but Minari misreads arrow and parquet from {_MOST_ROWS:,} on; "
            "pass --set kind=hdf5"
        )
    if rewards.form is not None and rewards.form.shape:
        raise InvalidOption("rewards: several numbers per step; pass --set kind=hdf5")


def _structure(layout: Layout, path: Path, is_hdf5: bool) -> Iterator[Loss]:
    """Yield the losses by keys of Dict spaces. Raises InvalidOption for invalid keys."""
    if not isinstance(layout, Branch):
        return
    label, names = printable(name_of(path)), [str(key) for key, _ in layout.parts()]
    if len(set(names)) < len(names) or (not names and not is_hdf5):
        raise InvalidOption(f"{label}: empty, or with keys that collide in Minari")
    for name in names:
        if name in ("", ".", "..") or "\0" in name or ("/" in name and is_hdf5):
            hint = "; pass --set kind=arrow" if "/" in name else ""
            raise InvalidOption(f"{label}: key {printable(name)!r} is not possible in HDF5{hint}")
    if any(type(key) is int for key in layout.keys or ()):
        yield Loss("structure", f"integer keys of {label} become text")
    for key, child in layout.parts():
        yield from _structure(child, (*path, key), is_hdf5)


class _LeafPlanner(NamedTuple):
    source: ExportSource
    path: Path
    space: PlainSpace
    form: RowType | None

    @property
    def name(self) -> str:
        return printable(name_of(self.path))

    def planned(self, is_hdf5: bool) -> tuple[RowType | None, PlainSpace, list[Loss]]:
        """Return the type of the rows (None: text), the space for Minari, and the losses."""
        kind, form = self.space["type"], self.form
        if form is None:
            return self._text(is_hdf5)
        if form.dtype.kind not in "biuf":
            raise InvalidOption(f"{self.name}: values of {form.dtype}, not supported by Minari")
        if not is_hdf5 and (0 in form.shape or (kind != "custom" and form.shape != tuple(self.space.get("shape", ())))):
            raise InvalidOption(
                f"{self.name}: rows of shape {form.shape}, which has no elements, or differs from the space; Minari "
                "reads these only from hdf5: pass --set kind=hdf5"
            )
        if not is_hdf5 and kind == "Discrete" and form.dtype.kind == "b":
            form = RowType(np.dtype(np.int64), (), mixed=True)  # Minari cannot read scalars of bool
        if kind in ("Box", "Discrete", "MultiDiscrete", "MultiBinary"):
            return form, self.space, []
        lost = Loss("spaces", f"the space of {self.name}, {_class_of(self.space)}, becomes an unbounded Box")
        return form, widest(form.dtype, form.shape), [lost]

    def _text(self, is_hdf5: bool) -> tuple[RowType | None, PlainSpace, list[Loss]]:
        if self.space["type"] not in ("Text", "custom"):
            values = "values of several dtypes or shapes" if "dtype" in self.space else _class_of(self.space)
            raise InvalidOption(
                f"{self.name}: {values}, not supported by Minari; wrap the environment so that it is a Box, or export "
                "to another format"
            )
        longest, characters = self._text_limits(is_hdf5)
        if self.space["type"] == "Text":
            return None, self.space, []
        loss = Loss("spaces", f"the space of {self.name}, {_class_of(self.space)}, becomes Text")
        return None, text_of(longest, "".join(sorted(characters))), [loss]

    def _text_limits(self, is_hdf5: bool) -> tuple[int, set[str]]:
        """Return the length of the longest text, and all characters. Raises InvalidOption for other values."""
        longest, characters = 0, set(" ")
        for window in self.source.survey(name_of(self.path)):
            for path, rows in window.columns.items():
                are_text = path == self.path and set(map(type, rows.tolist())) <= {str}
                if path == self.path[: len(path)] and not are_text:
                    space = _class_of(self.space)
                    raise InvalidOption(f"{self.name}: {space} has values other than text; not supported by Minari")
                for text in set(rows.tolist()) if are_text else ():
                    longest = max(longest, len(text))
                    characters.update(text)
        if not is_utf8("".join(characters)) or (is_hdf5 and "\0" in characters):
            raise InvalidOption(f"{self.name}: text with a lone surrogate or NUL; not supported by Minari")
        return longest, characters


def _class_of(space: PlainSpace) -> str:
    return printable(str(space.get("class") or space["type"]))[:100]


def _reset_losses(source: ExportSource, is_hdf5: bool) -> Iterator[Loss]:
    """Yield losses of seeds and options that Minari cannot store."""
    large_seeds = np.flatnonzero(source.episodes["seed"] == wire.SEED_ELSEWHERE).tolist() if is_hdf5 else ()
    large = sum((source.trace[i].seed or 0) >= _INTEGER_LIMIT for i in large_seeds)
    unfit = sum(not are_options(episode.options, is_hdf5) for episode in source.trace.scan(columns=()))
    if large:
        yield Loss("seed", f"{large:,} seeds of 2^64 and more{RESTORED}")
    if unfit:
        yield Loss("options", f"options of {unfit:,} resets{RESTORED}")


def are_options(options: Any, is_hdf5: bool) -> bool:
    """Return True if Minari can store exactly the options of a reset."""
    return not options or (_fits_hdf5(options) if is_hdf5 else _fits_json(options))


def _fits_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and _fits_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_fits_json, value))
    return value is None or type(value) in (bool, int, float, str)


def _fits_hdf5(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(_is_key(key) and _fits_hdf5(item) for key, item in value.items())
    return _attribute(value) is not None and not isinstance(value, list)


def attributes_of(options: dict[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    """Yield options as HDF5 attributes of Minari: "options/goal/x" is options["goal"]["x"].

    Options that attributes cannot hold are skipped.
    """
    for key, value in options.items():
        if _is_key(key) and isinstance(value, dict):
            yield from attributes_of(value, f"{name}/{key}")
        elif _is_key(key) and (attribute := _attribute(value)) is not None:
            yield f"{name}/{key}", attribute


def _attribute(value: Any) -> Any:
    """Return a value as a number, a text, or an array of numbers; None if an attribute cannot hold it."""
    if type(value) is int:
        return value if -(1 << 63) <= value < _INTEGER_LIMIT else None
    if type(value) is str:
        return value if is_text(value) else None
    if type(value) is list and len(set(map(type, value))) == 1 and type(value[0]) in (bool, int, float):
        value = np.array(value)
    if type(value) in (bool, float):
        return np.asarray(value)
    is_array = isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf"
    return np.asarray(value) if is_array and value.nbytes <= _LARGEST_ATTRIBUTE else None


def _is_key(key: Any) -> bool:
    return type(key) is str and key != "" and "/" not in key and is_text(key)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_spec(text: Any) -> bool:
    """Return True for JSON text of an EnvSpec. Does not make the environment."""
    try:
        return isinstance(text, str) and isinstance(EnvSpec.from_json(text), EnvSpec)
    except Exception:  # gymnasium raises many types for invalid JSON
        return False
