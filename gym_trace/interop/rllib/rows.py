"""Rows: a step each, as RLlib's SingleAgentEnvRunner writes them when it is not to write episodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gym_trace.errors import InvalidOption
from gym_trace.interop.contract import Loss
from gym_trace.interop.losses import losses
from gym_trace.interop.rllib.names import Names
from gym_trace.interop.rllib.shards import ShardWriter
from gym_trace.interop.source import Source, flags
from gym_trace.interop.steps.windows import Window
from gym_trace.model.layout import Leaf
from gym_trace.model.values import Array
from gym_trace.reading.forms import Form

_GROUP_BYTES, _GROUP_ROWS = 16 << 20, 1 << 16
_COLUMNS = ("observations", "actions", "rewards", "terminations", "truncations")


class RowKind:
    """Steps of a trace as rows."""

    def __init__(self, source: Source):
        """Raises InvalidOption if rows cannot hold the spaces."""
        self._source = source
        if not source.steps:
            raise InvalidOption(f"{source.trace.directory}: no episode has a step, so there are no rows for RLlib")
        self._forms = {name: self._form(name) for name in ("observations", "actions", "rewards")}

    def _form(self, name: str) -> Form:
        layout = getattr(self._source.layouts, name, None)
        if name != "rewards" and not isinstance(layout, Leaf):
            raise InvalidOption(
                f"RLlib: rows cannot hold {name} of a Dict or Tuple, as Ray reads them; kind=episodes can"
            )
        form = self._source.forms[(name,)]
        if form is None or not _is_held(form):
            kind = "of no dtype and shape that all share" if form is None else f"{form.dtype} {form.shape}"
            raise InvalidOption(f"RLlib: rows cannot hold {name}, which are {kind}, as Ray reads them")
        return form

    def lost(self) -> Iterator[Loss]:
        """What rows cannot say."""
        for name, form in self._forms.items():
            if form.mixed:
                yield Loss("dtype", f"{name} have several dtypes, and are {form.dtype} in all rows")
        yield from losses(self._source, "infos", "annotations", "outcome", "flags", "parts", "empty_episode")

    def write(self, target: Path) -> None:
        """Windows are gathered until they make a row group of some size."""
        source, names, name = self._source, Names(self._source), ""
        with ShardWriter(target, self._schema(), source.about) as writer:
            group = _Group(self._forms)
            for window in source.windows(*_COLUMNS):
                if window.start == 0:
                    name = names.next(window.episode)
                    group.identities += [source.identity(window.episode)] if len(window.episode) else []
                group.add(window, name)
                if group.bytes > _GROUP_BYTES or group.rows > _GROUP_ROWS:
                    writer.write(group.columns(), group.identities)
                    group = _Group(self._forms)
            if group.rows:
                writer.write(group.columns(), group.identities)

    def _schema(self) -> pa.Schema:
        observations, actions, rewards = map(_arrow_type, self._forms.values())
        return pa.schema(
            {
                "eps_id": pa.string(),
                "t": pa.int64(),
                "obs": observations,
                "new_obs": observations,
                "actions": actions,
                "rewards": rewards,
                "terminateds": pa.bool_(),
                "truncateds": pa.bool_(),
            }
        )


class _Group:
    """Windows that are to become a row group."""

    def __init__(self, forms: dict[str, Form]):
        self._forms = forms
        self._parts: list[list[Array]] = [[] for _ in range(7)]
        self._names: list[str] = []
        self._counts: list[int] = []
        self.identities: list[str] = []
        self.bytes = self.rows = 0

    def add(self, window: Window, name: str) -> None:
        """name: of its episode."""
        if not window.steps:
            return
        observations, actions, rewards = (_typed(window.columns[key], form) for key, form in self._forms.items())
        steps = window.first_step + np.arange(window.steps)
        rows = (steps, observations[:-1], observations[1:], actions, rewards, *flags(window))
        for part, values in zip(self._parts, rows):
            part.append(values)
        self._names.append(name)
        self._counts.append(window.steps)
        self.rows += window.steps
        self.bytes += 2 * observations.nbytes + actions.nbytes

    def columns(self) -> list[Any]:
        """As arrow has them."""
        names = pa.array(self._names, pa.string()).take(pa.array(np.repeat(np.arange(len(self._counts)), self._counts)))
        return [names, *(_arrow_array(np.concatenate(part)) for part in self._parts)]


def _is_held(form: Form) -> bool:
    if form.dtype.kind == "b":
        return form.shape == ()
    return form.dtype.kind in "iuf" and form.dtype.itemsize <= 8 and 0 not in form.shape


def _typed(rows: Array, form: Form) -> Array:
    if rows.dtype == object:  # of several dtypes
        rows = np.stack([np.asarray(row, form.dtype) for row in rows])
    return np.ascontiguousarray(rows, form.dtype.newbyteorder("="))


def _arrow_type(form: Form) -> Any:
    value = pa.from_numpy_dtype(form.dtype.newbyteorder("="))
    return value if form.shape == () else pa.fixed_shape_tensor(value, form.shape)


def _arrow_array(rows: Array) -> Any:
    if rows.ndim == 1:
        return pa.array(rows)
    kind = _arrow_type(Form(rows.dtype, rows.shape[1:]))  # without a permutation, which Ray does not read
    values = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows[0].size)
    return pa.ExtensionArray.from_storage(kind, values)
