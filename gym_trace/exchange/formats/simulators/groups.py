"""Files with one group per episode: the map of a format, and its episodes read backwards along that map."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.layout import Layout, Leaf, PlainSpace
from gym_trace.data.packing import pack
from gym_trace.data.schema import Layouts, WriterSchema
from gym_trace.data.values import ABSENT, Array, objects, placeholder
from gym_trace.data.vocabulary import ENVIRONMENT, FINAL
from gym_trace.exchange.formats.columns import FLAG
from gym_trace.exchange.formats.foreign import in_parts, widest
from gym_trace.exchange.formats.hdf5.reading import H5Group, H5Rows, columns_in
from gym_trace.exchange.formats.imported import Imported, NewEpisode, NewSteps, imported, new_schema
from gym_trace.exchange.formats.infos import infos_of
from gym_trace.exchange.formats.rows import NEXT_DIFFER, first_writer, named, step_ranges
from gym_trace.playback.row_types import RowType

Name = tuple[str, ...]  # path of an array in the group of an episode
_MOST_BESIDE = 1 << 20  # bytes of the arrays of an episode that are not of its steps
BESIDE = "arrays"  # key of a reset info with these
NO_OBSERVATIONS: PlainSpace = widest(np.dtype(np.float32), (0,))


class GroupMap(NamedTuple):
    """The arrays of an episode of N steps. "": the format has none of that name.

    Attributes:
        prefix: of the names of episodes, before their number.
        observations: group of N rows, or N + 1; leaf: name in it of observations that are one array; "": the array
            itself is in place of the group.
        next_observations: group of the N rows after the steps.
        terminations, truncations: flags.
        states: of the simulator, before each step, and perhaps after the last one.
        has_nested_states: True if a state is a dict of arrays of one row, as of one lane; otherwise it is one array.
        infos: keys of infos that are arrays beside the others, not in a group "infos".
        flag: type of the flags.
    """

    prefix: str
    observations: str
    leaf: str
    next_observations: str
    terminations: str
    truncations: str
    states: str
    has_nested_states: bool = False
    infos: tuple[str, ...] = ()
    flag: RowType = FLAG

    def name_of(self, leaf: Leaf) -> Name:
        """Return the name of a leaf of the observations or actions."""
        root, *keys = leaf.path
        if root != "observations":
            return (str(root), *map(str, keys))
        return (self.observations, *([self.leaf] if self.leaf and not keys else map(str, keys)))

    @property
    def roots(self) -> frozenset[str]:
        """Return the first parts of all names that have a meaning, so that annotations have others."""
        own = (self.observations, self.next_observations, self.terminations, self.truncations, self.states)
        return frozenset((*own, *self.infos, "actions", "rewards", "infos"))


def episode_names(group: H5Group, prefix: str) -> list[str]:
    """Return the names of the episodes in a group, by number."""
    names = [name for name in group.names() if name.startswith(prefix) and name[len(prefix) :].isdecimal()]
    return sorted((name for name in names if len(name) < len(prefix) + 20), key=in_parts)


class Demonstration:
    """An episode in a file. steps: their number. columns: all arrays, by their paths."""

    def __init__(self, group: H5Group, format: GroupMap):
        self.group, self.format = group, format
        self.columns = columns_in(group)
        actions = [rows for name, rows in self.columns.items() if name[0] == "actions"]
        if not actions:
            raise group.fault("has no actions")
        self.steps = len(actions[0])

    def space_of(self, root: str) -> PlainSpace:
        """Return a space as wide as the arrays. root: "observations" or "actions"."""
        name = self.format.observations if root == "observations" else root
        tree: dict[str, Any] = {}
        for path, rows in self.columns.items():
            if path[0] == name:
                inner = tree
                for part in path[:-1]:
                    inner = inner.setdefault(part, {})
                inner[path[-1]] = widest(self._of_steps(path, rows).dtype, rows.shape[1:])
        return _dict_space(tree[name]) if name in tree else NO_OBSERVATIONS

    def _of_steps(self, name: Name, rows: H5Rows) -> H5Rows:
        expected = {self.steps, self.steps + (name[0] in (self.format.observations, self.format.states))}
        if not rows.shape or len(rows) not in expected or rows.dtype.kind not in "biuf":
            problem = f"{rows.dtype} of shape {rows.shape}"
            raise rows.fault(f"has {problem}, where numbers of {self.steps} steps should be")
        return rows

    def _leaf(self, leaf: Leaf) -> Callable[[int, int], Array]:
        """Return a function that reads rows of a leaf of the observations or actions. Raises UnreadableRecording."""
        name = self.format.name_of(leaf)
        if leaf.dtype is None or (name not in self.columns and 0 not in leaf.shape):
            raise self.group.fault(f"has no numbers {'/'.join(name)}")
        if name not in self.columns:
            return lambda begin, end: np.zeros((end - begin, *leaf.shape), leaf.dtype)
        rows = self._of_steps(name, self.columns[name])
        after = self.columns.get((self.format.next_observations, *name[1:]))

        def read(begin: int, end: int) -> Array:
            values: Array = rows.read(begin, end)
            if end > len(rows):  # the last one is after the last step
                unknown = placeholder(rows.dtype, rows.shape[1:])
                last = unknown if after is None else self._of_steps(name, after).read(self.steps - 1, self.steps)
                values = np.concatenate([values, last])
            is_alike = values.size == (end - begin) * math.prod(leaf.shape)  # one number, or an array of one
            return values.reshape(end - begin, *leaf.shape) if is_alike else values

        return read

    def has_final(self, layout: Layout) -> bool:
        """Return True if the observation after the last step is stored."""
        names = [self.format.name_of(leaf) for leaf in layout.leaves() if 0 not in leaf.shape]
        after = self.format.next_observations
        return bool(names) and all(
            len(self.columns[name]) > self.steps or (after, *name[1:]) in self.columns
            for name in names
            if name in self.columns
        )

    def episode(
        self, layouts: Layouts, warnings: list[str], marks: Mapping[str, bool] | None = None, **known: Any
    ) -> NewEpisode:
        """Return the episode. warnings: gets some. marks: annotations of all steps. known: other fields.

        Its identity, if gym-trace wrote the file, has the reset info, too.
        """
        has_final, of_steps, beside = self.has_final(layouts.observations), dict[Name, H5Rows](), dict[str, Any]()
        for name, rows in self.columns.items():
            if name[0] not in self.format.roots or self._is_other_state(name):
                label = "/".join(name)
                if rows.shape and len(rows) == self.steps and rows.dtype.kind in "biuf":
                    of_steps[name] = rows
                elif rows.dtype.kind in "biuf" and rows.row_size * max(1, len(rows)) <= _MOST_BESIDE // 8:
                    beside[label] = rows.read()
                else:
                    warnings.append(f"skipped, neither numbers of each step nor small: {named([label])}")
        if known.get("identity") is not None:
            known["reset_info"] = None
        elif beside:
            known["reset_info"] = {**(known.get("reset_info") or {}), BESIDE: beside}
        parts = self._parts(layouts, of_steps, marks or {}, has_final, warnings)
        return NewEpisode(self.steps, parts, **known, has_final_observation=has_final)

    def _is_other_state(self, name: Name) -> bool:
        """Return True for states that are recorded after the steps, as those of Isaac Lab, in a group."""
        return name[0] == self.format.states and not self.format.has_nested_states and len(name) > 1

    def _parts(
        self,
        layouts: Layouts,
        annotations: dict[Name, H5Rows],
        marks: Mapping[str, bool],
        has_final: bool,
        warnings: list[str],
    ) -> Iterator[NewSteps]:
        format, leaves = self.format, [self._leaf(leaf) for leaf in layouts.observations.leaves()]
        acts = [self._leaf(leaf) for leaf in layouts.actions.leaves()]
        states = {
            name: self._of_steps(name, rows)
            for name, rows in self.columns.items()
            if name[0] == format.states and not self._is_other_state(name)
        }
        infos: dict[Name, H5Rows] = {(key,): self.columns[key,] for key in format.infos if (key,) in self.columns}
        infos |= {name[1:]: rows for name, rows in self.columns.items() if name[0] == "infos" and len(name) > 1}
        size = sum(rows.row_size for rows in self.columns.values())
        for begin, end in step_ranges(self.steps, size):
            observed = [read(begin, end + 1) for read in leaves]
            if has_final and format.next_observations and NEXT_DIFFER not in warnings:
                self._compare_next(layouts.observations, observed, begin, warnings)
            rewards = self._scalars("rewards", begin, end)
            ends, cuts = (self._scalars(name, begin, end) for name in (format.terminations, format.truncations))
            yield NewSteps(
                layouts.observations.join(iter([rows[begin > 0 :] for rows in observed])),
                layouts.actions.join(read(begin, end) for read in acts),
                np.full(end - begin, np.nan) if rewards is None else rewards,
                None if ends is None else ends != 0,
                None if cuts is None else cuts != 0,
                infos_of({name: rows.read(begin, end) for name, rows in infos.items()}, end - begin) if infos else None,
                {"/".join(name): rows.read(begin, end) for name, rows in annotations.items()}
                | {name: np.full(end - begin, value) for name, value in marks.items()},
                self._states(states, begin, end) if states else {},
            )

    def _compare_next(self, layout: Layout, observed: list[Array], begin: int, warnings: list[str]) -> None:
        for leaf, rows in zip(layout.leaves(), observed):
            after = self.columns.get((self.format.next_observations, *self.format.name_of(leaf)[1:]))
            if after is not None and after.read(begin, begin + len(rows) - 1).tobytes() != rows[1:].tobytes():
                warnings.append(NEXT_DIFFER)
                return

    def _scalars(self, name: str, begin: int, end: int) -> Array | None:
        """Return a number per step; None if the episode has no such array."""
        if not name or (name,) not in self.columns:
            return None
        rows = self._of_steps((name,), self.columns[name,])
        if rows.shape[1:] not in ((), (1,)):
            raise rows.fault(f"has shape {rows.shape}; one number per step expected")
        values: Array = rows.read(begin, end).reshape(-1)
        return values

    def _states(self, states: dict[Name, H5Rows], begin: int, end: int) -> dict[str, Array]:
        """Return the states of some steps as a trace has them: before each, and after the last one."""
        has_last = end == self.steps and all(len(rows) > end for rows in states.values())
        read = {name: rows.read(begin, end + has_last) for name, rows in states.items()}
        rows = [self._state({name: values[i] for name, values in read.items()}) for i in range(end - begin + has_last)]
        found = {ENVIRONMENT: objects(rows[: end - begin])}
        return found | ({FINAL: objects([*[ABSENT] * (end - begin - 1), rows[-1]])} if has_last else {})

    def _state(self, values: dict[Name, Array]) -> dict[str, Any]:
        if not self.format.has_nested_states:
            return {"state": pack(values[(self.format.states,)]), "generator": None}
        state: dict[str, Any] = {}
        for (_, *outer, last), value in values.items():
            inner = state
            for key in outer:
                inner = inner.setdefault(key, {})
            inner[last] = value[None]
        return {"state": pack(state), "generator": None}


def _dict_space(tree: Any) -> PlainSpace:
    if "type" in tree and not isinstance(tree["type"], dict):
        return tree  # type: ignore[no-any-return]
    return {"type": "Dict", "spaces": [[key, _dict_space(tree[key])] for key in sorted(tree)]}


def plain(value: Any) -> Any:
    """Return an attribute of HDF5 as a value of Python, or an array."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value.item() if isinstance(value, np.generic) else value


def content_of(
    kind: str,
    first: Demonstration,
    environment: Mapping[str, Any],
    metadata: Mapping[str, Any],
    about: str | None,
    warning: str,
    episodes: Callable[[Layouts, list[str]], Iterator[NewEpisode]],
) -> Imported:
    """Return the content of a file.

    first: its first episode. metadata: what it says of all episodes. about: the text of gym-trace, if it has one.
    warning: of another file. episodes: takes the layouts of its spaces, and a list of warnings that gets some.
    """
    format = first.format
    has_infos = any(name[0] in ("infos", *format.infos) for name in first.columns)
    observations, actions = first.space_of("observations"), first.space_of("actions")
    metadata = {"imported_from": kind, **metadata}
    schema = new_schema(kind, observations, actions, environment, metadata, infos=has_infos)
    layouts = WriterSchema.of(schema).layouts if about is None else first_writer(about)[1]
    warnings = [] if about is not None else [warning, *_missing(first, layouts)]
    return imported(kind, episodes(layouts, warnings), schema, about, warnings=warnings)


def _missing(first: Demonstration, layouts: Layouts) -> Iterator[str]:
    """Yield what a file does not have, judged by its first episode."""
    if not any(name[0] == first.format.observations for name in first.columns):
        yield "no observations: they are empty; states of the simulator, if there are any, are states of the trace"
    elif not first.has_final(layouts.observations):
        yield "the final observations are unknown: has_final_observation is False, and the last row a placeholder"
    if ("rewards",) not in first.columns:
        yield "no rewards: they are NaN"
    if (first.format.terminations,) not in first.columns:
        yield f"no {first.format.terminations}: episodes are cut"
