"""Worker process: step vector environments with the policy, record them, and deliver rollouts."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv

from gym_trace.data.returns import LaneReturns, Return
from gym_trace.data.values import Array
from gym_trace.envs.clipping import clipping
from gym_trace.envs.seeding import episode_seed, worker_roots
from gym_trace.errors import InvalidOption, TraceError, TrainingFailed
from gym_trace.format.ring.lanes.autoreset import DISABLED
from gym_trace.playback.trace import open_trace
from gym_trace.printable import error_text, printable
from gym_trace.recording.processes.local import exit_after, has_parent
from gym_trace.recording.provenance import recorded_by
from gym_trace.recording.vector.wrapper import TraceRecordingVectorWrapper
from gym_trace.training.network.forms import picked
from gym_trace.training.processes.inference import Acting, InferenceClient, OwnModel, ServedModel, Stopped
from gym_trace.training.processes.shared import Message, PolicyTask, RolloutBuffer, Weights, has_more, put, take
from gym_trace.training.rollouts import STATE, Origin, Rollout

_HEARTBEAT_SECONDS = 1.0  # between messages to the driver
_ORPHANED_SECONDS = 5.0  # in which it saves everything after the parent has ended


@dataclass(frozen=True)
class Actor:
    """Arguments of a worker. Picklable, as make_env must be.

    number: of the worker. life: number of its restarts.
    free: pipe of slots to fill. full: pipe of filled slots.
    client: connection to the server; None: the worker has its own network.
    """

    task: PolicyTask
    make_env: Callable[[], gymnasium.Env[Any, Any]]
    number: int
    life: int
    buffer: RolloutBuffer
    weights: Weights
    free: Connection
    full: Connection
    client: InferenceClient | None = None


class RolloutReport(NamedTuple):
    """Report of a rollout: returns, lengths and objectives of episodes that ended, and seconds spent."""

    steps: int
    episodes: tuple[tuple[Return, int, float | None], ...]
    seconds: dict[str, float]


class Crashed(TraceError):
    """An environment raised an error; the message has the error and the step."""


class RolloutWorker:
    """Collect rollouts until the driver stops it.

    Attributes:
        shaping: reward shaping from the next episode on, see Settings.
    """

    def __init__(self, actor: Actor, control: Connection):
        self._actor, self._control, self._settings = actor, control, actor.task.settings
        self._over = threading.Event()
        self._groups: list[EnvGroup] = []
        self.shaping = self._settings.reward_shaping
        self._waiting: list[list[Message]] = [[] for _ in range(self._settings.splits)]

    def listen(self) -> None:
        """Receive reward shaping, and the end, from the driver; runs in its own thread."""
        try:
            while (shaping := self._control.recv()) is not None:
                self.shaping = shaping
        except (EOFError, OSError):
            exit_after(_ORPHANED_SECONDS)
        self._over.set()

    def report(self, kind: str, fact: Any = None) -> None:
        try:
            self._control.send((kind, fact))
        except OSError:
            self._over.set()

    def rollouts(self) -> Generator[None]:
        """Collect and deliver rollouts; yield after each, and when another group may step."""
        actor, settings, groups = self._actor, self._settings, self._groups
        try:
            for number in range(settings.splits):
                groups.append(EnvGroup(actor, number, partial(self.report, "running")))
                groups[-1].begin()
            acting: Acting
            if actor.client is None:
                acting = OwnModel(actor.task.shape, settings, actor.weights, [group.seed for group in groups])
            else:
                acting = ServedModel(actor.client, actor.number, settings.splits, actor.life, self._over)
            self.report("running")
            for rollouts in itertools.cycle([self._rollouts(group, acting) for group in groups]):
                next(rollouts)
                if self._over.is_set():
                    break
                yield
        except Stopped:
            pass
        finally:
            for group in groups:
                group.envs.close()

    def raise_for_misfit(self, error: Exception) -> None:
        """Raise TrainingFailed if an observation or reward of the wrong form caused the error: it would recur."""
        for group in [] if isinstance(error, TraceError) else self._groups:
            if group.active_lane is not None and (misfit := group.misfit()) is not None:
                raise TrainingFailed(f"{misfit[1]}, in {group.describe_step(misfit[0])}") from error

    def raise_explained(self, error: Exception) -> None:
        """Raise Crashed or TrainingFailed with the step, if an environment caused the error."""
        self.raise_for_misfit(error)
        for group in self._groups:
            if (lane := group.active_lane) is not None and not isinstance(error, TraceError):
                self.report("crashed", (error_text(error), *group.progress(lane)))
                raise Crashed(f"{error_text(error)}, in {group.describe_step(lane)}") from error

    def _rollouts(self, group: EnvGroup, acting: Acting) -> Iterator[None]:
        """Fill one slot after another; yield when other groups may step."""
        actor = self._actor
        while True:
            begin = time.perf_counter()
            message = self._free_slot(group.number)
            group.seconds["waiting"] += time.perf_counter() - begin
            version = acting.begin(group.number, message.version)
            group.shaping = self.shaping
            yield from group.collect(actor.buffer.rollout(message.slot), acting, version)
            actor.buffer.returns(message.slot)[...] = group.returns
            actor.buffer.set_origin(message.slot, group.origin, group.seed if actor.client is None else -1)
            group.envs.secure()
            put(actor.full, message)
            self.report("collected", group.report())
            yield

    def _free_slot(self, group: int) -> Message:
        """Wait for a free slot; skip messages of earlier lives."""
        actor = self._actor
        while not self._over.is_set():
            if self._waiting[group]:
                return self._waiting[group].pop(0)
            if not has_more(actor.free, _HEARTBEAT_SECONDS):
                self.report("waiting")
                continue
            try:
                message = take(actor.free)
            except EOFError:  # the learner is gone; the driver restarts it
                self._over.wait(_HEARTBEAT_SECONDS)
                continue
            if message.life == actor.life:
                self._waiting[message.slot // self._settings.slots_per_split % self._settings.splits].append(message)
        raise Stopped


class EnvGroup:
    """Recorded vector environment of a worker.

    Attributes:
        active_lane: lane whose environment is being stepped or reset; None between steps.
    """

    active_lane: int | None = None

    def __init__(self, actor: Actor, number: int, send_heartbeat: Callable[[], None] = lambda: None):
        """send_heartbeat: called periodically while the environment steps."""
        task, settings = actor.task, actor.task.settings
        self._send_heartbeat, self._last_heartbeat = send_heartbeat, time.monotonic()
        self.number, self._lanes, self._steps = number, settings.num_envs, settings.rollout
        self._form, self._leaves = task.shape.actions, task.shape.leaves
        self._objective, self.shaping = task.objective, settings.reward_shaping
        self._writer = f"a{actor.number}-{number}-{actor.life}-{os.urandom(4).hex()}"
        root, self.seed = worker_roots(task.seed, actor.number, actor.life, number)
        self._seeds = map(partial(episode_seed, root), itertools.count())
        self.seconds = {"waiting": 0.0, "acting": 0.0, "stepping": 0.0}
        self._ended: list[tuple[Return, int, float | None]] = []
        # Per lane: last action (None: reset), and its result.
        self._last_calls: list[tuple[Any, Any]] = [(None, None)] * self._lanes
        makers = [partial(self._watched, actor.make_env, lane) for lane in range(self._lanes)]
        envs = SyncVectorEnv(makers, autoreset_mode=DISABLED)
        try:
            with recorded_by(task.provenance):
                directory = os.path.join(task.path, "trace")
                self.envs = TraceRecordingVectorWrapper(envs, directory, uid=self._writer, on_exist="append")
        except BaseException:
            envs.close()
            raise
        self._first_step = 0
        self._returns, self._lengths = LaneReturns(self._lanes), np.zeros(self._lanes, np.int64)
        self._longest, self._episode_seeds = 0, [0] * self._lanes
        self._all = np.ones(self._lanes, bool)
        self.returns = np.empty((self._steps, self._lanes))  # return of an episode at its last step, NaN elsewhere
        self._state = np.zeros((self._lanes, task.shape.state), np.float32)
        self._infos: dict[str, Any] = {}
        self._staggers = settings.stagger

    def begin(self) -> None:
        """Begin the first episodes."""
        self._reset(self._all)
        if self._staggers:
            self._stagger()

    def _heartbeat(self) -> None:
        """Send a heartbeat when it is due: a rollout may take long."""
        if time.monotonic() - self._last_heartbeat > _HEARTBEAT_SECONDS:
            self._last_heartbeat = time.monotonic()
            self._send_heartbeat()

    def _watched(self, make_env: Callable[[], gymnasium.Env[Any, Any]], lane: int) -> gymnasium.Env[Any, Any]:
        self._heartbeat()
        env = clipping(make_env())
        step, reset = env.step, env.reset

        def stepped(action: Any) -> Any:
            self.active_lane, self._last_calls[lane] = lane, (action, None)
            result = step(action)
            self._last_calls[lane] = action, result
            return result

        def begun(**options: Any) -> Any:
            self.active_lane, self._last_calls[lane] = lane, (None, None)
            result = reset(**options)
            self._last_calls[lane] = None, result
            return result

        vars(env).update(step=stepped, reset=begun)  # not a wrapper, which would be in the trace
        return env

    # -- errors of the environment ------------------------------------------------------------------------------------

    def misfit(self) -> tuple[int, str] | None:
        """Return the first lane with an observation that does not fit the space, or a reward that is not a number."""
        for lane, (_, result) in enumerate(self._last_calls):
            if not isinstance(result, tuple):
                continue
            for leaf in self._leaves:
                name = "/".join(map(str, ("observation", *leaf.path)))
                try:
                    found = picked(result[0], leaf.path)
                except (LookupError, TypeError, ValueError) as error:
                    return lane, f"{name}: expected shape {leaf.shape} of {leaf.dtype}, got none ({error_text(error)})"
                if found.shape != leaf.shape or not np.can_cast(found.dtype, leaf.dtype, "same_kind"):
                    actual = f"shape {found.shape} of {found.dtype}"
                    if found.dtype == object and not found.shape:
                        actual = type(found.item()).__name__
                    return lane, f"{name}: expected shape {leaf.shape} of {leaf.dtype}, got {actual}"
            try:
                float(result[1] if len(result) == 5 else 0.0)
            except (TypeError, ValueError):
                return lane, f"reward: expected a number, got {printable(f'{result[1]!r:.100}')}"
        return None

    def describe_step(self, lane: int) -> str:
        """Return text for the step that a lane failed to make. The recorder must be closed."""
        action, seed = self._last_calls[lane][0], self._episode_seeds[lane]
        if action is None:
            return f"the reset of an episode (seed {seed})"
        numbers = np.flatnonzero(open_trace(self.envs.directory).episodes["seed"] == seed)
        episode = f"episode {numbers[0]}" if len(numbers) else "an episode"
        return f"step {self._lengths[lane]} of {episode} (seed {seed}, action {printable(f'{action!s:.100}')})"

    def progress(self, lane: int) -> tuple[int, bool]:
        """Return the number of the step that a lane failed to make, and whether any episode got further."""
        step = 0 if self._last_calls[lane][0] is None else int(self._lengths[lane])
        return step, max(self._longest, int(self._lengths.max())) > step

    # -- steps --------------------------------------------------------------------------------------------------------

    def _stagger(self) -> None:
        """Take random steps, so that lanes are at different steps of their episodes when learning begins."""
        seed = next(self._seeds)
        self.envs.action_space.seed(seed)
        self.envs.single_action_space.seed(seed)
        for step in range(self._steps):
            *_, over = self._step(self._random_actions())
            due = np.arange(self._lanes) * self._steps // self._lanes == self._steps - 1 - step
            self._reset(over | due)

    def _random_actions(self) -> Any:
        masks = [picked(self._observations, leaf.path) for leaf in self._leaves if leaf.is_mask]
        if not masks:
            return self.envs.action_space.sample()
        space = self.envs.single_action_space
        return np.array([space.sample(mask=row.astype(np.int8)) for row in masks[0]])

    def _step(self, actions: Any) -> tuple[Any, Array, Array, Array]:
        """Step all lanes; return rewards, terminations, truncations, and the lanes whose episode has ended."""
        self._observations, rewards, terminations, truncations, self._infos = self.envs.step(actions)
        self.active_lane = None
        self._first_step += 1
        self._returns.add(rewards, self._all)
        self._lengths += 1
        self._heartbeat()
        return rewards, terminations, truncations, terminations | truncations

    def _reset(self, lanes: Array) -> None:
        if lanes.any():
            seeds = [next(self._seeds) if lane else None for lane in lanes.tolist()]
            options = {} if self.shaping is None else {"reward_shaping": self.shaping}
            self._longest = max(self._longest, int(self._lengths[lanes].max()))
            self._episode_seeds = [old if new is None else new for new, old in zip(seeds, self._episode_seeds)]
            self._observations, _ = self.envs.reset(seed=seeds, options={"reset_mask": lanes, **options})
            self.active_lane = None
            self._state[lanes] = 0.0
            self._lengths[lanes] = 0
            self._returns.take(lanes)

    def collect(self, rollout: Rollout, acting: Acting, version: int) -> Iterator[None]:
        """Fill a rollout; yield when another group may step. Raises Stopped."""
        self.origin = Origin(self._writer, self._first_step, version)
        self.returns[...] = np.nan
        rollout.state[...] = self._state
        for step in range(self._steps):
            begin = time.perf_counter()
            observed = [picked(self._observations, leaf.path) for leaf in self._leaves]
            for column, rows in zip(rollout.observations, observed):
                column[step] = rows
            self._check_masks(observed)
            acting.request(self.number, observed, self._state)
            if acting.is_concurrent:
                yield
            sampled = acting.result(self.number)
            rollout.actions[step], rollout.logprob[step] = sampled.actions, sampled.logprob
            versions = np.full(self._lanes, sampled.version, np.int64)
            annotations = {"logprob": sampled.logprob, "value": sampled.values, "version": versions}
            if step == 0:
                self.origin = self.origin._replace(version=sampled.version)
                if self._state.size:
                    annotations[STATE] = self._state
            acted_at = time.perf_counter()
            self.envs.annotate(**annotations)
            self._state = sampled.state
            rewards, terminations, truncations, lanes = self._step(self._form.to_batch(sampled.actions))
            rollout.rewards[step], rollout.terminations[step] = rewards, terminations
            rollout.truncations[step] = truncations
            if lanes.any():
                for final, leaf in zip(rollout.finals, self._leaves):
                    final[step, truncations] = picked(self._observations, leaf.path)[truncations]
                objectives = self._objectives(lanes)
                totals = self._returns.take(lanes)
                self.returns[step, lanes] = totals
                self._ended.extend(zip(totals, self._lengths[lanes].tolist(), objectives))
                self._state = self._state.copy()
                self._reset(lanes)
            self.seconds["acting"] += acted_at - begin
            self.seconds["stepping"] += time.perf_counter() - acted_at
        for column, leaf in zip(rollout.observations, self._leaves):
            column[self._steps] = picked(self._observations, leaf.path)

    def _objectives(self, lanes: Array) -> Sequence[float | None]:
        """Return the objectives of ended episodes, which a population compares. Raises InvalidOption."""
        name = self._objective
        if name is None:
            return [None] * int(lanes.sum())
        try:
            if np.all(self._infos["_" + name][lanes]):
                return [float(value) for value in self._infos[name][lanes]]
        except (KeyError, TypeError, ValueError):
            pass
        keys = printable(", ".join(key for key in self._infos if not key.startswith("_"))) or "nothing"
        raise InvalidOption(f"objective={name!r}: no number in the last info of an episode, which has {keys}")

    def _check_masks(self, observed: list[Array]) -> None:
        """Raise TrainingFailed if a mask allows no action."""
        for leaf, rows in zip(self._leaves, observed):
            if leaf.is_mask and not rows.any(1).all():
                raise TrainingFailed("action_mask allows no action, in an unfinished episode")

    def report(self) -> RolloutReport:
        """Return the report since the last one."""
        found = RolloutReport(self._steps * self._lanes, tuple(self._ended), dict(self.seconds))
        self._ended, self.seconds = [], dict.fromkeys(self.seconds, 0.0)
        return found


def act(control: Connection, actor: Actor) -> None:
    """Body of a worker process."""
    torch.set_num_threads(1)
    if has_parent():
        worker = RolloutWorker(actor, control)
        threading.Thread(target=worker.listen, daemon=True).start()
        try:
            for _ in worker.rollouts():
                pass
        except Exception as error:
            worker.raise_explained(error)
            raise
    control.send(("ended", None))
