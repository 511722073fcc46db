"""Episodes of importers, and their conversion to segments of a trace."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, NamedTuple, cast

import numpy as np
from gymnasium import Space

from gym_trace.data.layout import Layout, Leaf, PlainSpace, taken_apart
from gym_trace.data.packing import pack, pack_lenient
from gym_trace.data.schema import IMPORTED_FROM, Layouts, WriterSchema
from gym_trace.data.values import Array, densified
from gym_trace.data.vocabulary import OUTCOMES, Outcome
from gym_trace.envs.spaces import describe
from gym_trace.errors import CorruptTrace, UnreadableRecording
from gym_trace.exchange.formats.identity import flags_of, malformed, read_about, read_identity
from gym_trace.format import wire
from gym_trace.format.directory import is_writer_id, new_writer_id
from gym_trace.format.ring.segment import ColumnRows, Columns, Segment, size_of
from gym_trace.recording.reset_record import packed_start, stored_seed

_OVERRIDDEN = ("outcome", "seed", "options", "reset_info", "has_final_observation")  # fields that an identity replaces
_NO_FLAGS = np.zeros((2, 0), np.bool_)
_UNKNOWN_TIME = int(np.iinfo(np.int64).min)  # NaT of NumPy
Schema = dict[str, Any]  # schema record of a writer (docs/FORMAT.md, section 4)


class NewSteps(NamedTuple):
    """Consecutive steps of an episode.

    observations: one row per step, after it; the first steps of an episode have one more row in front, after the
    reset. An array, or dicts and tuples of arrays as in the space. actions, rewards: one row per step.
    terminations, truncations: (steps,) bool, flags of the environment; None: derived from the outcome.
    infos: one dict per step. annotations: by name, one row per step. states: likewise, as in Episode.states.

    Examples:
        >>> steps = gym_trace.formats.NewSteps(observations=np.arange(4), actions=np.zeros(3, int), rewards=np.ones(3))
        >>> steps.terminations is None  # the format does not know
        True
    """

    observations: Any
    actions: Any
    rewards: Any
    terminations: Array | None = None
    truncations: Array | None = None
    infos: Sequence[Any] | None = None
    annotations: Mapping[str, Any] = {}
    states: Mapping[str, Any] = {}


class NewEpisode(NamedTuple):
    """An episode to write.

    steps: their number. parts: all steps in parts, read on demand; an episode without steps has one empty part.
    outcome: None: "terminated" or "truncated" by the flags of the last step, otherwise "cut".
    has_final_observation: False if the last row of observations is a placeholder: NaN, 0 or "".
    identity: the text of ExportSource.identity(); it overrides all other fields.
    number: its id in the writer, larger than that of the episode before; None: the next one.

    Examples:
        >>> steps = gym_trace.formats.NewSteps(np.arange(4), np.zeros(3, int), np.ones(3))
        >>> episode = gym_trace.formats.NewEpisode(3, [steps], outcome="terminated", seed=7)
    """

    steps: int
    parts: Iterable[NewSteps]
    outcome: str | None = None
    seed: int | None = None
    options: dict[str, Any] | None = None
    reset_info: dict[str, Any] | None = None
    identity: str | None = None
    has_final_observation: bool = True
    number: int | None = None


@dataclass
class Imported:
    """The content of a new trace.

    Attributes:
        kind: the format, in words.
        schemas: schema of each writer, by its id.
        segments: (id of a writer, part of its content), read on demand; None as content: the writer is complete.
        ends: called after these; yields (id of a writer, end of an episode in parts).
        total: number of steps, or of another unit that done() counts; 0: unknown.
        done: returns the amount read so far.
        facts: of the whole trace: author, license, description …
        warnings: one sentence per missing fact; reading the segments may add more.
        beside: files to copy into the directory of the trace, such as videos.

    Examples:
        >>> space = gymnasium.spaces.Discrete(4)
        >>> schema = gym_trace.formats.new_schema("my format", space, space)
        >>> found = gym_trace.formats.imported("my format", [], schema, warnings=["no episodes"])
        >>> found.kind, found.warnings
        ('my format', ['no episodes'])
    """

    kind: str
    schemas: dict[str, Schema]
    segments: Iterator[tuple[str, Segment | None]]
    total: int = 0
    done: Callable[[], int] = lambda: 0
    ends: Callable[[], Iterable[tuple[str, Segment]]] = lambda: ()
    facts: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
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

    environment: id, spec (the EnvSpec as JSON text), class and note, where known.

    Examples:
        >>> space = gymnasium.spaces.Discrete(2)
        >>> schema = gym_trace.formats.new_schema("my format", space, space, {"id": "Mine-v0"})
        >>> schema["environment"]["id"]
        'Mine-v0'
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
    warnings: Iterable[str] = (),
    steps: int = 0,
    writer: str | None = None,
) -> Imported:
    """Return the episodes of another format as the content of a trace.

    Args:
        kind: the format, in words.
        episodes: in their order.
        schema: of the writer of all episodes whose identity names no writer; see new_schema().
        about: the text of ExportSource.about, if the format stored it; restores the original writers.
        warnings: one sentence per missing fact; reading the episodes may add some to a list.
        steps: their total number; 0: unknown.
        writer: the id of the writer of `schema`; None, or an invalid one: a new id.

    Raises UnreadableRecording, also while the episodes are read.

    Examples:
        >>> space = gymnasium.spaces.Discrete(4)
        >>> steps = gym_trace.formats.NewSteps(np.arange(4), np.zeros(3, int), np.ones(3))
        >>> episodes = [gym_trace.formats.NewEpisode(3, [steps], outcome="terminated")]
        >>> schema = gym_trace.formats.new_schema("my format", space, space)
        >>> gym_trace.formats.imported("my format", episodes, schema).kind
        'my format'
    """
    original = {} if about is None else read_about(about)
    schemas = {name: schema for name, schema in original.get("writers", {}).items() if is_writer_id(name)}
    builder = _Builder(schemas, schema)
    if writer is not None:
        builder.add_writer(writer if is_writer_id(writer) else new_writer_id())
    facts = dict(original.get("facts") or facts or {})
    segments = builder.segments(episodes)
    warnings = warnings if isinstance(warnings, list) else list(warnings)
    return Imported(kind, schemas, segments, steps, lambda: builder.steps, builder.ends, facts, warnings)


def first_episodes(segments: Iterable[tuple[str, Segment | None]], limit: int) -> Iterator[tuple[str, Segment | None]]:
    """Yield the segments of the first `limit` episodes, and read no more."""
    left = limit
    for name, segment in segments:
        if segment is not None:
            count = int(np.count_nonzero(segment.fragments["flags"] & wire.STOPS))
            if count > left:  # the segment has several episodes, without steps
                columns = {path: rows[:left] for path, rows in cast(Columns, segment.columns).items()}
                segment = Segment(segment.fragments[:left], columns, segment.size)
            left -= count
        yield name, segment
        if left <= 0:
            return


def together(parts: Sequence[Imported]) -> Imported:
    """Join several contents. Their writers are written one after the other."""

    def segments() -> Iterator[tuple[str, Segment | None]]:
        for part in parts:
            yield from part.segments
            yield from part.ends()
            for name in part.schemas:
                yield name, None

    return Imported(
        " and ".join(dict.fromkeys(part.kind for part in parts)),
        cast(dict[str, Schema], ChainMap(*(part.schemas for part in parts))),  # reading the segments adds some
        segments(),
        sum(part.total for part in parts),
        lambda: sum(part.done() for part in parts),
        lambda: (end for part in parts for end in part.ends()),
        {key: value for part in parts for key, value in part.facts.items()},
        [warning for part in parts for warning in part.warnings],
        [file for part in parts for file in part.beside],
    )


class _Builder:
    """Converts episodes to segments; those without an identity get a writer and ids."""

    def __init__(self, schemas: dict[str, Schema], schema: Schema):
        self.steps = 0
        self._schemas, self._schema = schemas, schema
        self._default_writer: str | None = None  # for episodes whose identity names no writer of `schemas`
        self._next_id = 0
        self._layouts: dict[str, Layouts] = {}
        self._begun: set[tuple[str, int]] = set()  # episodes in parts (is_part), by writer and id
        self._ends: dict[tuple[str, int], Segment] = {}  # their ends, written after all parts

    def segments(self, episodes: Iterable[NewEpisode]) -> Iterator[tuple[str, Segment]]:
        for episode in episodes:
            known = {name: getattr(episode, name) for name in _OVERRIDDEN}
            known |= {} if episode.identity is None else read_identity(episode.identity)
            writer = known.get("writer")
            if writer not in self._schemas:
                writer = self._default_writer or self.add_writer(new_writer_id())
                number = self._next_id if episode.number is None else episode.number
                known |= {"episode_id": number, "lane": 0, "first_step": 0, "is_part": False}
                self._next_id = number + 1
            try:
                yield from self._episode_segments(writer, episode, known)
            except (wire.OutOfRange, OverflowError) as error:
                raise malformed("an episode") from error

    def ends(self) -> Iterator[tuple[str, Segment]]:
        """Yield the ends of the episodes in parts, once."""
        ends, self._ends = self._ends, {}
        for (writer, _), end in ends.items():
            yield writer, end

    def add_writer(self, name: str) -> str:
        """Add the writer of episodes whose identity names none."""
        self._default_writer, self._schemas[name] = name, self._schema
        return name

    def _layouts_of(self, writer: str) -> Layouts:
        if writer not in self._layouts:
            try:
                self._layouts[writer] = WriterSchema.of(self._schemas[writer]).layouts
            except CorruptTrace as error:
                raise malformed("a space") from error
        return self._layouts[writer]

    def _episode_segments(
        self, writer: str, episode: NewEpisode, known: dict[str, Any]
    ) -> Iterator[tuple[str, Segment]]:
        layouts, stored_flags = self._layouts_of(writer), flags_of(known, episode.steps)
        key = writer, known.get("episode_id", 0)
        first_step, is_part = known.get("first_step", 0), bool(known.get("is_part"))
        begins = key not in self._begun
        if is_part:
            self._begun.add(key)
        if first_step > 0 and begins:  # the earlier steps are missing, but the start of the episode is known
            yield writer, _segment(known, first_step, _NO_FLAGS, {}, opening=wire.STARTS)
        done, outcome = 0, 0
        for steps in episode.parts:
            count, has_initial = len(steps.rewards), done == 0
            last = done + count >= episode.steps
            if stored_flags is None:
                flags = _flags(steps, last, known["outcome"])
            else:
                flags = stored_flags[:, done : done + count]
            opening = wire.HAS_INITIAL * has_initial | wire.STARTS * (has_initial and first_step == 0 and begins)
            closing = 0
            if last:
                outcome = _outcome(known["outcome"], flags)
                closing = wire.STOPS | wire.PLACEHOLDER * (not known["has_final_observation"])
                # The end of a lost episode is mostly unknown.
                closing |= wire.ENDS * (not is_part and (outcome > 0 or "end_time" in known))
                if is_part and OUTCOMES[outcome] != "lost":
                    ended = first_step + episode.steps
                    self._ends[key] = _segment(known, ended, _NO_FLAGS, {}, closing=wire.ENDS, outcome=outcome)
            columns = _columns(layouts, steps, flags.shape[1], has_initial)
            yield writer, _segment(known, first_step + done, flags, columns, opening, closing, outcome)
            done += flags.shape[1]
            self.steps += flags.shape[1]
            if last:
                break
        if done != episode.steps:
            raise UnreadableRecording(f"an episode of {episode.steps} steps has only {done}")


def _flags(steps: NewSteps, last: bool, outcome: str | None) -> Array:
    """Return the terminations and truncations of some steps, (2, steps) bool; missing ones by the outcome."""
    pair = np.zeros((2, len(steps.rewards)), np.bool_)
    for row, flags, name in zip(pair, (steps.terminations, steps.truncations), ("terminated", "truncated")):
        if flags is not None:
            row[:] = flags
        elif last:
            row[-1:] = outcome == name
    return pair


def _outcome(outcome: str | None, flags: Array) -> int:
    if outcome is not None:
        if outcome not in OUTCOMES:
            raise malformed("an episode")
        return 0 if outcome in ("lost", "running") else OUTCOMES.index(outcome)
    terminated, truncated = (bool(row[-1:].any()) for row in flags)
    return int(Outcome.TERMINATED if terminated else Outcome.TRUNCATED if truncated else Outcome.CUT)


def _segment(
    known: dict[str, Any],
    first_step: int,
    flags: Array,
    columns: Columns,
    opening: int = 0,
    closing: int = 0,
    outcome: int = 0,
) -> Segment:
    """Return steps of an episode, with one fragment per run of steps up to a terminated or truncated one.

    flags: (2, steps) bool. opening, closing: the flags of the first and of the last fragment.
    """
    bits = flags[0] * wire.TERMINATED | flags[1] * wire.TRUNCATED
    rows, begin = [], 0
    for end in (*(np.flatnonzero(bits[:-1]) + 1).tolist(), len(bits)):
        own = opening * (begin == 0) | closing * (end == len(bits)) | (int(bits[end - 1]) if end > begin else 0)
        rows.append(_fragment(known, first_step + begin, end - begin, own, outcome))
        begin = end
    if opening & wire.STARTS:
        columns = {**columns, ("starts",): [_start(known)]}
    table = np.frombuffer(bytearray().join(rows), wire.FRAGMENT)
    return Segment(table, columns, table.nbytes + sum(map(size_of, columns.values())))


def _fragment(known: dict[str, Any], first_step: int, steps: int, flags: int, outcome: int) -> bytes:
    start, end = known.get("start_time"), known.get("end_time")
    seed, start_times, end_times = wire.NO_SEED, (0, 0), (0, 0)
    if flags & wire.STARTS:
        seed = stored_seed(known["seed"])
        start_times = _UNKNOWN_TIME if start is None else start, known.get("clock_offset", 0)
    if flags & wire.ENDS:
        duration = known.get("duration", 0)
        end_times = duration, 0 if start is None or end is None else end - start - duration
    lane, number = known.get("lane", 0), known.get("episode_id", 0)
    outcome = outcome if flags & wire.ENDS else 0
    return wire.pack_fragment(number, first_step, steps, lane, flags, outcome, 0.0, seed, *start_times, *end_times)


def _start(known: dict[str, Any]) -> bytes:
    state = known.get("rng_state")
    values = known["options"], None if state is None else {"rng_state": state}, known["reset_info"]
    return packed_start(known["seed"], *(None if value is None else pack_lenient(value)[0] for value in values))[0]


# -- rows -------------------------------------------------------------------------------------------------------------


def _columns(layouts: Layouts, steps: NewSteps, count: int, has_initial: bool) -> Columns:
    """Return the rows of all columns. Raises UnreadableRecording for a wrong number of rows."""
    columns = _of_tree(layouts.observations, steps.observations)
    if count:
        columns |= _of_tree(layouts.actions, steps.actions)
        columns[("rewards",)] = _rows(steps.rewards, is_typed=True)
        if steps.infos is not None:
            columns[("infos",)] = _values(steps.infos)
        columns |= {("annotations", name): _rows(values) for name, values in steps.annotations.items()}
        columns |= {("states", name): _values(values) for name, values in steps.states.items()}
    for path, rows in columns.items():
        expected = count + has_initial if path[0] == "observations" else count
        if len(rows) != expected:
            name = "/".join(map(str, path))
            raise UnreadableRecording(f"{name}: {len(rows)} rows instead of {expected}")
    return columns


def _of_tree(layout: Layout, tree: Any) -> Columns:
    if isinstance(layout, Leaf):
        return {layout.path: _rows(tree, layout.dtype is not None)}
    keys: list[Any] = list(range(len(layout.children))) if layout.keys is None else layout.keys
    kind, tree_keys = (tuple, range(len(tree))) if layout.keys is None else (dict, tree)
    if isinstance(tree, kind) and set(tree_keys) == set(keys):
        columns: Columns = {}
        for key, child in zip(keys, layout.children):
            columns |= _of_tree(child, tree[key])
        return columns
    leaves = list(layout.leaves())  # tree is a list of rows, whose structure differs from that of the space
    split = list(zip(*(taken_apart(layout, row) for row in tree))) or [()] * len(leaves)
    return {leaf.path: _rows(list(values), leaf.dtype is not None) for leaf, values in zip(leaves, split)}


def _rows(values: Any, is_typed: bool = False) -> ColumnRows:
    """Return a native array of numbers unchanged, other rows as one packed value per row.

    is_typed: first join a list of numbers of one dtype and shape to an array.
    """
    if is_typed and isinstance(values, list) and (joined := densified(values)) is not None:
        values = joined
    if isinstance(values, np.ndarray) and values.dtype.kind in "biufc" and values.ndim and values.dtype.isnative:
        return np.ascontiguousarray(values)
    return _values(values)


def _values(values: Sequence[Any]) -> list[bytes]:
    return [pack(value) for value in values]
