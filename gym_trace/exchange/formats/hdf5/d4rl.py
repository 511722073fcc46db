"""Export and import of HDF5 files in the layout of D4RL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import Any, ClassVar

import numpy as np

from gym_trace.data.layout import Leaf
from gym_trace.data.values import Array, placeholder
from gym_trace.errors import InvalidOption, TraceError, UnreadableRecording
from gym_trace.exchange.formats.columns import FLAG, Column, reward_column, value_column
from gym_trace.exchange.formats.contract import ExportPlan, Loss, Target, losses, mixed_dtypes
from gym_trace.exchange.formats.foreign import begins_with, widest
from gym_trace.exchange.formats.hdf5.reading import (
    MAGIC,
    MOST_ARRAYS,
    H5File,
    H5Group,
    H5Rows,
    arrays_in,
    columns_in,
    row_blocks,
)
from gym_trace.exchange.formats.hdf5.writing import Arrays, BlobArray, Datasets, new_file, text
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.imported import Imported, NewEpisode, imported, new_schema
from gym_trace.exchange.formats.infos import ANNOTATIONS, InfoColumns, PackedInfos, info_columns, infos_of, packed
from gym_trace.exchange.formats.rows import RowQueue, lengths_between, named, steps_of
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.playback.scan import LEFT_OUT
from gym_trace.playback.step_runs import StepRuns, beside_steps


@dataclass(frozen=True)
class D4RLExporter:
    """One HDF5 file in the layout of D4RL, which CORL, IQL, TD3+BC and CleanRL's offline scripts read."""

    name: ClassVar[str] = "d4rl"
    makes: ClassVar[str] = "file"
    finals: ClassVar[str] = LEFT_OUT

    def plan(self, source: ExportSource) -> ExportPlan:
        columns, infos = _columns(source), info_columns(source)
        lost = [
            *mixed_dtypes({column.name: column.form for column in columns}),
            *losses(source, "seed", "options", "reset_info", "outcome", "flags", "parts", restored=True),
            *infos.losses(),
            *losses(source, "empty_episode"),
        ]
        if (both := _ends_with_both_flags(source)) and not source.has_flags_within():
            lost.append(Loss("flags", f"{both:,} episodes, terminated and truncated at once, read as terminated"))
        columns += [info.column() for info in infos.found]
        return ExportPlan(lost, partial(_write, source, columns, infos), self._how_to_load)

    def _how_to_load(self, path: FilePath) -> str:
        names = "('observations', 'actions', 'next_observations', 'rewards', 'terminals', 'timeouts')"
        read = f"dataset = {{name: file[name][()] for name in {names}}}"
        return f"import h5py\nwith h5py.File({str(path.resolve())!r}) as file:\n    {read}"


def _columns(source: ExportSource) -> list[Column]:
    """Return the columns but those of infos. Raises InvalidOption unless each is a numeric array."""
    forms = []
    for name, layout in zip(("observations", "actions"), source.layouts):
        form = source.forms.get((name,)) if isinstance(layout, Leaf) else None
        if form is None or form.dtype.kind not in "biuf":
            raise InvalidOption(
                f"{name}: not one array of numbers, as D4RL needs; wrap the environment, as in "
                "gymnasium.wrappers.FlattenObservation, or export to a format with structure, such as minari"
            )
        forms.append(form)
    rewards = reward_column(source)
    if rewards.form is not None and rewards.form.shape:
        raise InvalidOption("rewards: several numbers per step, and D4RL stores one; export to minari")
    return [
        Column(("observations",), forms[0], lambda runs: beside_steps(runs, runs.columns["observations",], False)),
        Column(("next_observations",), forms[0], lambda runs: beside_steps(runs, runs.columns["observations",], True)),
        value_column(("actions",), forms[1], ("actions",)),
        rewards,
        Column(("terminals",), FLAG, lambda runs: _ends(runs, runs.terminated)),
        Column(("timeouts",), FLAG, lambda runs: _ends(runs, ~runs.terminated)),
    ]


def _ends(runs: StepRuns, chosen: Array) -> Array:
    """Return (steps,) bool: True for the last steps of episodes whose last runs are chosen."""
    is_end = np.zeros(runs.size, np.bool_)
    is_end[runs.step_offsets[1:][runs.closes & chosen & (runs.lengths > 0)] - 1] = True
    return is_end


def _ends_with_both_flags(source: ExportSource) -> int:
    """Count the episodes that ended terminated and truncated."""
    ended = source.trace[source.episodes["outcome"] == "terminated"]
    return sum(bool(len(e) and e.truncations[-1]) for e in ended.scan(columns=["truncations"])) if len(ended) else 0


def _write(source: ExportSource, columns: list[Column], infos: InfoColumns, target: Target) -> None:
    facts, ours = source.facts, f"metadata/{KEY}"
    metadata = {"env_id": source.environment.get("id"), **{name: facts.get(name) for name in ("algorithm", "author")}}
    with new_file(target.staged) as (file, check):
        datasets = Datasets(columns, ["metadata", ours])
        datasets.create(file.id, source.steps)
        for name, value in metadata.items():
            if isinstance(value, str) and value:
                with suppress(UnicodeEncodeError, ValueError):  # not valid text in HDF5; `about` has it anyway
                    text(file.id, f"metadata/{name}", value)
        text(file.id, f"{ours}/about", source.about)
        identities = Arrays(f"{ours}/episodes", None)
        identity_texts = identities.new(file.id, int((source.episodes["steps"] > 0).sum()))
        packed_infos = BlobArray(file, f"{ours}/infos") if infos.need_packing else None
        row = episode = 0
        for runs in source.runs():
            ended = runs.episode[runs.closes]
            if len(ended := ended[source.episodes["steps"][ended] > 0]):
                identities.write(identity_texts, episode, source.identities(ended))
            if runs.size:
                datasets.write(runs, row)
            if packed_infos is not None:
                packed_infos.add(data for _, data in packed(runs.columns, row, runs.size, infos))
            row, episode = row + runs.size, episode + len(ended)
            source.advance(runs.size)
            check()
        if packed_infos is not None:
            packed_infos.write()


_KIND = "D4RL"
_MAP = {  # fields of NewSteps, and their arrays
    "observations": "observations",
    "actions": "actions",
    "rewards": "rewards",
    "terminations": "terminals",
    "truncations": "timeouts",
    "next_observations": "next_observations",
}
_REQUIRED = ("observations", "actions", "rewards", "terminals")
_SCALARS = ("rewards", "terminations", "truncations")
_WARNING = "D4RL stores no spaces, environment, seeds or times; the spaces are as wide as the dtypes"
_KNOWN = frozenset((*_MAP.values(), "infos", "metadata"))
_LONGEST_METADATA = 1024  # characters; longer values are skipped


class D4RLImporter:
    """One HDF5 file in the layout of D4RL"""

    name: ClassVar[str] = "d4rl"

    def recognises(self, path: FilePath) -> bool:
        if not begins_with(path, MAGIC):
            return False
        with suppress(TraceError), H5File(path) as file:
            return all(name in file.root and not file.root.is_group(name) for name in _REQUIRED)
        return False

    def read(self, path: FilePath) -> Imported:
        with ExitStack() as on_error:  # afterwards, episodes() closes the file
            file = _D4RLFile(on_error.enter_context(H5File(path)))
            observations, actions = (
                widest(rows.dtype, rows.shape[1:]) for rows in (file.arrays["observations"], file.arrays["actions"])
            )
            environment, metadata = {"note": f"{path.name} names no environment"}, file.metadata()
            schema = new_schema(_KIND, observations, actions, environment, metadata, infos=bool(file.infos))
            facts = {key: value for key, value in metadata.items() if key in ("algorithm", "author")}
            content = imported(_KIND, file.episodes(), schema, file.about, facts, file.warnings, file.rows)
            on_error.pop_all()
            return content


class _D4RLFile:
    """A file of D4RL. warnings: missing facts; reading adds more."""

    def __init__(self, file: H5File):
        self._file, root = file, file.root
        self.arrays = {role: _numbers(root, name) for role, name in _MAP.items() if name in root or name in _REQUIRED}
        observations, after = self.arrays["observations"], self.arrays.get("next_observations")
        self.rows = rows = len(self.arrays["rewards"])
        for role, array in self.arrays.items():
            if len(array) != rows:
                raise array.fault(f"has {len(array)} rows for {rows} rewards")
            if role in _SCALARS and array.shape not in ((rows,), (rows, 1)):
                raise array.fault(f"has shape {array.shape}; one number per row expected")
        if after is not None and after.shape != observations.shape:
            raise after.fault(f"has shape {after.shape}, but observations have {observations.shape}")
        self._metadata = root.group("metadata") if "metadata" in root and root.is_group("metadata") else None
        ours = self._metadata.group(KEY) if self._metadata is not None and KEY in self._metadata else None
        self.about = None if ours is None else ours.rows("about").text()
        self._identities = None if ours is None else ours.rows("episodes")
        infos = columns_in(root.group("infos")) if "infos" in root and root.is_group("infos") else {}
        self._skipped = ["/".join(("infos", *path)) for path, array in infos.items() if len(array) != rows]
        infos = {path: array for path, array in infos.items() if len(array) == rows and array.shape}
        self._annotations = {path[1]: infos.pop(path) for path in [*infos] if ours and path[0] == ANNOTATIONS}
        self.infos = {} if ours else infos
        self._packed_infos = ours.rows("infos") if ours and "infos" in ours else None
        if not ours:
            self._annotations |= self._unknown_arrays(root)
        self.warnings = [] if ours else self._import_warnings()

    def _import_warnings(self) -> list[str]:
        warnings = [_WARNING]
        if "next_observations" not in self.arrays:
            warnings.append(
                "no next_observations: the final observation of each episode is unknown; "
                "episode.has_final_observation is False, and the row a placeholder"
            )
        if "truncations" not in self.arrays:
            warnings.append("no timeouts: an episode that was not terminated is joined to the next one")
        if self._annotations:
            warnings.append(f"arrays unknown to D4RL become annotations: {named([*self._annotations])}")
        metadata, imported = arrays_in(self._metadata) if self._metadata is not None else (), self.metadata()
        skipped = [f"metadata/{name}" for path, _ in metadata if (name := "/".join(path)) not in imported]
        if skipped := self._skipped + skipped:
            warnings.append(f"skipped, not arrays with one row per step: {named(skipped)}")
        return warnings

    def _unknown_arrays(self, root: H5Group) -> dict[str, H5Rows]:
        """Return arrays unknown to D4RL that have one row per step."""
        arrays = {}
        names = [name for name in root.names() if name not in _KNOWN]
        if len(names) > MOST_ARRAYS:
            raise root.fault(f"has more than {MOST_ARRAYS} arrays")
        for name in names:
            with suppress(UnreadableRecording):  # a link, or values that are not numbers
                if not root.is_group(name):
                    array = root.rows(name)
                    if array.shape and len(array) == self.rows and not array.is_bytes:
                        arrays[name] = array
                        continue
            self._skipped.append(name)
        return arrays

    def metadata(self) -> dict[str, Any]:
        """Return the numbers and texts in the group "metadata", by path."""
        metadata: dict[str, Any] = {"imported_from": _KIND}
        for path, rows in arrays_in(self._metadata) if self._metadata is not None else ():
            if path[0] != KEY and not rows.shape and not rows.is_bytes:
                value = rows.read()
                value = value if isinstance(value, str) else value.item()
                if len(str(value)) <= _LONGEST_METADATA:
                    metadata["/".join(path)] = value
        return metadata

    def episodes(self) -> Iterator[NewEpisode]:
        """Yield the episodes. Raises UnreadableRecording."""
        with self._file:
            ends = {role: self.arrays[role] for role in ("terminations", "truncations") if role in self.arrays}
            lengths = lengths_between(np.logical_or(*_flags(rows)) for _, _, rows in row_blocks(ends, self.rows))
            if self._identities is not None and len(self._identities) != len(lengths):
                raise UnreadableRecording(
                    f"{self._file.path}: has {len(lengths):,} episodes, but gym-trace stored metadata of "
                    f"{len(self._identities):,}; changed or damaged"
                )
            identities, queue = iter(self._identities or ()), RowQueue(self._blocks())
            observations, has_final = self.arrays["observations"], "next_observations" in self.arrays
            final = placeholder(observations.dtype, observations.shape[1:])
            for steps in lengths:
                parts = steps_of(queue, steps, final, self.warnings)
                identity = next(identities, None)
                yield NewEpisode(steps, parts, identity=identity, has_final_observation=has_final)

    def _blocks(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield rows as steps_of() takes them."""
        unpacked, blobs = PackedInfos(), iter(self._packed_infos or ())
        tree = {**self.arrays, "infos": self.infos, "annotations": self._annotations}
        for begin, end, rows in row_blocks(tree, self.rows):
            rows["rewards"] = rows["rewards"].reshape(-1)
            rows["terminations"], rows["truncations"] = _flags(rows)
            if self.infos:
                rows["infos"] = infos_of(rows["infos"], end - begin)
            if self._packed_infos is not None:
                while unpacked.end < end and (data := next(blobs, None)) is not None:
                    unpacked.add(unpacked.end, np.asarray(data, np.uint8).tobytes())
                infos, annotations = unpacked.take(end - begin)
                rows |= {"infos": infos or [], "annotations": rows["annotations"] | annotations}
            yield end - begin, rows


def _flags(rows: dict[str, Any]) -> tuple[Array, Array]:
    """Return the terminated and truncated flags in terminals and timeouts."""
    terminals: Array = rows["terminations"].reshape(-1).astype(np.bool_)
    return terminals, rows.get("truncations", np.zeros(len(terminals))).reshape(-1).astype(np.bool_) & ~terminals


def _numbers(root: H5Group, name: str) -> H5Rows:
    rows = root.rows(name)
    if rows.is_text or rows.is_bytes or not rows.shape:
        raise rows.fault("not an array of numbers")
    return rows
