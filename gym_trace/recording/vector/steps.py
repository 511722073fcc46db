"""Record the steps of all lanes as they happen: batches, filters, infos, annotations, resets."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space

from gym_trace.data.layout import layout_of
from gym_trace.data.packing import pack
from gym_trace.data.tensors import is_masked, is_on_device, library_of, plain_array
from gym_trace.data.trees import leaves_of
from gym_trace.data.values import Array, objects
from gym_trace.envs.autoreset import FINAL_INFO, FINAL_OBSERVATION
from gym_trace.errors import InvalidOption, UnstorableValue, raise_if_of_signal
from gym_trace.format import wire
from gym_trace.format.ring.chunk_builder import PACKED_ABSENT
from gym_trace.format.ring.lanes.autoreset import SAME_STEP
from gym_trace.format.ring.lanes.entries import Reset, StepExtras
from gym_trace.format.ring.lanes.writer import Step
from gym_trace.format.ring.segment import ColumnRows
from gym_trace.recording.options import RecordingOptions, copied_schema, storage_in
from gym_trace.recording.recorder import Recorder, State, using_recorder
from gym_trace.recording.vector.batches import BatchPacker, infos_by_lane, last_of
from gym_trace.recording.vector.device_rows import DeviceCopies, FetchedTree
from gym_trace.recording.vector.lanes import Lanes
from gym_trace.recording.vector.slabs import LaneSlabs

_FLOAT = np.dtype("<f8")
_NOTHING: Mapping[int, bytes | None] = {}
Result = tuple[Any, Any, Any, Any, Any]  # result of a step in vector environments of Gymnasium


class UpcomingReset(NamedTuple):
    """A reset before it happens."""

    lanes: Array  # the recorded lanes
    reset: Array  # all lanes that are reset, by their numbers in the environment
    is_whole: bool  # True if all lanes are reset
    options: bytes | None  # packed
    ids: Array | None  # ids of the episodes; None without filters
    utc: int
    monotonic: int


class Packers(NamedTuple):
    """Copy batches with rows of these lanes into rows of the recorded lanes."""

    lanes: Lanes
    observations: BatchPacker
    actions: BatchPacker


class PackedInfos(NamedTuple):
    """Infos of the recorded lanes as MessagePack. finals: FINAL_INFO, or None."""

    infos: list[bytes]
    finals: list[bytes] | None


@dataclass(eq=False)
class ReturnedStep:
    """A step that has returned, while its rows are on their way from a device.

    Attributes:
        fetched: actions, or () if they are recorded, and results.
        annotations: rows of annotations by name; empty for those in fetched.
        steps: number of recorded steps when its recording began; None before.
    """

    fetched: FetchedTree
    annotations: dict[str, ColumnRows]
    infos: Any
    utc: int
    monotonic: int
    steps: int | None = None


class LaneSteps:
    """Records the steps of all lanes, each in two halves: the actions before they are executed, then their results.

    The caller first tries slab.record_action(), then record_action(); if both return False, the step is not recorded.
    After the step it calls record_result(), unless slab.record_result() has recorded the result. If the step raises, it
    calls neither: the next step or reset finds the actions without a result. A copy is another writer, in which each
    lane begins with its next episode.

    Actions on a device are kept there, and copied to the host together with the results. They are recorded after the
    step, so after a kill within it they are unknown.

    Args:
        spaces: observation space and action space of one lane.
        lanes: the lanes of the environment, and those that are recorded.
        mode: autoreset mode.
        lazy: True to create no files before the first reset.
        lag: see DeviceCopies; only without filters.

    The owner of the recording calls recorder.save_at_exit(), because the recorder has a reference to this object.
    """

    def __init__(
        self,
        directory: Path,
        schema: dict[str, Any],
        options: RecordingOptions,
        spaces: tuple[Space[Any], Space[Any]],
        lanes: Lanes,
        mode: str,
        lazy: bool = False,
        lag: int = 0,
    ):
        self._lag = lag
        self._directory, self._schema, self._options, self._spaces = directory, schema, options, spaces
        self._lanes, self._count, self._mode = lanes, lanes.recorded, mode
        self._filters = options.filters()
        self._infos, self._info_keys = bool(options.record_infos), options.info_keys
        self.has_more = self._filters.is_active or self._infos  # True if each step has more to record than arrays
        self._attach(lazy)

    def _attach(self, lazy: bool) -> None:
        """Make the recorder, and the packers that copy batches into its rows."""
        observation = layout_of(self._schema["observation_space"], ("observations",))
        action = layout_of(self._schema["action_space"], ("actions",))
        storage = storage_in(self._directory, self._options)
        self.recorder = recorder = Recorder(storage, self._schema, self._options, self._filters.summary)
        self.slabs = LaneSlabs(
            recorder,
            self._count,
            self._mode,
            observation,
            action,
            self._filters,
            self._infos,
            self._lanes.numbers,
        )
        recorder.attach(self.slabs, self.slabs, lazy)
        recorder.catch_up = self.catch_up
        self._all, self._chosen = (
            Packers(
                lanes,
                BatchPacker(observation, self._spaces[0], lanes, recorder),
                BatchPacker(action, self._spaces[1], lanes, recorder),
            )
            for lanes in (self._lanes, Lanes(self._count))
        )
        self._copies = DeviceCopies(self._lanes, self._lag)
        self._kept: tuple[Any] | tuple[()] = ()  # actions of a step that has not returned
        self.annotations: dict[str, Any] = {}  # annotations of the next step: rows, or arrays on a device

    # -- resets -------------------------------------------------------------------------------------------------------

    @using_recorder
    def upcoming(self, options: Mapping[str, Any] | None) -> UpcomingReset | None:
        """Return a reset that is about to happen, of all lanes or those in options["reset_mask"]; None: not recorded.

        After an exception before begin(), the state of the lanes is unknown.
        """
        recorder, slabs = self.recorder, self.slabs
        recorder.begin_again()
        self._finish_interrupted()
        self.catch_up()
        if not slabs.ready():
            recorder.warn_if_unrecorded()
            return None
        mask = None if options is None else options.get("reset_mask")
        slabs.begin_event()
        try:
            reset = np.arange(self._lanes.count) if mask is None else self._lanes_in(mask)
        except Exception as error:  # user objects may raise anything
            self._warn_skipped("flags in a reset_mask", error)
            return None
        lanes = reset if self._lanes.numbers is None else np.flatnonzero(np.isin(self._lanes.numbers, reset))
        given = {key: value for key, value in (options or {}).items() if key != "reset_mask"}
        packed_options = recorder.packed("reset", given) if given else None
        if mask is None:
            self.annotations = {}
        ids = None if slabs.filters is None else slabs.filters.reset(lanes)
        return UpcomingReset(lanes, reset, mask is None, packed_options, ids, time.time_ns(), time.monotonic_ns())

    @using_recorder
    def begin(
        self,
        upcoming: UpcomingReset,
        observations: Any,
        infos: Any,
        seeds: Sequence[Any],
        generators: Mapping[int, bytes | None] = _NOTHING,
    ) -> None:
        """Record a reset. seeds: one for each lane of the vector environment. generators: see packed_generators()."""
        recorder, slabs, lanes = self.recorder, self.slabs, upcoming.lanes
        try:
            # EnvPool answers a masked reset with rows of the lanes it has reset, Gymnasium with rows of all lanes.
            own = self._all.observations.has_rows(observations, len(upcoming.reset))
            numbers = self._lanes.of(lanes.tolist())
            count = len(upcoming.reset) if own else self._lanes.count
            rows = np.searchsorted(upcoming.reset, numbers) if own else np.array(numbers, np.int64)
            packed_infos = self._packed_infos(infos, rows.tolist(), count) if self._infos else [None] * len(rows)
            starts = [
                recorder.start(
                    lane, seeds[lane], upcoming.options, generators.get(lane), info, upcoming.utc, upcoming.monotonic
                )
                for lane, info in zip(numbers, packed_infos)
            ]
            batch = self._all.observations.batch(observations, None if len(rows) == count else rows, count)
        except Exception as error:  # user objects may raise anything
            self._warn_skipped("observations and infos of a reset", error)
            return
        given = np.array([seed for _, _, seed, *_ in starts], np.int64)
        records = [record for _, _, _, record, *_ in starts]
        slabs.add(Reset(lanes, batch, given, records, upcoming.ids, upcoming.utc, upcoming.monotonic))
        recorder.report()

    # -- steps --------------------------------------------------------------------------------------------------------

    @using_recorder
    def record_action(self, actions: Any) -> bool:
        """Record actions after slab.record_action() returned False; return False if that is impossible."""
        slabs = self.slabs
        if slabs.state is State.TAKEN_OVER:
            self.recorder.warn_of_copy()
        self.recorder.begin_again()
        self._finish_interrupted()
        if slabs.unrecorded and self.recorder.clock.is_requested:
            self.catch_up()
        if not slabs.ready():
            return False
        kept = self._copies.keep(actions)
        if kept is not None:
            slabs.slab.disable_fast_path()  # the next step must look at it
            self._kept = (kept,)
            return True
        self.catch_up()
        return self._record_actions(self._all, actions)

    def _record_actions(self, packers: Packers, actions: Any) -> bool:
        slabs = self.slabs
        if slabs.slab.record_action(packers.lanes.tree(actions)):
            return True
        slabs.begin_event()
        try:
            packed_actions = packers.actions.step(actions, slabs.output_buffers().actions)
        except Exception as error:  # user objects may raise anything
            self._warn_skipped("actions of a step", error)
            return False
        slabs.record_actions(packed_actions)
        return True

    @using_recorder
    def record_result(self, result: Result, annotations: dict[str, Any]) -> None:
        """Record the results of a step with further values, or after slab.record_result() returned False."""
        slabs, kept = self.slabs, self._kept
        if slabs.state is State.TAKEN_OVER or not (kept or slabs.slab.is_waiting):  # the process forked within the step
            self._kept = ()
            return
        utc, monotonic = time.time_ns(), time.monotonic_ns()
        infos = result[4]
        more = {name: rows for name, rows in annotations.items() if library_of(type(rows))}
        given, fetched = (kept, *result[:4], more), None
        if kept or any(map(is_on_device, leaves_of(given))):
            finals = self._finals_in(infos)
            if self._can_be_fetched(kept, result[0], finals):
                fetched = self._copies.fetch((*given, finals))
        if fetched is not None:
            annotations = {name: rows if name not in more else [] for name, rows in annotations.items()}
            packed = self._all_infos(infos) if self._infos and self._lag else infos
            slabs.unrecorded.append(ReturnedStep(fetched, annotations, packed, utc, monotonic))
            self._kept = ()
            self._record_returned(self._lag if kept else 0)
            return
        if kept:
            self.catch_up()
            self._kept = ()
            if not slabs.ready(is_next=False) or not self._record_actions(self._all, kept[0]):
                return
        for name, rows in more.items():
            annotations[name] = self._late_annotation(self._lanes, name, rows)
        if not (annotations or self.has_more) and slabs.slab.record_result(*map(self._lanes.tree, result[:4])):
            return
        slabs.begin_event()
        self._add_step(self._all, result[:4], None, annotations, infos, utc, monotonic)

    def _can_be_fetched(self, actions: tuple[Any, ...], observations: Any, finals: Any) -> bool:
        """Return False if a tuple may have a value per lane: then its items are not batches, which fetch() cuts."""
        is_batch = self._all.observations.is_batch
        return self._lanes.numbers is None or (
            all(map(self._all.actions.is_batch, actions))
            and is_batch(observations)
            and (finals is None or isinstance(finals, (list, np.ndarray)) or is_batch(finals))
        )

    def _add_step(
        self,
        packers: Packers,
        result: tuple[Any, ...],
        finals: Any,
        annotations: dict[str, ColumnRows],
        infos: Any,
        utc: int,
        monotonic: int,
    ) -> None:
        """End the event of a step. finals: the last observations of lanes that were fetched; None: those in infos."""
        slabs, lanes = self.slabs, packers.lanes
        observations, rewards, terminations, truncations = result
        try:
            buffers = slabs.output_buffers()
            packed_rewards: ColumnRows = buffers.rewards
            terminated, truncated = buffers.terminations, buffers.truncations
            terminated[...] = plain_array(lanes.rows(terminations))
            truncated[...] = plain_array(lanes.rows(truncations))
            rewards = lanes.rows(rewards)
            if type(rewards) is np.ndarray and rewards.dtype == _FLOAT and rewards.shape == buffers.rewards.shape:
                buffers.rewards[...] = rewards
            else:
                rewards = self._rewards(rewards)
                packed_rewards = self._packed_rewards(rewards)
        except Exception as error:
            self._warn_skipped("rewards, terminations and truncations of a step", error)
            return
        ids = kept = last = step_infos = reset_infos = None
        if slabs.filters is not None:
            ids, kept = slabs.filters.step(rewards, terminated | truncated)
        ended: list[int] = []
        try:
            if self._mode == SAME_STEP:
                ended = np.flatnonzero(terminated | truncated).tolist()
                finals = self._finals_in(infos) if ended and packers is self._all else finals
                last = self._finals(packers, finals, ended) if ended else None
            if self._infos:  # infos of steps and of resets
                used = range(self._count) if ids is None or kept is None else np.flatnonzero(kept | (ids >= 0)).tolist()
                step_infos, reset_infos = self._infos_of_step(infos, used, ended)
            packed_observations = packers.observations.step(observations, buffers.observations)
        except Exception as error:
            self._warn_skipped("observations and infos of a step", error)
            return
        extras = StepExtras(
            finals=last, infos=step_infos, reset_infos=reset_infos, annotations=annotations, ids=ids, keep_mask=kept
        )
        actions = slabs.pending_actions() or []
        slabs.add(Step(utc, monotonic, packed_observations, actions, packed_rewards, terminated, truncated, extras))

    # -- steps on a device --------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Wait for the steps that are on their way, and record them."""
        self._record_returned(0)

    def _record_returned(self, lag: int) -> None:
        """Record returned steps, in order: those that have arrived, and all but the last ones."""
        # Copied, because a signal handler may fork, or call close(), which records and removes them.
        while (steps := [*self.slabs.unrecorded]) and (len(steps) > lag or steps[0].fetched.has_arrived()):
            self._record_oldest(steps[0])

    def _finish_interrupted(self) -> None:
        """Call before a step or reset: finish what an exception, such as Ctrl-C, has interrupted."""
        if self._kept:  # the environment raised
            self.catch_up()
            self.slabs.begin_event()
            self._kept = ()
        elif (steps := [*self.slabs.unrecorded]) and steps[0].steps is not None:
            self._record_oldest(steps[0])

    def _record_oldest(self, step: ReturnedStep) -> None:
        """Record the oldest step that has returned. If Ctrl-C interrupts this, the next call finishes it."""
        slabs = self.slabs
        try:
            values = step.fetched.tree()
        except Exception as error:  # an earlier error of the device, for example
            raise_if_of_signal(error)
            slabs.begin_event()
            self._remove(step)
            self.recorder.complain("lanes", f"a step could not be copied from the device; skipped ({error!r:.200})")
            return
        if step.steps is None and (not values[0] or slabs.ready(is_next=False)):
            step.steps = slabs.steps
        if step.steps == slabs.steps:
            self._record(step, *values)
        else:  # it cannot be recorded, or was
            slabs.state = State.IDLE
        self._remove(step)
        step.fetched.release()

    def _remove(self, step: ReturnedStep) -> bool:
        """Remove a step from those to be recorded; return False if that is done."""
        try:
            self.slabs.unrecorded.remove(step)
        except ValueError:
            return False
        return True

    def _record(
        self,
        step: ReturnedStep,
        actions: tuple[Any, ...],
        *values: Any,  # four results, annotations, finals
    ) -> None:
        slabs, (*result, more, finals) = self.slabs, values
        has_more = step.annotations or self.has_more
        if not slabs.slab.is_waiting:
            is_usual = not has_more and step.monotonic <= self.recorder.clock.due
            if is_usual and slabs.slab.record_step(actions[0], *result, step.utc, step.monotonic):
                return
            if not self._record_actions(self._chosen, actions[0]):
                return
        for name, rows in more.items():
            step.annotations[name] = self._late_annotation(self._chosen.lanes, name, rows)
        slabs.begin_event()
        if slabs.filters is not None and not self._remove(step):  # a filter must see the step only once
            return
        self._add_step(self._chosen, tuple(result), finals, step.annotations, step.infos, step.utc, step.monotonic)

    def annotate(self, values: Mapping[str, Any]) -> None:
        """Record further values with the next step, each with one row per lane.

        Raises UnstorableValue, InvalidOption.
        """
        for name, value in values.items():
            rows = value if is_on_device(value) else plain_array(value)
            has_rows = getattr(rows, "shape", True) and hasattr(rows, "__getitem__") and hasattr(rows, "__len__")
            count = len(rows) if has_rows and not isinstance(rows, (str, bytes, Mapping)) else "no"
            if count != self._lanes.count:
                raise InvalidOption(
                    f"annotate({name}=...): {count} rows for {self._lanes.count} lanes; pass one per lane"
                )
            kept = self._copies.keep(rows) if is_on_device(rows) else None
            self.annotations[name] = self._annotation(name, self._lanes.rows(rows)) if kept is None else kept

    def _annotation(self, name: str, rows: Any) -> ColumnRows:
        """Return rows of the recorded lanes as a column. Raises UnstorableValue."""
        rows = plain_array(rows)
        return np.array(rows) if _is_numeric(rows) else [packed_annotation(name, row) for row in rows]

    def _late_annotation(self, lanes: Lanes, name: str, rows: Any) -> ColumnRows:
        """Return rows as a column, or warn and return one without values: the step that they belong to has returned."""
        try:
            return self._annotation(name, lanes.rows(rows))
        except Exception as error:  # see DeviceCopies.keep()
            raise_if_of_signal(error)
            self.recorder.complain(f"annotations/{name}", f"left out ({error!r:.200})")
            return [PACKED_ABSENT] * self._count

    # -- batches taken apart ------------------------------------------------------------------------------------------

    def _warn_skipped(self, what: str, error: Exception) -> None:
        """Warn that a step or reset cannot be recorded; it is treated as if it had raised."""
        raise_if_of_signal(error)
        self.recorder.complain("lanes", f"the {what}: not one per lane; skipped ({error!r:.200})")

    def _lanes_in(self, mask: Any) -> Array:
        """Return the lanes for which a mask is true."""
        flags = np.asarray(plain_array(mask))
        if flags.size != self._lanes.count:
            raise ValueError(f"{flags.size} flags for {self._lanes.count} lanes")
        return np.flatnonzero(flags)

    def _finals_in(self, infos: Any) -> Any:
        return last_of(infos, FINAL_OBSERVATION, self._lanes.count) if self._mode == SAME_STEP else None

    def _finals(self, packers: Packers, finals: Any, ended: list[int]) -> tuple[Array, list[ColumnRows]] | None:
        """Return the last observations of lanes that were reset in the same step; None if they are unknown."""
        if finals is None:
            complaint = "no final_obs in infos, no final_observations; the last ones of episodes are unknown"
            self.recorder.complain("observations", complaint)
            return None
        lanes = packers.lanes
        numbers = lanes.of(ended)
        if isinstance(finals, list) or (isinstance(finals, np.ndarray) and finals.dtype == object):
            return np.array(ended), packers.observations.single([finals[number] for number in numbers])
        return np.array(ended), packers.observations.batch(finals, np.array(numbers), lanes.count)

    def _rewards(self, values: Any) -> Array:
        values = self.recorder.plain("rewards", values)
        try:
            rewards: Array = objects(list(values)) if is_masked(values) else np.asarray(values)
        except ValueError:  # rewards have different shapes
            rewards = objects(list(values))
        if rewards.shape[:1] != (self._count,):
            raise ValueError(f"rewards of shape {rewards.shape}")
        return rewards

    def _packed_rewards(self, rewards: Array) -> ColumnRows:
        """Return a copy of rewards as rows."""
        if rewards.ndim == 1 and rewards.dtype.kind in "biuf" and rewards.dtype.isnative:
            buffer = self.slabs.reward_buffer(rewards.dtype)
            buffer[...] = plain_array(rewards)
            return buffer
        if _is_numeric(rewards):
            return np.array(rewards)
        return [self.recorder.packed("rewards", reward) for reward in rewards]

    def _infos_of_step(self, infos: Any, used: Sequence[int], ended: list[int]) -> tuple[list[bytes], list[bytes]]:
        """Return the infos of a step, and those of resets in it, as MessagePack."""
        if isinstance(infos, PackedInfos):
            reset_infos, finals = infos
            last = None if finals is None else [finals[lane] if lane in ended else b"" for lane in range(self._count)]
        else:
            reset_infos = self._infos_of(infos, used)
            last_infos = last_of(infos, FINAL_INFO, self._lanes.count) if ended else None
            last = None if last_infos is None else self._infos_of(last_infos, sorted({*ended} & {*used}))
        return reset_infos if last is None else [final or info for final, info in zip(last, reset_infos)], reset_infos

    def _all_infos(self, infos: Any) -> PackedInfos:
        """Return all infos of a step, before it is known which lanes have ended."""
        lanes = range(self._count)
        last = last_of(infos, FINAL_INFO, self._lanes.count) if self._mode == SAME_STEP else None
        return PackedInfos(self._infos_of(infos, lanes), None if last is None else self._infos_of(last, lanes))

    def _infos_of(self, infos: Any, used: Sequence[int]) -> list[bytes]:
        """Return the infos of the recorded lanes as MessagePack; empty for lanes that are not used."""
        packed = [b""] * self._count
        for lane, info in zip(used, self._packed_infos(infos, self._lanes.of(used), self._lanes.count)):
            packed[lane] = info
        return packed

    def _packed_infos(self, infos: Any, rows: Sequence[int], count: int) -> list[bytes]:
        """Return rows of the infos of count lanes as MessagePack."""
        finals = (*FINAL_OBSERVATION, *FINAL_INFO) if self._mode == SAME_STEP else ()
        try:
            chosen = infos_by_lane(infos, count, self._info_keys, finals, rows)
        except Exception as error:  # user mappings may raise anything, or contain themselves
            raise_if_of_signal(error)
            chosen = [infos] * len(rows)
        return [self.recorder.packed("infos", info) for info in chosen]

    # -- copies -------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("recorder", "slabs", "_all", "_chosen", "_copies", "_kept"):
            del state[name]
        state["is_open"] = self.slabs.is_open
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_open = state.pop("is_open")
        self.__dict__.update(state)
        self._schema = copied_schema(self._schema)
        self._attach(lazy=True)
        if is_open:
            self.slabs.take_over()


def _is_numeric(rows: Any) -> bool:
    """Return True if rows are an array of numbers, which becomes a typed column."""
    return type(rows) is np.ndarray and rows.dtype.kind in "biufc" and rows.dtype.isnative


def packed_annotation(name: str, value: Any) -> bytes:
    """Return an annotation of a lane as MessagePack. Raises UnstorableValue."""
    packed = pack(value)
    if len(packed) > wire.MAX_VALUES // 4:
        raise UnstorableValue(f"annotate({name}=...): {len(packed)} bytes; at most {wire.MAX_VALUES // 4}")
    return packed
