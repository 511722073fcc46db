"""TorchRL: a trace as TED, TorchRL's layout of steps, in a memory-mapped TensorDict.

A step is a row: what was observed before it and the action at the root, what it led to under "next".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.interop.contract import Loss
from gym_trace.interop.losses import losses
from gym_trace.interop.source import Source, flags, leaves_of
from gym_trace.interop.steps.choice import name_of
from gym_trace.interop.steps.windows import LEFT_OUT, Window
from gym_trace.interop.torchrl.memmap import RESERVED, Key, MemmapWriter, has_tensors_of
from gym_trace.model.layout import Branch, Layout
from gym_trace.model.layout import Path as ColumnPath
from gym_trace.model.values import Array
from gym_trace.printable import printable
from gym_trace.reading.forms import Form

ABOUT, EPISODES = "gym_trace.json", "gym_trace.episodes.jsonl"
_OWN = frozenset(("action", "annotations", "done", "episode", "next", "reward", "terminated", "truncated"))
_ENDS = ("done", "terminated", "truncated")


@dataclass(frozen=True)
class TorchRLExporter:
    """TorchRL: steps as a memory-mapped TensorDict, for a ReplayBuffer and SliceSampler."""

    name: ClassVar[str] = "torchrl"
    extra: ClassVar[str] = ""
    makes: ClassVar[str] = "directory"
    finals: ClassVar[str] = LEFT_OUT

    def lost(self, source: Source) -> Iterator[Loss]:
        """Text, Tuples, infos, and what there is of episodes without a step. Raises InvalidOption for other values."""
        keys = _Keys(source)
        for path in keys.left_out:
            what = "annotations" if path[0] == "annotations" else "text"
            yield Loss(what, f"{_told(path)} is left out: its values are text, or no arrays of one dtype and shape")
        if _has_tuples(source.layouts.observations) or _has_tuples(source.layouts.actions):
            yield Loss("structure", 'a Tuple is read as a TensorDict with the keys "0", "1" …')
        for path, form in source.forms.items():
            if form is not None and form.mixed and path in keys.of:
                yield Loss("dtype", f"{_told(path)} has several dtypes, and is {form.dtype} in all rows")
        yield from losses(source, "infos", "outcome", "flags", "parts", "empty_episode")

    def write(self, source: Source, target: Path) -> None:
        """Each tensor is a file, to which the rows of window after window are added."""
        keys = _Keys(source)
        (target / ABOUT).write_text(source.about)
        with MemmapWriter(target) as writer, (target / EPISODES).open("x") as episodes:
            for key, (dtype, shape) in keys.tensors().items():
                writer.declare(key, dtype, shape)
            number = -1
            for window in source.windows(*keys.columns):
                if window.start == 0:
                    if not len(window.episode):
                        continue
                    number += 1
                    episodes.write(f"{source.identity(window.episode)}\n")
                if window.steps:
                    writer.add(window.steps, keys.rows(window, number))
            writer.close()

    def how_to_load(self, path: Path) -> str:
        """A replay buffer that maps the files."""
        return (
            "from tensordict import TensorDict; from torchrl.data import ReplayBuffer, SliceSampler, TensorStorage\n"
            f"data = TensorDict.load_memmap({str(path)!r})\n"
            "buffer = ReplayBuffer(storage=TensorStorage(data), batch_size=256, "
            'sampler=SliceSampler(slice_len=8, traj_key="episode", strict_length=False))'
        )


class _Keys:
    """Which tensors there are of a trace.

    of: by the path of a column, the key that its rows have; of observations, at the root as under "next".
    left_out: leaves of observations that tensors cannot hold.
    columns: that are read.
    """

    def __init__(self, source: Source):
        """Raises InvalidOption if tensors cannot hold the actions, the rewards, or any of the observations."""
        self._layouts = source.layouts
        self._forms = source.forms
        self.of: dict[ColumnPath, Key] = {}
        self.left_out: list[ColumnPath] = []
        if not source.steps:
            raise InvalidOption(f"{source.trace.directory}: no episode has a step, so there is nothing for TorchRL")
        base = _base(source.layouts.observations)
        for leaf in source.layouts.observations.leaves():
            if self._is_held(leaf.path):
                self.of[leaf.path] = (*base, *map(str, leaf.path[1:]))
            else:
                self.left_out.append(leaf.path)
        if not self.of:
            raise InvalidOption("TorchRL: tensors cannot hold any of the observations")
        for path, key in self._beside():
            if not self._is_held(path):
                raise InvalidOption(
                    f"TorchRL: tensors cannot hold the {_told(path)}: they are text, or not of one dtype and shape"
                )
            self.of[path] = key
        notes = [path for path in source.forms if path[0] == "annotations"]
        for path in notes:
            if self._is_held(path):
                self.of[path] = ("annotations", str(path[1]))
            else:
                self.left_out.append(path)
        self.columns = ["observations", "actions", "rewards", "terminations", "truncations"]
        self.columns += ["annotations"] * bool(notes)
        _check_names(self.of)

    def _beside(self) -> Iterator[tuple[ColumnPath, Key]]:
        for leaf in self._layouts.actions.leaves():
            yield leaf.path, ("action", *map(str, leaf.path[1:]))
        yield ("rewards",), ("reward",)

    def _is_held(self, path: ColumnPath) -> bool:
        form = self._forms.get(path)
        return form is not None and has_tensors_of(form.dtype)

    def _form(self, path: ColumnPath) -> Form:
        form = self._forms[path]
        assert form is not None
        return form

    def tensors(self) -> dict[Key, tuple[np.dtype[Any], tuple[int, ...]]]:
        """dtype and shape of a row, by key."""
        found: dict[Key, tuple[np.dtype[Any], tuple[int, ...]]] = {("episode",): (np.dtype(np.int64), ())}
        for path, key in self.of.items():
            dtype, shape = self._form(path)[:2]
            if path[0] == "rewards":
                found[("next", *key)] = dtype, shape or (1,)
                continue
            found[key] = dtype, shape
            if path[0] == "observations":
                found[("next", *key)] = dtype, shape
        return found | {key: (np.dtype(np.bool_), (1,)) for name in _ENDS for key in ((name,), ("next", name))}

    def rows(self, window: Window, number: int) -> dict[Key, Array]:
        """The rows of all tensors of a window of an episode that has this number."""
        rows: dict[Key, Array] = {("episode",): np.full(window.steps, number)}
        for leaf, values in leaves_of(self._layouts.observations, window.columns["observations"]):
            if leaf.path in self.of:
                key, array = self.of[leaf.path], _typed(values, self._form(leaf.path))
                rows[key], rows[("next", *key)] = array[:-1], array[1:]
        for leaf, values in leaves_of(self._layouts.actions, window.columns["actions"]):
            rows[self.of[leaf.path]] = _typed(values, self._form(leaf.path))
        rows["next", "reward"] = _typed(window.columns["rewards"], self._form(("rewards",)))
        for name, values in window.columns.get("annotations", {}).items():
            if ("annotations", name) in self.of:
                path = ("annotations", name)
                rows[self.of[path]] = _typed(values, self._form(path))
        terminated, truncated = flags(window)
        for name, ends in zip(_ENDS, (terminated | truncated, terminated, truncated)):
            rows["next", name], rows[(name,)] = ends, np.zeros(window.steps, np.bool_)
        return rows


def _base(observations: Layout) -> Key:
    """Where observations are: those of a Dict at the root, as TorchRL's GymEnv has them, unless names are taken."""
    if isinstance(observations, Branch) and observations.keys is not None:
        names = {str(key) for key in observations.keys}
        if not names & (_OWN | RESERVED):
            return ()
    return ("observation",)


def _check_names(keys: dict[ColumnPath, Key]) -> None:
    for key, count in Counter(keys.values()).items():
        if count > 1 or RESERVED & set(key):
            raise InvalidOption(f"TorchRL: a TensorDict cannot have the key {printable('/'.join(key))!r}, or not twice")


def _told(path: ColumnPath) -> str:
    return printable(name_of(path))


def _has_tuples(layout: Layout) -> bool:
    return isinstance(layout, Branch) and (layout.keys is None or any(map(_has_tuples, layout.children)))


def _typed(rows: Array, form: Form) -> Array:
    """Rows as an array of one form; those of a column of several dtypes may come one by one."""
    if rows.dtype == object:
        rows = np.stack([np.asarray(row, form.dtype) for row in rows])
    return np.asarray(rows, form.dtype)
