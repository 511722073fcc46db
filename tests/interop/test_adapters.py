"""Objects of learning libraries hold the steps of the trace, bit for bit, and their algorithms train on them."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from planted_defects import check_adapter

import gym_trace
from gym_trace import Trace, TraceRecordingWrapper, import_trace, open_trace
from gym_trace.data.episode import infos_of
from gym_trace.errors import InvalidOption, MissingExtra, TraceError, TraceExists
from gym_trace.exchange.formats.conformance import Loaded

NO_ARRAYS = {"text"}


def adapter(name: str) -> Any:
    """Return a module of gym_trace.exchange; skip the test where its library is not installed."""
    try:
        return importlib.import_module(f"gym_trace.exchange.{name}")
    except MissingExtra as missing:
        pytest.skip(str(missing))


def ends_of(count: int, terminated: bool, truncated: bool) -> np.ndarray:
    ends = np.zeros((2, count), np.bool_)
    ends[:, -1] = terminated, truncated
    return ends


class Acting(gymnasium.Env[Any, Any]):
    """Two episodes of five steps."""

    def __init__(self, action_space: Any, observation_space: Any = spaces.Box(-1, 1, (3,))):  # noqa: B008
        self.action_space, self.observation_space = action_space, observation_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.observation_space.sample(), 0.0, self.count == 5, False, {}


def acting(action_space: Any, directory: Path, *observation_space: Any) -> Path:
    """Record a trace with random actions of a space."""
    with TraceRecordingWrapper(Acting(action_space, *observation_space), directory, on_exist="append") as env:
        gym_trace.record_episodes(env, episodes=2, seed=0)
    return directory


# -- d3rlpy -----------------------------------------------------------------------------------------------------------


def d3rlpy_episodes(trace: Trace) -> Iterator[Loaded]:
    replay_buffer = adapter("d3rlpy").replay_buffer
    for episode in replay_buffer(trace).episodes:
        assert episode.rewards.dtype == np.float32
        observations = episode.observations
        if isinstance(observations, np.ndarray) and observations.ndim == 4:
            observations = np.moveaxis(observations, 1, -1)
        elif not isinstance(observations, np.ndarray):
            observations = tuple(np.moveaxis(rows, 1, -1) if rows.ndim == 4 else rows for rows in observations)
        flags = ends_of(len(episode), episode.terminated, not episode.terminated)
        yield Loaded(observations, episode.actions, episode.rewards[:, 0], *flags)


def test_d3rlpy_holds_the_trace(tmp_path: Path) -> None:
    pytest.importorskip("d3rlpy")
    lost = {"final_observation", "structure", "dtype", "flags", "empty_episode"}
    rejected = check_adapter(d3rlpy_episodes, tmp_path, lost=lost)
    assert set(rejected) == NO_ARRAYS | {"dict", "integers", "several-integers", "several-rewards"}


@pytest.mark.parametrize("space", [spaces.Discrete(3, start=5), spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(2)])
def test_d3rlpy_gets_no_actions_that_it_cannot_take(tmp_path: Path, space: Any) -> None:
    replay_buffer = adapter("d3rlpy").replay_buffer
    with pytest.raises(InvalidOption, match="d3rlpy"):
        replay_buffer(acting(space, tmp_path / "trace"))


@pytest.mark.parametrize(("name", "algorithm"), [("CartPole", "DiscreteCQL"), ("Pendulum", "CQL")])
def test_d3rlpy_trains(name: str, algorithm: str, record: Callable[[str], Path]) -> None:
    d3rlpy = pytest.importorskip("d3rlpy")
    replay_buffer = adapter("d3rlpy").replay_buffer
    buffer = replay_buffer(record(name))
    made = getattr(d3rlpy.algos, f"{algorithm}Config")(batch_size=32).create()
    nowhere = d3rlpy.logging.NoopAdapterFactory()
    made.fit(buffer, n_steps=20, n_steps_per_epoch=10, show_progress=False, logger_adapter=nowhere)
    assert made.predict(buffer.episodes[0].observations[:4]).shape[0] == 4


def test_d3rlpy_makes_no_transition_across_episodes(record: Callable[[str], Path]) -> None:
    replay_buffer = adapter("d3rlpy").replay_buffer
    trace = open_trace(record("CartPole"))
    terminated = np.count_nonzero(trace.episodes["outcome"] == "terminated")
    assert replay_buffer(trace).transition_count == trace.episodes["steps"].sum() - len(trace) + terminated


def test_d3rlpy_takes_one_image_of_a_dict(record: Callable[[str], Path]) -> None:
    replay_buffer = adapter("d3rlpy").replay_buffer
    buffer, trace = replay_buffer(record("nested"), observation="camera"), open_trace(record("nested"))
    images = trace[0].observations["camera"][:-1]
    assert np.array_equal(np.moveaxis(buffer.episodes[0].observations, 1, -1), images)
    with pytest.raises(InvalidOption, match="camera"):
        replay_buffer(trace, observation="picture")


# -- imitation --------------------------------------------------------------------------------------------------------


def imitation_trajectories(trace: Trace) -> Iterator[Loaded]:
    trajectories = adapter("imitation").trajectories
    ended = trace[trace.episodes["steps"] > 0]
    for trajectory, episode in zip(trajectories(trace), ended, strict=True):
        assert trajectory.terminal == bool(episode.terminations[-1] or episode.truncations[-1])
        observations = trajectory.obs if isinstance(trajectory.obs, np.ndarray) else dict(trajectory.obs.items())
        infos = None if trajectory.infos is None else list(trajectory.infos)
        assert repr(infos) == repr(infos_of(episode))
        yield Loaded(observations, trajectory.acts, trajectory.rews, episode.terminations, episode.truncations)


def test_imitation_holds_the_trace(tmp_path: Path) -> None:
    pytest.importorskip("imitation")
    rejected = check_adapter(imitation_trajectories, tmp_path, lost={"empty_episode"})
    assert set(rejected) == NO_ARRAYS | {"dict", "tuple", "several-rewards"}


def test_imitation_clones(record: Callable[[str], Path]) -> None:
    bc = pytest.importorskip("imitation.algorithms.bc")
    trajectories = adapter("imitation").trajectories
    trace = open_trace(record("CartPole"))
    trainer = bc.BC(
        observation_space=trace.observation_space,
        action_space=trace.action_space,
        demonstrations=trajectories(trace),
        rng=np.random.default_rng(0),
        batch_size=16,
    )
    trainer.train(n_batches=10, progress_bar=False)
    assert trace.action_space.contains(trainer.policy.predict(trace[0].observations[0])[0])


# -- Stable-Baselines3 ------------------------------------------------------------------------------------------------


def sb3_transitions(trace: Trace) -> Iterator[Loaded]:
    replay_buffer = adapter("sb3").replay_buffer
    buffer = replay_buffer(trace)
    assert buffer.full
    stops = (np.flatnonzero(buffer.dones[:, 0]) + 1).tolist()
    scale = buffer.action_space if isinstance(buffer.action_space, spaces.Box) else None
    for start, stop in zip([0, *stops], stops):
        at = slice(start, stop)
        observations = sb3_rows(buffer.observations, buffer.next_observations, at)
        actions = buffer.actions[at, 0]
        if scale is not None:
            assert (scale.low == -1).all()
            assert (scale.high == 1).all()
        timeouts = buffer.timeouts[at, 0] > 0
        terminated = (buffer.dones[at, 0] > 0) & ~timeouts
        yield Loaded(observations, actions, buffer.rewards[at, 0], terminated, timeouts)


def sb3_rows(before: Any, after: Any, at: slice) -> Any:
    """All observations of an episode, of which the last is that which the last step led to."""
    if isinstance(before, dict):
        return {key: sb3_rows(rows, after[key], at) for key, rows in before.items()}
    assert before[at, 0][1:].tobytes() == after[at, 0][:-1].tobytes()
    rows = np.concatenate((before[at, 0], after[at, 0][-1:]))
    return np.moveaxis(rows, 1, -1) if rows.ndim == 4 else rows


def test_sb3_holds_the_trace(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    lost = {"structure", "dtype", "flags", "empty_episode"}
    rejected = check_adapter(sb3_transitions, tmp_path, lost=lost)
    assert set(rejected) == NO_ARRAYS | {"dict", "tuple", "integers", "several-rewards"}


class Goals(gymnasium.Env[Any, Any]):
    """Goal-based, with infos that its reward is computed from."""

    observation_space = spaces.Dict(
        {key: spaces.Box(-9, 9, (2,)) for key in ("observation", "achieved_goal", "desired_goal")}
    )
    action_space = spaces.Box(np.float32([-3, 0]), np.float32([1, 10]))

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def _observed(self) -> dict[str, Any]:
        return {key: self.random.normal(size=2).astype(np.float32) for key in self.observation_space}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count = 0
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        ended = self.count == 7
        info = {"scale": float(self.count)}
        return self._observed(), float(action.sum()), ended and action[0] > 0, ended and action[0] <= 0, info

    def compute_reward(self, achieved: Any, desired: Any, infos: Any) -> Any:
        assert all("scale" in info for info in infos)
        return -np.linalg.norm(achieved - desired, axis=-1).astype(np.float32)


@pytest.mark.parametrize(
    ("make", "algorithm", "policy", "options"),
    [
        (lambda: gymnasium.make("CartPole-v1", max_episode_steps=25), "DQN", "MlpPolicy", {}),
        (lambda: gymnasium.make("Pendulum-v1"), "SAC", "MlpPolicy", {}),
        (Goals, "SAC", "MultiInputPolicy", {}),
        (Goals, "SAC", "MultiInputPolicy", {"her": True}),
    ],
)
def test_sb3_gets_what_it_would_have_collected_itself(
    make: Callable[[], Any], algorithm: str, policy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    replay_buffer = adapter("sb3").replay_buffer
    common: dict[str, Any] = {"buffer_size": 420, "learning_starts": 421, "seed": 0, "device": "cpu"}
    if options.get("her"):
        common |= {"replay_buffer_class": sb3.HerReplayBuffer, "replay_buffer_kwargs": {"copy_info_dict": True}}
    recorder = TraceRecordingWrapper(make(), tmp_path / "trace", record_infos=True)
    collector = getattr(sb3, algorithm)(policy, recorder, **common)
    collector.learn(420)
    recorder.close()
    model = getattr(sb3, algorithm)(policy, make(), **common)
    own, filled = collector.replay_buffer, replay_buffer(tmp_path / "trace", model)
    assert filled is model.replay_buffer
    assert (own.pos, own.full) == (filled.pos, filled.full)
    names = ["observations", "next_observations", "actions", "rewards", "dones", "timeouts"]
    for name in names + (["ep_start", "ep_length"] if options.get("her") else []):
        one, other = getattr(own, name), getattr(filled, name)
        for key in one if isinstance(one, dict) else [None]:
            mine, theirs = (array if key is None else array[key] for array in (one, other))
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            if name in ("dones", "timeouts", "ep_length"):  # the last episode goes on there, and is cut in the trace
                mine, theirs = mine[:400], theirs[:400]
            assert np.allclose(mine, theirs, rtol=0, atol=5e-7) if name == "actions" else np.array_equal(mine, theirs)
    model.set_logger(sb3.common.logger.configure(None, []))
    model.train(gradient_steps=3, batch_size=16)


def test_sb3_divides_the_steps_among_environments(record: Callable[[str], Path]) -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    replay_buffer = adapter("sb3").replay_buffer
    model = sb3.DQN("MlpPolicy", sb3.common.env_util.make_vec_env("CartPole-v1", 7), device="cpu", buffer_size=700)
    with pytest.warns(UserWarning, match="skipped the last 3 steps"):
        buffer = replay_buffer(record("CartPole"), model)
    flat = np.concatenate([episode.observations[:-1] for episode in open_trace(record("CartPole"))])[:217]
    assert np.array_equal(buffer.observations[:31].swapaxes(0, 1).reshape(217, 4), flat)
    assert (buffer.pos, buffer.full) == (31, False)


def test_sb3_has_images_as_cnn_policies_see_them(record: Callable[[str], Path]) -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    replay_buffer = adapter("sb3").replay_buffer
    trace = open_trace(record("Pong"))[:1]
    steps = len(trace[0])
    model = sb3.DQN("CnnPolicy", trace.make_env(), buffer_size=steps, device="cpu")
    buffer = replay_buffer(trace, model)
    assert np.array_equal(np.moveaxis(buffer.observations[:, 0], 1, -1), trace[0].observations[:-1])


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda sb3: sb3.SAC("MlpPolicy", "Pendulum-v1"), "does not fit"),
        (lambda sb3: sb3.DQN("MlpPolicy", "MountainCar-v0"), "does not fit"),
        (lambda sb3: sb3.PPO("MlpPolicy", "CartPole-v1"), "PPO has no replay buffer"),
        (lambda sb3: sb3.DQN("MlpPolicy", "CartPole-v1", buffer_size=219), "buffer_size=220"),
        (lambda sb3: sb3.DQN("MlpPolicy", sb3.common.env_util.make_vec_env("CartPole-v1", 221)), "221 environments"),
    ],
)
def test_sb3_models_that_do_not_fit_are_rejected(
    make: Callable[[Any], Any], problem: str, record: Callable[[str], Path]
) -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    replay_buffer = adapter("sb3").replay_buffer
    model = make(sb3)
    with pytest.raises(InvalidOption, match=problem):
        replay_buffer(record("CartPole"), model)
    if getattr(model, "replay_buffer", None) is not None:
        assert not model.replay_buffer.size()


def test_sb3_scales_actions_for_models_after_rescale_action(record: Callable[[str], Path]) -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    replay_buffer = adapter("sb3").replay_buffer
    plain = gymnasium.make("Pendulum-v1")
    rescaled = gymnasium.wrappers.RescaleAction(gymnasium.make("Pendulum-v1"), np.float32(-1), np.float32(1))
    own, other = (
        replay_buffer(record("Pendulum"), sb3.SAC("MlpPolicy", env, buffer_size=300, device="cpu")).actions
        for env in (plain, rescaled)
    )
    assert own.tobytes() == other.tobytes()
    recorded_actions = np.concatenate([episode.actions for episode in open_trace(record("Pendulum"))])
    assert np.abs(recorded_actions).max() > 1.9
    assert np.allclose(own[: len(recorded_actions), 0], recorded_actions / 2, rtol=0, atol=1e-6)


_UNIT = spaces.Box(-1, 1, (3,))


@pytest.mark.parametrize(
    ("recorded", "model"),
    [
        ((spaces.Discrete(3, start=5), _UNIT), (spaces.Discrete(3), _UNIT)),
        ((spaces.Discrete(3), _UNIT), (spaces.Discrete(2), _UNIT)),
        ((spaces.Discrete(2), _UNIT), (spaces.Discrete(3), _UNIT)),
        ((spaces.Box(-2, 2, (1,)), _UNIT), (spaces.Box(-4, 4, (1,)), _UNIT)),
        ((spaces.Box(-2, 2, (1,)), _UNIT), (spaces.Box(-1, 1, (2,)), _UNIT)),
        ((spaces.Discrete(2), spaces.Box(-9, 9, (3,))), (spaces.Discrete(2), _UNIT)),
        ((spaces.Discrete(2), _UNIT), (spaces.Discrete(2), spaces.Box(0, 255, (3,), np.uint8))),
        ((spaces.Discrete(2), spaces.Box(0, 255, (3,), np.uint8)), (spaces.Discrete(2), _UNIT)),
        ((spaces.Discrete(2), spaces.Discrete(3)), (spaces.Discrete(2), spaces.Discrete(4))),
    ],
    ids=str,
)
def test_sb3_models_of_other_spaces_are_rejected(recorded: Any, model: Any, tmp_path: Path) -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    replay_buffer = adapter("sb3").replay_buffer
    trace = acting(recorded[0], tmp_path / "trace", recorded[1])
    algorithm = sb3.DQN if isinstance(model[0], spaces.Discrete) else sb3.SAC
    made = algorithm("MlpPolicy", Acting(*model), buffer_size=300, device="cpu")
    with pytest.raises(InvalidOption, match=r"trace does not fit|numbers actions from 0|lie outside of"):
        replay_buffer(trace, made)
    assert not made.replay_buffer.size()


@pytest.mark.parametrize("largest", [2.0, 2.1])
def test_sb3_takes_imported_actions_within_the_bounds_of_the_model(largest: float, tmp_path: Path) -> None:
    h5py, sb3 = pytest.importorskip("h5py"), pytest.importorskip("stable_baselines3")
    replay_buffer = adapter("sb3").replay_buffer
    with h5py.File(tmp_path / "file.hdf5", "w") as file:
        file["observations"], file["rewards"] = np.zeros((8, 3), np.float32), np.zeros(8)
        file["actions"] = np.linspace(-2, largest, 8, dtype=np.float32)[:, None]
        file["terminals"] = np.arange(8) == 7
    import_trace(tmp_path / "file.hdf5", tmp_path / "trace")
    model = sb3.SAC("MlpPolicy", "Pendulum-v1", buffer_size=300, device="cpu")
    if largest > 2:
        with pytest.raises(InvalidOption, match="1 numbers of an episode lie outside"):
            replay_buffer(tmp_path / "trace", model)
    else:
        buffer = replay_buffer(tmp_path / "trace", model)
        assert np.allclose(buffer.actions[:8, 0, 0], np.linspace(-1, 1, 8))


def test_writers_of_different_spaces_are_rejected(tmp_path: Path) -> None:
    trajectories = adapter("imitation").trajectories
    for space in (spaces.Box(-1, 1, (1,)), spaces.Box(-2, 2, (1,))):
        acting(space, tmp_path / "trace")
    with pytest.raises(TraceError, match="different values of action_space"):
        trajectories(tmp_path / "trace")


@pytest.mark.parametrize("kind", ["DummyVecEnv", "SubprocVecEnv"])
def test_the_environments_of_make_vec_env_record_into_one_directory(tmp_path: Path, kind: str) -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common import vec_env
    from stable_baselines3.common.env_util import make_vec_env

    envs = make_vec_env(
        "CartPole-v1",
        n_envs=3,
        seed=5,
        wrapper_class=TraceRecordingWrapper,
        wrapper_kwargs={"directory": tmp_path / "trace"},
        vec_env_cls=getattr(vec_env, kind),
    )
    sb3.PPO("MlpPolicy", envs, n_steps=64, seed=5, device="cpu").learn(192)
    envs.close()
    trace = open_trace(tmp_path / "trace")
    assert int(trace.episodes["steps"].sum()) == 192
    assert len({*trace.episodes["writer"].tolist()}) == 3
    assert {episode.seed for episode in trace} >= {5, 6, 7}
    with pytest.raises(TraceExists):
        make_vec_env(
            "CartPole-v1", wrapper_class=TraceRecordingWrapper, wrapper_kwargs={"directory": tmp_path / "trace"}
        )


def test_a_trace_without_finished_steps_is_rejected(tmp_path: Path) -> None:
    trajectories = adapter("imitation").trajectories
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / "trace")
    env.reset(seed=0)
    env.close()
    with pytest.raises(InvalidOption, match="no finished episodes"):
        trajectories(tmp_path / "trace")


# -- RLlib ------------------------------------------------------------------------------------------------------------


def rllib_episodes(trace: Trace) -> Iterator[Loaded]:
    episodes = adapter("rllib").episodes
    ended = trace[trace.episodes["steps"] > 0]
    for made, episode in zip(episodes(trace, normalize_actions=False), ended, strict=True):
        assert made.is_done
        assert made.is_terminated == bool(episode.terminations[-1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts = [made.get_observations(), made.get_actions(), made.get_rewards()]
        yield Loaded(*parts, *ends_of(len(episode), made.is_terminated, made.is_truncated))


def test_rllib_holds_the_trace(tmp_path: Path) -> None:
    pytest.importorskip("ray.rllib")
    rejected = check_adapter(rllib_episodes, tmp_path, lost={"flags", "empty_episode"})
    assert set(rejected) == set()


def test_rllib_gets_actions_scaled_as_its_own_episodes_have_them(tmp_path: Path) -> None:
    episodes = adapter("rllib").episodes
    from ray.rllib.utils.spaces.space_utils import get_base_struct_from_space, normalize_action

    space = spaces.Dict(
        {
            "push": spaces.Box(np.float32([-2, 0]), np.float32([2, 10])),
            "rest": spaces.Tuple((spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(3))),
            "steps": spaces.Box(0, 9, (1,), np.int64),
            "unit": spaces.Box(-1, 1, (2,)),
        }
    )
    trace = open_trace(acting(space, tmp_path / "trace"))
    struct = get_base_struct_from_space(space)
    for own, made in zip(trace, episodes(trace), strict=True):
        actions = made.get_actions()
        assert np.array_equal(actions["rest"][0], own.actions["rest"][0])  # which RLlib would make NaN
        assert np.abs(own.actions["push"]).max() > 1
        for step in range(len(own)):
            row = {"push": own.actions["push"][step], "steps": own.actions["steps"][step]}
            expected = normalize_action(row, {key: struct[key] for key in row})
            assert np.array_equal(actions["push"][step], expected["push"])
            assert actions["unit"][step].tobytes() == own.actions["unit"][step].tobytes()
            assert actions["steps"][step].dtype == np.int64
            assert np.array_equal(actions["steps"][step], own.actions["steps"][step])


# -- imported episodes without a final observation --------------------------------------------------------------------


@pytest.fixture
def without_finals(tmp_path: Path) -> Trace:
    """A terminated episode of 5 steps and a truncated one of 4, imported from D4RL without next observations."""
    h5py = pytest.importorskip("h5py")
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "d4rl.hdf5", "w") as file:
        file["observations"] = rng.normal(size=(9, 3)).astype(np.float32)
        file["actions"] = rng.uniform(-1, 1, size=(9, 2)).astype(np.float32)
        file["rewards"] = rng.normal(size=9).astype(np.float32)
        file["terminals"] = np.arange(9) == 4
        file["timeouts"] = np.arange(9) == 8
    import_trace(tmp_path / "d4rl.hdf5", tmp_path / "trace")
    return open_trace(tmp_path / "trace")


def test_sb3_gets_no_unknown_observation(without_finals: Trace) -> None:
    replay_buffer = adapter("sb3").replay_buffer
    buffer = replay_buffer(without_finals)
    assert buffer.size() == 8
    assert np.isfinite(buffer.next_observations).all()
    assert buffer.dones[:, 0].tolist() == [0, 0, 0, 0, 1, 0, 0, 1]
    assert buffer.timeouts[:, 0].tolist() == [0, 0, 0, 0, 0, 0, 0, 1]


def test_imitation_and_rllib_get_no_unknown_observation(without_finals: Trace) -> None:
    trajectories = adapter("imitation").trajectories
    found = trajectories(without_finals)
    assert [(len(one), one.terminal) for one in found] == [(5, True), (3, False)]
    assert all(np.isfinite(one.obs).all() for one in found)
    episodes = adapter("rllib").episodes
    made = list(episodes(without_finals))
    assert [(len(one), one.is_terminated, one.is_truncated) for one in made] == [(5, True, False), (3, False, True)]
    assert all(np.isfinite(one.get_observations()).all() for one in made)
