"""A trace as a Minari dataset: planned and checked before the first byte is written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from gymnasium.envs.registration import EnvSpec

from gym_trace.data.layout import Branch, Layout, Leaf, Path, PlainSpace, leaves_in
from gym_trace.data.values import is_utf8
from gym_trace.errors import InvalidOption
from gym_trace.exchange.formats.contract import Loss, losses
from gym_trace.exchange.formats.foreign import widest
from gym_trace.exchange.formats.infos import InfoColumns, info_columns, is_text
from gym_trace.exchange.formats.minari.spaces import text_of, to_json, with_leaves
from gym_trace.exchange.formats.rows import named
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.playback.column_selection import name_of
from gym_trace.playback.row_types import RowType
from gym_trace.printable import printable

FILE = "metadata.json"
KINDS = ("hdf5", "arrow", "parquet")
_MOST_ROWS = 131_072  # per episode: pyarrow splits longer ones into batches, which Minari reads as episodes
_LARGEST_INTEGER = 1 << 64
_LARGEST_ATTRIBUTE = 32 << 10  # bytes


class MinariPlan(NamedTuple):
    """The columns of a Minari dataset.

    spaces: of observations and actions, as Minari has them in JSON. forms: of each leaf, by its path; None: text.
    rewards: what they are. infos: which are columns. has_infos: whether there are infos at all. losses: see Exporter.
    """

    spaces: tuple[str, str]
    forms: dict[Path, RowType | None]
    rewards: RowType
    infos: InfoColumns
    losses: list[Loss]


def plan_of(source: ExportSource, is_hdf5: bool) -> MinariPlan:
    """Plan the export of a trace to one of Minari's kinds. Raises InvalidOption, CorruptTrace."""
    found: list[Loss] = []
    forms: dict[Path, RowType | None] = {}
    spaces = []
    for root, plain, layout in zip(("observations", "actions"), source.plain_spaces, source.layouts):
        assert isinstance(layout, (Leaf, Branch))
        found += _structure(layout, (root,), is_hdf5)
        said = []
        for path, space in leaves_in(plain, (root,)):
            leaf = _Leaf(source, path, space, source.forms.get(path))
            forms[path], space, lost = leaf.planned(is_hdf5)
            said.append(space)
            found += lost
        spaces.append(to_json(with_leaves(plain, iter(said))))
    rewards = source.form_of_rewards()
    if rewards is None or rewards.dtype.kind not in "biuf":
        raise InvalidOption("rewards: not all are numbers of one shape; export to jsonl or parquet")
    if not is_hdf5:
        _check_rows(source, rewards)
    if rewards.mixed:
        found.append(_mixed("rewards", rewards))
    infos = info_columns(source)
    found += [*_of_infos(infos), *_of_resets(source, is_hdf5), *losses(source, "outcome", "flags", "parts")]
    if not is_hdf5:
        found += losses(source, "empty_episode")
    return MinariPlan((spaces[0], spaces[1]), forms, rewards, infos, found)


def _check_rows(source: ExportSource, rewards: RowType) -> None:
    """Raises InvalidOption for what only Minari's hdf5 can hold."""
    longest = int(source.episodes["steps"].max())
    if longest >= _MOST_ROWS:
        raise InvalidOption(
            f"an episode has {longest:,} steps, but Minari misreads arrow and parquet from {_MOST_ROWS:,} on; "
            "pass --set kind=hdf5"
        )
    if rewards.shape:
        raise InvalidOption("rewards: several numbers each need --set kind=hdf5")


def _structure(layout: Layout, path: Path, is_hdf5: bool) -> Iterator[Loss]:
    if not isinstance(layout, Branch):
        return
    place, names = printable(name_of(path)), [str(key) for key, _ in layout.parts()]
    if len(set(names)) < len(names) or (not names and not is_hdf5):
        raise InvalidOption(f"{place}: empty, or with keys that collide in Minari")
    for name in names:
        if name in ("", ".", "..") or "\0" in name or ("/" in name and is_hdf5):
            told = "; --set kind=arrow can" if "/" in name else ""
            raise InvalidOption(f"{place}: a key {printable(name)!r} cannot be in HDF5 files{told}")
    if any(type(key) is int for key in layout.keys or ()):
        yield Loss("structure", f"integer keys of {place} become text")
    for key, child in layout.parts():
        yield from _structure(child, (*path, key), is_hdf5)


class _Leaf(NamedTuple):
    source: ExportSource
    path: Path
    space: PlainSpace
    form: RowType | None

    @property
    def name(self) -> str:
        return printable(name_of(self.path))

    def planned(self, is_hdf5: bool) -> tuple[RowType | None, PlainSpace, list[Loss]]:
        """Return the form of its rows, the space for Minari, and the losses."""
        kind, form = self.space["type"], self.form
        if form is None:
            return self._text(is_hdf5)
        if form.dtype.kind not in "biuf":
            raise InvalidOption(f"{self.name}: values of {form.dtype}, not supported by Minari")
        if not is_hdf5 and (0 in form.shape or (kind != "custom" and form.shape != tuple(self.space.get("shape", ())))):
            told = f"rows of shape {form.shape}, which is not that of the space, or has no elements"
            raise InvalidOption(f"{self.name}: {told}; Minari can read that from hdf5 alone: --set kind=hdf5")
        if not is_hdf5 and kind == "Discrete" and form.dtype.kind == "b":
            form = RowType(np.dtype(np.int64), (), mixed=True)  # Minari cannot read a single bit
        lost = [_mixed(self.name, form)] if form.mixed else []
        if kind in ("Box", "Discrete", "MultiDiscrete", "MultiBinary"):
            return form, self.space, lost
        lost.append(Loss("spaces", f"the space of {self.name}, {_told(self.space)}, becomes an unbounded Box"))
        return form, widest(form.dtype, form.shape), lost

    def _text(self, is_hdf5: bool) -> tuple[RowType | None, PlainSpace, list[Loss]]:
        if self.space["type"] not in ("Text", "custom"):
            told = "values of several dtypes or shapes" if "dtype" in self.space else _told(self.space)
            raise InvalidOption(
                f"{self.name}: {told}, which Minari cannot hold; wrap the environment so that it is a Box, or export "
                "to a format that can"
            )
        longest, characters = self._seen(is_hdf5)
        if self.space["type"] == "Text":
            return None, self.space, []
        told = f"the space of {self.name}, {_told(self.space)}, is Text in Minari"
        return None, text_of(longest, "".join(sorted(characters))), [Loss("spaces", told)]

    def _seen(self, is_hdf5: bool) -> tuple[int, set[str]]:
        """The length of the longest text that is there, and the characters. Raises InvalidOption if not all is text."""
        longest, characters = 0, set(" ")
        for window in self.source.survey(name_of(self.path)):
            for path, rows in window.columns.items():
                are_text = path == self.path and set(map(type, rows.tolist())) <= {str}
                if path == self.path[: len(path)] and not are_text:
                    told = f"{_told(self.space)} has values other than text, for which Minari has no space"
                    raise InvalidOption(f"{self.name}: {told}")
                for text in set(rows.tolist()) if are_text else ():
                    longest = max(longest, len(text))
                    characters.update(text)
        if not is_utf8("".join(characters)) or (is_hdf5 and "\0" in characters):
            raise InvalidOption(f"{self.name}: text with a lone surrogate or NUL; not supported by Minari")
        return longest, characters


def _told(space: PlainSpace) -> str:
    return printable(str(space.get("class") or space["type"]))[:100]


def _mixed(name: str, form: RowType) -> Loss:
    return Loss("dtype", f"{name}: values of several dtypes become {form.dtype}")


def _of_infos(found: InfoColumns) -> Iterator[Loss]:
    for what, names, why in (
        ("infos", found.left_out, "are missing from some steps or vary in kind; only an import restores them"),
        ("annotations", found.unlike, "are missing from some steps or vary in kind; only an import restores them"),
        ("reset_info", found.missing, "are missing from some resets: NaN, 0, False or empty there"),
    ):
        if names:
            yield Loss(what, f"{what}: {named(names)} {why}")


def _of_resets(source: ExportSource, is_hdf5: bool) -> Iterator[Loss]:
    """Seeds and options that Minari cannot show."""
    elsewhere = np.flatnonzero(source.episodes["seed"] == -2).tolist() if is_hdf5 else ()
    large = sum((source.trace[i].seed or 0) >= _LARGEST_INTEGER for i in elsewhere)
    unfit = sum(not are_options(episode.options, is_hdf5) for episode in source.trace.scan(columns=()))
    if large:
        yield Loss("seed", f"{large:,} seeds of 2^64 and more: only an import restores them")
    if unfit:
        yield Loss("options", f"options of {unfit:,} resets: only an import restores them in full")


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
    """Options as Minari has them in HDF5: the attribute "options/goal/x" is options["goal"]["x"].

    Options that attributes cannot hold are skipped.
    """
    for key, value in options.items():
        if _is_key(key) and isinstance(value, dict):
            yield from attributes_of(value, f"{name}/{key}")
        elif _is_key(key) and (kept := _attribute(value)) is not None:
            yield f"{name}/{key}", kept


def _attribute(value: Any) -> Any:
    """A number, a text, or an array of numbers; None if a value is nothing of that kind."""
    if type(value) is int:
        return value if -(1 << 63) <= value < _LARGEST_INTEGER else None
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
    except Exception:  # gymnasium says in many ways that it does not like what it is given
        return False
