"""Export to HDF5 files as those of D4RL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, ClassVar

import h5py
import numpy as np

from gym_trace.data.layout import Leaf
from gym_trace.errors import InvalidOption
from gym_trace.exchange.formats.contract import ExportPlan, Loss, Target, losses
from gym_trace.exchange.formats.hdf5.writing import Arrays, BlobArray, new_file, new_group, text
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.infos import InfoColumns, info_columns, packed
from gym_trace.exchange.formats.rows import named
from gym_trace.exchange.formats.source import ExportSource, flags
from gym_trace.exchange.formats.steps.windows import Window
from gym_trace.playback.row_types import RowType
from gym_trace.playback.scan import LEFT_OUT

_FLAG = RowType(np.dtype(np.bool_), ())
_FOR_IMPORT = "are stored for an import only"


@dataclass(frozen=True)
class D4RLExporter:
    """One HDF5 file in the layout of D4RL, which CORL, IQL, TD3+BC and CleanRL's offline scripts read."""

    name: ClassVar[str] = "d4rl"
    makes: ClassVar[str] = "file"
    finals: ClassVar[str] = LEFT_OUT

    def plan(self, source: ExportSource) -> ExportPlan:
        forms, infos = _forms(source), info_columns(source)

        def write(target: Target) -> None:
            with new_file(target.staged) as (file, check):
                for _ in _Writing(file, source, forms, infos).write():
                    check()

        return ExportPlan(list(self._losses(source, forms, infos)), write, self._how_to_load)

    def _losses(self, source: ExportSource, forms: dict[str, RowType], infos: InfoColumns) -> Iterator[Loss]:
        for name, form in forms.items():
            if form.mixed:
                yield Loss("dtype", f"{name}: values of several dtypes become {form.dtype}")
        for loss in losses(source, "seed", "options", "reset_info"):
            yield Loss(loss.what, loss.why.replace("are not kept", _FOR_IMPORT))
        for what, names in (("infos", infos.left_out), ("annotations", infos.unlike)):
            if names:
                told = named(names)
                yield Loss(what, f"{what} missing from some steps, or of varying form, {_FOR_IMPORT}: {told}")
        yield from losses(source, "outcome", "flags", "parts", "empty_episode")
        if (both := _of_both_flags(source)) and not source.has_flags_within():
            told = "that were terminated and truncated at once read as terminated"
            yield Loss("flags", f"{both:,} episodes {told}")

    def _how_to_load(self, path: FilePath) -> str:
        names = "('observations', 'actions', 'next_observations', 'rewards', 'terminals', 'timeouts')"
        read = f"dataset = {{name: file[name][()] for name in {names}}}"
        return f"import h5py\nwith h5py.File({str(path.resolve())!r}) as file:\n    {read}"


def _forms(source: ExportSource) -> dict[str, RowType]:
    """Return the forms of observations, actions and rewards. Raises InvalidOption unless each is one numeric array."""
    found = {}
    for name, layout in zip(("observations", "actions"), source.layouts):
        form = source.forms.get((name,)) if isinstance(layout, Leaf) else None
        if form is None or form.dtype.kind not in "biuf":
            raise InvalidOption(
                f"D4RL's files have one array of numbers for {name}, which these are not; wrap the environment in "
                "gymnasium.wrappers.FlattenObservation or the like, or export to a format with structure: minari"
            )
        found[name] = form
    rewards = source.form_of_rewards()
    if rewards is None or rewards.dtype.kind not in "biuf":
        raise InvalidOption("rewards: not all are numbers of one shape; export to jsonl or parquet")
    if rewards.shape:
        raise InvalidOption("rewards: several numbers each, D4RL stores one; export to minari")
    return {**found, "rewards": rewards}


def _of_both_flags(source: ExportSource) -> int:
    """Count the episodes that ended terminated and truncated."""
    ended = source.trace[source.episodes["outcome"] == "terminated"]
    return sum(bool(len(e) and e.truncations[-1]) for e in ended.scan(columns=["truncations"])) if len(ended) else 0


class _Writing:
    """A file that is being written."""

    def __init__(self, file: h5py.File, source: ExportSource, forms: dict[str, RowType], infos: InfoColumns):
        self._source, self._file, self._root, self._infos = source, file, file.id, infos
        kinds = {
            "observations": forms["observations"],
            "next_observations": forms["observations"],
            "actions": forms["actions"],
            "rewards": forms["rewards"],
            "terminals": _FLAG,
            "timeouts": _FLAG,
        }
        self._arrays = {name: Arrays(name, form.dtype, form.shape) for name, form in kinds.items()}
        self._of_infos = [Arrays("/".join(("infos", *c.path)), c.dtype, c.shape) for c in self._infos.columns]
        for name in sorted({"/".join(("infos", *c.path[:i])) for c in self._infos.columns for i in range(len(c.path))}):
            new_group(self._root, name)
        self._data = [arrays.new(self._root, source.steps) for arrays in (*self._arrays.values(), *self._of_infos)]

    def write(self) -> Iterator[Window]:
        """Yields what has been written."""
        row, identities = 0, Arrays("episodes", None)
        self._metadata()
        kept = identities.new(new_group(self._root, f"metadata/{KEY}"), int((self._source.episodes["steps"] > 0).sum()))
        text(self._root, f"metadata/{KEY}/about", self._source.about)
        episode, told = 0, []
        whole = BlobArray(self._file, f"metadata/{KEY}/infos") if self._infos.are_kept_whole else None
        for window in self._source.windows():
            if not window.steps:
                continue
            if window.start == 0:
                told.append(self._source.identity(window.episode))
            for arrays, data, rows in zip((*self._arrays.values(), *self._of_infos), self._data, self._rows(window)):
                arrays.write(data, row, rows)
            if whole is not None:
                for _, data in packed(window, self._infos):
                    whole.add(data)
            row += window.steps
            yield window
            if len(told) >= 1024:
                identities.write(kept, episode, told)
                episode, told = episode + len(told), []
        identities.write(kept, episode, told)
        if whole is not None:
            whole.write()

    def _rows(self, window: Window) -> Iterator[Any]:
        columns = window.columns
        terminations, truncations = flags(window)
        yield columns[("observations",)][:-1]
        yield columns[("observations",)][1:]
        yield columns[("actions",)]
        yield columns[("rewards",)]
        yield terminations
        yield truncations & ~terminations
        for column in self._infos.columns:
            yield column.rows(window)

    def _metadata(self) -> None:
        new_group(self._root, "metadata")
        facts = self._source.facts
        said = {"env_id": self._source.environment.get("id"), "algorithm": facts.get("algorithm")}
        for name, value in (said | {"author": facts.get("author")}).items():
            if isinstance(value, str) and value:
                with suppress(UnicodeEncodeError, ValueError):  # not valid text in HDF5; the facts have it anyway
                    text(self._root, f"metadata/{name}", value)
