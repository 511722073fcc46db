"""A worker with several environments side by side."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv

from gym_trace.collecting.policies import Annotating, LanePolicies
from gym_trace.collecting.worker import Worker
from gym_trace.envs.seeding import episode_seed, policy_seed
from gym_trace.model.values import Array
from gym_trace.recording.vector.wrapper import TraceRecordingVectorWrapper
from gym_trace.ring.lanes.autoreset import DISABLED


class VectorWorker(Worker):
    """Several environments side by side, each with an episode of its own; those without one are not recorded."""

    def _make_env(self) -> Any:
        count = self._setup.num_envs or 1
        self._doing: list[int | None] = [None] * count  # the episode of each lane
        return SyncVectorEnv([self._setup.make_env] * count, autoreset_mode=DISABLED)

    def _make_recorder(self, env: Any) -> Any:
        setup = self._setup
        self._wanted: deque[bool] = deque()  # whether to record the episodes that the lanes begin, in turn
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
        self.say("running")
        self.play_lanes(recorder, policy, self._begin_lanes)

    def ended(self, episode: int, steps: int, total: Any) -> None:
        super().ended(episode, steps, total)
        self._doing[self._doing.index(episode)] = None

    def _begin_lanes(self, envs: Any, policy: Any, lanes: Array, observations: Any) -> tuple[list[int | None], Any]:
        """Gives lanes that are free an episode, where there is one to do; waits for one if there is none in any."""
        doing, begun = self._doing, lanes.copy()
        while not self.over:
            for lane in np.flatnonzero(begun).tolist():
                doing[lane] = episode = self._todo.popleft() if self._todo else None
                policy.reset(lane, 0 if episode is None else policy_seed(self.seed, episode))
            self._at = tuple(episode for episode in doing if episode is not None)
            if self._at:
                return doing, self._reset(envs, begun, first=observations is None)
            begun[:] = True
            self._await_more()
        return doing, observations

    def _reset(self, envs: Any, lanes: Array, first: bool) -> Any:
        seeds = [episode_seed(self.seed, episode or 0) for episode in self._doing]  # any, for those not recorded
        self._wanted.extend(self._doing[lane] is not None for lane in np.flatnonzero(lanes).tolist())
        given = [seed if now else None for seed, now in zip(seeds, lanes.tolist())]
        observations, _ = envs.reset(seed=given, options=None if first else {"reset_mask": lanes})
        return observations
