"""Environments and arguments of other packages, whose objects cannot be copied or have unusual attributes."""

import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from runs import play
from scripted_env import CountingEnv

import gym_trace
from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.errors import EnvironmentUnavailable, InvalidOption
from gym_trace.playback.episode_index import index_of

needs_vectors = pytest.mark.skipif(not hasattr(gymnasium.vector, "AutoresetMode"), reason="needs gymnasium 1.1")


class Schedule:
    """Owner of a filter method; cannot be copied."""

    def __init__(self) -> None:
        self.lock, self.asked = threading.Lock(), 0

    def keeps(self, number: int) -> bool:
        self.asked += 1
        return number % 2 == 0


@pytest.mark.parametrize("name", ["episode_filter", "frame_filter"])
def test_a_bound_method_is_a_filter_and_its_owner_is_not_copied(tmp_path: Path, name: str) -> None:
    schedule = Schedule()
    options: Any = {name: schedule.keeps}
    env = TraceRecordingWrapper(CountingEnv(), tmp_path / "t", **options)
    play(env, 4)
    env.close()
    assert schedule.asked >= 4
    assert len(open_trace(tmp_path / "t")) > 0
    assert env._saved_kwargs[name].__self__ is schedule


def test_metadata_stays_as_it_was_given(tmp_path: Path) -> None:
    metadata = {"rates": [1, 2]}
    env = TraceRecordingWrapper(CountingEnv(), tmp_path / "t", metadata=metadata)
    metadata["rates"].append(3)
    play(env, 1)
    env.close()
    assert open_trace(tmp_path / "t").metadata == {"rates": [1, 2]}
    assert env._saved_kwargs["metadata"] == {"rates": [1, 2]}


@pytest.mark.parametrize("error", [NotImplementedError, AttributeError, RuntimeError])
def test_an_environment_that_has_no_generator_can_be_reset_without_a_seed(tmp_path: Path, error: Any) -> None:
    class Bare(CountingEnv):
        @property
        def np_random(self) -> Any:
            raise error("np_random")

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self._buffer[...] = 0
            return self._buffer, {}

    env = TraceRecordingWrapper(Bare(), tmp_path / "t")
    env.reset()
    env.step(0)
    env.close()
    (episode,) = open_trace(tmp_path / "t")
    assert (len(episode), episode.rng_state) == (1, None)


class Batched(gymnasium.vector.VectorEnv):  # type: ignore[type-arg]
    """Two lanes that count to three, and are reset in the step that ends their episode, as SuperSuit's are."""

    metadata: dict[str, Any] = {}  # noqa: RUF012
    render_mode = None

    def __init__(self) -> None:
        self.num_envs = 2
        self.observation_space, self.action_space = spaces.Box(0, 9, (1,)), spaces.Discrete(2)
        self.count = 0

    def _told(self) -> Any:
        return np.full((2, 1), self.count, np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.count = 0
        return self._told(), [{"began": True}] * 2

    def step(self, actions: Any) -> Any:
        self.count += 1
        over = np.full(2, self.count == 3, np.uint8)
        infos: list[dict[str, Any]] = [{"count": self.count} for _ in range(2)]
        if over.any():
            for lane, info in enumerate(infos):
                info["terminal_observation"] = self._told()[lane]
            self.count = 0
        return self._told(), np.ones(2, np.float32), over, np.zeros(2, np.uint8), infos


class OfSuperSuit(Batched):
    __module__ = "supersuit.vector.markov_vector_wrapper"


@needs_vectors
def test_supersuits_lanes_are_reset_in_the_step_that_ends_their_episode(tmp_path: Path) -> None:
    env = gym_trace.TraceRecordingVectorWrapper(OfSuperSuit(), tmp_path / "t", record_infos=True)
    env.reset()
    for _ in range(7):
        env.step(np.zeros(2, np.int64))
    env.close()
    episodes = sorted(open_trace(tmp_path / "t"), key=lambda episode: (episode.lane, episode.episode_id))
    counts = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1]] * 2
    assert [episode.observations[:, 0].tolist() for episode in episodes] == counts
    assert [[info["count"] for info in episode.infos] for episode in episodes] == [count[1:] for count in counts]


@needs_vectors
def test_a_vector_environment_without_single_spaces_raises_with_advice(tmp_path: Path) -> None:
    envs: Any = Batched()
    with pytest.raises(InvalidOption, match="set its single_observation_space"):
        gym_trace.TraceRecordingVectorWrapper(envs, tmp_path / "t")
    assert not (tmp_path / "t").exists()
    envs.single_observation_space, envs.single_action_space = envs.observation_space, envs.action_space
    env = gym_trace.TraceRecordingVectorWrapper(envs, tmp_path / "t")
    env.reset()
    env.close()


class OfEnvPool(gymnasium.vector.VectorEnv):  # type: ignore[type-arg]
    """Lane l counts from 100 * l on, three steps an episode. A masked reset answers with the lanes it has reset."""

    metadata = {"autoreset_mode": "NextStep"}  # noqa: RUF012
    single_observation_space = spaces.Box(0, 1000, (1,), np.float32)
    single_action_space = spaces.Discrete(2)

    def __init__(self, num_envs: int = 4, batch_size: int = 4):
        self.num_envs, self.config = num_envs, {"num_envs": num_envs, "batch_size": batch_size}
        self.counts = np.zeros(num_envs, np.int64)

    @property
    def is_async(self) -> bool:
        return self.config["batch_size"] != self.num_envs

    def _told(self, lanes: Any) -> tuple[Any, dict[str, Any]]:
        observations = (100 * lanes + self.counts[lanes]).astype(np.float32)[:, None]
        return observations, {"env_id": lanes.astype(np.int32), "players": {"env_id": lanes.astype(np.int32)}}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        lanes = np.arange(self.num_envs) if options is None else np.flatnonzero(options["reset_mask"])
        self.counts[lanes] = 0
        return self._told(lanes)

    def step(self, actions: Any) -> Any:
        over = self.counts == 3
        self.counts = np.where(over, 0, self.counts + 1)
        observations, infos = self._told(np.arange(self.num_envs))
        return observations, np.ones(self.num_envs), self.counts == 3, np.zeros(self.num_envs, np.bool_), infos


@needs_vectors
def test_an_asynchronous_envpool_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=r"2 of its 4 environments.*batch_size=num_envs"):
        gym_trace.TraceRecordingVectorWrapper(OfEnvPool(batch_size=2), tmp_path / "t")
    assert not (tmp_path / "t").exists()


@needs_vectors
@pytest.mark.parametrize("filtered", [False, True])
def test_a_masked_reset_that_answers_with_the_lanes_it_reset_is_recorded(tmp_path: Path, filtered: bool) -> None:
    more: dict[str, Any] = {"episode_filter": lambda episode: True} if filtered else {}
    envs = gym_trace.TraceRecordingVectorWrapper(OfEnvPool(), tmp_path / "t", record_infos=True, **more)
    envs.reset()
    envs.step(np.zeros(4, np.int64))
    envs.reset(options={"reset_mask": np.array([False, True, False, True])})
    for _ in range(3):
        envs.step(np.zeros(4, np.int64))
    envs.close()
    kept = sorted(open_trace(tmp_path / "t"), key=lambda episode: (episode.lane, episode.episode_id))
    counts = [(0, [0, 1, 2, 3]), (0, [0]), (1, [0, 1]), (1, [0, 1, 2, 3])]
    counts += [(lane + 2, told) for lane, told in counts]
    assert [(e.lane, (e.observations[:, 0] - 100 * e.lane).tolist()) for e in kept] == counts
    outcomes = ["terminated", "closed", "cut", "terminated"] * 2
    assert [episode.outcome for episode in kept] == outcomes
    assert [episode.reset_info["env_id"] for episode in kept] == [episode.lane for episode in kept]
    assert {(e.lane, info["players"]["env_id"]) for e in kept for info in e.infos} == {(n, n) for n in range(4)}


@needs_vectors
@pytest.mark.parametrize("where", ["of another kind", "in its arguments"])
def test_a_spec_that_cannot_be_copied_is_described_as_far_as_it_goes(tmp_path: Path, where: str) -> None:
    envs: Any = OfSuperSuit()
    if where == "of another kind":
        envs.spec = threading.Lock()
    else:
        envs.spec = gymnasium.envs.registration.EnvSpec(
            "Lock-v0", "nowhere:Env", kwargs={"lock": threading.Lock(), "num_envs": 2}
        )
    env = gym_trace.TraceRecordingVectorWrapper(envs, tmp_path / "t")
    env.reset()
    env.close()
    description = index_of(open_trace(tmp_path / "t")).readers[0].schema["environment"]
    assert description["id"] == (None if where == "of another kind" else "Lock-v0")
    assert "spec" in description["note"]


@needs_vectors
def test_a_recorder_that_could_not_be_made_leaves_the_environment_open(tmp_path: Path) -> None:
    envs = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    with pytest.raises(InvalidOption):
        gym_trace.TraceRecordingVectorWrapper(envs, tmp_path / "t", reward_classes=[1], frame_filter=bool)
    assert not envs.closed
    envs.close()


@needs_vectors
def test_a_vector_environment_is_not_taken_for_a_single_one(tmp_path: Path) -> None:
    class Both(OfSuperSuit, gymnasium.Env):  # type: ignore[type-arg, misc]
        pass

    with pytest.raises(InvalidOption, match="use TraceRecordingVectorWrapper"):
        TraceRecordingWrapper(Both(), tmp_path / "t")


@needs_vectors
def test_a_single_environment_is_not_taken_for_a_vector(tmp_path: Path) -> None:
    single: Any = gymnasium.make("CartPole-v1")
    with pytest.raises(InvalidOption, match="use TraceRecordingWrapper"):
        gym_trace.TraceRecordingVectorWrapper(single, tmp_path)
    assert not list(tmp_path.iterdir())


class Simulator:
    """An environment of another library, without any attribute of Gymnasium's."""

    def __init__(self) -> None:
        self.now = 0

    def told(self) -> Any:
        return np.array([self.now], np.float32)


class View(gymnasium.Env[Any, Any]):
    """A wrapper whose innermost environment is not Gymnasium's, as robosuite's GymWrapper."""

    observation_space, action_space = spaces.Box(0, 99, (1,)), spaces.Discrete(2)

    def __init__(self) -> None:
        self.env = Simulator()

    @property
    def unwrapped(self) -> Any:
        return self.env

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.env.now = 0
        return self.env.told(), {}

    def step(self, action: Any) -> Any:
        self.env.now += 1
        return self.env.told(), 1.0, self.env.now == 9, False, {}


def make_limited_view() -> Any:
    return gymnasium.wrappers.TimeLimit(View(), 5)


@pytest.mark.parametrize("make", [View, make_limited_view])
def test_a_foreign_unwrapped_environment_is_recorded_and_verified(tmp_path: Path, make: Any) -> None:
    with TraceRecordingWrapper(make(), tmp_path / "t") as env:
        gym_trace.record_episodes(env, episodes=3, seed=0)
    trace = open_trace(tmp_path / "t")
    described = trace.env_spec
    assert described["class"] == f"{__name__}.Simulator"
    assert described["wrappers"][-1] == f"{__name__}.View"
    assert {verdict.verdict for verdict in gym_trace.verify_trace(trace, make_env=make)} == {"identical"}
    stands: Any = gym_trace.env_at(trace, 2, 4, make_env=make)
    assert stands.unwrapped.now == 4
    with pytest.raises(InvalidOption, match="states=2: Simulator offers no state"):
        TraceRecordingWrapper(make(), tmp_path / "s", states=2)


@needs_vectors
def test_lanes_whose_unwrapped_is_not_gymnasiums_are_recorded_and_verified(tmp_path: Path) -> None:
    envs = gymnasium.vector.SyncVectorEnv([make_limited_view] * 2)
    recorder = gym_trace.TraceRecordingVectorWrapper(envs, tmp_path / "t")
    recorder.reset(seed=3)
    for _ in range(20):
        recorder.step(recorder.action_space.sample())
    recorder.close()
    verdicts = list(gym_trace.verify_trace(tmp_path / "t", make_env=make_limited_view))
    assert len(verdicts) > 4
    assert {verdict.verdict for verdict in verdicts} == {"identical"}


def test_metadata_of_none_does_not_hinder_a_replay_with_a_render_mode(tmp_path: Path) -> None:
    class Plain(CountingEnv):
        metadata: Any = None

    with TraceRecordingWrapper(Plain(length=4), tmp_path / "t") as env:
        gym_trace.record_episodes(env, episodes=1, seed=0)
    with pytest.raises(EnvironmentUnavailable, match="without render_mode='ansi'"):
        gym_trace.env_at(tmp_path / "t", 0, 2, make_env=lambda: Plain(length=4), render_mode="ansi")
