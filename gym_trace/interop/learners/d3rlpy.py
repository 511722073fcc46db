"""d3rlpy 2: the HDF5 file that its ReplayBuffer.dump writes and ReplayBuffer.load reads (docs/EXPORT.md, d3rlpy)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
from h5py import h5d, h5p, h5s, h5t

from gym_trace.errors import InvalidOption
from gym_trace.interop.contract import Loss
from gym_trace.interop.hdf5.writing import new_file
from gym_trace.interop.identity import KEY
from gym_trace.interop.learners.arrays import (
    Actions,
    Observations,
    Part,
    actions_of,
    as_form,
    identities_of,
    lost_flags,
    narrowed_rewards,
    observations_of,
    reward_form,
)
from gym_trace.interop.losses import losses
from gym_trace.interop.source import Source, flags
from gym_trace.interop.steps.plain import json_text
from gym_trace.interop.steps.windows import KEPT
from gym_trace.model.values import Array

_VERSION = "2.1"  # of the layout
_COLUMNS = ("observations", "actions", "rewards", "terminated")
_SMALL = 16 << 10  # bytes of an array that is kept in the header of its dataset, which is quicker to write and to read
_CHUNK = 256 << 10  # bytes that are compressed at a time
_COMPRESSION = {"none": {}, "gzip": {"compression": "gzip", "compression_opts": 1, "shuffle": True}}


@dataclass(frozen=True)
class D3rlpyExporter:
    """d3rlpy 2: an HDF5 file that ReplayBuffer.load reads; images have their channels first.

    observation: of dict observations the one that is exported, such as "image" or "state/position"; "": all of them,
    as a tuple, for which d3rlpy wants an encoder of yours.
    compression: "none", as d3rlpy does; "gzip" makes files of images a hundred times smaller, and takes longer.
    """

    name: ClassVar[str] = "d3rlpy"
    extra: ClassVar[str] = "hdf5"
    makes: ClassVar[str] = "file"
    finals: ClassVar[str] = KEPT

    observation: str = ""
    compression: str = "none"

    def __post_init__(self) -> None:
        if self.compression not in _COMPRESSION:
            raise InvalidOption(f"compression={self.compression!r}: give one of {', '.join(_COMPRESSION)}")

    def lost(self, source: Source) -> Iterator[Loss]:
        observations, actions = self._checked(source)
        table = source.episodes
        without = int(np.count_nonzero((table["outcome"] != "terminated") & (table["steps"] > 0)))
        told = f"; d3rlpy makes no transition of the last step of {without:,}, not terminated" if without else ""
        yield Loss("final_observation", f"the final observation of each episode is not kept{told}")
        yield from losses(source, "infos", "annotations", "empty_episode", "parts")
        yield from observations.lost()
        if not observations.is_one and any(part.name != str(place) for place, part in enumerate(observations.parts)):
            names = ", ".join(f"{place} is {part.name}" for place, part in enumerate(observations.parts))
            yield Loss("structure", f"observations are a list of arrays, without their names: {names}")
        yield from actions.lost()
        if actions.kind not in ("Discrete", "Box"):
            yield Loss("spaces", f"actions of {actions.kind} read as continuous ones, of whole numbers")
        yield from narrowed_rewards(source, reward_form(source, "d3rlpy"))
        yield from lost_flags(source)

    def write(self, source: Source, target: Path) -> None:
        observations, actions = self._checked(source)
        reward = reward_form(source, "d3rlpy")
        with new_file(target) as (opened, check):
            file = _File(opened, _COMPRESSION[self.compression])
            place = -1  # of the episode among those that have steps
            for window in source.windows("observations", "actions", "rewards", "terminations", "truncations"):
                if not window.steps:
                    continue
                place += window.opens
                steps, whole = len(window.episode), slice(window.start, window.start + window.steps)
                tree = window.columns
                rows = [_arranged(rows[:-1]) for rows in observations.rows(tree["observations"])]
                if observations.is_one:
                    file.put(f"observations_{place}", rows[0], steps, whole)
                else:
                    for number, array in enumerate(rows):
                        file.put(f"observations_{place}_{number}", array, steps, whole)
                file.put(f"actions_{place}", actions.rows(tree["actions"]).reshape(window.steps, -1), steps, whole)
                rewards = as_form(tree["rewards"], reward).astype(np.float32).reshape(-1, 1)
                file.put(f"rewards_{place}", rewards, steps, whole)
                if window.closes:
                    file.put_small(f"terminated_{place}", np.asarray(flags(window)[0][-1]))
                check()
            file.tell("columns", list(_COLUMNS))
            file.tell("num_episodes", place + 1)
            file.tell("version", _VERSION)
            file.tell(KEY, source.about)
            file.tell(f"{KEY}_observations", json_text(list(map(_described, observations.parts))))
            for texts in identities_of(source):
                file.extend(f"{KEY}_episodes", texts)
                check()
            opened.attrs["action_space"], opened.attrs["action_size"] = _action_space(actions)

    def how_to_load(self, path: Path) -> str:
        with h5py.File(path, "r") as file:
            kind, size = file.attrs["action_space"], int(file.attrs["action_size"])
        return (
            "import d3rlpy\n"
            f"with open({str(path)!r}, 'rb') as file:\n"
            "    episodes = d3rlpy.dataset.load(d3rlpy.dataset.Episode, file)\n"
            "dataset = d3rlpy.dataset.ReplayBuffer(d3rlpy.dataset.InfiniteBuffer(), episodes=episodes, "
            f"action_space=d3rlpy.ActionSpace.{kind}, action_size={size})"
        )

    def _checked(self, source: Source) -> tuple[Observations, Actions]:
        actions = actions_of(source, ("Discrete", "Box", "MultiDiscrete", "MultiBinary"), "d3rlpy")
        if actions.kind == "Discrete" and actions.space.start < 0:
            raise InvalidOption("d3rlpy numbers discrete actions from 0; these have negative numbers")
        reward_form(source, "d3rlpy")
        return observations_of(source, self.observation), actions


def _action_space(actions: Actions) -> tuple[str, int]:
    """What d3rlpy calls it, and how many actions, or numbers of one, there are; ReplayBuffer.load would guess both."""
    if actions.kind == "Discrete":
        return "DISCRETE", int(actions.space.start + actions.space.n)
    return "CONTINUOUS", int(np.prod(actions.form.shape))


def _arranged(rows: Array) -> Array:
    """Observations as d3rlpy has them: an axis at least, and images with their channels first."""
    if rows.ndim == 1:
        return rows[:, None]
    if rows.ndim == 3 and rows.dtype == np.uint8:
        return rows[:, None]  # grey
    if _has_channels_last(rows.shape[1:]):
        return np.moveaxis(rows, -1, 1)
    return rows


def _has_channels_last(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[2] < min(shape[:2])


class _File:
    """The datasets of an HDF5 file, which has several for each episode."""

    def __init__(self, file: h5py.File, filters: dict[str, Any]):
        self._file, self._filters = file, filters
        self._compact = h5p.create(h5p.DATASET_CREATE)
        self._compact.set_layout(h5d.COMPACT)
        self._types: dict[np.dtype[Any], h5t.TypeID] = {}
        self._spaces: dict[tuple[int, ...], h5s.SpaceID] = {}
        self._begun: dict[str, h5d.DatasetID] = {}  # those of which there is more to come
        self._room = np.empty(0, np.uint8)

    def put(self, name: str, rows: Array, length: int, where: slice) -> None:
        """Writes some rows of an array that has so many."""
        if len(rows) == length and rows.nbytes <= _SMALL:
            self.put_small(name, rows)
            return
        if where.start == 0:
            made = self._file.create_dataset(
                name, (length, *rows.shape[1:]), rows.dtype, **self._filtered(rows, length)
            )
            self._begun[name] = made.id
        dataset = self._begun[name] if where.stop < length else self._begun.pop(name)
        block, place = self._in_order(rows), dataset.get_space()
        place.select_hyperslab((where.start, *(0 for _ in rows.shape[1:])), rows.shape)
        dataset.write(h5s.create_simple(rows.shape), place, block)

    def _in_order(self, rows: Array) -> Array:
        """The same as they lie in the file; those that do not are there until the next ones are."""
        if rows.flags.c_contiguous:
            return rows
        if len(self._room) < rows.nbytes:
            self._room = np.empty(rows.nbytes, np.uint8)
        room = self._room[: rows.nbytes].view(rows.dtype).reshape(rows.shape)
        room[...] = rows
        return room

    def put_small(self, name: str, array: Array) -> None:
        """As create_dataset does, in a fifth of the time."""
        kind = self._types.setdefault(array.dtype, h5t.py_create(array.dtype, logical=True))
        if array.shape not in self._spaces:
            self._spaces[array.shape] = h5s.create_simple(array.shape) if array.shape else h5s.create(h5s.SCALAR)
        dataset = h5d.create(self._file.id, name.encode(), kind, self._spaces[array.shape], self._compact)
        dataset.write(h5s.ALL, h5s.ALL, np.ascontiguousarray(array))

    def _filtered(self, rows: Array, length: int) -> dict[str, Any]:
        if not self._filters or not rows.nbytes:
            return {}
        row = max(1, rows.nbytes // len(rows))
        return {**self._filters, "chunks": (max(1, min(length, _CHUNK // row)), *rows.shape[1:])}

    def tell(self, name: str, value: Any) -> None:
        self._file[name] = value

    def extend(self, name: str, texts: list[str]) -> None:
        """Adds texts to an array of them."""
        if name not in self._file:
            self._file.create_dataset(name, (0,), h5py.string_dtype(), maxshape=(None,), chunks=(len(texts),))
        before = len(self._file[name])
        self._file[name].resize((before + len(texts),))
        self._file[name][before:] = texts


def _described(part: Part) -> dict[str, Any]:
    shape = part.form.shape
    order = "channels_last" if _has_channels_last(shape) else "as_recorded"
    return {"name": part.name, "dtype": part.form.dtype.str, "shape": list(shape), "recorded": order}
