"""The columns of a trace, a leaf of a space each, and their rows: as channels and entities have them, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from gym_trace.errors import CorruptTrace, UnreadableRecording
from gym_trace.interop.identity import read_about
from gym_trace.interop.imported import NewSteps, Schema
from gym_trace.interop.source import Source, leaves_of
from gym_trace.interop.steps.windows import Window
from gym_trace.interop.viewing.images import is_image
from gym_trace.model.layout import Path
from gym_trace.model.schema import Layouts, WriterSchema
from gym_trace.model.values import ABSENT, Array, objects
from gym_trace.reading.forms import Form

_MOST_ROWS, _MOST_BYTES = 1024, 4 << 20  # of steps that are imported at a time
_VALUE_BYTES = 1024  # what a row of any size counts
FLAGS = {"terminated": "terminations", "truncated": "truncations"}
_ROOTS = {"observations": "observation", "actions": "action", "rewards": "reward", "infos": "info"}


class Column(NamedTuple):
    """A column.

    name: as "observation/position". form: of its rows; None: values of any kind. is_image: whether rows become PNG.
    """

    name: str
    path: Path
    form: Form | None
    is_image: bool

    @property
    def comes_before(self) -> bool:
        """Whether a row is there before the step is made, and not because of it."""
        return self.path[0] in ("observations", "actions", "annotations")


def columns_in(source: Source) -> list[Column]:
    """All that a trace has, but its flags."""
    layouts, forms = source.layouts, source.forms
    leaves = [leaf.path for layout in (layouts.observations, layouts.actions) for leaf in layout.leaves()]
    others = [path for path in forms if path[0] in ("annotations", "infos")]
    return [
        Column(name_of(path), path, form := forms[path], form is not None and is_image(form))
        for path in (*leaves, ("rewards",), *sorted(others, key=str))
    ]


def name_of(path: Path) -> str:
    """A path with slashes; one in a key becomes %2F, and an empty key %."""
    parts = [str(part).replace("%", "%25").replace("/", "%2F") or "%" for part in path[1:]]
    return "/".join((_ROOTS.get(str(path[0]), str(path[0])), *parts))


def _key_of(part: str) -> str:
    return "" if part == "%" else part.replace("%2F", "/").replace("%25", "%")


def rows_of(source: Source, columns: list[Column], window: Window) -> dict[str, Array]:
    """The rows of a window by the name of the column: typed where it has a form, otherwise objects.

    Raises InvalidOption where values have not the structure of their space.
    """
    told, layouts = window.columns, source.layouts
    found = {leaf.path: rows for leaf, rows in leaves_of(layouts.observations, told["observations"])}
    if not window.opens:
        found = {path: rows[1:] for path, rows in found.items()}
    found |= {leaf.path: rows for leaf, rows in leaves_of(layouts.actions, told["actions"])}
    found[("rewards",)] = told["rewards"]
    if told.get("infos") is not None:
        found[("infos",)] = objects(told["infos"])
    found |= {("annotations", name): rows for name, rows in told.get("annotations", {}).items()}
    nothing = objects([None] * window.steps)
    return {column.name: typed(found.get(column.path, nothing), column.form) for column in columns}


def typed(rows: Array, form: Form | None) -> Array:
    """Rows as their form has them, objects where there is none."""
    if form is None:
        return rows if rows.dtype == object else objects(list(rows))
    array = rows if rows.dtype != object else np.array(rows.tolist(), form.dtype)
    return array.astype(form.dtype, copy=False).reshape(len(rows), *form.shape)


# -- and back ---------------------------------------------------------------------------------------------------------


def writers_of(about: str, where: str) -> tuple[Schema, Layouts]:
    """The first writer of what was exported, and the layouts of all. Raises UnreadableRecording."""
    schemas = list(read_about(about)["writers"].values())
    try:
        return schemas[0], WriterSchema.of(schemas[0]).layouts
    except (CorruptTrace, IndexError) as error:
        raise UnreadableRecording(f"{where}: what gym-trace has said of spaces is malformed") from error


class Waiting(Protocol):
    """Rows of columns that come one after the other, of all columns in turns.

    Attributes:
        is_much: whether so much waits that it had better be taken.
    """

    @property
    def is_much(self) -> bool: ...

    def ready(self, name: str) -> int:
        """How many rows of a column are there that were not taken."""

    def take(self, name: str, count: int) -> Any:
        """The next so many of them."""

    def read_on(self) -> None:
        """Reads more. Raises UnreadableRecording if there is no more."""


def parts_of(layouts: Layouts, others: list[str], waiting: Waiting, steps: int) -> Iterator[NewSteps]:
    """The next episode of so many steps, some of them at a time. others: names of infos and annotations."""
    seen = {name_of(leaf.path) for leaf in layouts.observations.leaves()}
    done = {"reward", *others, *(name_of(leaf.path) for leaf in layouts.actions.leaves())}
    leaves = (*layouts.observations.leaves(), *layouts.actions.leaves())
    most = max(1, min(_MOST_ROWS, _MOST_BYTES // sum((leaf.row_size or _VALUE_BYTES for leaf in leaves), 1)))
    begin = 0
    while True:
        lead = int(begin == 0)
        wanted = min(steps - begin, most)
        while True:
            count = min(
                wanted,
                min(map(waiting.ready, done)),
                min(map(waiting.ready, seen), default=wanted + lead) - lead,
            )
            if count == wanted or (count > 0 and waiting.is_much):
                break
            waiting.read_on()
        rows = {name: waiting.take(name, count + lead * (name in seen)) for name in seen | done}
        for name in FLAGS:  # which the identity has, too
            waiting.take(name, min(count, waiting.ready(name)))
        yield _steps_of(layouts, rows.__getitem__, others if count else [])
        begin += count
        if begin >= steps:
            return


def _steps_of(layouts: Layouts, take: Callable[[str], Any], others: list[str]) -> NewSteps:
    """Steps of which take(name) gives the rows of a column. others: the names of those of infos and annotations."""
    observations = layouts.observations.join(take(name_of(leaf.path)) for leaf in layouts.observations.leaves())
    actions = layouts.actions.join(take(name_of(leaf.path)) for leaf in layouts.actions.leaves())
    rewards = take("reward")
    infos = take("info") if "info" in others else None
    notes = {name.partition("/")[2]: _marked(take(name)) for name in others if name.startswith("annotations/")}
    return NewSteps(
        observations,
        actions,
        rewards,
        infos=None if infos is None or not len(infos) or infos[0] is None else infos,
        annotations={_key_of(name): rows for name, rows in notes.items() if rows is not None},
    )


def _marked(rows: Any) -> Any:
    """Annotations with ABSENT where there was none; None if there was none at all."""
    if isinstance(rows, np.ndarray):
        return rows if len(rows) else None
    found = [ABSENT if row is None else row for row in rows]
    return None if all(row is ABSENT for row in found) else found
