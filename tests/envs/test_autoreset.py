"""Single environments that reset themselves in step(): each episode is an episode, and the reset is not a step."""

import copy
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from echo_env import EchoEnv, check_echoes, try_steps
from scripted_env import CountingEnv, bits

from gym_trace import TraceRecordingWrapper, open_trace, verify_trace

AT_ONCE = hasattr(gymnasium.wrappers, "AutoResetWrapper")  # Gymnasium 0.29; newer ones do it in the step after the end
Autoreset: Any = gymnasium.wrappers.AutoResetWrapper if AT_ONCE else gymnasium.wrappers.Autoreset


def test_autoreset_does_not_change_the_recorded_episodes(tmp_path: Path) -> None:
    bare, told = EchoEnv(3), []
    for actions in ((1, 2, 3), (4, 5, 6), (7,)):
        bare.reset()
        told += [bare._told(-1), *[bare.step(action)[0] for action in actions]]
    env = TraceRecordingWrapper(Autoreset(EchoEnv(3)), tmp_path, record_infos=True)
    env.reset(seed=4)
    for action in (1, 2, 3, 4, 5, 6, 7) if AT_ONCE else (1, 2, 3, 0, 4, 5, 6, 0, 7):
        env.step(action)
    env.close()
    assert check_echoes(tmp_path, infos=True) == [(0, 0, [1, 2, 3]), (1, 0, [4, 5, 6]), (2, 0, [7])]
    episodes = list(open_trace(tmp_path))
    assert bits(np.concatenate([episode.observations for episode in episodes])) == bits(np.array(told))
    assert [episode.outcome for episode in episodes] == ["terminated", "terminated", "closed"]
    assert [episode.total_reward for episode in episodes] == [6.0, 6.0, 1.0]
    assert [episode.terminations.tolist()[-1] for episode in episodes] == [True, True, False]
    assert [episode.seed for episode in episodes] == [4, None, None]
    assert [episode.reset_info for episode in episodes] == [{}, {}, {}]


def test_the_agent_gets_the_same_values_as_without_a_recorder(tmp_path: Path) -> None:
    bare, env = Autoreset(EchoEnv(3)), TraceRecordingWrapper(Autoreset(EchoEnv(3)), tmp_path)
    assert bits(env.reset()) == bits(bare.reset())
    for action in range(9):
        assert bits(env.step(action)) == bits(bare.step(action))
    env.close()


def test_filters_are_called_for_each_automatically_reset_episode(tmp_path: Path) -> None:
    asked: list[int] = []

    def every_other(episode: int) -> bool:
        asked.append(episode)
        return episode % 2 == 1

    env = TraceRecordingWrapper(
        Autoreset(EchoEnv(3)), tmp_path, episode_filter=every_other, frame_filter=lambda step: step != 1
    )
    env.reset()
    for _ in range(12 if AT_ONCE else 15):
        env.step(env.unwrapped.asked % 3)  # type: ignore[attr-defined]
    env.close()
    assert asked == [0, 1, 2, 3, 4] if AT_ONCE else [0, 1, 2, 3]
    assert check_echoes(tmp_path) == [(1, 0, [0]), (1, 2, [2]), (3, 0, [0]), (3, 2, [2])]


def test_wrappers_around_the_one_that_resets_change_nothing(tmp_path: Path) -> None:
    inner = gymnasium.wrappers.RecordEpisodeStatistics(Autoreset(gymnasium.wrappers.TimeLimit(CountingEnv(9), 4)))
    env = TraceRecordingWrapper(inner, tmp_path)
    env.reset()
    for _ in range(10):
        env.step(0)
    env.close()
    lengths = [4, 4, 2] if AT_ONCE else [4, 4, 0]
    episodes = list(open_trace(tmp_path))
    assert [(len(episode), episode.first_step) for episode in episodes] == [(length, 0) for length in lengths]
    assert [episode.observations[0, 0] for episode in episodes] == [0, 0, 0]
    assert [episode.outcome for episode in episodes] == ["truncated", "truncated", "closed"]


def test_episodes_that_the_environment_began_itself_can_be_verified(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(Autoreset(gymnasium.make("CartPole-v1")), tmp_path)
    env.reset(seed=5)
    for step in range(100):
        env.step(step % 3 % 2)
    env.close()
    trace = open_trace(tmp_path)
    assert len(trace) > 4
    if not AT_ONCE:
        assert [episode.rng_state is None for episode in trace] == [True, *[False] * (len(trace) - 1)]
    assert {verdict.verdict for verdict in verify_trace(tmp_path)} == {"identical"}
    resetting = verify_trace(tmp_path, make_env=lambda: Autoreset(gymnasium.make("CartPole-v1")))
    assert {verdict.verdict for verdict in resetting} == {"identical"}


def test_a_copy_made_before_an_autoreset_begins_with_the_next_episode(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(Autoreset(EchoEnv(2)), tmp_path)
    env.reset()
    try_steps(env, 1, 2)
    other = copy.deepcopy(env)
    env.close()
    try_steps(other, *([3, 4] if AT_ONCE else [0, 3, 4]))
    other.close()
    assert sorted(actions for _, _, actions in look_at_actions(tmp_path)) == [[1, 2], [3, 4]]


def look_at_actions(directory: Path) -> list[tuple[int, int, list[int]]]:
    parts = [(part.episode_id, part.first_step, part.actions.tolist()) for part in open_trace(directory)]
    return [part for part in parts if part[2]]


def test_a_reset_of_its_own_that_raises_is_tried_again_and_glues_nothing(tmp_path: Path) -> None:
    class Failing(EchoEnv):
        fails = 0

        def reset(self, **options: Any) -> Any:
            if self.episode == 0 and self.fails < 1:
                self.fails += 1
                raise ValueError("not now")
            return super().reset(**options)

    env = TraceRecordingWrapper(Autoreset(Failing(2)), tmp_path)
    env.reset()
    try_steps(env, 1, 2, 0, 0, 3, 4)
    env.close()
    if not AT_ONCE:
        assert check_echoes(tmp_path) == [(0, 0, [1, 2]), (1, 0, [3, 4])]
