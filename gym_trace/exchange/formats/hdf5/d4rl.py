"""Export and import of HDF5 files in the layout of D4RL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, ClassVar

import h5py
import numpy as np

from gym_trace.data.layout import Leaf
from gym_trace.data.values import Array, placeholder
from gym_trace.errors import InvalidOption, TraceError, UnreadableRecording
from gym_trace.exchange.formats.contract import ExportPlan, Loss, Target, losses
from gym_trace.exchange.formats.foreign import begins_with, widest
from gym_trace.exchange.formats.hdf5.reading import (
    MAGIC,
    MOST_ARRAYS,
    H5File,
    H5Group,
    H5Rows,
    ReadAhead,
    arrays_in,
    columns_in,
    step_ranges,
)
from gym_trace.exchange.formats.hdf5.writing import Arrays, BlobArray, info_arrays, new_file, new_group, text
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.imported import Imported, NewEpisode, NewSteps, imported, new_schema
from gym_trace.exchange.formats.infos import ANNOTATIONS, InfoColumns, PackedInfos, info_columns, packed
from gym_trace.exchange.formats.rows import infos_of, named
from gym_trace.exchange.formats.source import ExportSource, flags
from gym_trace.exchange.formats.steps.windows import Window
from gym_trace.playback.row_types import RowType
from gym_trace.playback.scan import LEFT_OUT

_FLAG = RowType(np.dtype(np.bool_), ())
_ONLY_IMPORT = "can be restored only by an import"


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
                for _ in _FileWriter(file, source, forms, infos).write():
                    check()

        return ExportPlan(list(self._losses(source, forms, infos)), write, self._how_to_load)

    def _losses(self, source: ExportSource, forms: dict[str, RowType], infos: InfoColumns) -> Iterator[Loss]:
        for name, form in forms.items():
            if form.mixed:
                yield Loss("dtype", f"{name}: values of several dtypes become {form.dtype}")
        for loss in losses(source, "seed", "options", "reset_info"):
            yield Loss(loss.what, loss.why.replace("are not kept", _ONLY_IMPORT))
        for what, names in (("infos", infos.left_out), ("annotations", infos.unlike)):
            if names:
                yield Loss(what, f"{what} missing from some steps, or of varying type, {_ONLY_IMPORT}: {named(names)}")
        yield from losses(source, "outcome", "flags", "parts", "empty_episode")
        if (both := _ends_with_both_flags(source)) and not source.has_flags_within():
            yield Loss("flags", f"{both:,} episodes that were terminated and truncated at once read as terminated")

    def _how_to_load(self, path: FilePath) -> str:
        names = "('observations', 'actions', 'next_observations', 'rewards', 'terminals', 'timeouts')"
        read = f"dataset = {{name: file[name][()] for name in {names}}}"
        return f"import h5py\nwith h5py.File({str(path.resolve())!r}) as file:\n    {read}"


def _forms(source: ExportSource) -> dict[str, RowType]:
    """Return the RowType of observations, actions and rewards. Raises InvalidOption unless each is a numeric array."""
    forms = {}
    for name, layout in zip(("observations", "actions"), source.layouts):
        form = source.forms.get((name,)) if isinstance(layout, Leaf) else None
        if form is None or form.dtype.kind not in "biuf":
            raise InvalidOption(
                f"{name}: not one array of numbers, as D4RL needs; wrap the environment, as in "
                "gymnasium.wrappers.FlattenObservation, or export to a format with structure, such as minari"
            )
        forms[name] = form
    rewards = source.form_of_rewards()
    if rewards is None or rewards.dtype.kind not in "biuf":
        raise InvalidOption("rewards: not all are numbers of one shape; export to jsonl or parquet")
    if rewards.shape:
        raise InvalidOption("rewards: several numbers per step, and D4RL stores one; export to minari")
    return {**forms, "rewards": rewards}


def _ends_with_both_flags(source: ExportSource) -> int:
    """Count the episodes that ended terminated and truncated."""
    ended = source.trace[source.episodes["outcome"] == "terminated"]
    return sum(bool(len(e) and e.truncations[-1]) for e in ended.scan(columns=["truncations"])) if len(ended) else 0


class _FileWriter:
    def __init__(self, file: h5py.File, source: ExportSource, forms: dict[str, RowType], infos: InfoColumns):
        self._source, self._file, self._root, self._infos = source, file, file.id, infos
        row_types = {
            "observations": forms["observations"],
            "next_observations": forms["observations"],
            "actions": forms["actions"],
            "rewards": forms["rewards"],
            "terminals": _FLAG,
            "timeouts": _FLAG,
        }
        arrays, groups = info_arrays(infos.columns)
        for name in groups:
            new_group(self._root, name)
        self._arrays = [*(Arrays(name, form.dtype, form.shape) for name, form in row_types.items()), *arrays]
        self._datasets = [arrays.new(self._root, source.steps) for arrays in self._arrays]

    def write(self) -> Iterator[Window]:
        """Write all; yield each window after it is written."""
        row, identities = 0, Arrays("episodes", None)
        self._write_metadata()
        count = int((self._source.episodes["steps"] > 0).sum())
        identity_texts = identities.new(new_group(self._root, f"metadata/{KEY}"), count)
        text(self._root, f"metadata/{KEY}/about", self._source.about)
        episode, pending = 0, []
        packed_infos = BlobArray(self._file, f"metadata/{KEY}/infos") if self._infos.need_packing else None
        for window in self._source.windows():
            if not window.steps:
                continue
            if window.start == 0:
                pending.append(self._source.identity(window.episode))
            for arrays, dataset, rows in zip(self._arrays, self._datasets, self._rows(window)):
                arrays.write(dataset, row, rows)
            if packed_infos is not None:
                for _, data in packed(window, self._infos):
                    packed_infos.add(data)
            row += window.steps
            yield window
            if len(pending) >= 1024:
                identities.write(identity_texts, episode, pending)
                episode, pending = episode + len(pending), []
        identities.write(identity_texts, episode, pending)
        if packed_infos is not None:
            packed_infos.write()

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

    def _write_metadata(self) -> None:
        new_group(self._root, "metadata")
        facts = self._source.facts
        metadata = {name: facts.get(name) for name in ("algorithm", "author")}
        for name, value in {"env_id": self._source.environment.get("id"), **metadata}.items():
            if isinstance(value, str) and value:
                with suppress(UnicodeEncodeError, ValueError):  # not valid text in HDF5; `about` has it anyway
                    text(self._root, f"metadata/{name}", value)


_KIND = "D4RL"
_REQUIRED = ("observations", "actions", "rewards", "terminals")
_WARNING = "D4RL stores no spaces, environment, seeds or times; the spaces are as wide as the dtypes"
_KNOWN = frozenset((*_REQUIRED, "timeouts", "next_observations", "infos", "metadata"))
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
            observations, actions = (widest(rows.dtype, rows.shape[1:]) for rows in (file.observations, file.actions))
            environment, metadata = {"note": f"{path.name} names no environment"}, file.metadata()
            schema = new_schema(_KIND, observations, actions, environment, metadata, infos=bool(file.infos))
            facts = {key: value for key, value in metadata.items() if key in ("algorithm", "author")}
            content = imported(_KIND, file.episodes(), schema, file.about, facts, file.warnings, len(file.rewards))
            file.warnings = content.warnings
            on_error.pop_all()
            return content


class _D4RLFile:
    """A file of D4RL. warnings: missing facts; reading adds more."""

    def __init__(self, file: H5File):
        self._file, root = file, file.root
        self.observations, self.actions, self.rewards = (_numbers(root, name) for name in _REQUIRED[:3])
        self._terminals = _numbers(root, "terminals")
        self._timeouts = _numbers(root, "timeouts") if "timeouts" in root else None
        self._next = _numbers(root, "next_observations") if "next_observations" in root else None
        rows = len(self.rewards)
        scalars = (self.rewards, self._terminals, self._timeouts)
        for array in (*scalars, self.observations, self.actions, self._next):
            if array is not None and len(array) != rows:
                raise array.fault(f"has {len(array)} rows for {rows} rewards")
            if array in scalars and array is not None and array.shape not in ((rows,), (rows, 1)):
                raise array.fault(f"has shape {array.shape}; one number per row expected")
        if self._next is not None and self._next.shape != self.observations.shape:
            raise self._next.fault(f"has shape {self._next.shape}, but observations have {self.observations.shape}")
        self._metadata = root.group("metadata") if "metadata" in root and root.is_group("metadata") else None
        ours = self._metadata.group(KEY) if self._metadata is not None and KEY in self._metadata else None
        self.about = None if ours is None else ours.rows("about").text()
        self._identities = None if ours is None else ReadAhead(ours.rows("episodes"))
        infos = columns_in(root.group("infos")) if "infos" in root and root.is_group("infos") else {}
        self._skipped = ["/".join(("infos", *path)) for path, array in infos.items() if len(array) != rows]
        infos = {path: array for path, array in infos.items() if len(array) == rows and array.shape}
        annotations = {path[1]: infos.pop(path) for path in [*infos] if ours and path[0] == ANNOTATIONS}
        self._annotations = {name: ReadAhead(array, len(annotations)) for name, array in annotations.items()}
        self.infos = {} if ours else {path: ReadAhead(array, len(infos)) for path, array in infos.items()}
        self._packed_infos = ReadAhead(ours.rows("infos")) if ours and "infos" in ours else None
        if not ours:
            self._annotations |= self._unknown_arrays(root, rows)
        self.warnings = [] if ours else self._import_warnings()

    def _import_warnings(self) -> list[str]:
        warnings = [_WARNING]
        if self._next is None:
            warnings.append(
                "no next_observations: the final observation of each episode is unknown; "
                "episode.has_final_observation is False, and the row a placeholder"
            )
        if self._timeouts is None:
            warnings.append("no timeouts: an episode that was not terminated is joined to the next one")
        if self._annotations:
            warnings.append(f"arrays unknown to D4RL become annotations: {named([*self._annotations])}")
        metadata, imported = arrays_in(self._metadata) if self._metadata is not None else (), self.metadata()
        skipped = [f"metadata/{name}" for path, _ in metadata if (name := "/".join(path)) not in imported]
        if skipped := self._skipped + skipped:
            warnings.append(f"skipped, not arrays with one row per step: {named(skipped)}")
        return warnings

    def _unknown_arrays(self, root: H5Group, rows: int) -> dict[str, ReadAhead]:
        """Return arrays unknown to D4RL that have one row per step."""
        arrays = {}
        names = [name for name in root.names() if name not in _KNOWN]
        if len(names) > MOST_ARRAYS:
            raise root.fault(f"has more than {MOST_ARRAYS} arrays")
        for name in names:
            with suppress(UnreadableRecording):  # a link, or values that are not numbers
                if not root.is_group(name):
                    array = root.rows(name)
                    if array.shape and len(array) == rows and not array.is_bytes:
                        arrays[name] = ReadAhead(array, len(names))
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
            ends, terminal = self._ends()
            if self._identities is not None and len(self._identities) != len(ends):
                raise UnreadableRecording(
                    f"{self._file.path}: has {len(ends):,} episodes, but gym-trace stored metadata of "
                    f"{len(self._identities):,}; changed or damaged"
                )
            columns = [ReadAhead(rows) for rows in (self.observations, self.actions, self.rewards)]
            after = None if self._next is None else ReadAhead(self._next)
            begin = 0
            self._unpacked, self._next_packed = PackedInfos(), 0
            for number, end in enumerate(ends.tolist()):
                identity = None if self._identities is None else self._identities.read(number, number + 1)[0]
                is_last = number == len(ends) - 1
                outcome = "terminated" if terminal[number] else "truncated" if not is_last or self._ended else "cut"
                parts = self._parts(begin, end, columns, after)
                has_final = after is not None
                yield NewEpisode(end - begin, parts, outcome, identity=identity, has_final_observation=has_final)
                begin = end

    def _ends(self) -> tuple[Array, Array]:
        """Return (episodes,) the row after the last one of each, and the terminal flag of its last row."""
        end_blocks, terminal_blocks = [], []
        for begin, end in step_ranges(len(self.rewards), 64):
            is_end = terminals = self._terminals.read(begin, end).reshape(-1).astype(np.bool_)
            if self._timeouts is not None:
                is_end = terminals | self._timeouts.read(begin, end).reshape(-1).astype(np.bool_)
            last_rows = np.flatnonzero(is_end)
            end_blocks.append(last_rows + begin + 1)
            terminal_blocks.append(terminals[last_rows])
        ends, is_terminal = np.concatenate(end_blocks), np.concatenate(terminal_blocks)
        self._ended = not len(self.rewards) or bool(len(ends) and ends[-1] == len(self.rewards))
        if self._ended:
            return ends, is_terminal
        return np.append(ends, len(self.rewards)), np.append(is_terminal, False)

    def _parts(self, begin: int, end: int, columns: list[ReadAhead], after: ReadAhead | None) -> Iterator[NewSteps]:
        observations, actions, rewards = columns
        others = (*self.infos.values(), *self._annotations.values())
        row_size = sum(rows.row_size for rows in (self.observations, self.actions, *(ahead.rows for ahead in others)))
        for first, last in step_ranges(end - begin, row_size):
            first, last = first + begin, last + begin
            rows = observations.read(first if first == begin else first + 1, min(last + 1, end))
            if last == end:
                final = placeholder(rows.dtype, rows.shape[1:]) if after is None else after.read(end - 1, end)
                rows = np.concatenate([rows, final])
            if after is not None:
                self._compare(rows[-(last - first) :], after.read(first, last))
            infos, annotations = self._infos(first, last)
            annotations |= {name: ahead.read(first, last) for name, ahead in self._annotations.items()}
            reward = rewards.read(first, last).reshape(-1)
            yield NewSteps(rows, actions.read(first, last), reward, infos=infos, annotations=annotations)

    def _compare(self, rows: Array, after: Array) -> None:
        """Warn of next observations that differ from the following ones: a trace cannot store them."""
        warning = "some next_observations differ from the following observations; skipped"
        if warning not in self.warnings and rows.tobytes() != after.tobytes():
            self.warnings.append(warning)

    def _infos(self, begin: int, end: int) -> tuple[list[Any] | None, dict[str, Any]]:
        if self._packed_infos is not None:
            while self._unpacked.end < end and self._next_packed < len(self._packed_infos):
                data = self._packed_infos.read(self._next_packed, self._next_packed + 1)[0]
                self._unpacked.add(self._unpacked.end, np.asarray(data, np.uint8).tobytes())
                self._next_packed += 1
            return self._unpacked.take(end - begin)
        if not self.infos:
            return None, {}
        return infos_of({path: ahead.read(begin, end) for path, ahead in self.infos.items()}, end - begin), {}


def _numbers(root: H5Group, name: str) -> H5Rows:
    rows = root.rows(name)
    if rows.is_text or rows.is_bytes or not rows.shape:
        raise rows.fault("not an array of numbers")
    return rows
