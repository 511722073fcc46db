"""An environment with observations of every kind, and traces of it, for tests of lossless formats."""

from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from scripted_env import Result, ToyEnv

import gym_trace
from gym_trace.playback.episode_index import index_of

OBSERVATIONS = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (24, 20, 3), np.uint8),
        "state": spaces.Box(-np.inf, np.inf, (3,), np.float64),
        "half": spaces.Box(-np.inf, np.inf, (), np.float16),
        "count": spaces.Box(0, 2**32 - 1, (2,), np.uint32),
        "a/b": spaces.Discrete(3),
        "": spaces.Discrete(3),
        'a\\ "%é': spaces.Discrete(3),
        "mission": spaces.Text(20),
        "nothing": spaces.Dict({}),
        "pair": spaces.Tuple((spaces.MultiBinary(3), spaces.Box(0, 1, (0,), np.float32))),
    }
)


class Camera(ToyEnv):
    """Samples its spaces; episodes alternate between termination and truncation."""

    observation_space = OBSERVATIONS
    action_space = spaces.Tuple((spaces.Discrete(5), spaces.Box(-1, 1, (2,), np.float32)))

    def __init__(self, length: int = 5):
        self._length = length

    def result(self, action: Any) -> Result:
        if action is None:
            self.observation_space.seed(3)
        observation = self.observation_space.sample()
        observation["state"][0] = np.nan
        observation["mission"] = ("go", "é\udc80", "\0x", "")[self.t % 4]
        over, odd = self.t == self._length, self.episode % 2 == 0
        info = {"why": np.float32(self.t)} if self.t else {"level": self.episode + 1}
        return Result(observation, 0.1 * self.t, over and odd, over and not odd, info)


def record(directory: Path, length: int = 5, **options: Any) -> gym_trace.Trace:
    """Record four episodes: terminated, truncated, cut, and closed without a step."""
    with gym_trace.TraceRecordingWrapper(Camera(length), directory, **options) as env:
        env.action_space.seed(0)
        env.reset(seed=2**64 + 5, options={"map": (1, 2)})
        for _ in range(2 * length + 2):
            env.annotate(logprob=np.float32(0.5))
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()
        env.reset()
    return gym_trace.open_trace(directory)


def assert_same(back: gym_trace.Trace, trace: gym_trace.Trace) -> None:
    """Compares all that is known of all episodes, bit for bit."""
    assert len(back) == len(trace)
    assert back.facts == trace.facts
    for one, other in zip(trace, back):
        for name in ("observations", "actions", "rewards", "terminations", "truncations", "annotations"):
            assert_same_rows(getattr(other, name), getattr(one, name))
        for name in ("seed", "options", "outcome", "reset_info", "writer", "episode_id", "lane", "first_step", "split"):
            assert getattr(other, name) == getattr(one, name), name
        for name in ("start_time", "end_time", "start_monotonic", "end_monotonic"):
            assert getattr(other, name) == getattr(one, name), name
        if index_of(trace).readers[0].about.has_all_infos:
            assert other.infos == one.infos


def assert_same_rows(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
    if isinstance(one, (dict, tuple)):
        for left, right in zip(*(tree.values() if isinstance(tree, dict) else tree for tree in (one, other))):
            assert_same_rows(left, right)
    elif one.dtype == object:
        np.testing.assert_equal(one.tolist(), other.tolist())
    else:
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
