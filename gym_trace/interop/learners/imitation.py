"""imitation: what its serialize.save writes, a data set of Hugging Face's datasets (docs/EXPORT.md, imitation)."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import pyarrow as pa

from gym_trace.errors import InvalidOption, TraceError
from gym_trace.interop.contract import Loss
from gym_trace.interop.identity import KEY
from gym_trace.interop.learners.arrays import (
    Actions,
    Observations,
    actions_of,
    as_form,
    identities_of,
    lost_flags,
    observations_of,
    reward_form,
)
from gym_trace.interop.learners.jsonpickled import info_text
from gym_trace.interop.losses import losses
from gym_trace.interop.source import Source
from gym_trace.interop.steps.windows import Window
from gym_trace.model.values import Array
from gym_trace.reading.forms import Form

_SPACES = ("Box", "Discrete", "MultiDiscrete", "MultiBinary")
_FILE = "data-00000-of-00001.arrow"
_BATCH = 8 << 20  # bytes of whole trajectories from which on they are written
_MOST_ROWS = 1000  # that are written at a time
_IN_MEMORY = 32 << 20  # bytes of an array; what is more of a long episode waits in a file
_MOST_TEXT = (1 << 31) - 1  # bytes of the infos of an episode


@dataclass(frozen=True)
class ImitationExporter:
    """imitation: trajectories that its serialize.load reads, a directory of Hugging Face's datasets.

    observation: of dict observations the one that is exported, such as "image".
    """

    name: ClassVar[str] = "imitation"
    extra: ClassVar[str] = "imitation"
    makes: ClassVar[str] = "directory"

    observation: str = ""

    def lost(self, source: Source) -> Iterator[Loss]:
        observations, actions, reward = self._checked(source)
        yield from losses(source, "annotations", "empty_episode", "parts")
        if (source.episodes["outcome"] == "truncated").any():
            yield Loss("flags", "one flag, terminal, says that an episode was terminated or truncated")
        else:
            yield from lost_flags(source)
        yield from observations.lost()
        yield from actions.lost()
        dtypes = {str(form.dtype) for form in (observations.parts[0].form, actions.form, _floating(reward))}
        if others := sorted(dtypes - {"float64", "int64", "bool"}):
            told = f"imitation's loader gives {', '.join(others)} as float64 and int64; the files have them as recorded"
            yield Loss("dtype", told)

    def write(self, source: Source, target: Path) -> None:
        observations, actions, reward = self._checked(source)
        has_infos = ("infos",) in source.forms
        forms = observations.parts[0].form, actions.form, _floating(reward)
        with _Trajectories(target, *forms) as file:
            for window in source.windows(
                "observations", "actions", "rewards", "terminations", "truncations", *(["infos"] if has_infos else [])
            ):
                if not window.steps:
                    continue
                tree = window.columns
                rows = observations.rows(tree["observations"])[0]
                rewards = as_form(tree["rewards"], reward).astype(forms[2].dtype).reshape(-1)
                file.add(rows if window.opens else rows[1:], actions.rows(tree["actions"]), rewards, _infos_of(window))
                if window.closes:
                    file.end(bool(tree["terminations"][-1] or tree["truncations"][-1]))
        with open(target / f"{KEY}.jsonl", "w", encoding="utf-8") as episodes:
            for texts in identities_of(source):
                episodes.writelines(f"{text}\n" for text in texts)
        (target / f"{KEY}.json").write_text(source.about, encoding="utf-8")
        said = {key: str(source.facts.get(key, "")) for key in ("citation", "description", "homepage", "license")}
        (target / "dataset_info.json").write_text(json.dumps(said | {"features": file.features}, indent=2))
        state: dict[str, Any] = {
            "_data_files": [{"filename": _FILE}],
            "_fingerprint": file.digest(),
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        (target / "state.json").write_text(json.dumps(state, indent=2))

    def how_to_load(self, path: Path) -> str:
        return f"from imitation.data import serialize\ntrajectories = serialize.load({str(path)!r})"

    def _checked(self, source: Source) -> tuple[Observations, Actions, Form]:
        observations = observations_of(source, self.observation)
        if not observations.is_one:
            names = ", ".join(part.name for part in observations.parts)
            raise InvalidOption(
                "imitation saves observations that are one array; export one with --set observation=KEY "
                f"(observation=): {names}; or record the environment in a FlattenObservation"
            )
        actions = actions_of(source, _SPACES, "imitation")
        if not all(math.prod(form.shape) for form in (observations.parts[0].form, actions.form)):
            raise InvalidOption("imitation's format has no arrays without an element, which these have")
        return observations, actions, reward_form(source, "imitation")


def _floating(reward: Form) -> Form:
    """imitation takes rewards with a point alone."""
    return Form(reward.dtype if reward.dtype.kind == "f" else np.dtype(np.float64), ())


def _infos_of(window: Window) -> list[str]:
    infos = window.columns.get("infos")
    return ["{}"] * window.steps if infos is None else [info_text(info) for info in infos]


class _Trajectories:
    """The Arrow file, a row a trajectory, which is written some of them at a time."""

    def __init__(self, target: Path, observation: Form, action: Form, reward: Form):
        kinds = {"obs": _listed(observation), "acts": _listed(action), "rews": _listed(reward)}
        schema = {"obs": kinds["obs"], "acts": kinds["acts"], "infos": pa.list_(pa.string()), "terminal": pa.bool_()}
        self.features = {
            "obs": _feature(observation),
            "acts": _feature(action),
            "infos": {"feature": {"dtype": "string", "_type": "Value"}, "_type": "List"},
            "terminal": {"dtype": "bool", "_type": "Value"},
            "rews": _feature(reward),
        }
        told = {"huggingface": json.dumps({"info": {"features": self.features}})}
        self._schema = pa.schema(list({**schema, "rews": kinds["rews"]}.items()), metadata=told)
        self._sink = pa.OSFile(str(target / _FILE), "wb")
        self._writer = pa.ipc.new_stream(self._sink, self._schema)
        self._hash = hashlib.blake2b(json.dumps(self.features).encode(), digest_size=8)
        forms = (observation, action, reward, Form(np.dtype(np.uint8), ()), Form(np.dtype(np.int32), ()))
        self._columns = [_Rows(form, target) for form in forms]
        self._counts: list[list[int]] = []  # of rows of each column, of each trajectory
        self._ends: list[bool] = []

    def __enter__(self) -> _Trajectories:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                self._write()
                self._writer.close()
        finally:
            self._sink.close()
            for column in self._columns:
                column.close()

    def digest(self) -> str:
        """What is different for other contents: datasets keeps what it has computed by it."""
        return self._hash.hexdigest()

    def add(self, observations: Array, actions: Array, rewards: Array, infos: list[str]) -> None:
        """More of the trajectory that is being written."""
        texts = [text.encode() for text in infos]
        lengths = np.array(list(map(len, texts)), np.int32)
        blocks: list[Array] = [observations, actions, rewards, np.frombuffer(b"".join(texts), np.uint8), lengths]
        for column, block in zip(self._columns, blocks):
            self._hash.update(np.ascontiguousarray(block).data)
            column.add(block)

    def end(self, terminal: bool) -> None:
        """The trajectory is whole."""
        self._counts.append([column.rows for column in self._columns])
        self._ends.append(terminal)
        if len(self._ends) >= _MOST_ROWS or sum(column.size for column in self._columns) >= _BATCH:
            self._write()

    def _write(self) -> None:
        if not self._ends:
            return
        ends = np.zeros((len(self._ends) + 1, len(self._columns)), np.int64)
        ends[1:] = self._counts
        if ends.max() > _MOST_TEXT:
            raise TraceError("an episode has more than 2 GiB of infos, or rows, which imitation's format cannot hold")
        obs, acts, rews, texts, lengths = (column.taken() for column in self._columns)
        offsets = ends.astype(np.int32)
        starts = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=starts[1:])
        infos = pa.StringArray.from_buffers(len(lengths), pa.py_buffer(starts), pa.py_buffer(texts))
        columns = [
            pa.ListArray.from_arrays(offsets[:, 0], _nested(obs)),
            pa.ListArray.from_arrays(offsets[:, 1], _nested(acts)),
            pa.ListArray.from_arrays(offsets[:, 4], infos),
            pa.array(self._ends),
            pa.ListArray.from_arrays(offsets[:, 2], _nested(rews)),
        ]
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self._hash.update(offsets.tobytes() + bytes(self._ends))
        self._counts.clear()
        self._ends.clear()
        for column in self._columns:
            column.clear()


def _listed(form: Form) -> pa.DataType:
    kind = pa.from_numpy_dtype(form.dtype)
    for length in reversed(form.shape):
        kind = pa.list_(kind, length)
    return pa.list_(kind)


def _feature(form: Form) -> dict[str, Any]:
    """As _listed, in the words of datasets."""
    feature: dict[str, Any] = {"dtype": str(form.dtype), "_type": "Value"}
    for length in reversed(form.shape):
        feature = {"feature": feature, "length": length, "_type": "List"}
    return {"feature": feature, "_type": "List"}


def _nested(rows: Array) -> pa.Array:
    nested = pa.array(rows.reshape(-1))
    for length in reversed(rows.shape[1:]):
        nested = pa.FixedSizeListArray.from_arrays(nested, length)
    return nested


class _Rows:
    """Rows of one form that wait to be written, in memory, or in a file where they are many."""

    def __init__(self, form: Form, directory: Path):
        self._form, self._directory = form, directory
        self._blocks: list[Array] = []
        self._file: BinaryIO | None = None
        self.rows = self.size = self._held = 0

    def add(self, block: Array) -> None:
        self._blocks.append(block)
        self.rows += len(block)
        self.size += block.nbytes
        self._held += block.nbytes
        if self._held > _IN_MEMORY:
            self._spill()

    def _spill(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 - see close()
        for block in self._blocks:
            self._file.write(np.ascontiguousarray(block).data)
        self._blocks, self._held = [], 0

    def taken(self) -> Array:
        """All of them, which may be a map of the file."""
        shape = (self.rows, *self._form.shape)
        if self._file is None:
            return np.concatenate([np.empty((0, *self._form.shape), self._form.dtype), *self._blocks])
        self._spill()
        self._file.flush()
        return np.memmap(self._file, self._form.dtype, "r", shape=shape)

    def clear(self) -> None:
        self.close()
        self._blocks, self._file = [], None
        self.rows = self.size = self._held = 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
