"""Record rollouts, arrays of many steps of many lanes, as if they had been recorded step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.tensors import RawArray, plain_array
from gym_trace.data.trees import leaves_of, mapped
from gym_trace.data.values import Array
from gym_trace.data.vocabulary import Outcome
from gym_trace.envs.autoreset import named_mode
from gym_trace.errors import InvalidOption, raise_if_of_signal
from gym_trace.format.ring.lanes.autoreset import DISABLED, SAME_STEP
from gym_trace.recording.vector.device_rows import fetched
from gym_trace.recording.vector.steps import LaneSteps

Tree = Any  # an array, or a dict or tuple of trees
_FINAL = "final_obs"


class Batch(NamedTuple):
    """The checked arrays of one call, as NumPy arrays (times, lanes, ...).

    observations has one row more than the others, unless the observation after the last step is not known yet.
    """

    observations: Tree
    actions: Tree
    rewards: Array
    terminations: Array
    truncations: Array
    finals: Tree | None
    annotations: dict[str, Any]
    infos: dict[str, Any]
    times: int
    lanes: int
    is_whole: bool  # True if it has the observation after the last step

    @classmethod
    def of(
        cls,
        observations: Any,
        actions: Any,
        rewards: Any,
        terminations: Any,
        truncations: Any,
        finals: Any,
        annotations: Mapping[str, Any],
        infos: Mapping[str, Any],
    ) -> Batch:
        """Convert and check the arguments of rollouts(). Raises InvalidOption."""
        more_annotations = {f"annotations[{name!r}]": value for name, value in annotations.items()}
        more = {f"infos[{name!r}]": value for name, value in infos.items()}
        given = {"actions": actions, "rewards": rewards, "terminations": terminations, "truncations": truncations}
        if finals is not None:
            given["final_observations"] = finals
        given |= {"observations": observations, **more_annotations, **more}
        leaves = iter(fetched([*_leaves(given)]))
        found = {name: _plain(value, name, leaves) for name, value in given.items()}
        seen = found.pop("observations")
        times, lanes = _shape_of(found["rewards"])
        if not lanes:
            raise InvalidOption(
                f"rewards: shape {found['rewards'].shape} has no lanes; pass arrays of (steps, lanes, ...)"
            )
        rows = _shape_of(seen)[0]
        if rows not in (times, times + 1):
            raise InvalidOption(
                f"observations: {rows} rows for {times} steps; pass {times + 1}, up to those after the last step"
            )
        _demand_shape(seen, "observations", rows, lanes)
        for name, value in found.items():
            _demand_shape(value, name, times, lanes)
        return cls(
            seen,
            found["actions"],
            found["rewards"],
            _flags(found["terminations"], "terminations"),
            _flags(found["truncations"], "truncations"),
            found.get("final_observations"),
            {name: found[long] for name, long in zip(annotations, more_annotations)},
            {name: found[long] for name, long in zip(infos, more)},
            times,
            lanes,
            rows == times + 1,
        )


class RolloutRecorder:
    """Records rollouts of all lanes; each continues the previous one.

    Args:
        make: returns LaneSteps for a number of lanes, an autoreset mode, and the first observation and action of a
            lane.
    """

    def __init__(self, make: Callable[[int, str, Any, Any], LaneSteps], autoreset: Any, batch: Batch):
        self.mode, self.lanes = named_mode(autoreset), batch.lanes
        first = [_at(tree, (0, 0)) for tree in (batch.observations, batch.actions)]
        self.steps = make(batch.lanes, self.mode, *first)
        self.steps.recorder.save_at_exit(self)
        self._is_begun = False  # episodes are open in all lanes
        self._over = np.zeros(batch.lanes, np.bool_)  # DISABLED: lanes whose episode has ended
        self._last: Tree | None = None  # the observations after the last step, if they are known
        self._held: _Held | None = None  # the last step, if its observations are not known yet

    def add(self, batch: Batch, autoreset: Any) -> None:
        """Record a rollout. Raises InvalidOption if it does not continue the previous one."""
        self._demand_like_before(batch, autoreset)
        try:
            self._add(batch)
        except BaseException:
            self.steps.slabs.begin_event()  # without an end: the state of the lanes is unknown
            self._last = self._held = None
            if not self.steps.recorder.failed:
                complaint = "it was interrupted; each lane is recorded again from its next episode on, or after end()"
                self.steps.recorder.complain("rollouts()", complaint)
            raise

    def end(self, outcome: Outcome) -> None:
        """End the episodes of all lanes."""
        self.drop_held()
        self._is_begun, self._last = False, None  # first: whatever interrupts this, the next rollout begins episodes
        self._over[:] = False
        self.steps.slabs.end(outcome)

    def drop_held(self) -> None:
        """Drop a step whose observations were never passed."""
        if self._held is not None:
            self._held = None
            self.steps.recorder.complain(
                "observations", "the last step of the rollouts is not recorded: its result is missing; pass T + 1 rows"
            )

    def _demand_like_before(self, batch: Batch, autoreset: Any) -> None:
        mode = named_mode(autoreset)
        if batch.lanes != self.lanes:
            raise InvalidOption(f"rewards: {batch.lanes} lanes, and {self.lanes} before; use another TraceWriter")
        if mode != self.mode:
            raise InvalidOption(f"autoreset={autoreset!r}: it was {self.mode} before; use another TraceWriter")
        if mode == DISABLED and not batch.is_whole:
            raise InvalidOption(
                f"observations: {batch.times} rows for {batch.times} steps; with autoreset={DISABLED!r} pass one more"
            )
        if batch.finals is not None and mode != SAME_STEP:
            raise InvalidOption(f"final_observations: only with autoreset={SAME_STEP!r}; here it is {mode}")
        if self._last is None or not batch.times:
            return
        now = _at(batch.observations, 0)
        if _forms(now) != _forms(self._last):
            raise InvalidOption(
                f"observations: {_forms(now)} for a step, and {_forms(self._last)} before; use another TraceWriter"
            )
        differs = _lanes_that_differ(now, self._last) & ~self._over
        if differs.any():
            raise InvalidOption(
                f"observations: row 0 of lane {int(differs.argmax())} is not the last row of the call before; "
                "call end() first if the environments were reset"
            )

    def _add(self, batch: Batch) -> None:
        if not batch.times:
            return
        first = _at(batch.observations, 0)
        if not self._is_begun:
            self._reset(first, None)
            self._is_begun = True
        elif self._held is not None:
            held, self._held = self._held, None
            self._record_result(held, first)
        if self._over.any():
            self._reset(first, self._over.copy())
            self._over[:] = False
        for time, step in enumerate(_steps_of(batch)):
            self._record_action(_at(batch.actions, time), step)
            if time + 1 == batch.times and not batch.is_whole:
                self._held = step.detached()
            else:
                self._record_result(step, _at(batch.observations, time + 1))
        if self.mode == DISABLED:
            self._over |= (batch.terminations | batch.truncations).any(axis=0)
        self._last = _copied(_at(batch.observations, batch.times)) if batch.is_whole else None
        self.steps.recorder.report()

    def _reset(self, observations: Tree, lanes: Array | None) -> None:
        upcoming = self.steps.upcoming(None if lanes is None else {"reset_mask": lanes})
        if upcoming is not None:
            self.steps.begin(upcoming, observations, {}, [None] * self.lanes)

    def _record_action(self, actions: Tree, step: _Held) -> None:
        if not self.steps.slabs.slab.record_action(actions):
            step.is_recorded = self.steps.record_action(actions)

    def _record_result(self, step: _Held, observations: Tree) -> None:
        steps = self.steps
        if not step.is_recorded:
            return
        if step.annotations:
            steps.annotate(step.annotations)
        has_more = steps.has_more or steps.annotations
        if has_more or not steps.slabs.slab.record_result(observations, step.rewards, step.terminated, step.truncated):
            annotations, steps.annotations = steps.annotations, {}
            steps.record_result((observations, step.rewards, step.terminated, step.truncated, step.infos), annotations)


class _Held:
    """A step of all lanes without its observations."""

    def __init__(self, rewards: Array, terminated: Array, truncated: Array, annotations: dict[str, Any], infos: Any):
        self.rewards, self.terminated, self.truncated = rewards, terminated, truncated
        self.annotations, self.infos = annotations, infos
        self.is_recorded = True

    def detached(self) -> _Held:
        """Copy the arrays, which the caller may change."""
        flags = _copied(self.terminated), _copied(self.truncated)
        copy = _Held(_copied(self.rewards), *flags, _copied(self.annotations), _copied(self.infos))
        copy.is_recorded = self.is_recorded
        return copy


def _steps_of(batch: Batch) -> Iterator[_Held]:
    more = dict(batch.infos) if batch.finals is None else {**batch.infos, _FINAL: batch.finals}
    for time, parts in enumerate(zip(batch.rewards, batch.terminations, batch.truncations)):
        annotations = {name: _at(value, time) for name, value in batch.annotations.items()}
        infos = {name: _at(value, time) for name, value in more.items()}
        yield _Held(*parts, annotations, infos)


# -- trees of arrays --------------------------------------------------------------------------------------------------


def _leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of a tree of any mappings and tuples."""
    if isinstance(tree, (Mapping, tuple)):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _leaves(part)
    else:
        yield tree


def _plain(tree: Any, name: str, leaves: Iterator[Any]) -> Tree:
    """Convert a tree to dicts, tuples and arrays of NumPy. leaves: of the tree, on the host. Raises InvalidOption."""
    if isinstance(tree, Mapping):
        return {key: _plain(part, f"{name}[{key!r}]", leaves) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_plain(part, f"{name}[{number}]", leaves) for number, part in enumerate(tree))
    value = next(leaves)
    array = plain_array(value)
    if isinstance(array, RawArray):
        raise InvalidOption(f"{name}: NumPy lacks {array.dtype}; pass float32 (tensor.float()) or another dtype")
    if not isinstance(array, np.ndarray) and hasattr(value, "__dlpack__"):
        try:
            array = np.from_dlpack(value)
        except Exception as error:  # user arrays may raise anything
            raise_if_of_signal(error)
            raise InvalidOption(f"{name}: {error}; copy it to an array of NumPy first") from error
    if not isinstance(array, np.ndarray) or array.ndim < 2:
        got = f"shape {array.shape}" if isinstance(array, np.ndarray) else f"a {type(value).__name__}"
        raise InvalidOption(f"{name}: got {got}; pass an array of shape (steps, lanes, ...)")
    return array


def _shape_of(tree: Tree) -> tuple[int, int]:
    """Return the first two dimensions of the first array."""
    for leaf in leaves_of(tree):
        return leaf.shape[0], leaf.shape[1]
    raise InvalidOption("rollouts(): an empty dict or tuple; pass arrays of shape (steps, lanes, ...)")


def _demand_shape(tree: Tree, name: str, times: int, lanes: int) -> None:
    for leaf in leaves_of(tree):
        if leaf.shape[:2] != (times, lanes):
            raise InvalidOption(f"{name}: shape {leaf.shape}; expected ({times}, {lanes}, ...), as rewards say")


def _flags(value: Tree, name: str) -> Array:
    if not isinstance(value, np.ndarray) or value.ndim != 2:
        raise InvalidOption(f"{name}: pass one array of shape (steps, lanes)")
    return value if value.dtype == np.bool_ else value != 0


def _at(tree: Tree, index: Any) -> Tree:
    """Return the rows at an index of all arrays."""
    return tree[index] if type(tree) is np.ndarray else mapped(lambda array: array[index], tree)


def _copied(tree: Tree) -> Tree:
    return mapped(np.array, tree)


def _forms(tree: Tree) -> Any:
    """Return the dtype and shape of each array, in a tree of the same structure."""
    return mapped(lambda array: f"{array.dtype}{list(array.shape)}", tree)


def _lanes_that_differ(one: Tree, other: Tree) -> Array:
    """Return True for the lanes whose bits differ. Both have the same form."""
    found: list[Array] = []
    for pair in zip(leaves_of(one), leaves_of(other)):
        a, b = (np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1) for array in pair)
        found.append((a != b).any(axis=1))
    differs: Array = np.logical_or.reduce(found)
    return differs
