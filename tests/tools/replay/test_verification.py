"""Recorded episodes played again in their environment."""

import gc
import os
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit, TransformReward
from scripted_env import CountingEnv, Result, ToyEnv
from shell import ok, run
from vector_wrapper import TraceRecordingVectorWrapper

from gym_trace import TraceRecordingWrapper, audit, open_trace, record_episodes, verify_trace
from gym_trace.envs.clipping import clipping
from gym_trace.errors import CorruptTrace, EnvironmentUnavailable, InvalidOption
from gym_trace.tools.replay import resimulate
from gym_trace.tools.replay.compare import Difference
from gym_trace.tools.replay.resimulate import Verdict

PLAIN = [
    name
    for name in (
        *("CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1", "Acrobot-v1", "Blackjack-v1"),
        *("FrozenLake-v1", "FrozenLake8x8-v1", "CliffWalking-v0", "CliffWalking-v1", "Taxi-v3", "Taxi-v4"),
    )
    if name in gymnasium.registry and (name[:-1] + str(int(name[-1]) + 1)) not in gymnasium.registry
]


needs_vectors = pytest.mark.skipif(not hasattr(gymnasium.vector, "AutoresetMode"), reason="needs gymnasium 1.1")


class Inner(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Does something else than the environment at one step."""

    def __init__(self, env: Any, episode: int, step: int, act: Any = None, reward: Any = None):
        super().__init__(env)
        self.place, self.act, self.pay = (episode, step), act, reward
        self.now = [-1, 0]

    def reset(self, **options: Any) -> Any:
        self.now = [self.now[0] + 1, -1]
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        self.now[1] += 1
        here = tuple(self.now) == self.place
        observation, reward, *rest = super().step(self.act(action) if here and self.act else action)
        return (observation, self.pay(reward) if here and self.pay else reward, *rest)


class Forgetful(CountingEnv):
    """An environment that no replay can repeat."""

    drawn = 0

    def step(self, action: Any) -> Any:
        Forgetful.drawn += 1
        observation, _, *rest = super().step(action)
        return (observation, float(Forgetful.drawn), *rest)


def record(env: Any, directory: Path, episodes: int, steps: int = 60, seeded: Any = 3, **options: Any) -> Path:
    """Record episodes of limited length. seeded: seeds, or which episodes are seeded: every third one, none for 0."""
    recorder = TraceRecordingWrapper(env, directory, **options)
    recorder.action_space.seed(1)
    for episode in range(episodes):
        if isinstance(seeded, list):
            recorder.reset(seed=seeded[episode])
        else:
            recorder.reset(seed=episode if seeded and episode % seeded == 0 else None)
        for _ in range(steps):
            if any(recorder.step(recorder.action_space.sample())[2:4]):
                break
    recorder.close()
    return directory


def verdicts(directory: Path, **options: Any) -> list[str]:
    return [verdict.verdict for verdict in verify_trace(directory, **options)]


def only_difference(directory: Path, **options: Any) -> tuple[Verdict, Difference]:
    (odd,) = [verdict for verdict in verify_trace(directory, **options) if verdict.verdict != "identical"]
    assert odd.verdict == "differs"
    assert odd.difference is not None
    return odd, odd.difference


@pytest.mark.parametrize("env_id", PLAIN)
def test_episodes_are_identical_seeded_or_not_with_infos(tmp_path: Path, env_id: str) -> None:
    record(gymnasium.make(env_id), tmp_path, episodes=50, steps=30, record_infos=True)
    assert verdicts(tmp_path) == ["identical"] * 50


def test_an_unseeded_episode_can_be_verified_by_itself(tmp_path: Path) -> None:
    record(gymnasium.make("CartPole-v1"), tmp_path, episodes=8, seeded=0)
    assert verdicts(tmp_path, episodes=[6]) == ["identical"]


def test_mujoco_is_identical(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    record(gymnasium.make("HalfCheetah-v5"), tmp_path, episodes=6)
    assert verdicts(tmp_path) == ["identical"] * 6


def test_minigrid_is_identical(tmp_path: Path) -> None:
    gymnasium.register_envs(pytest.importorskip("minigrid"))
    record(gymnasium.make("MiniGrid-Empty-5x5-v0"), tmp_path, episodes=6)
    assert verdicts(tmp_path) == ["identical"] * 6


def test_hidden_randomness_is_replayed_from_the_last_seeded_episode_on(tmp_path: Path) -> None:
    gymnasium.register_envs(pytest.importorskip("ale_py"))
    env = gymnasium.make("ALE/Pong-v5", repeat_action_probability=0.25)
    record(env, tmp_path, episodes=5, steps=100, seeded=4)
    assert verdicts(tmp_path) == ["identical"] * 5
    assert verdicts(tmp_path, episodes=[3]) == ["identical"]


@pytest.mark.filterwarnings("ignore:observations. got float64")  # Gymnasium before 1.0 warns
def test_state_of_wrappers_is_carried_from_episode_to_episode(tmp_path: Path) -> None:
    env = gymnasium.wrappers.NormalizeObservation(gymnasium.make("CartPole-v1"))
    record(env, tmp_path, episodes=6, seeded=1)
    assert verdicts(tmp_path) == ["identical"] * 6
    assert verdicts(tmp_path, episodes=[5]) == ["identical"]


def test_a_reward_that_is_one_ulp_off_is_found(tmp_path: Path) -> None:
    record(Inner(gymnasium.make("Pendulum-v1"), 2, 17, reward=lambda r: float(np.nextafter(r, 1))), tmp_path, 5)
    odd, difference = only_difference(tmp_path, make_env=partial(gymnasium.make, "Pendulum-v1"))
    assert (odd.index, difference.step, difference.column) == (2, 17, "rewards")
    assert difference.recorded == np.nextafter(difference.seen, 1)
    assert difference.largest == difference.recorded - difference.seen


def test_another_action_than_recorded_is_found_at_its_step(tmp_path: Path) -> None:
    record(Inner(gymnasium.make("CartPole-v1"), 3, 4, act=lambda action: 1 - action), tmp_path, 5)
    odd, difference = only_difference(tmp_path, make_env=partial(gymnasium.make, "CartPole-v1"))
    assert (odd.index, difference.step, difference.column) == (3, 4, "observations")
    assert difference.at == (1,)
    assert odd.steps > 4


def test_another_gravity_is_found(tmp_path: Path) -> None:
    record(gymnasium.make("Pendulum-v1", g=10.0), tmp_path, 2)
    found = list(verify_trace(tmp_path, env_kwargs={"g": 9.81}))
    assert [verdict.verdict for verdict in found] == ["differs", "differs"]
    assert [verdict.difference and verdict.difference.step for verdict in found] == [0, 0]
    assert "at step 0, observations[" in str(found[0].difference)


def test_a_difference_within_the_tolerance_is_close(tmp_path: Path) -> None:
    record(gymnasium.make("Pendulum-v1", g=10.0), tmp_path, 1, steps=5)
    (verdict,) = verify_trace(tmp_path, env_kwargs={"g": 10.0 + 1e-6}, atol=1e-3)
    assert verdict.verdict == "close"
    assert 0 < verdict.largest < 1e-3


def test_columns_that_are_ignored_are_not_compared(tmp_path: Path) -> None:
    record(Inner(gymnasium.make("CartPole-v1"), 0, 3, reward=lambda r: r + 1), tmp_path, 1)
    make = partial(gymnasium.make, "CartPole-v1")
    assert verdicts(tmp_path, make_env=make) == ["differs"]
    assert verdicts(tmp_path, make_env=make, ignore=["rewards"]) == ["identical"]
    with pytest.raises(InvalidOption, match="unknown column"):
        list(verify_trace(tmp_path, ignore=["reward"]))


def test_an_environment_that_does_not_agree_with_itself_is_said_to_be_so(tmp_path: Path) -> None:
    record(Forgetful(length=4), tmp_path, 2, seeded=2)
    first, second = verify_trace(tmp_path, make_env=lambda: Forgetful(length=4))
    assert first.verdict == "differs"
    assert "not deterministic" in first.reason
    assert second.verdict == "unverifiable"
    assert "not restored by seed or generator state" in second.reason


class Whimsical(CountingEnv):
    """Its infos have something that no seed brings back."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=seed)[0], {"whim": os.urandom(8)}


def test_infos_that_do_not_agree_with_themselves_are_said_to_be_so(tmp_path: Path) -> None:
    record(Whimsical(length=4), tmp_path, 2, seeded=2, record_infos=True)
    first, second = verify_trace(tmp_path, make_env=lambda: Whimsical(length=4))
    assert first.verdict == "differs"
    assert "not deterministic" in first.reason
    assert second.verdict == "unverifiable"
    assert second.reason.startswith("infos differ, and so do two replays: ")
    assert verdicts(tmp_path, make_env=lambda: Whimsical(length=4), ignore=["infos"]) == ["identical"] * 2


class Scripted(CountingEnv):
    """Its reset info is the next of a list that all of them share."""

    infos: ClassVar[list[int]] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=seed)[0], {"drawn": Scripted.infos.pop(0)}


UNSTEADY = "two replays also differ: not deterministic"
ALONE = "matches only by itself, in a fresh environment"


@pytest.mark.parametrize(
    ("episodes", "drawn", "verdict", "needed", "reason"),
    [
        ([0, 1], [7, 8], "identical", 0, ""),
        ([0, 1], [7, 0, 7, 8, 7, 8], "identical", 1, ""),
        ([0, 1], [7, 0, 7, 8, 7, 0], "differs", 0, UNSTEADY),
        ([1], [0, 7, 8, 7, 8], "identical", 1, ""),
        ([1], [0, 7, 8, 7, 0], "differs", 0, UNSTEADY),  # once by chance
        ([0, 1, 2], [7, 8, 0, 0, 9, 9], "identical", 0, ALONE),
        ([0, 1, 2], [7, 8, 0, 0, 9, 0], "differs", 0, UNSTEADY),
    ],
)
def test_an_episode_that_differs_first_passes_after_two_matches(
    episodes: Any, drawn: Any, verdict: str, needed: int, reason: str, tmp_path: Path
) -> None:
    Scripted.infos[:] = [7, 8, 9]
    record(Scripted(length=4), tmp_path, 3, seeded=1, record_infos=True)
    Scripted.infos[:] = drawn
    *_, found = verify_trace(tmp_path, episodes=episodes, make_env=lambda: Scripted(length=4))
    assert not Scripted.infos
    assert (found.verdict, found.needed, found.reason) == (verdict, needed, reason)


def test_verify_names_the_episodes_that_need_earlier_ones(tmp_path: Path) -> None:
    env = gymnasium.wrappers.NormalizeObservation(gymnasium.make("CartPole-v1"))
    record(env, tmp_path, episodes=4, seeded=1)
    (found,) = verify_trace(tmp_path, episodes=[3])
    assert (found.verdict, found.needed) == ("identical", 3)
    done = run("verify", tmp_path, "--episodes", "0,2,3")
    assert done.stdout == SUMMARY.format(3, 3, "2 of them only after the episodes before " + BY_SEED)


SUMMARY = "{} episodes replayed: {} identical, bit for bit; {}\n"
BY_SEED = "(the seed alone does not decide the start)"


class Pool(CountingEnv):
    """Its starts come from a pool, by a counter of resets."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        _, info = super().reset(seed=seed)
        self._buffer += (self.calls.count("reset") - 1) % 3
        return self._buffer, info


class Pool4(Pool):
    def __init__(self) -> None:
        super().__init__(length=4)


def test_verify_counts_the_episodes_whose_start_depends_on_earlier_ones(tmp_path: Path) -> None:
    record(Pool(length=4), tmp_path / "a", 7, seeded=1)
    for options in ({}, {"workers": 2}):
        found = verify_trace(tmp_path / "a", make_env=Pool4, **options)
        assert [(verdict.verdict, verdict.needed) for verdict in found] == [
            ("identical", number if number % 3 else 0) for number in range(7)
        ]
    done = run("verify", tmp_path / "a", "--make", "test_verification:Pool4")
    assert done.stdout == SUMMARY.format(7, 7, "4 of them only after the episodes before " + BY_SEED)
    done = run("verify", tmp_path / "a", "--make", "test_verification:Pool4", "--json", "--episodes", "2,3")
    assert ['"needed": 2' in line for line in done.stdout.splitlines()] == [True, False]


def test_a_copy_without_the_episodes_that_a_start_depends_on_says_so(tmp_path: Path) -> None:
    record(Pool(length=4), tmp_path / "a", 7, seeded=1)
    ok("edit", "filter", tmp_path / "a", "--episodes", "1,2,3,5", "-o", tmp_path / "b")
    found = [(verdict.verdict, verdict.reason) for verdict in verify_trace(tmp_path / "b", make_env=Pool4)]
    lost = "unverifiable", resimulate._EARLIER_MISSING
    assert found == [lost, lost, ("identical", ""), lost]  # the third one has the first start of the pool
    ok("edit", "filter", tmp_path / "a", "--episodes", "0,1,2", "-o", tmp_path / "c")
    assert verdicts(tmp_path / "c", make_env=Pool4) == ["identical"] * 3


def test_a_writer_that_has_lost_all_its_episodes_is_an_error(tmp_path: Path) -> None:
    record(CountingEnv(length=9), tmp_path, 1)
    (batch,) = tmp_path.glob("*.gtb")
    os.truncate(batch, batch.stat().st_size // 6)
    with pytest.raises(CorruptTrace):
        verify_trace(tmp_path, make_env=CountingEnv)
    assert not list(verify_trace(tmp_path, make_env=CountingEnv, on_damage="skip"))
    with pytest.raises(CorruptTrace):
        audit(tmp_path, make_env=CountingEnv)
    with TraceRecordingWrapper(CountingEnv(length=9), tmp_path, on_exist="append") as env:
        record_episodes(env, episodes=2, seed=0)
    with pytest.raises(CorruptTrace):
        verify_trace(tmp_path, make_env=CountingEnv)
    assert verdicts(tmp_path, episodes=[0], make_env=partial(CountingEnv, length=9)) == ["identical"]


def test_an_environment_that_raises_differs(tmp_path: Path) -> None:
    record(CountingEnv(length=9), tmp_path, 1)

    def fails(action: Any) -> Any:
        raise RuntimeError("out of coffee")

    (verdict,) = verify_trace(tmp_path, make_env=lambda: Inner(CountingEnv(length=9), 0, 3, act=fails))
    assert verdict.verdict == "differs"
    assert "RuntimeError: out of coffee" in str(verdict.difference)


@needs_vectors
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
def test_lanes_of_a_vector_run_are_verified_one_by_one(tmp_path: Path, kind: Callable[..., Any], mode: str) -> None:
    options = {"autoreset_mode": gymnasium.vector.AutoresetMode[mode]}
    name = "sync" if kind is SyncVectorEnv else "async"
    envs = TraceRecordingVectorWrapper(gymnasium.make_vec("CartPole-v1", 3, name, vector_kwargs=options), tmp_path)
    envs.action_space.seed(1)
    envs.reset(seed=5)
    for _ in range(100):
        envs.step(envs.action_space.sample())
    envs.close()
    found = verdicts(tmp_path)
    assert len(found) > 6
    assert set(found) == {"identical"}


class PlainNumbers(ToyEnv):
    """Observations and infos are plain Python numbers, which vector environments put into arrays."""

    observation_space = gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(9), gymnasium.spaces.Discrete(9)])
    action_space = gymnasium.spaces.Discrete(2)

    def result(self, action: Any) -> Result:
        info = {"t": self.t, "half": self.t / 2, "odd": self.t % 2 == 1, "deep": {"nan": float("nan")}}
        return Result((self.t, 8), 1.0, self.t == 4, False, info)


@needs_vectors
@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
def test_plain_numbers_of_lanes_are_identical_in_the_dtype_of_the_space(tmp_path: Path, mode: str) -> None:
    plain = SyncVectorEnv([PlainNumbers] * 2, autoreset_mode=gymnasium.vector.AutoresetMode[mode])
    envs = TraceRecordingVectorWrapper(plain, tmp_path, record_infos=True)
    envs.reset(seed=5)
    for _ in range(10):
        envs.step(envs.action_space.sample())
    envs.close()
    assert open_trace(tmp_path)[0].observations[0].dtype == np.int64
    assert set(verdicts(tmp_path, make_env=PlainNumbers)) == {"identical"}


@needs_vectors
def test_lanes_that_are_stepped_together_are_said_to_be_unverifiable(tmp_path: Path) -> None:
    envs = TraceRecordingVectorWrapper(gymnasium.make_vec("CartPole-v1", 2, "vector_entry_point"), tmp_path)
    envs.reset(seed=5)
    envs.step(envs.action_space.sample())
    envs.close()
    found = list(verify_trace(tmp_path))
    assert {verdict.verdict for verdict in found} == {"unverifiable"}
    assert "CartPoleVectorEnv steps all its lanes together" in found[0].reason


def test_a_part_that_begins_in_mid_episode_is_unverifiable(tmp_path: Path) -> None:
    record(gymnasium.make("Pendulum-v1"), tmp_path, 1, steps=20, frame_filter=lambda step: step != 7)
    assert verdicts(tmp_path) == ["identical", "unverifiable"]


def test_workers_come_to_the_same_verdicts(tmp_path: Path) -> None:
    record(Inner(gymnasium.make("CartPole-v1"), 61, 4, act=lambda action: 1 - action), tmp_path, 130, steps=6)
    make = partial(gymnasium.make, "CartPole-v1")
    one, two = ({v.index: v.verdict for v in verify_trace(tmp_path, make_env=make, workers=n)} for n in (1, 2))
    assert one == two
    assert [index for index, verdict in one.items() if verdict == "differs"] == [61]


def test_an_environment_that_cannot_be_made_is_an_error_that_says_why(tmp_path: Path) -> None:
    record(CountingEnv(length=3), tmp_path, 1)
    with pytest.raises(EnvironmentUnavailable, match="--make MODULE:FUNCTION"):
        list(verify_trace(tmp_path))


def test_rewards_of_several_types_are_compared_by_their_values(tmp_path: Path) -> None:
    class Mixed(CountingEnv):
        def step(self, action: Any) -> Any:
            observation, reward, *rest = super().step(action)
            return (observation, np.float32(reward) if int(observation[0]) % 2 else float(reward), *rest)

    record(Mixed(length=6), tmp_path, 2)
    assert verdicts(tmp_path, make_env=lambda: Mixed(length=6)) == ["identical"] * 2


def test_only_bit_for_bit_equality_is_identical(tmp_path: Path) -> None:
    class Told(CountingEnv):
        def __init__(self, reward: Any):
            super().__init__(length=2)
            self.reward = reward

        def step(self, action: Any) -> Any:
            observation, _, *rest = super().step(action)
            return (observation, self.reward, *rest)

    cases = [(0.0, -0.0, "close"), (np.inf, 3.0, "differs"), (3.0, np.inf, "differs"), (np.inf, np.inf, "identical")]
    for i, (recorded, seen, verdict) in enumerate(cases):
        record(Told(recorded), tmp_path / str(i), 1)
        assert verdicts(tmp_path / str(i), make_env=partial(Told, seen), rtol=0.5) == [verdict]


@pytest.mark.parametrize("lanes", [0, 2])
def test_the_seconds_that_an_episode_took_are_not_compared(tmp_path: Path, lanes: int) -> None:
    make = timed if not lanes else lambda: SyncVectorEnv([timed] * lanes)
    recorder = TraceRecordingVectorWrapper if lanes else TraceRecordingWrapper
    env: Any = recorder(make(), tmp_path, record_infos=True)
    env.reset(seed=3)
    for step in range(30):
        if lanes:
            env.step(np.array([step % 2] * lanes))
        elif any(env.step(1)[2:4]):
            env.reset()
    env.close()
    verdicts = list(verify_trace(tmp_path))
    assert {verdict.verdict for verdict in verdicts} == {"identical"}
    verdicts = list(verify_trace(tmp_path, make_env=twice_rewarded, ignore=["rewards"]))
    assert "infos/episode" in {verdict.difference and verdict.difference.column for verdict in verdicts}  # the return


def twice_rewarded() -> Any:
    return RecordEpisodeStatistics(TransformReward(gymnasium.make("CartPole-v1"), lambda reward: 2 * reward))


def timed() -> Any:
    return RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_difference_before_an_unstorable_action_is_reported(tmp_path: Path) -> None:
    env: Any = TraceRecordingWrapper(CountingEnv(9), tmp_path)
    env.reset(seed=0)
    env.step(0)
    env.step(Fraction(1, 2))
    env.close()
    verdicts = list(verify_trace(tmp_path, make_env=lambda: TransformReward(CountingEnv(9), lambda reward: -5.0)))
    assert [verdict.verdict for verdict in verdicts] == ["differs"]


BOX, WIDER = Box(-1, 1, (2,), np.float32), Box(-3, 3, (2,), np.float32)


class Pushed(ToyEnv):
    """Rewards how hard it is pushed."""

    def __init__(self, action_space: Any) -> None:
        super().__init__(Discrete(1), action_space)

    def result(self, action: Any) -> Result:
        push = action["push"] if isinstance(action, dict) else action[0] if isinstance(action, tuple) else action
        return Result(0, 0.0 if push is None else float(push.sum()))


@pytest.mark.parametrize("kind", [lambda box: box, lambda box: Dict(push=box), lambda box: Tuple([box, Discrete(2)])])
def test_wrappers_around_a_made_environment_are_rebuilt(tmp_path: Path, kind: Any) -> None:
    space, pushes = kind(BOX), kind(WIDER)
    env = TraceRecordingWrapper(TimeLimit(clipping(Pushed(space)), 9), tmp_path)
    pushes.seed(0)
    env.reset(seed=0)
    for _ in range(9):
        env.step(pushes.sample())
    env.close()
    assert verdicts(tmp_path, make_env=lambda: Pushed(space)) == ["identical"]
    assert verdicts(tmp_path, make_env=lambda: TimeLimit(clipping(Pushed(space)), 9)) == ["identical"]
    assert verdicts(tmp_path, make_env=lambda: TimeLimit(Pushed(space), 9)) == ["differs"]  # which is another one


def test_a_tolerance_is_that_of_one_column_or_of_its_parts(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(gymnasium.make("Pendulum-v1"), tmp_path)
    play_pendulum = [env.reset(seed=0), *(env.step(env.action_space.sample()) for _ in range(20))]
    env.close()
    assert len(play_pendulum) == 21
    changed = {"env_kwargs": {"g": 10.0 + 1e-6}}
    verdicts = {
        name: next(verify_trace(tmp_path, tolerances=tolerances, **changed))
        for name, tolerances in {
            "both": {"observations": 1e-3, "rewards": 1e-3},
            "observations": {"observations": 1e-3},
            "rewards": {"rewards": 1e-3},
        }.items()
    }
    assert {name: found.verdict for name, found in verdicts.items()} == {
        "both": "close",
        "observations": "differs",
        "rewards": "differs",
    }
    assert verdicts["observations"].difference.column == "rewards"
    tolerances = ("--tolerance", "observations=1e-3", "--tolerance", "rewards=1e-3")
    assert run("verify", tmp_path, "--env-arg", "g=10.000001", *tolerances).exit_code == 0
    for wrong in ("1e-3", "rewards=x", "scores=1", "rewards=-1"):
        assert run("verify", tmp_path, "--tolerance", wrong).exit_code == 2


# -- the order of verdicts ---------------------------------------------------------------------------------------------


class Counted(CountingEnv):
    """Counts environments that are open, and resets. A seed sets the length of episodes, rewards count the episodes."""

    open = most_open = resets = 0

    def __init__(self) -> None:
        super().__init__()
        self._lives = 0
        Counted.open += 1
        Counted.most_open = max(Counted.most_open, Counted.open)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        Counted.resets += 1
        self._lives += 1
        self.length = self.length if seed is None else 2 + seed
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return (observation, float(self._lives), *rest)

    def close(self) -> None:
        Counted.open -= 1


@pytest.fixture
def lanes(tmp_path: Path) -> Path:
    """Lanes with episodes of 2 to 6 steps. Each flush ends a chunk, in which lane comes after lane."""
    envs = TraceRecordingVectorWrapper(SyncVectorEnv([Counted] * 5), tmp_path)
    envs.reset(seed=1)
    for step in range(60):
        envs.step(envs.action_space.sample())
        if step % 7 == 6:
            envs.flush()
    envs.close()
    return tmp_path


@pytest.mark.parametrize("most", [1, 3, 32])
def test_verdicts_come_in_the_order_of_the_trace(lanes: Path, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.tools.replay.verify._MOST_ENVIRONMENTS", most)
    trace = open_trace(lanes)
    assert (np.diff(trace.episodes["lane"].astype(int)) < 0).sum() > 5  # lanes that come up again
    Counted.open = Counted.most_open = Counted.resets = 0
    found = list(verify_trace(trace, make_env=Counted))
    assert [verdict.index for verdict in found] == list(range(len(trace)))
    assert {verdict.verdict for verdict in found} == {"identical"}
    for episode, verdict in zip(trace, found, strict=True):
        assert (episode.lane, episode.episode_id, len(episode)) == (verdict.lane, verdict.episode_id, verdict.steps)
    assert Counted.resets == len(trace)  # no episode was played twice
    assert (Counted.open, Counted.most_open) == (0, min(most + 1, 5))


class Rendering(Pool4):
    """Counts the environments that exist, open or closed."""

    alive: ClassVar[WeakSet["Rendering"]] = WeakSet()
    most = 0

    def __init__(self) -> None:
        super().__init__()
        self.render_mode = "rgb_array"
        Rendering.alive.add(self)
        Rendering.most = max(Rendering.most, len(Rendering.alive))


@needs_vectors
def test_environments_that_render_exist_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco.egl", None)
    envs = TraceRecordingVectorWrapper(SyncVectorEnv([Rendering] * 2), tmp_path)
    for seed in range(5):  # episodes that depend on those before, cut so that the lanes alternate
        envs.reset(seed=seed)
        envs.step([0, 0])
    envs.close()
    del envs
    gc.collect()
    Rendering.most = 0
    found = verify_trace(tmp_path, make_env=Rendering)
    assert {verdict.verdict for verdict in found} == {"identical"}
    assert Rendering.most == 1


def test_verdicts_on_a_view_come_in_its_order(lanes: Path) -> None:
    trace = open_trace(lanes)
    view = trace[[7, 3, 20, 3, 11]]
    found = list(verify_trace(view, make_env=Counted))
    assert [verdict.index for verdict in found] == [0, 1, 2, 3, 4]
    assert [verdict.episode_id for verdict in found] == view.episodes["episode_id"].tolist()
    (one,) = verify_trace(view, make_env=Counted, episodes=[2])
    assert (one.index, one.episode_id) == (2, trace[20].episode_id)


def test_the_first_verdict_on_lanes_comes_before_the_last_episode(lanes: Path) -> None:
    Counted.open = Counted.resets = 0
    verdicts_on = verify_trace(lanes, make_env=Counted)
    assert next(verdicts_on).index == 0
    assert Counted.resets == 1
    verdicts_on.close()  # type: ignore[attr-defined]
    assert Counted.open == 0


def test_workers_give_verdicts_in_the_order_of_the_trace(tmp_path: Path) -> None:
    make = partial(gymnasium.make, "CartPole-v1")
    envs = TraceRecordingVectorWrapper(SyncVectorEnv([make] * 3), tmp_path)
    envs.reset(seed=1)
    for step in range(80):
        envs.step(envs.action_space.sample())
        if step % 20 == 19:
            envs.flush()
    envs.close()
    trace = open_trace(tmp_path)
    assert (np.diff(trace.episodes["lane"].astype(int)) < 0).any()
    found = list(verify_trace(trace, workers=2))
    assert [verdict.index for verdict in found] == list(range(len(trace)))
    assert [verdict.lane for verdict in found] == trace.episodes["lane"].tolist()
