"""A worker with several environments side by side."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from gym_trace.collecting.policies import LanePolicies
from gym_trace.collecting.worker import Worker
from gym_trace.envs.seeding import episode_seed, policy_seed
from gym_trace.model.returns import LaneReturns
from gym_trace.model.values import Array
from gym_trace.recording.vector.wrapper import TraceRecordingVectorWrapper


class LanesWorker(Worker):
    """Several environments side by side, each with an episode of its own; those without one are not recorded."""

    def _made(self) -> Any:
        count = self._setup.num_envs or 1
        return SyncVectorEnv([self._setup.make_env] * count, autoreset_mode=AutoresetMode.DISABLED)

    def _recording(self, env: Any) -> Any:
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

    def _play(self, recorder: Any) -> None:
        root, count = self._setup.seed, recorder.num_envs
        policies = LanePolicies(self._setup.make_policy, recorder)
        doing: list[int | None] = [None] * count  # the episode of each lane
        begin, totals, lengths = np.ones(count, np.bool_), LaneReturns(count), np.zeros(count, np.int64)
        every = np.ones(count, np.bool_)
        observations: Any = None
        self.say("running")
        while not self._over:
            if begin.any():
                for lane in np.flatnonzero(begin).tolist():
                    doing[lane] = episode = self._todo.popleft() if self._todo else None
                    policies.reset(lane, 0 if episode is None else policy_seed(root, episode))
                if all(episode is None for episode in doing):
                    begin[:] = True
                    self._await_more()
                    continue
                observations = self._reset(recorder, doing, begin, first=observations is None)
                lengths[begin] = 0
                self._open = tuple(episode for episode in doing if episode is not None)
            actions, notes = policies.act(observations)
            if notes:
                recorder.annotate(**notes)
            observations, rewards, terminations, truncations, _ = recorder.step(actions)
            begin = terminations | truncations
            totals.add(rewards, every)
            lengths += 1
            self._steps += sum(episode is not None for episode in doing)
            for lane, total in zip(np.flatnonzero(begin).tolist(), totals.take(begin)):
                episode = doing[lane]
                if episode is not None:
                    self._finished.append((episode, int(lengths[lane]), total))
                    doing[lane] = None
            if time.monotonic() >= self._next_beat:
                self.say("running")

    def _reset(self, recorder: Any, doing: list[int | None], begin: Array, first: bool) -> Any:
        seeds = [episode_seed(self._setup.seed, episode or 0) for episode in doing]  # any, for those not recorded
        self._wanted.extend(doing[lane] is not None for lane in np.flatnonzero(begin).tolist())
        given = [seed if now else None for seed, now in zip(seeds, begin.tolist())]
        observations, _ = recorder.reset(seed=given, options=None if first else {"reset_mask": begin})
        return observations
