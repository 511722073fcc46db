"""TraceWriter: record a robot, a game or a simulator step by step, without a Gymnasium environment."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec

from gym_trace.data.packing import pack
from gym_trace.data.tensors import plain_array
from gym_trace.data.vocabulary import Outcome
from gym_trace.envs import spaces
from gym_trace.envs.identity import describe_environment
from gym_trace.errors import InvalidOption, RecordingError, UnstorableValue, raise_if_of_signal
from gym_trace.format.directory import check_writer_id
from gym_trace.format.ring.lanes.autoreset import NEXT_STEP
from gym_trace.format.ring.segment import snapshot
from gym_trace.recording.options import (
    RecordingKeywords,
    RecordingOptions,
    new_schema,
    opened_directory,
    takes_recording_options,
)
from gym_trace.recording.recorder import Recorder
from gym_trace.recording.single.steps import StepRecorder
from gym_trace.recording.vector.lanes import Lanes
from gym_trace.recording.vector.rollouts import Batch, RolloutRecorder
from gym_trace.recording.vector.steps import LaneSteps

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ENDS = {outcome.word: outcome for outcome in (Outcome.TERMINATED, Outcome.TRUNCATED, Outcome.CUT, Outcome.CLOSED)}
_MOST_LANES = 1 << 24
_SPACES = ("observation_space", "action_space")


@takes_recording_options
class TraceWriter:
    """Records the steps that you report: of a robot, a game, your own simulator.

        with TraceWriter("traces/robot") as writer:
            writer.begin(robot.observe())
            for action in plan:
                writer.act(action)  # optional: known even if the process dies while the robot moves
                observation, reward, done = robot.move(action)
                writer.step(action, observation, reward, terminated=done)

    Recorded steps survive a kill of the process. An episode belongs to the thread that began it; give each
    thread a lane() of its own. A copy (fork, pickle, deepcopy) is a new writer, which records from its next begin() on.

    Args:
        observation_space, action_space: spaces of Gymnasium. None: inferred from the first value: arrays and numbers
            become a Box of their dtype and shape without bounds, dicts and tuples are nested, anything else is recorded
            value by value. Without an action_space the first files are written at the first action.
        environment: description of the environment: an EnvSpec (which verify_trace can make), its id, or a dict of
        facts. directory … keep_if: see RecordingOptions.

    Attributes:
        directory: pathlib.Path of the trace.

    Raises:
        TraceExists: the directory holds a trace of an earlier run and on_exist is "error".
        InvalidOption: an argument is invalid.

    Its methods raise InvalidOption for calls out of order, with what to call instead, and RecordingError, once, if the
    trace could not be written.

    Examples:
        >>> with gym_trace.TraceWriter("traces/robot") as writer:
        ...     writer.begin(np.zeros(3, np.float32))
        ...     writer.step(np.float32(0.5), np.ones(3, np.float32), 1.0, terminated=True)
        >>> gym_trace.open_trace("traces/robot")[0].observations
        array([[0., 0., 0.],
               [1., 1., 1.]], dtype=float32)
    """

    directory: Path

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        observation_space: Space[Any] | None = None,
        action_space: Space[Any] | None = None,
        environment: EnvSpec | str | Mapping[str, Any] | None = None,
        **options: Unpack[RecordingKeywords],
    ):
        self._options = recording = RecordingOptions(directory=directory, **options)
        recording.filters()  # checks them
        if recording.uid is not None:
            check_writer_id(recording.uid)
        self._spaces: list[Any] = [observation_space, action_space]
        for name, space in zip(_SPACES, self._spaces):
            if space is not None and not isinstance(space, Space):
                raise InvalidOption(f"{name}: got a {type(space).__name__}; pass a space of Gymnasium or omit it")
        describe_environment(environment)  # checks it
        self._environment = environment
        with opened_directory(directory, recording.on_exist) as self.directory:
            self._open(None)

    def _open(self, lane: int | None) -> None:
        """Set the state of a new writer. lane: None for the writer that makes the others."""
        self._lane = lane
        self._lanes: dict[int, TraceWriter] = {}
        self._steps: StepRecorder | None = None  # None until both spaces are known
        self._rollouts: RolloutRecorder | None = None
        self._waiting: list[_Beginning] = []  # episodes that began before _steps was set
        self._is_closed = False
        self._end_episode()
        self._thread = threading.get_ident()  # thread of the open episode

    def _end_episode(self) -> None:
        self._is_open = self._is_special = False
        self._has_acted = False  # act() was called, and step() was not yet
        self._action: Any = None  # the argument of act()
        self._annotations: dict[str, Any] = {}  # annotations of the next step

    # -- episodes -----------------------------------------------------------------------------------------------------

    def begin(
        self, observation: Any, info: Any = None, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Begin an episode with its first observation. An episode that has not ended is kept with the outcome "cut".

        Args:
            info: recorded if record_infos is set.
            seed, options: what the environment was reset with; a replay passes them to reset().

        Examples:
            >>> with gym_trace.TraceWriter("traces/writer-begin") as writer:
            ...     writer.begin(np.zeros(2, np.float32), seed=3, options={"level": 2})
            >>> gym_trace.open_trace("traces/writer-begin")[0].options
            {'level': 2}
        """
        try:
            self._begin(observation, info, seed, options)
        except InvalidOption:  # the call is rejected
            raise
        except BaseException:
            self._end_episode()  # later steps must not join the previous episode
            raise

    def _begin(self, observation: Any, info: Any, seed: int | None, options: dict[str, Any] | None) -> None:
        self._demand_files("begin")
        self._demand_thread("begin")
        self._demand_steps("begin")
        self._end_episode()
        self._thread = threading.get_ident()
        if self._spaces[0] is None:
            self._infer(0, observation)
        if self._steps is None and self._spaces[1] is not None:
            self._attach()
        beginning = _Beginning(observation, info, seed, options)
        if self._steps is None:
            beginning.detach()
            self._waiting.append(beginning)
        else:
            beginning.record(self._steps)
        self._is_open = True

    def end(self, outcome: str = "cut") -> None:
        """End the open episode, or those of all lanes of rollouts: as "terminated", "truncated", "cut" or "closed".

        Not needed after a step with terminated=True or truncated=True. An action without a result is not kept.

        Examples:
            >>> with gym_trace.TraceWriter("traces/writer-end") as writer:
            ...     writer.begin(np.zeros(2, np.float32))
            ...     writer.step(1, np.zeros(2, np.float32), 0.5)
            ...     writer.end("truncated")
            >>> gym_trace.open_trace("traces/writer-end")[0].outcome
            'truncated'
        """
        self._demand_episode("end")
        if outcome not in _ENDS:
            raise InvalidOption(f"end({outcome!r}): pass one of {', '.join(_ENDS)}")
        if self._rollouts is not None:
            self._rollouts.end(_ENDS[outcome])  # first: after a Ctrl-C in it, end() can be called again
        self._end_episode()
        if self._steps is not None:
            self._steps.end(_ENDS[outcome])
        elif self._rollouts is None:
            self._waiting[-1].outcome = _ENDS[outcome]

    # -- steps --------------------------------------------------------------------------------------------------------

    def act(self, action: Any) -> None:
        """Record the action that is about to be executed. Optional: step() does it if act() did not.

        If the process dies before step(), the trace knows the action: ``episode.pending_action``.

        Examples:
            >>> with gym_trace.TraceWriter("traces/writer-act") as writer:
            ...     writer.begin(np.zeros(2, np.float32))
            ...     writer.act(1)  # before the robot moves
            ...     writer.step(1, np.zeros(2, np.float32), 0.5)
            >>> gym_trace.open_trace("traces/writer-act")[0].actions
            array([1])
        """
        self._demand_episode("act")
        self._demand_steps("act")
        if self._has_acted:
            raise InvalidOption(
                "act(): the previous action has no result; pass that to step(), or begin() a new episode"
            )
        self._record_action(action)
        self._has_acted, self._action = True, action

    def step(
        self,
        action: Any,
        observation: Any,
        reward: Any,
        terminated: bool = False,
        truncated: bool = False,
        info: Any = None,
        **annotations: Any,
    ) -> None:
        """Record a step: the action, its result, and any further values of the agent, such as value=1.5.

        terminated and truncated end the episode. Raises UnstorableValue for an annotation that cannot be stored. After
        another exception in step(), such as Ctrl-C, the step is skipped, and the next one begins another part of the
        episode.

        Examples:
            >>> with gym_trace.TraceWriter("traces/writer-step") as writer:
            ...     writer.begin(np.zeros(2, np.float32))
            ...     writer.step(1, np.zeros(2, np.float32), 0.5, truncated=True, value=1.5)
            >>> gym_trace.open_trace("traces/writer-step")[0].annotations
            {'value': array([1.5])}
        """
        try:
            self._step(action, observation, reward, terminated, truncated, info, annotations)
        except (InvalidOption, UnstorableValue):  # the call is rejected: the caller may correct it
            raise
        except BaseException:
            self._has_acted = self._is_special = False
            if self._steps is not None:
                self._steps.lose()
            raise

    def _step(
        self,
        action: Any,
        observation: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        info: Any,
        annotations: dict[str, Any],
    ) -> None:
        self._demand_episode("step")
        if self._rollouts is not None:
            self._demand_steps("step")
        acted = self._has_acted
        if acted and self._action is not action and not _is_equal(self._action, action):
            raise InvalidOption("step(): the action is not that of act(); pass the same one, or leave act() out")
        try:
            is_over = bool(terminated) or bool(truncated)
        except Exception as error:  # arrays of several values
            raise_if_of_signal(error)
            raise InvalidOption(f"step(): terminated and truncated are one truth value each ({error})") from error
        if annotations:
            self.annotate(**annotations)
        is_late = bool(self._annotations)
        if not acted:
            if is_late and self._steps is not None:
                self._annotate(self._steps)
                is_late = False
            self._record_action(action)
        steps, self._has_acted = self._steps, False
        assert steps is not None  # _record_action() made it
        if is_late:
            self._annotate(steps)
        slab = steps.slabs.slab
        if self._is_special or is_late or not slab.record_result(observation, reward, terminated, truncated):
            self._is_special = False
            steps.record_result(observation, reward, terminated, truncated, info)
        if is_over:
            self._is_open = False

    def rollouts(
        self,
        observations: Any,
        actions: Any,
        rewards: Any,
        terminations: Any,
        truncations: Any,
        *,
        final_observations: Any = None,
        autoreset: Any = NEXT_STEP,
        annotations: Mapping[str, Any] | None = None,
        infos: Mapping[str, Any] | None = None,
    ) -> None:
        """Record T steps of N lanes, such as the buffer of a policy update, or the result of jax.lax.scan.

        Pass arrays of NumPy, PyTorch (any device), JAX, or another library with DLPack; dicts and tuples of arrays are
        values of Dict and Tuple spaces. Each call continues the previous one. The steps of a call that has returned
        survive a kill.

        Args:
            observations: shape (T + 1, N, ...). Row t is the observation before action t, and the last row the one
                after the last action; row 0 of the next call repeats it. Or shape (T, N, ...): row 0 of the next call
                completes the last step, which is not recorded without a next call.
            actions, rewards, terminations, truncations: shape (T, N, ...). Step t ends the episode of a lane if one of
                its flags is not 0.
            final_observations: shape (T, N, ...), with "SameStep": the last observations of the episodes that end. Rows
                of other lanes are ignored. Without them, the last ones are unknown, with a warning:
                Episode.has_final_observation is False.
            autoreset: autoreset mode, as in vector environments of Gymnasium. "NextStep": the action after an end is
                ignored, and its result is the first observation of the next episode. "SameStep": the observation
                after the end is the first one of the next episode. "Disabled": the lane is ignored until the next call,
                whose row 0 begins its next episode.
            annotations: further values of the agent by name, shape (T, N, ...) each.
            infos: infos as in a vector environment, shape (T, N, ...) each; recorded if record_infos is set.

        Episodes begin with row 0 of the first call, and of the first call after end(), which ends the episodes of all
        lanes. Raises InvalidOption, before recording, for arrays that do not match, or do not continue the previous
        call.

        Examples:
            >>> with gym_trace.TraceWriter("traces/writer-rollouts") as writer:
            ...     observations = np.zeros((6, 2, 3), np.float32)  # 5 steps of 2 lanes, and what follows
            ...     flags = np.zeros((5, 2), bool)
            ...     writer.rollouts(observations, np.zeros((5, 2), np.int64), np.ones((5, 2)), flags, flags)
            >>> gym_trace.open_trace("traces/writer-rollouts").episodes["steps"].tolist()
            [5, 5]
        """
        self._demand_files("rollouts")
        self._demand_thread("rollouts")
        if self._steps is not None or self._waiting:
            raise InvalidOption("rollouts(): this writer records single steps; use another TraceWriter, or a lane()")
        batch = Batch.of(
            observations,
            actions,
            rewards,
            terminations,
            truncations,
            final_observations,
            annotations or {},
            infos or {},
        )
        if self._rollouts is None:
            if not batch.times:
                return
            self._rollouts = RolloutRecorder(self._lane_steps, autoreset, batch)
        self._thread, self._is_open = threading.get_ident(), True
        self._rollouts.add(batch, autoreset)

    def _lane_steps(self, count: int, mode: str, observation: Any, action: Any) -> LaneSteps:
        """Make the recorder of rollouts. observation, action: the first ones of a lane."""
        for which, value in enumerate((observation, action)):
            if self._spaces[which] is None:
                self._infer(which, value)
        schema = self._schema({"num_envs": count, "autoreset_mode": mode})
        observed, acted = (spaces.restore(schema[name], stand_in=True) for name in _SPACES)
        return LaneSteps(self.directory, schema, self._options, (observed, acted), Lanes(count), mode, lazy=True)

    def annotate(self, **values: Any) -> None:
        """Record further values with the next step. Raises UnstorableValue.

        Examples:
            >>> with gym_trace.TraceWriter("traces/writer-annotate") as writer:
            ...     writer.begin(np.zeros(2, np.float32))
            ...     writer.annotate(value=1.5)
            ...     writer.step(1, np.zeros(2, np.float32), 0.5)
            >>> gym_trace.open_trace("traces/writer-annotate")[0].annotations
            {'value': array([1.5])}
        """
        self._demand_episode("annotate")
        self._demand_steps("annotate")
        self._annotations.update({name: snapshot(plain_array(value), pack) for name, value in values.items()})

    def _annotate(self, steps: StepRecorder) -> None:
        annotations, self._annotations = self._annotations, {}
        steps.annotate(annotations)

    def _record_action(self, action: Any) -> None:
        if self._steps is None:
            self._infer(1, action)
            self._attach()
        steps = self._steps
        assert steps is not None
        if not (steps.slabs.slab.record_action(action) or steps.record_action(action)):
            steps.expect(action)
            self._is_special = True

    # -- files --------------------------------------------------------------------------------------------------------

    def lane(self, lane: int) -> TraceWriter:
        """Return the writer of one lane, always the same one. It steps on its own, also in a thread of its own.

        Its episodes have this number as their .lane, and files of their own in the directory. close() closes it, too.

        Examples:
            >>> with gym_trace.TraceWriter("traces/writer-lane") as writer:
            ...     for number in (0, 1):
            ...         writer.lane(number).begin(np.zeros(2, np.float32))
            >>> gym_trace.open_trace("traces/writer-lane").episodes["lane"].tolist()
            [0, 1]
        """
        self._demand_files("lane")
        if self._lane is not None:
            raise InvalidOption(f"lane({lane!r}): this writer is lane {self._lane}; ask the writer that made it")
        if isinstance(lane, bool) or not isinstance(lane, (int, np.integer)) or not 0 <= lane < _MOST_LANES:
            raise InvalidOption(f"lane({lane!r}): pass a number from 0 to {_MOST_LANES - 1}")
        if lane not in self._lanes:
            writer = TraceWriter.__new__(TraceWriter)
            writer._options, writer._spaces, writer._environment = self._options, [*self._spaces], self._environment
            writer.directory = self.directory
            writer._open(int(lane))
            self._lanes.setdefault(int(lane), writer)  # another thread may have come first
        return self._lanes[lane]

    def flush(self) -> None:
        """Write all steps so far, so that other processes can read them. Raises RecordingError if that fails.

        Examples:
            >>> with gym_trace.TraceWriter("traces/writer-flush") as writer:
            ...     writer.begin(np.zeros(2, np.float32))
            ...     writer.step(1, np.zeros(2, np.float32), 0.5)
            ...     writer.flush()
            >>> gym_trace.open_trace("traces/writer-flush")[0].rewards
            array([0.5])
        """
        for recorder in self._recorders():
            recorder.flush()

    def secure(self) -> None:
        """Make all steps so far survive a kill, also without memory-mapped files.

        Examples:
            >>> with gym_trace.TraceWriter("traces/writer-secure") as writer:
            ...     writer.begin(np.zeros(2, np.float32))
            ...     writer.step(1, np.zeros(2, np.float32), 0.5)
            ...     writer.secure()
            >>> gym_trace.open_trace("traces/writer-secure")[0].rewards
            array([0.5])
        """
        for recorder in self._recorders():
            recorder.secure()

    def close(self) -> None:
        """Save everything. An open episode gets the outcome "closed". Closing twice is fine. Raises RecordingError.

        Examples:
            >>> writer = gym_trace.TraceWriter("traces/writer-close")
            >>> writer.begin(np.zeros(2, np.float32))
            >>> writer.close()
            >>> gym_trace.open_trace("traces/writer-close")[0].outcome
            'closed'
        """
        failures = []
        for writer in self._all():
            writer._is_closed, writer._is_open = True, False
            if writer._waiting:  # no action was recorded
                writer._infer(1, None)
                writer._attach()
            if writer._rollouts is not None:
                writer._rollouts.drop_held()
        for recorder in self._recorders():
            try:
                recorder.close()
            except RecordingError as error:  # the other lanes are saved first
                failures.append(error)
        if failures:
            raise failures[0]

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all(self) -> list[TraceWriter]:
        return [self, *self._lanes.values()]

    def _recorders(self) -> Iterator[Recorder]:
        for writer in self._all():
            if writer._steps is not None:
                yield writer._steps.recorder
            if writer._rollouts is not None:
                yield writer._rollouts.steps.recorder

    def _infer(self, which: int, value: Any) -> None:
        self._spaces[which] = spaces.inferred(value)

    def _attach(self) -> None:
        """Make the recorder, as both spaces are now known, and record the episodes that began before."""
        schema, options = self._schema({}), self._options
        if self._lane is not None and options.uid is not None:
            schema["writer"] = f"{options.uid}-lane{self._lane}"
        is_filtered = options.filters().by_step
        self._steps = StepRecorder(self.directory, schema, options, is_filtered, self._lane or 0, lazy=True)
        for beginning in self._waiting:
            beginning.record(self._steps)
        self._waiting = []
        if self._annotations:
            self._annotate(self._steps)

    def _schema(self, described: dict[str, Any]) -> dict[str, Any]:
        inferred = [name for name, space in zip(_SPACES, self._spaces) if isinstance(space, dict)]
        described |= self._options.filters().described() | ({"inferred": inferred} if inferred else {})
        return new_schema(self._options, self._environment, self._spaces[0], self._spaces[1], described)

    # -- calls out of order -------------------------------------------------------------------------------------------

    def _demand_episode(self, method: str) -> None:
        if not self._is_open:
            self._demand_files(method)
            raise InvalidOption(f"{method}(): no episode is open; call begin() first")
        if threading.get_ident() != self._thread:
            self._demand_thread(method)
            self._thread = threading.get_ident()  # the thread of the episode has ended

    def _demand_steps(self, method: str) -> None:
        if self._rollouts is not None:
            raise InvalidOption(f"{method}(): this writer records rollouts; use another TraceWriter, or a lane()")

    def _demand_files(self, method: str) -> None:
        if self._is_closed:
            raise InvalidOption(f"{method}(): the writer is closed; make another one with on_exist='append'")

    def _demand_thread(self, method: str) -> None:
        if not self._is_open or threading.get_ident() == self._thread:
            return
        owner = next((thread for thread in threading.enumerate() if thread.ident == self._thread), None)
        if owner is not None:
            raise InvalidOption(
                f"{method}(): the open episode belongs to the thread {owner.name}; use a lane() for each thread"
            )

    # -- copies -------------------------------------------------------------------------------------------------------

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._thread = threading.get_ident()


class _Beginning:
    """The beginning of an episode, and its outcome if it ended without a step."""

    def __init__(self, observation: Any, info: Any, seed: int | None, options: dict[str, Any] | None):
        self._given = observation, info, seed, options
        self._clocks = time.time_ns(), time.monotonic_ns()
        self.outcome: Outcome | None = None

    def detach(self) -> None:
        """Copy what the caller may change."""
        observation, info, seed, options = self._given
        self._given = _copied(observation), _copied(info), seed, _copied(options)

    def record(self, steps: StepRecorder) -> None:
        """Begin the episode."""
        observation, info, seed, options = self._given
        upcoming = steps.upcoming(seed, options)
        if upcoming is None:
            return
        steps.begin((*upcoming[:3], *self._clocks), observation, {} if info is None else info)
        if self.outcome is not None:
            steps.end(self.outcome)


def _copied(value: Any) -> Any:
    value = plain_array(value)
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return copy.deepcopy(value)


def _is_equal(one: Any, other: Any) -> bool:
    """Return True if two actions are equal, or cannot be compared."""
    try:
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
        if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
            return len(one) == len(other) and all(map(_is_equal, one, other))
        return bool(np.array_equal(plain_array(one), plain_array(other)))
    except Exception:  # user objects may raise anything
        return True
