"""Workers of collect(): record the episodes they are given, and report progress."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv

from gym_trace.data.returns import Return
from gym_trace.data.values import Array
from gym_trace.envs.seeding import episode_seed, policy_seed
from gym_trace.format.ring.lanes.autoreset import DISABLED
from gym_trace.recording.collecting.policies import Annotating, LanePolicies, Policy
from gym_trace.recording.collecting.rollout import LOOK_SECONDS, Rollout
from gym_trace.recording.processes.local import exit_after, has_parent
from gym_trace.recording.provenance import recorded_by
from gym_trace.recording.single.wrapper import TraceRecordingWrapper
from gym_trace.storage.remote.address import is_url

_ORPHANED_SECONDS = 2.0  # the worker saves everything within this time after the parent has ended


@dataclass(frozen=True)
class Setup:
    """Task of a worker. Picklable, as its callables must be.

    Attributes:
        make_env: makes the environment. make_policy: makes the policy from observation and action space.
        directory: directory of the trace, or a URL; files for it go through the spool of the worker's machine.
        uid: of the worker's writer. recording: other options of the recording wrapper.
        is_remote: True if the worker may run on another machine, whose spool it then publishes.
        num_envs: environments in a SyncVectorEnv; None: one environment, not in a vector environment.
        provenance: see provenance.provenance_of.
    """

    make_env: Callable[[], gymnasium.Env[Any, Any]]
    make_policy: Callable[[Any, Any], Policy]
    directory: str
    uid: str
    seed: int
    is_remote: bool
    recording: dict[str, Any] = field(default_factory=dict)
    num_envs: int | None = None
    provenance: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Progress of a worker since its last report.

    Attributes:
        closed: True in the last report: everything is saved.
        finished: episode, steps and return of each. steps: of all episodes, including open ones.
        episodes: open episodes.
    """

    closed: bool = False
    finished: tuple[tuple[int, int, Return], ...] = ()
    steps: int = 0
    episodes: tuple[int, ...] = ()


class Worker(Rollout):
    """Record episodes that arrive over a connection."""

    def __init__(self, connection: Any, setup: Setup):
        super().__init__(setup.seed)
        self._connection, self._setup = connection, setup
        self._todo: deque[int] = deque()
        self._wakeup = threading.Event()  # set by new episodes, and by the end
        self._finished: list[tuple[int, int, Return]] = []
        self._playing: tuple[int, ...] = ()  # open episodes

    # -- the parent ---------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Receive lists of episodes, and None for the end; runs in its own thread."""
        while True:
            try:
                episodes = self._connection.recv()
            except (EOFError, OSError):  # the parent is gone
                exit_after(_ORPHANED_SECONDS)
                episodes = None
            self.receive(episodes)
            if episodes is None:
                return

    def receive(self, episodes: list[int] | None) -> None:
        """Take on more episodes; None: end after the current step."""
        self._todo.extend(episodes or ())
        self.over = self.over or episodes is None
        self._wakeup.set()

    def report(self, closed: bool = False) -> None:
        finished, self._finished = tuple(self._finished), []
        self.next_look = time.monotonic() + LOOK_SECONDS
        try:
            self._connection.send(Report(closed, finished, self.steps, self._playing))
        except OSError:  # the parent is gone; listen() notices it, too
            self.receive(None)

    # -- episodes -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        env = self._make_env()
        try:
            with recorded_by(self._setup.provenance):
                recorder = self._make_recorder(env)
        except BaseException:
            env.close()
            raise
        try:
            # Otherwise a resumed run, which has not seen this writer, records the same episodes.
            if has_parent(self._connection):
                self._record(recorder)
        finally:
            recorder.close()
            if not self.over:  # an error: name the open episodes
                self.report()
        self.report(closed=True)

    def look(self) -> None:
        self.report()

    def ended(self, episode: int, steps: int, total: Return) -> None:
        self._finished.append((episode, steps, total))

    def _make_env(self) -> Any:
        return self._setup.make_env()

    def _make_recorder(self, env: Any) -> Any:
        setup = self._setup
        return TraceRecordingWrapper(env, setup.directory, uid=setup.uid, on_exist="append", **setup.recording)

    def _record(self, recorder: Any) -> None:
        """Record the assigned episodes until the run is over."""
        acting_policy = self._setup.make_policy(recorder.observation_space, recorder.action_space)
        policy = Annotating(acting_policy, recorder)
        self.report()
        while not self.over:
            if self._todo:
                self._playing = (self._todo.popleft(),)
                self.play(recorder, policy, *self._playing)
                self._playing = ()
            else:
                self._await_more()

    def _await_more(self) -> None:
        self._wakeup.clear()
        self.report()
        if not self._todo and not self.over:
            self._wakeup.wait(LOOK_SECONDS)


class VectorWorker(Worker):
    """Worker with several environments, each with its own episode; lanes without an episode are not recorded."""

    def _make_env(self) -> Any:
        count = self._setup.num_envs or 1
        self._lane_episodes: list[int | None] = [None] * count  # the episode of each lane
        return SyncVectorEnv([self._setup.make_env] * count, autoreset_mode=DISABLED)

    def _make_recorder(self, env: Any) -> Any:
        from gym_trace.recording.vector.wrapper import TraceRecordingVectorWrapper  # needs Gymnasium 1.1

        setup = self._setup
        self._wanted: deque[bool] = deque()  # per reset lane, in order: record its next episode?
        return TraceRecordingVectorWrapper(
            env,
            setup.directory,
            uid=setup.uid,
            on_exist="append",
            episode_filter=lambda episode_id: self._wanted.popleft(),
            **setup.recording,
        )

    def _record(self, recorder: Any) -> None:
        policy = Annotating(LanePolicies(self._setup.make_policy, recorder), recorder)
        self.report()
        self.play_lanes(recorder, policy, self._begin_lanes)

    def ended(self, episode: int, steps: int, total: Any) -> None:
        super().ended(episode, steps, total)
        self._lane_episodes[self._lane_episodes.index(episode)] = None

    def _begin_lanes(self, envs: Any, policy: Any, lanes: Array, observations: Any) -> tuple[list[int | None], Any]:
        """Assign episodes to free lanes; wait if all lanes are idle."""
        lane_episodes, starting = self._lane_episodes, lanes.copy()
        while not self.over:
            for lane in np.flatnonzero(starting).tolist():
                lane_episodes[lane] = episode = self._todo.popleft() if self._todo else None
                policy.reset(lane, 0 if episode is None else policy_seed(self.seed, episode))
            self._playing = tuple(episode for episode in lane_episodes if episode is not None)
            if self._playing:
                return lane_episodes, self._reset(envs, starting, first=observations is None)
            starting[:] = True
            self._await_more()
        return lane_episodes, observations

    def _reset(self, envs: Any, lanes: Array, first: bool) -> Any:
        seeds = [episode_seed(self.seed, episode or 0) for episode in self._lane_episodes]  # 0: not recorded
        self._wanted.extend(self._lane_episodes[lane] is not None for lane in np.flatnonzero(lanes).tolist())
        lane_seeds = [seed if is_reset else None for seed, is_reset in zip(seeds, lanes.tolist())]
        observations, _ = envs.reset(seed=lane_seeds, options=None if first else {"reset_mask": lanes})
        return observations


def worker_for(connection: Any, setup: Setup) -> Worker:
    """Return a worker that reports over the connection."""
    return (Worker if setup.num_envs is None else VectorWorker)(connection, setup)


def work(connection: Connection, setup: Setup) -> None:
    """Body of a worker process."""
    if is_url(setup.directory):
        from gym_trace.recording.publishing.spool import (
            leave_to_parent,  # only here, because of the time that its import takes
        )

        leave_to_parent(setup.uid if setup.is_remote else None, getattr(connection, "is_polled", None))
    worker = worker_for(connection, setup)
    threading.Thread(target=worker.listen, daemon=True).start()
    worker.run()
