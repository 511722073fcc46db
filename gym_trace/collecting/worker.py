"""What a worker process does: records the episodes that it is told to, and says how far it is."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import gymnasium

from gym_trace.collecting.policies import Annotating, Policy
from gym_trace.collecting.rollout import LOOK_SECONDS, Rollout
from gym_trace.model.returns import Return
from gym_trace.recording.provenance import recorded_by
from gym_trace.recording.single.wrapper import TraceRecordingWrapper

_ORPHANED_SECONDS = 2.0  # that a worker has to save what it has when its parent is gone


@dataclass(frozen=True)
class Setup:
    """What a worker needs to know. Picklable, as its callables have to be.

    make_env: makes the environment. make_policy: makes the policy, given observation and action space.
    uid: of the worker's writer. recording: other options of the wrapper that records.
    num_envs: how many environments to step side by side, as a SyncVectorEnv; None: one, as it is.
    cpu: to run on; None: any. niceness: added to that of the process. provenance: see provenance.provenance_of.
    """

    make_env: Callable[[], gymnasium.Env[Any, Any]]
    make_policy: Callable[[Any, Any], Policy]
    directory: str
    uid: str
    seed: int
    recording: dict[str, Any] = field(default_factory=dict)
    num_envs: int | None = None
    cpu: int | None = None
    niceness: int = 0
    provenance: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What a worker says: that it is alive, and what it has done since it said so last.

    state: "running", "closed" (all is saved; the last thing it says) or "failed" (likewise; trouble says why).
    finished: episode, steps and return of each.
    steps: of all episodes, also the open ones. episodes: those that are open.
    """

    state: str
    finished: tuple[tuple[int, int, Return], ...] = ()
    steps: int = 0
    episodes: tuple[int, ...] = ()
    trouble: str = ""


class Worker(Rollout):
    def __init__(self, connection: Connection, setup: Setup):
        super().__init__(setup.seed)
        self._connection, self._setup = connection, setup
        self._todo: deque[int] = deque()
        self._told = threading.Event()  # that there is more to do, or that it is over
        self._finished: list[tuple[int, int, Return]] = []
        self._at: tuple[int, ...] = ()  # the episodes that are open

    # -- the parent ---------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Takes lists of episodes, and None for the end; in a thread of its own."""
        while True:
            try:
                episodes = self._connection.recv()
            except (EOFError, OSError):  # the parent is gone
                threading.Thread(target=_exit_soon, daemon=True).start()
                episodes = None
            if episodes is None:
                self.stop()
                return
            self._todo.extend(episodes)
            self._told.set()

    def stop(self) -> None:
        """Has the worker end after the step it is at."""
        self.over = True
        self._told.set()

    def say(self, state: str, trouble: str = "") -> None:
        finished, self._finished = tuple(self._finished), []
        self.next_look = time.monotonic() + LOOK_SECONDS
        try:
            self._connection.send(Report(state, finished, self.steps, self._at, trouble))
        except OSError:  # the parent is gone: listen() sees to it
            self.stop()

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
            if _has_parent():
                self._record(recorder)
        finally:
            recorder.close()
        self.say("closed")

    def look(self) -> None:
        self.say("running")

    def ended(self, episode: int, steps: int, total: Return) -> None:
        self._finished.append((episode, steps, total))

    def _make_env(self) -> Any:
        return self._setup.make_env()

    def _make_recorder(self, env: Any) -> Any:
        setup = self._setup
        return TraceRecordingWrapper(env, setup.directory, uid=setup.uid, on_exist="append", **setup.recording)

    def _record(self, recorder: Any) -> None:
        """Records what there is to do, until it is over."""
        made = self._setup.make_policy(recorder.observation_space, recorder.action_space)
        policy = Annotating(made, recorder)
        self.say("running")
        while not self.over:
            if self._todo:
                self._at = (self._todo.popleft(),)
                self.play(recorder, policy, *self._at)
                self._at = ()
            else:
                self._await_more()

    def _await_more(self) -> None:
        self._told.clear()
        self.say("running")
        if not self._todo and not self.over:
            self._told.wait(LOOK_SECONDS)


def _has_parent() -> bool:
    """Whether whoever started this process is there. If not, a run that was resumed before this writer was to be seen
    records the episodes that this process was given, too."""
    parent = multiprocessing.parent_process()
    return parent is None or parent.is_alive()


def _exit_soon() -> None:
    """Ends this process even if its environment hangs."""
    time.sleep(_ORPHANED_SECONDS)
    os._exit(1)
