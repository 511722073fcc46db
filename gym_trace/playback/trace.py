"""Reading traces: Trace, and scan_recorded_traces as in gym_recording."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, overload

import numpy as np

from gym_trace.data.episode import Episode
from gym_trace.data.other_names import OF_TRACE, KnowsOtherNames
from gym_trace.data.selecting.conditions import chosen_rows
from gym_trace.data.showing.frames import episodes_frame
from gym_trace.data.showing.html import player
from gym_trace.data.values import Array
from gym_trace.data.vocabulary import SCANNED
from gym_trace.errors import CorruptTrace, InvalidOption, TraceNotFound, warn
from gym_trace.format.batch_reader import Damage
from gym_trace.format.facts import read_facts
from gym_trace.playback.episode_columns import EpisodeColumns
from gym_trace.playback.episode_index import EpisodeIndex, index_of, writer_agreed_on
from gym_trace.playback.episode_scan import arrays_of, scan_content
from gym_trace.playback.episode_table import EpisodeTable
from gym_trace.playback.opened import OnDisk, Opened, extents_of, reopened
from gym_trace.playback.shown import Shown
from gym_trace.playback.step_columns import steps_where
from gym_trace.playback.writer_reader import FileSnapshot
from gym_trace.storage.opening import absolute, path_of, storage_at
from gym_trace.storage.protocol import ReadStorage, Storage
from gym_trace.storage.remote.address import is_url

if TYPE_CHECKING:  # sampling is imported on demand: most traces are not opened for training
    from gym_trace.playback.sampling.batches import Batches
    from gym_trace.playback.sampling.items import Hindsight

EpisodeCallback = Callable[[Any, Any, Array], Any]
TraceLike: TypeAlias = "Trace | str | os.PathLike[str] | ReadStorage"

_CACHE_BYTES = 1 << 30  # decoded rows


def scan_recorded_traces(
    directory: TraceLike, episode_cb: EpisodeCallback | None = None, max_episodes: int | None = None
) -> int:
    """Call a function with the arrays of each recorded episode, in the order of the trace.

    Incomplete episodes are included, and those still being recorded, with their steps so far. To skip the latter:
    ``scan_recorded_traces(trace[trace.episodes["outcome"] != "running"], episode_cb)``.

    Args:
        directory: directory of the trace; or a storage, a trace, or a view of one.
        episode_cb: called as ``episode_cb(observations, actions, rewards)``: arrays of N + 1, N and N rows (dicts and
            tuples of arrays for Dict and Tuple spaces), which the callback may keep and modify. A truthy result ends
            the scan.
        max_episodes: stop after this number of episodes.

    Returns:
        The number of episodes passed to the callback.

    Raises:
        TraceNotFound, CorruptTrace.

    Examples:
        >>> lengths = []
        >>> def see(observations, actions, rewards):
        ...     lengths.append(len(rewards))
        >>> gym_trace.scan_recorded_traces("traces/cartpole", see)
        20
        >>> lengths[:3]
        [12, 9, 13]
    """
    trace = as_trace(directory)
    count = 0
    limit = len(trace) if max_episodes is None else max_episodes
    if limit <= 0:
        return 0
    for observations, actions, rewards in trace._arrays():
        count += 1
        if (episode_cb is not None and episode_cb(observations, actions, rewards)) or count >= limit:
            break
    return count


def open_trace(
    directory: str | os.PathLike[str] | ReadStorage,
    *,
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
) -> Trace:
    """Open a trace for reading. It may still be written to.

    Args:
        directory: a local directory; a URL such as "s3://bucket/trace", which needs the extra [remote]; or a
            gym_trace.storage.ReadStorage, to read from anywhere else.
        cache: for a URL, a directory for fetched data. None: $GYM_TRACE_URL_CACHE, or else 128 MiB of memory.
        cache_bytes: limit of this directory in bytes, for all traces in it. None: 10 GiB. The least recently used data
            is removed, except for data in use.

    Raises:
        TraceNotFound, InvalidOption.
        RemoteError: the store did not respond, or denied access. MissingExtra.

    Examples:
        >>> trace = gym_trace.open_trace("traces/cartpole")
        >>> len(trace), trace[0].observations.shape, trace[0].outcome
        (20, (13, 4), 'terminated')
    """
    return Trace(storage_at(directory, cache, cache_bytes))


def as_trace(trace: TraceLike) -> Trace:
    """Open a trace unless it is open already. Raises TraceNotFound."""
    return trace if isinstance(trace, Trace) else Trace(trace)


def storage_of(trace: TraceLike) -> ReadStorage:
    """Return the storage of a trace, for functions that read its files; a view has the storage of the whole trace."""
    if isinstance(trace, Trace):
        return trace._opened.storage
    return storage_at(trace)


def writable_storage_of(trace: TraceLike) -> Storage:
    """Return the storage of a trace, for functions that write to it. Raises InvalidOption if it is read-only."""
    storage = storage_of(trace)
    if not isinstance(storage, Storage):
        if is_url(root := storage.root):
            raise InvalidOption(
                f"{root}: traces at URLs are not changed; change a copy (gym-trace pull {root} DIR), and push it to "
                "another URL"
            )
        raise InvalidOption(f"{root}: this storage is read-only; pass one that has all of Storage")
    return storage


class Trace(KnowsOtherNames):
    """A recorded trace: a sequence of episodes.

    Opening reads only indexes; steps are read and decoded on access, chunk by chunk.

    ``trace[3]`` is an episode. ``trace[10:20]``, ``trace[[1, 4]]`` and ``trace[mask]``, a mask over .episodes, are
    views: traces with only these episodes, which every function that takes a trace accepts. A view does not change when
    more is recorded.

    A trace can be pickled and copied. The copy opens the same directory and has the same episodes at the same indices,
    until it is refreshed. Any number of threads may read it.

    Attributes:
        directory: absolute pathlib.Path; the root of a URL or a storage.
        episodes: structured array, one row per episode: index, episode_id, writer (an index of .writers), lane,
            first_step, steps, return, outcome, seed (-1: none), start_time, end_time (datetime64[ns], UTC),
            clock_offset and duration (ns), has_final_observation (see Episode). Episodes that are being recorded are
            included, with the outcome "running" and the steps so far:
            ``trace[trace.episodes["outcome"] != "running"]`` skips them.
        writers: ids of the writers.
        damage: damage found so far, as (path, start, end, problem).

    Examples:
        >>> trace = gym_trace.open_trace("traces/cartpole")
        >>> len(trace), trace.observation_space.shape, int(trace.episodes["steps"].sum())
        (20, (4,), 461)
        >>> trace[-3:].episodes["return"].tolist()
        [39.0, 20.0, 19.0]
        >>> sum(episode.total_reward for episode in trace) / len(trace)
        23.05
    """

    _OTHER_NAMES = OF_TRACE

    def __init__(self, directory: str | os.PathLike[str] | ReadStorage):
        self._opened = Opened(absolute(storage_at(directory)))
        self._content = EpisodeIndex.whole(())
        self.refresh()
        if not self._content.all_readers:
            raise TraceNotFound(
                f"{self.directory}: no trace here; it has no *.manifest.jsonl and no *.gtb files",
                directory=str(self.directory),
            )

    def __copy__(self) -> Trace:
        return self._with(self._content)

    def __deepcopy__(self, memo: Any) -> Trace:
        return self._with(self._content)

    def __reduce__(self) -> Any:
        return _reopened, (self._opened.storage, extents_of(self._content.all_readers), self._content.chosen)

    def _with(self, content: EpisodeIndex) -> Trace:
        other = Trace.__new__(Trace)
        other._opened, other._content = self._opened, content
        return other

    def __repr__(self) -> str:
        return self._shown.text()

    def _repr_html_(self) -> str:
        content = self._content
        return self._shown.html(lambda index: self._episode(content, index), player(self))

    @property
    def _shown(self) -> Shown:
        return Shown(self.directory, self._content, len(self.damage))

    # -- episodes -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._content)

    def __iter__(self) -> Iterator[Episode]:
        return self.scan()

    @overload
    def __getitem__(self, index: int) -> Episode: ...

    @overload
    def __getitem__(self, index: slice | Iterable[int] | Array) -> Trace: ...

    def __getitem__(self, index: int | slice | Iterable[int] | Array) -> Episode | Trace:
        """Return an episode by its index, or a view of several. Reads nothing until arrays are accessed."""
        content = self._content
        if isinstance(index, (int, np.integer)):
            if not -len(self) <= index < len(self):
                raise IndexError(f"no episode {index}; the trace has {len(self)}")
            return self._episode(content, range(len(content))[index])
        if index is None or isinstance(index, (str, float)):
            raise TypeError(f"trace[{index!r}]: pass an index, a slice, indices, or a mask over trace.episodes")
        selected, _ = content.selected(index)
        return self._with(content.view(selected))

    @property
    def episodes(self) -> Array:
        return self._content.table.view(EpisodeTable)

    def to_pandas(self) -> Any:
        """Return the episodes as a pandas.DataFrame. Needs pandas.

        One row per episode, by its index: episode_id, writer (its id), split, lane, first_step, steps, return, outcome,
        seed (integers, or missing), start_time, end_time (UTC), duration (a timedelta), has_final_observation. Unknown
        values are missing.

        Raises MissingExtra.

        Examples:
            >>> frame = gym_trace.open_trace("traces/cartpole").to_pandas()
            >>> frame.groupby("outcome", observed=True)["return"].max().to_dict()
            {'terminated': 58.0}
        """
        table, writers = self._content.table, [writer.about_or_empty for writer in self._content.readers]
        seeds: list[int | None] = [None if seed < 0 else seed for seed in table["seed"].tolist()]
        for index in np.flatnonzero(table["seed"] < -1).tolist():  # too large for the table
            seeds[index] = self._episode(self._content, index).seed
        return episodes_frame(table, self.writers, [writer.split for writer in writers], seeds)

    def select(
        self,
        where: str | None = None,
        *,
        sort: str | None = None,
        limit: int | None = None,
    ) -> Trace:
        """Return a view of selected episodes: ``trace.select("return > 100", sort="-return", limit=3)``.

        Applies where, then sort, then limit. Conditions are never run as Python. A million episodes take a
        fraction of a second.

        Args:
            where: a condition: ``return > 100 and outcome == "lost"``. Operators: and, or, not; == != < <= > >=, also
                chained (``0 < steps <= 10``); in and not in, for lists and for text; + - * / %, abs(), isnan()
                and isinf() for numbers.
                Values: numbers, text, True, False and None. Columns:

                - index (in the whole trace), steps, lane, episode_id, first_step, duration (seconds), seed, return are
                  numbers (if rewards are several numbers each, the columns are return[0] and so on);
                - outcome, split, writer (its id) are text; so is flag, set by a person in the viewer (good, bad, look;
                  None: not set);
                - has_final_observation is true or false: ``not has_final_observation`` selects imported episodes whose
                  final observation is unknown;
                - start_time, end_time are compared with ISO 8601 text: ``start_time >= "2026-11-01"``, in UTC unless
                  the text has an offset; parts that are omitted take their first moment;
                - metadata.KEY is metadata passed to the writer; options.KEY is an option passed to reset, which reads
                  the starts of episodes. ``metadata["a key"].deeper[0]`` reaches into dicts and lists. Values are
                  compared with values of the same type only; without a comparison, only True selects.

                Unknown values are None, and equal only to None (``seed is None``, ``options.level is None``): a missing
                seed, a return of NaN, the end and duration of an incomplete episode, a missing key, a division by 0.
                None is neither less nor greater than a value, so ``seed != 5`` and ``not return < 100`` include
                episodes without a seed or a return. Integers of any size, such as seeds, are compared exactly; their
                sums and products are exact up to 64 bits; everything else is float64.
            sort: one column or several, ``"split, -return"``; - means descending. Unknown values come last; equal
                episodes keep their order. None: the order of this trace. When sorted by return, complete episodes
                (terminated or truncated, with steps) come first, unless where names outcome. ``"random"`` shuffles,
                ``"random:SEED"`` in the same order each time.
            limit: number of episodes to keep, from the first.

        Raises:
            InvalidOption: an argument is invalid; the message points to the position.
            CorruptTrace: options or rewards were needed and are damaged.

        Examples:
            >>> best = gym_trace.open_trace("traces/cartpole").select("steps > 10", sort="-return", limit=3)
            >>> best.indices.tolist(), best.episodes["return"].tolist()
            ([8, 17, 3], [58.0, 39.0, 33.0])
        """
        content = self._content
        columns = self._columns(content)
        chosen = chosen_rows(columns, where, sort=sort, limit=limit, complete=columns.complete)
        return self._with(content.view(chosen))

    def _columns(self, content: EpisodeIndex) -> EpisodeColumns:
        return EpisodeColumns(content, self._with(content).scan, lambda: self.facts)

    @property
    def indices(self) -> Array:
        """(n,) int64: indices of the episodes in the whole trace, in the order of this view.

        Examples:
            >>> gym_trace.open_trace("traces/cartpole").select("steps > 40").indices
            array([8])
        """
        return self._content.whole_indices

    @property
    def _whole(self) -> Trace:
        content = self._content
        return self if content.chosen is None else self._with(EpisodeIndex.whole(content.all_readers))

    def refresh(self) -> int:
        """Read newly recorded data, and return the number of new episodes. A view never changes.

        Running episodes have more steps then, and may have ended. An episode is identified by its writer, episode_id
        and first_step: its index can change if several lanes or writers record. After an edit in place, which may
        remove episodes, the number can be negative.

        Examples:
            >>> trace = gym_trace.open_trace("traces/cartpole")
            >>> trace.refresh()  # nothing was recorded since
            0
        """
        before = self._content
        if before.chosen is not None:
            return 0
        writers = list(self._opened.refresh().values())
        if writers != before.all_readers:
            self._content = EpisodeIndex.whole(writers)
        return len(self) - len(before)

    def _episode(self, content: EpisodeIndex, index: int) -> Episode:
        writer, row = content.locate(index)
        record = content.record(index)
        source = OnDisk(self._opened, writer, row, record)
        return Episode(record, writer.writer, writer.split, source, prefix=writer.about.prefix)

    # -- what writers and people recorded about it --------------------------------------------------------------------

    @property
    def directory(self) -> FilePath:
        return path_of(self._opened.storage.root)

    @property
    def writers(self) -> list[str]:
        return [writer.writer for writer in self._content.readers]

    @property
    def metadata(self) -> Any:
        """Metadata passed to the recorder. Raises TraceError if writers have different metadata."""
        return writer_agreed_on(self, "metadata").metadata

    @property
    def env_spec(self) -> dict[str, Any]:
        """The recorded environment: id, spec (JSON), wrappers, class. Raises TraceError if writers differ."""
        return writer_agreed_on(self, "environment").env_spec

    @property
    def observation_space(self) -> Any:
        """The recorded gymnasium space. Raises TraceError if writers recorded different spaces.

        A custom space that is not plain data is a StandIn: it contains every value and cannot be sampled.
        """
        return writer_agreed_on(self, "observation_space").observation_space

    @property
    def action_space(self) -> Any:
        """The recorded gymnasium space. Raises TraceError if writers recorded different spaces.

        A custom space that is not plain data is a StandIn: it contains every value and cannot be sampled.
        """
        return writer_agreed_on(self, "action_space").action_space

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that people stated about the whole trace: author, license, description, tags, homepage, citation,
        reference_scores ({"random": …, "expert": …}), and others. Read on each access; if the file is damaged, warns
        and returns an empty dict.
        """
        try:
            return read_facts(self._opened.storage)
        except CorruptTrace as error:
            self._report(Damage(str(error.path), 0, 0, error.problem))
            return {}

    def make_env(self, *, trust: bool = False, env_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        """Make the recorded environment, with its wrappers; kwargs override the recorded arguments.

        Args:
            trust: allow the trace to import modules, call classes and open files. Without it, the error lists what the
                environment needs.
            env_kwargs: further arguments of the environment, such as one called "trust".

        Raises:
            EnvironmentUnavailable: lists what is missing.

        Examples:
            >>> env = gym_trace.open_trace("traces/cartpole").make_env(max_episode_steps=50)
            >>> env.spec.id, env.spec.max_episode_steps
            ('CartPole-v1', 50)
        """
        from gym_trace.envs.make import make_environment

        return make_environment(self.env_spec, trust, {**(env_kwargs or {}), **kwargs})

    @property
    def damage(self) -> list[Damage]:
        found = [damage for writer in self._content.readers for damage in writer.damage]
        return list(dict.fromkeys([*found, *self._opened.skipped]))

    def _report(self, damage: Damage) -> None:
        if damage not in self._opened.skipped:
            self._opened.skipped[damage] = None
            where = f"bytes {damage.start} to {damage.end}" if damage.end else "all of it"
            warn(f"{damage.path}: skipped {where}: {damage.problem}")

    # -- steps --------------------------------------------------------------------------------------------------------

    def scan(
        self,
        columns: Iterable[str] | None = None,
        episodes: slice | Iterable[int] | Array | None = None,
        on_damage: str = "raise",
    ) -> Iterator[Episode]:
        """Yield episodes, reading each chunk once, in memory that does not grow with the trace.

        Args:
            columns: the columns to read: "observations", "actions", "rewards", "terminations", "truncations", "infos",
                "annotations", "states". None: read a column of a chunk when an episode first uses it; from a URL,
                columns that the previous episodes used are fetched ahead.
            episodes: a slice, indices, or a boolean mask; yielded in this order. None: all. If they do
                not ascend, as in a sorted view, each episode is read by itself, and each column on access.
            on_damage: "raise" CorruptTrace when a damaged chunk is read, or "skip" it: all columns are read in advance,
                episodes that lost a chunk come in parts, a warning describes what was skipped, and .damage lists it.

        Examples:
            >>> trace = gym_trace.open_trace("traces/cartpole")
            >>> [len(episode.rewards) for episode in trace.scan(["rewards"], episodes=slice(3))]
            [12, 9, 13]
        """
        roots = _checked_columns(columns)
        if on_damage not in ("raise", "skip"):
            raise InvalidOption(f'on_damage={on_damage!r}: pass "raise" or "skip"')
        content = self._content
        wanted, ordered = content.selected(episodes)
        if ordered:
            return self._scan(content, roots, wanted, on_damage == "skip")
        if on_damage == "raise":
            return (self._episode(content, int(i)) for i in wanted)
        indices = wanted if content.chosen is None else content.chosen[wanted]
        runs = np.split(wanted, np.flatnonzero(np.diff(indices) <= 0) + 1)
        return chain.from_iterable(self._scan(content, roots, run, True) for run in runs)

    def _scan(
        self, content: EpisodeIndex, roots: frozenset[str] | None, wanted: Array, skip: bool
    ) -> Iterator[Episode]:
        yield from scan_content(content, roots, wanted, self._report if skip else None)
        for damage in self.damage if skip else ():
            self._report(damage)

    def find_steps(self, where: str, on_damage: str = "raise") -> Array:
        """Find the steps where a condition holds, reading only the columns that it names, chunk by chunk.

        ``trace.find_steps("isnan(next_observation).any or reward < -5")``. The language is that of select(). Columns,
        as in to_arrow() and SQL:

        - observation (before the step), next_observation (after it), action, reward: each element of a row is compared;
          ``.any`` and ``.all`` after parentheses combine them: ``(abs(action) > 1).any``. ``observation.pair[2]``
          names an element; unlike in SQL, the first one is [0];
        - annotations.NAME, info.KEY; terminated, truncated, which are true or false;
        - step (in the whole episode) and episode (its index in this trace).

        isnan() and isinf() are true for numbers only; unknown values are None, as in select().

        Args:
            where: the condition.
            on_damage: "raise" CorruptTrace at a damaged chunk, or "skip" it, with a warning.

        Returns:
            (n, 2) int64, episode and step, sorted.

        Raises InvalidOption, which points to the position, and CorruptTrace.

        Examples:
            >>> gym_trace.open_trace("traces/cartpole").find_steps("abs(next_observation[3]) > 2.3").tolist()
            [[1, 8]]
        """
        if on_damage not in ("raise", "skip"):
            raise InvalidOption(f'on_damage={on_damage!r}: pass "raise" or "skip"')
        skip = on_damage == "skip"
        found = steps_where(self._content, where, self._report if skip else None)
        for damage in self.damage if skip else ():
            self._report(damage)
        return found

    # -- tables ------------------------------------------------------------------------------------------------------

    def partitions(self, n: int) -> list[Any]:
        """Return the episodes in at most n parts of about the same number of steps, for other processes to read.

        A partition can be pickled, and is small. Its open() returns its episodes as a trace, its to_arrow() as record
        batches. Running episodes are skipped.

        Raises InvalidOption, MissingExtra; CorruptTrace; TraceError if the writers have different spaces.

        Examples:
            >>> parts = gym_trace.open_trace("traces/cartpole").partitions(4)
            >>> [part.episodes for part in parts]
            [7, 3, 5, 5]
            >>> len(parts[0].open())
            7
        """
        found: list[Any] = _tables().partitions_of(self, n, handle_of)
        return found

    def to_arrow(self, columns: Sequence[str] | None = None, where: Any = None, *, table: str = "steps") -> Any:
        """Return the steps, or the episodes, as a pyarrow.RecordBatchReader, which reads batches on demand.

        The columns of steps: episode, step, observation (before the step), action, reward, terminated, truncated,
        next_observation (after it), info, annotations; of episodes: episode, steps, return, outcome, seed, options,
        final_observation, has_final_observation, environment, split, metadata, writer, episode_id, lane, first_step,
        start_time, end_time. Running episodes are skipped.

        Args:
            columns: read only these. None: all.
            where: a condition: text, as for find_steps() or, with table="episodes", for select(); or a pyarrow
                expression, ``pyarrow.dataset.field("action") == 3``. Columns that only the condition names are not
                returned; the others are decoded only in episodes with matching rows.
            table: "steps" or "episodes".

        Raises InvalidOption, MissingExtra. Reading the batches raises CorruptTrace at a damaged chunk.

        Examples:
            >>> trace = gym_trace.open_trace("traces/cartpole")
            >>> trace.to_arrow(["episode", "reward"], where="step >= 50").read_all().num_rows
            8
        """
        return _tables().to_arrow(_tables().dataset_of(self, table), columns, where)

    def to_dataset(self, table: str = "steps") -> Any:
        """Return the steps, or the episodes, as a pyarrow.dataset.Dataset.

        It can be pickled. ``polars.scan_pyarrow_dataset`` and others accept it, and pass the columns and conditions of
        a query to it. It has the columns of to_arrow(), and no fragments. Raises InvalidOption, MissingExtra.

        Examples:
            >>> dataset = gym_trace.open_trace("traces/cartpole").to_dataset("episodes")
            >>> dataset.to_table(["steps", "outcome"]).slice(0, 1).to_pylist()
            [{'steps': 12, 'outcome': 'terminated'}]
        """
        return _tables().dataset_of(self, table)

    def to_duckdb(self) -> Any:
        """Return a duckdb connection with the views steps and episodes, with the columns of to_arrow().

        ``trace.to_duckdb().sql("SELECT action, avg(reward) FROM steps GROUP BY action")`` decodes only the columns that
        the query names. Lists count from 1 in SQL. Raises InvalidOption, MissingExtra.

        Examples:
            >>> database = gym_trace.open_trace("traces/cartpole").to_duckdb()
            >>> database.sql("SELECT count(*) FROM steps WHERE action = 1").fetchall()
            [(247,)]
        """
        from gym_trace.playback.tables.sql import connection

        return connection([self])

    def _arrays(self) -> Iterator[tuple[Any, Any, Array]]:
        """Yield observations, actions and rewards of each episode."""
        content = self._content
        if content.chosen is not None:
            episodes = self.scan(("observations", "actions", "rewards"))
            return ((episode.observations, episode.actions, episode.rewards) for episode in episodes)
        # One iterator per writer: a generator around these would cost a tenth of the time.
        return chain.from_iterable(map(arrays_of, content.all_readers))

    # -- batches for training -----------------------------------------------------------------------------------------

    def windows(
        self,
        length: int,
        batch_size: int = 256,
        *,
        seed: int = 0,
        columns: Iterable[str] | None = None,
        strict_length: bool = True,
        span: bool | tuple[bool, bool] = False,
        stride: int = 1,
        replacement: bool = True,
        sampling: str = "steps",
        weights: Array | None = None,
        cache: str | None = "auto",
        cache_bytes: int = _CACHE_BYTES,
        follow: float | None = None,
        most_steps: int | None = None,
        on_damage: str = "raise",
    ) -> Batches:
        """Return batches of windows: consecutive steps of one episode.

        ``for batch in trace.windows(64, 256)`` gives dicts of arrays: observations (256, 65, …), with one row more than
        the others, actions (256, 64, …), rewards, terminations, truncations, annotations (a dict of arrays), mask
        (256, 64), True where there is a step, and (256,) episode, its index in the trace, and first_step. Dict and
        Tuple spaces have dicts and tuples of arrays. Views work the same: ``trace.select("return > 100").windows(64)``.

        An episode whose final observation is unknown (Episode.has_final_observation) lacks its last step; if that step
        terminated it, the step is kept and the observation before it is repeated. If a trace has such terminated
        episodes, batches also have next_observation_mask, (256, 64), False where the observation after a step is
        unknown.

        Args:
            length: steps of a window.
            batch_size: windows of a batch; the last batch of an epoch may have fewer.
            seed: the same seed gives the same batches, in any process and with any number of workers; batches of a
                stream (cache=None) differ from these, and depend on cache_bytes.
            columns: only these columns; infos only if named; "annotations.logprob" is one annotation. None: all but
                infos.
            strict_length: skip shorter episodes. False: pad them with zeros.
            span: True if windows may reach beyond the start and the end of an episode: (start, end) or one value for
                both. Such windows have fewer steps.
            stride: distance between the starts of windows in an episode, in steps.
            replacement: sample with replacement, endlessly. False: an iteration is an epoch with each window once.
            sampling: "steps": all windows are equally likely; "episodes": all episodes are.
            weights: sample windows in proportion to these, with replacement: one weight per episode, per step (that a
                window starts with), or per window. Batches also have index and weight, (batch_size,): the argument of
                update_priorities(), and 1 / (windows * probability).
            cache: where decoded rows are kept: "memory"; "disk", below $GYM_TRACE_CACHE or the user's cache directory,
                mapped into memory, reused, and extended when the trace has grown; None: nowhere, parts of the trace are
                decoded again in each epoch, in shuffled order; "auto": in memory if they fit. Or a device of PyTorch,
                such as "cuda:1": rows lie there, and batches are tensors there, with the same values in the same order.
            cache_bytes: limit of memory or disk, including about 70 bytes per episode for positions. A stream exceeds
                it if the positions and one decoded chunk (recorders write up to 24 MiB) need more.
            follow: read new data of live writers, at most once per this number of seconds. This refreshes the
                trace; rows in memory are not decoded again. None: the episodes of the trace as it is now.
            most_steps: with follow, keep only the episodes that started last, up to this number of steps.
            on_damage: "raise" CorruptTrace at a damaged chunk, or "skip" it, like scan(): windows never span the gap, a
                warning describes it, and .damage of the trace lists it. A stream then reads the trace once in advance.

        Raises InvalidOption, CorruptTrace; TraceError if the writers have different spaces.

        Examples:
            >>> batches = gym_trace.open_trace("traces/cartpole").windows(8, 32, columns=["observations", "actions"])
            >>> batch = next(iter(batches))
            >>> batch["observations"].shape, batch["actions"].shape
            ((32, 9, 4), (32, 8))
        """
        from gym_trace.playback.sampling.batches import Order
        from gym_trace.playback.sampling.orders import batches_of, windows

        order = Order(
            batch_size, seed, columns, replacement, weights, cache, cache_bytes, follow, most_steps, on_damage
        )
        return batches_of(self, windows(length, strict_length, span, stride, sampling), order, self._report)

    def transitions(
        self,
        batch_size: int = 256,
        *,
        seed: int = 0,
        columns: Iterable[str] | None = None,
        n_steps: int = 1,
        gamma: float = 0.99,
        n_frames: int = 1,
        goals: Hindsight | None = None,
        replacement: bool = True,
        weights: Array | None = None,
        cache: str | None = "auto",
        cache_bytes: int = _CACHE_BYTES,
        follow: float | None = None,
        most_steps: int | None = None,
        on_damage: str = "raise",
    ) -> Batches:
        """Return batches of transitions: dicts of arrays with one row per transition: observations, actions, rewards,
        next_observations, terminations, truncations, discount, annotations, episode, first_step.

        A step to an unknown observation (Episode.has_final_observation) is skipped, unless it terminated its episode:
        value targets do not use next_observations then, which repeat observations. If a trace has such steps, batches
        also have next_observation_mask, (batch_size,), False for these steps.

        Args:
            n_steps: steps of a transition, fewer at the end of an episode: rewards are discounted and summed (float64),
                next_observations follow the last step, terminations and truncations are those of the last step. The
                target of a value is ``rewards + discount * ~terminations * value(next_observations)``.
            gamma: discount per step; discount is gamma to the power of the number of steps.
            n_frames: number of observations to stack, (batch_size, n_frames, …), newest last; the first observation of
                an episode is repeated before its start.
            goals: relabel goals with reached ones: ``Hindsight("future", env.unwrapped.compute_reward)``.
            batch_size, seed, columns, replacement, weights, cache, cache_bytes, follow, most_steps,
            on_damage: see windows().

        Raises the same errors as windows().

        Examples:
            >>> batches = gym_trace.open_trace("traces/cartpole").transitions(64, n_steps=3, gamma=0.99)
            >>> batch = next(iter(batches))
            >>> batch["observations"].shape, batch["next_observations"].shape, batch["rewards"].shape
            ((64, 4), (64, 4), (64,))
        """
        from gym_trace.playback.sampling.batches import Order
        from gym_trace.playback.sampling.orders import batches_of, transitions

        order = Order(
            batch_size, seed, columns, replacement, weights, cache, cache_bytes, follow, most_steps, on_damage
        )
        return batches_of(self, transitions(self, n_steps, gamma, n_frames, goals), order, self._report)

    def trajectories(
        self,
        batch_size: int = 16,
        *,
        seed: int = 0,
        columns: Iterable[str] | None = None,
        replacement: bool = True,
        cache: str | None = "auto",
        cache_bytes: int = _CACHE_BYTES,
        follow: float | None = None,
        most_steps: int | None = None,
        on_damage: str = "raise",
    ) -> Batches:
        """Return batches of whole episodes, like windows(), padded to the longest of the batch. Episodes without steps
        are skipped. For arguments and errors see windows().

        Examples:
            >>> batch = next(iter(gym_trace.open_trace("traces/cartpole").trajectories(4)))
            >>> batch["actions"].shape, batch["mask"].sum(axis=1).tolist()
            ((4, 33), [23, 33, 33, 12])
        """
        from gym_trace.playback.sampling.batches import Order
        from gym_trace.playback.sampling.orders import TRAJECTORIES, batches_of

        order = Order(batch_size, seed, columns, replacement, None, cache, cache_bytes, follow, most_steps, on_damage)
        return batches_of(self, TRAJECTORIES, order, self._report)

    def normalization(self, columns: Iterable[str] | None = None) -> dict[str, Any]:
        """Return mean, std, min, max and count of each element of each numeric column, over all steps.

        ``norm = trace.normalization()["observations"]``, then ``(batch["observations"] - norm.mean) / norm.std``. The
        structure is that of batches: Dict and Tuple spaces have dicts and tuples of Moments, None for leaves that are
        not numeric; annotations are a dict. The final observation counts if it is known.

        Rows are decoded once, in bounded memory. For a whole trace, the result is cached (in $GYM_TRACE_CACHE, or the
        user's cache directory; never in the trace) and extended as the trace grows; for a view, it is computed each
        time.

        Args:
            columns: only these columns. None: observations, actions and rewards.

        Raises InvalidOption, CorruptTrace; TraceError if the writers have different spaces.

        Examples:
            >>> norm = gym_trace.open_trace("traces/cartpole").normalization(["rewards"])["rewards"]
            >>> float(norm.mean), float(norm.std)
            (1.0, 0.0)
        """
        from gym_trace.playback.sampling.batches import roots_of
        from gym_trace.playback.sampling.normalization import moments_of

        chosen = ("observations", "actions", "rewards") if columns is None else columns
        return moments_of(self, roots_of(chosen))


class TraceHandle(NamedTuple):
    """Some episodes of a trace as they are now, for another process. Picklable.

    extents: snapshots of the files of their writers. chosen: indices of the episodes in these; a slice if contiguous.
    """

    storage: ReadStorage
    extents: tuple[FileSnapshot, ...]
    chosen: slice | Array

    def open(self) -> Trace:
        """Return a view of these episodes. Raises TraceNotFound; TraceError if they were changed or removed."""
        return _reopened(*self)


def handle_of(trace: Trace) -> TraceHandle:
    """Return a handle of a trace or view. It skips writers without episodes in the view."""
    content = index_of(trace)
    extents = extents_of(content.readers)
    counts = np.array(
        [len(writer.parts) if writer.extent in extents else 0 for writer in content.all_readers], np.int64
    )
    numbers = content.bounds.searchsorted(content.whole_indices, side="right") - 1
    chosen: Array = content.whole_indices - content.bounds[numbers] + (np.cumsum(counts) - counts)[numbers]
    is_run = len(chosen) > 0 and bool((np.diff(chosen) == 1).all())
    return TraceHandle(storage_of(trace), extents, slice(int(chosen[0]), int(chosen[-1]) + 1) if is_run else chosen)


def _reopened(storage: ReadStorage, extents: tuple[FileSnapshot, ...], chosen: slice | Array | None) -> Trace:
    trace = Trace.__new__(Trace)
    trace._opened = reopened(storage, extents)
    trace._content = EpisodeIndex.whole(list(trace._opened.writers.values()))
    return trace if chosen is None else trace[chosen]


def _tables() -> Any:
    """Import the tables of a trace, which need pyarrow. Raises MissingExtra."""
    from gym_trace.playback.tables import partitions

    return partitions


def _checked_columns(columns: Iterable[str] | None) -> frozenset[str] | None:
    if columns is None:
        return None
    roots = frozenset([columns] if isinstance(columns, str) else columns)
    if unknown := roots - set(SCANNED):
        raise InvalidOption(f"columns: unknown columns {sorted(unknown)}; choose from {', '.join(SCANNED)}")
    return roots
