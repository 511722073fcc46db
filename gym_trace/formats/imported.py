"""Episodes as importers give them, and what they become in a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space

from gym_trace.envs.spaces import describe
from gym_trace.errors import CorruptTrace, UnreadableRecording
from gym_trace.format import wire
from gym_trace.format.directory import is_writer_id, new_writer_id
from gym_trace.formats.identity import flags_of, malformed, read_about, read_identity
from gym_trace.model.layout import Branch, Layout, Leaf, PlainSpace, taken_apart
from gym_trace.model.packing import pack, pack_lenient
from gym_trace.model.schema import IMPORTED_FROM, Layouts, WriterSchema
from gym_trace.model.values import Array
from gym_trace.model.vocabulary import OUTCOMES, Outcome
from gym_trace.recording.reset_record import packed_start, stored_seed
from gym_trace.ring.segment import Columns, Rows, Segment, size_of

_UNKNOWN_TIME = int(np.iinfo(np.int64).min)  # as NumPy has what is not a time
Schema = dict[str, Any]  # the schema record of a writer (docs/FORMAT.md, section 4)


class NewSteps(NamedTuple):
    """Some steps of an episode, one after the other.

    observations: the rows that the steps led to; those of the first steps of an episode have one more in front. An
    array, or dicts and tuples of them as the space has them. actions, rewards: one row per step.
    terminations, truncations: (steps,) bool, as the environment said; None: the outcome says it.
    infos: one dict per step. annotations: by name, one row per step.
    """

    observations: Any
    actions: Any
    rewards: Any
    terminations: Array | None = None
    truncations: Array | None = None
    infos: Sequence[Any] | None = None
    annotations: Mapping[str, Any] = {}


class NewEpisode(NamedTuple):
    """An episode to write.

    steps: their number. parts: all steps in parts, read on demand; one empty part for no steps.
    outcome: None: "terminated" or "truncated" as the flags of the last step say, otherwise "cut".
    has_final_observation: whether the last row of observations is what the last step led to; otherwise it is a
        placeholder: NaN, 0 or "".
    identity: the text of Source.identity(); it overrides all other fields.
    """

    steps: int
    parts: Iterable[NewSteps]
    outcome: str | None = None
    seed: int | None = None
    options: dict[str, Any] | None = None
    reset_info: dict[str, Any] | None = None
    identity: str | None = None
    has_final_observation: bool = True


@dataclass
class Imported:
    """The content of a new trace.

    Attributes:
        kind: the format, in words.
        schemas: of each writer, by its id, what is known of it.
        segments: (id of the writer, a piece of what it has), read as they are asked for; None: it has no more.
        total: steps, or whatever done counts, in all; 0: not known.
        done: how much of that has been read so far.
        facts: of the whole trace: author, license, description …
        notes: what could not be known, in a sentence each; more may come while the segments are read.
        beside: files outside of the trace format that are copied next to it, such as videos.
    """

    kind: str
    schemas: dict[str, Schema]
    segments: Iterator[tuple[str, Segment | None]]
    total: int = 0
    done: Callable[[], int] = lambda: 0
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    beside: list[FilePath] = field(default_factory=list)


def new_schema(
    kind: str,
    observation_space: Space[Any] | PlainSpace,
    action_space: Space[Any] | PlainSpace,
    environment: Mapping[str, Any] | None = None,
    metadata: Any = None,
    split: str = "",
    infos: bool = False,
) -> Schema:
    """Return the schema of a writer from another format.

    environment: what is known of id, spec (the EnvSpec as JSON text), class, note.
    """
    spaces = [space if isinstance(space, dict) else describe(space) for space in (observation_space, action_space)]
    return {
        "split": split,
        "observation_space": spaces[0],
        "action_space": spaces[1],
        "environment": {"id": None, "spec": None, "wrappers": [], "render_mode": None, **(environment or {})},
        "versions": {},
        "platform": "",
        "recorder": {IMPORTED_FROM: kind, "record_infos": infos},
        "metadata": metadata,
    }


def imported(
    kind: str,
    episodes: Iterable[NewEpisode],
    schema: Schema,
    about: str | None = None,
    facts: Mapping[str, Any] | None = None,
    notes: Iterable[str] = (),
    steps: int = 0,
) -> Imported:
    """Episodes of another format as a trace.

    Args:
        kind: the format, in words.
        episodes: in their order.
        schema: of a writer of all episodes that say nothing of theirs; see new_schema().
        about: what Source.about gave, where the format kept it: with it the writers are those of the trace it was.
        steps: in all, if that is known.

    Raises UnreadableRecording, also while the episodes are read.
    """
    known = {} if about is None else read_about(about)
    schemas = {writer: said for writer, said in known.get("writers", {}).items() if is_writer_id(writer)}
    said = known.get("facts") or facts or {}
    builder = _Builder(schemas, schema)
    return Imported(kind, schemas, builder.segments(episodes), steps, lambda: builder.steps, dict(said), list(notes))


class _Builder:
    """Makes segments of episodes, and gives those that have none a writer and ids."""

    def __init__(self, schemas: dict[str, Schema], schema: Schema):
        self.steps = 0
        self._schemas, self._schema = schemas, schema
        self._own: str | None = None  # the writer of what says nothing of its own
        self._next_id = 0
        self._layouts: dict[str, Layouts] = {}
        self._begun: set[tuple[str, int]] = set()  # episodes of which there are parts
        self._ends: dict[tuple[str, int], Any] = {}  # of these, as fragments

    def segments(self, episodes: Iterable[NewEpisode]) -> Iterator[tuple[str, Segment]]:
        for episode in episodes:
            yield from self._episode(episode)
        for (writer, _), table in self._ends.items():
            yield writer, Segment(table, {}, table.nbytes)

    def _episode(self, episode: NewEpisode) -> Iterator[tuple[str, Segment]]:
        known = {} if episode.identity is None else read_identity(episode.identity)
        writer = known.get("writer")
        if writer not in self._schemas:
            known, writer = {**known, "episode_id": self._next_id, "lane": 0, "first_step": 0}, self._own_writer()
            known.pop("is_part", None)
            self._next_id += 1
        try:
            yield from self._pieces(writer, episode, known)
        except (wire.OutOfRange, OverflowError) as error:
            raise malformed("an episode") from error

    def _own_writer(self) -> str:
        if self._own is None:
            self._own = new_writer_id()
            self._schemas[self._own] = self._schema
        return self._own

    def _layouts_of(self, writer: str) -> Layouts:
        if writer not in self._layouts:
            try:
                self._layouts[writer] = WriterSchema.of(self._schemas[writer]).layouts
            except CorruptTrace as error:
                raise malformed("a space") from error
        return self._layouts[writer]

    def _pieces(self, writer: str, episode: NewEpisode, known: dict[str, Any]) -> Iterator[tuple[str, Segment]]:
        layouts, kept = self._layouts_of(writer), flags_of(known, episode.steps)
        key = writer, known.get("episode_id", 0)
        at, is_part = known.get("first_step", 0), bool(known.get("is_part"))
        begins = key not in self._begun
        if is_part:
            self._begun.add(key)
        bare: dict[str, Any] = {"columns": {}, "steps": 0, "flags": 0}
        if at > 0 and begins:  # what came before was not kept, but how the episode began is known
            yield writer, self._segment(known, episode, {**bare, "starts": True}, at)
        done, outcome = 0, 0
        for steps in episode.parts:
            terminations, truncations = self._flags_of(steps, kept, done, episode, known)
            count = len(terminations)
            last = done + count >= episode.steps
            if last:
                outcome = _outcome(known.get("outcome", episode.outcome), terminations, truncations)
            columns = _columns(layouts, steps, count, leads=done == 0)
            piece = {"columns": columns, "steps": count, "leads": done == 0, "starts": done == 0 and at == 0 and begins}
            is_known_end = outcome > 0 or "end_time" in known  # of what is lost it mostly is not
            piece["placeholder"] = last and not known.get("has_final_observation", episode.has_final_observation)
            piece |= {"stops": last, "ends": last and not is_part and is_known_end, "outcome": outcome}
            yield writer, self._segment(known, episode, piece, at + done, terminations, truncations)
            done += count
            self.steps += count
            if last:
                break
        if done != episode.steps:
            raise UnreadableRecording(f"an episode of {episode.steps} steps of which there are {done}")
        if is_part and OUTCOMES[outcome] != "lost":
            end = self._segment(known, episode, {**bare, "ends": True, "outcome": outcome}, at + done)
            self._ends[key] = end.fragments

    def _flags_of(
        self, steps: NewSteps, kept: tuple[Array, Array] | None, done: int, episode: NewEpisode, known: dict[str, Any]
    ) -> tuple[Array, Array]:
        count = len(steps.rewards)
        if kept is not None:
            return kept[0][done : done + count], kept[1][done : done + count]
        pair = np.zeros((2, count), np.bool_)
        outcome = known.get("outcome", episode.outcome)
        for row, given, name in zip(
            pair, (steps.terminations, steps.truncations), ("terminated", "truncated"), strict=True
        ):
            if given is not None:
                row[:] = given
            elif count and done + count == episode.steps:
                row[-1] = outcome == name
        return pair[0], pair[1]

    def _segment(
        self,
        known: dict[str, Any],
        episode: NewEpisode,
        piece: dict[str, Any],
        first_step: int,
        terminations: Array | None = None,
        truncations: Array | None = None,
    ) -> Segment:
        """One piece, with a fragment for each run of steps up to one that is terminated or truncated."""
        count, columns = piece["steps"], dict(piece["columns"])
        ends = [count]
        if terminations is not None and truncations is not None:
            ends = [*(np.flatnonzero(terminations[:-1] | truncations[:-1]) + 1).tolist(), count]
        rows, begin = [], 0
        for end in ends:
            is_first, is_last = begin == 0, end == count
            flags = wire.STARTS * bool(is_first and piece.get("starts"))
            flags |= wire.LEADS * bool(is_first and piece.get("leads"))
            if end > begin and terminations is not None and truncations is not None:
                flags |= wire.TERMINATED * bool(terminations[end - 1]) | wire.TRUNCATED * bool(truncations[end - 1])
            flags |= wire.PLACEHOLDER * bool(is_last and piece.get("placeholder"))
            flags |= wire.STOPS * bool(is_last and piece.get("stops")) | wire.ENDS * bool(is_last and piece.get("ends"))
            rows.append(_fragment(known, episode, first_step + begin, end - begin, flags, piece.get("outcome", 0)))
            begin = end
        if piece.get("starts"):
            columns[("starts",)] = [_start(known, episode)]
        table = np.frombuffer(bytearray().join(rows), wire.FRAGMENT)
        return Segment(table, columns, table.nbytes + sum(map(size_of, columns.values())))


def _outcome(said: str | None, terminations: Array, truncations: Array) -> int:
    if said is not None:
        if said not in OUTCOMES:
            raise malformed("an episode")
        return 0 if said in ("lost", "running") else OUTCOMES.index(said)
    if len(terminations) and terminations[-1]:
        return int(Outcome.TERMINATED)
    return int(Outcome.TRUNCATED if len(truncations) and truncations[-1] else Outcome.CUT)


def _seed(known: dict[str, Any], episode: NewEpisode) -> Any:
    return known.get("seed", episode.seed)


def _fragment(
    known: dict[str, Any], episode: NewEpisode, first_step: int, steps: int, flags: int, outcome: int
) -> bytes:
    start, end = known.get("start_time"), known.get("end_time")
    seed = stored_seed(_seed(known, episode)) if flags & wire.STARTS else wire.NO_SEED
    begun = (_UNKNOWN_TIME if start is None else start, known.get("clock_offset", 0)) if flags & wire.STARTS else (0, 0)
    took = (0, 0)
    if flags & wire.ENDS:
        duration = known.get("duration", 0)
        took = (duration, 0 if start is None or end is None else end - start - duration)
    else:
        outcome = 0
    lane, number = known.get("lane", 0), known.get("episode_id", 0)
    return wire.pack_fragment(number, first_step, steps, lane, flags, outcome, 0.0, seed, *begun, *took)


def _start(known: dict[str, Any], episode: NewEpisode) -> bytes:
    options, info = known.get("options", episode.options), known.get("reset_info", episode.reset_info)
    state = known.get("rng_state")
    return packed_start(
        _seed(known, episode),
        None if options is None else pack_lenient(options)[0],
        None if state is None else pack_lenient({"rng_state": state})[0],
        None if info is None else pack_lenient(info)[0],
    )[0]


# -- rows -------------------------------------------------------------------------------------------------------------


def _columns(layouts: Layouts, steps: NewSteps, count: int, leads: bool) -> Columns:
    """The rows of all columns. Raises UnreadableRecording if one has another number of them."""
    columns = _of_tree(layouts.observations, steps.observations, count + leads)
    if count:
        columns |= _of_tree(layouts.actions, steps.actions, count)
        columns[("rewards",)] = _rows(steps.rewards)
        if steps.infos is not None:
            columns[("infos",)] = _values(steps.infos)
        columns |= {("annotations", name): _rows(values) for name, values in steps.annotations.items()}
    for path, rows in columns.items():
        expected = count + leads if path[0] == "observations" else count
        if len(rows) != expected:
            name = "/".join(map(str, path))
            raise UnreadableRecording(f"{name}: {len(rows)} rows where there should be {expected}")
    return columns


def _of_tree(layout: Layout, tree: Any, rows: int) -> Columns:
    if isinstance(layout, Leaf):
        return {layout.path: _rows(tree)}
    if _has_structure(layout, tree):
        keys = range(len(layout.children)) if layout.keys is None else layout.keys
        columns: Columns = {}
        for key, child in zip(keys, layout.children):
            columns |= _of_tree(child, tree[key], rows)
        return columns
    leaves = list(layout.leaves())  # values that have another structure than their space, a row each
    split = list(zip(*(taken_apart(layout, row) for row in tree))) or [()] * len(leaves)
    return {leaf.path: _rows(list(values)) for leaf, values in zip(leaves, split)}


def _has_structure(layout: Branch, tree: Any) -> bool:
    if layout.keys is None:
        return isinstance(tree, tuple) and len(tree) == len(layout.children)
    return isinstance(tree, dict) and tree.keys() == set(layout.keys)


def _rows(values: Any) -> Rows:
    """Typed if it is an array of numbers of the byte order of the machine, otherwise a value of any kind a row."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "biufc" and values.ndim and values.dtype.isnative:
        return np.ascontiguousarray(values)
    return _values(values)


def _values(values: Sequence[Any]) -> list[bytes]:
    return [pack(value) for value in values]
