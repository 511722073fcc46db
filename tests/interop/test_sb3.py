"""Whether a filled buffer is what Stable-Baselines3 would have collected itself, and whether it trains from it."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from gym_trace import TraceRecordingWrapper, export, open_trace
from gym_trace.errors import InvalidOption, TraceExists, UnreadableRecording
from gym_trace.interop.conformance import Loaded, check_export, check_exporter
from gym_trace.interop.learners.sb3 import ReplayBufferExporter

sb3 = pytest.importorskip("stable_baselines3")
from gym_trace.interop.sb3 import load_replay_buffer  # noqa: E402

COLUMNS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
EXAMPLES = Path(__file__).parents[2] / "examples"
REFUSED = {"dict", "tuple", "integers", "several-rewards"}  # nested, no dict, actions from -2 on, several rewards
REAL_REFUSED = ("Blackjack", "nested")


def load(path: Path) -> Iterator[Loaded]:
    buffer = load_replay_buffer(path)
    assert buffer.full
    file = np.load(path)
    exact, identities = file["actions"], file["gym_trace.jsonl"].decode().splitlines()
    assert buffer.dones[-1, 0]
    ends = np.flatnonzero(buffer.dones[:, 0]) + 1
    assert len(ends) == len(identities)
    recorded = [key for key in file.files if key.startswith("observations")]
    shapes = {key.partition("/")[2]: file[key].shape[1:] for key in recorded}
    for start, stop, identity in zip([0, *ends[:-1].tolist()], ends.tolist(), identities):
        where = slice(start, stop)
        one = [_rows(buffer, key, shape, where) for key, shape in shapes.items()]
        observations = dict(zip(shapes, one)) if "" not in shapes else one[0]
        is_scaled = isinstance(buffer.action_space, spaces.Box) and not (np.abs(buffer.action_space.high) == 1).all()
        actions = exact[where] if is_scaled else buffer.actions[where, 0].reshape(exact[where].shape)
        ended, timed_out = buffer.dones[where, 0] > 0, buffer.timeouts[where, 0] > 0
        yield Loaded(observations, actions, buffer.rewards[where, 0], ended & ~timed_out, timed_out, identity=identity)


def _rows(buffer: Any, key: str, shape: tuple[int, ...], where: slice) -> Any:
    """Of one episode: all observations, of which the last is that which the last step led to."""
    both = [(table[key] if key else table)[where, 0] for table in (buffer.observations, buffer.next_observations)]
    assert both[0][1:].tobytes() == both[1][:-1].tobytes()
    rows = np.concatenate((both[0], both[1][-1:]))
    if rows.shape[1:] != shape and len(shape) == 3:
        rows = np.moveaxis(rows, 1, -1)
    return rows.reshape(len(rows), *shape)


def test_what_the_buffer_has_is_the_trace(tmp_path: Path) -> None:
    only = set(check_exporter(ReplayBufferExporter(), load, tmp_path, suffix=".npz"))
    assert only == REFUSED


def test_what_the_buffer_has_of_a_real_environment_is_the_trace(real: Path, tmp_path: Path) -> None:
    if real.name in REAL_REFUSED:
        with pytest.raises(InvalidOption, match="FlattenObservation"):
            export(real, tmp_path / "out.npz", "sb3")
        return
    check_export(ReplayBufferExporter(), load, real, tmp_path / "out.npz")


def collected(env: Any, algorithm: str, policy: str, steps: int, tmp_path: Path, **options: Any) -> tuple[Any, Any]:
    """What a model has collected, and what it is filled with from a trace of the same steps."""
    recorder = TraceRecordingWrapper(env, tmp_path / "trace")
    common: dict[str, Any] = {"buffer_size": steps, "learning_starts": steps + 1, "seed": 0, "device": "cpu"}
    model = getattr(sb3, algorithm)(policy, recorder, **common, **options)
    model.learn(steps)
    recorder.close()
    export(tmp_path / "trace", tmp_path / "out.npz", "sb3")
    own = model.replay_buffer
    assert load_replay_buffer(tmp_path / "out.npz", model) is model.replay_buffer
    return own, model.replay_buffer


def assert_same(own: Any, filled: Any, inexact: tuple[str, ...] = ()) -> None:
    assert (type(own), own.pos, own.full, own.buffer_size) == (
        type(filled),
        filled.pos,
        filled.full,
        filled.buffer_size,
    )
    for name in COLUMNS:
        one, other = getattr(own, name), getattr(filled, name)
        for key in one if isinstance(one, dict) else [""]:
            mine, theirs = (array[key] if key else array for array in (one, other))
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            if name in ("dones", "timeouts"):  # the last episode has not ended for the one, and is cut for the other
                mine, theirs = mine[: own.pos - 1 or None], theirs[: own.pos - 1 or None]
            if name in inexact:
                assert np.allclose(mine, theirs, rtol=0, atol=5e-7)
            else:
                assert mine.tobytes() == theirs.tobytes(), name


def test_it_is_bit_for_bit_what_dqn_has_collected(tmp_path: Path) -> None:
    env = gymnasium.make("CartPole-v1", max_episode_steps=25)
    own, filled = collected(env, "DQN", "MlpPolicy", 400, tmp_path)
    assert own.timeouts.any()
    assert (own.dones > own.timeouts).any()
    assert_same(own, filled)


def test_it_is_what_sac_has_collected_with_actions_scaled_as_its_policy_does(tmp_path: Path) -> None:
    own, filled = collected(gymnasium.make("Pendulum-v1"), "SAC", "MlpPolicy", 450, tmp_path)
    assert_same(own, filled, inexact=("actions",))
    assert filled.actions.max() <= 1


class Goal(gymnasium.Env[Any, Any]):
    """Observations of every kind that Stable-Baselines3 takes in a dict."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (40, 48, 3), np.uint8),
            "place": spaces.Box(-1, 1, (2, 2), np.float64),
            "side": spaces.Discrete(3),
            "of/several": spaces.MultiDiscrete([2, 3]),
            "bits": spaces.MultiBinary(4),
        }
    )
    action_space = spaces.Box(np.float32([-3, 0]), np.float32([1, 10]))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        over = self.count == 7
        return self.observation_space.sample(), float(action.sum()), over and action[0] > 0, over and action[0] <= 0, {}


def test_it_is_what_sac_has_collected_of_dicts(tmp_path: Path) -> None:
    own, filled = collected(Goal(), "SAC", "MultiInputPolicy", 60, tmp_path)
    assert_same(own, filled, inexact=("actions",))


def test_it_has_images_as_cnn_policies_see_them(record: Callable[[str], Path], tmp_path: Path) -> None:
    export(record("Pong"), tmp_path / "out.npz", "sb3")
    env = open_trace(record("Pong")).make_env()
    model = sb3.DQN("CnnPolicy", env, buffer_size=10, device="cpu")
    buffer = load_replay_buffer(tmp_path / "out.npz", model)
    assert buffer.observations.shape == (160, 1, 3, 210, 160)
    _train(model, 1)


@pytest.mark.parametrize(
    ("name", "algorithm", "options"),
    [
        ("CartPole", "DQN", {}),
        ("CartPole", "DQN", {"n_steps": 3}),
        ("Taxi", "DQN", {}),
        ("Pendulum", "SAC", {}),
        ("HalfCheetah", "TD3", {}),
        ("HalfCheetah", "SAC", {"replay_buffer_kwargs": {"handle_timeout_termination": False}}),
    ],
)
def test_gradient_steps_are_taken_from_it(
    name: str, algorithm: str, options: Any, record: Callable[[str], Path], tmp_path: Path
) -> None:
    trace = open_trace(record(name))
    export(trace, tmp_path / "out.npz", "sb3")
    model = getattr(sb3, algorithm)("MlpPolicy", trace.make_env(), device="cpu", buffer_size=1000, seed=0, **options)
    buffer = load_replay_buffer(tmp_path / "out.npz", model)
    assert buffer.size() == trace.episodes["steps"].sum()
    before = [parameter.detach().clone() for parameter in model.policy.parameters()]
    _train(model, 5)
    assert any((one != other).any() for one, other in zip(before, model.policy.parameters()))
    model.learning_starts = 0
    model.learn(20)  # and goes on from there
    assert buffer.size() == trace.episodes["steps"].sum() + 20


def _train(model: Any, steps: int) -> None:
    model.set_logger(sb3.common.logger.configure(None, []))
    model.train(gradient_steps=steps, batch_size=16)


def test_a_model_of_several_environments_has_as_many_steps_of_each(
    record: Callable[[str], Path], tmp_path: Path
) -> None:
    export(record("CartPole"), tmp_path / "out.npz", "sb3")
    model = sb3.DQN("MlpPolicy", sb3.common.env_util.make_vec_env("CartPole-v1", 7), device="cpu", buffer_size=700)
    with pytest.warns(UserWarning, match="the last 3 of 220 steps are left out"):
        buffer = load_replay_buffer(tmp_path / "out.npz", model)
    flat = np.load(tmp_path / "out.npz")["observations"][:217]
    assert np.array_equal(buffer.observations[:31].swapaxes(0, 1).reshape(217, 4), flat)
    assert (buffer.pos, buffer.full, buffer.buffer_size) == (31, False, 100)
    _train(model, 2)


def test_its_own_pickle_of_it_is_read_by_load_replay_buffer(record: Callable[[str], Path], tmp_path: Path) -> None:
    export(record("CartPole"), tmp_path / "out.npz", "sb3")
    model = sb3.DQN("MlpPolicy", "CartPole-v1", device="cpu", buffer_size=300)
    before = load_replay_buffer(tmp_path / "out.npz", model)
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    model.load_replay_buffer(tmp_path / "buffer.pkl")
    assert_same(before, model.replay_buffer)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: sb3.SAC("MlpPolicy", "Pendulum-v1"), "observations are of shape"),
        (lambda: sb3.DQN("MlpPolicy", "MountainCar-v0"), "observations are of shape"),
        (lambda: sb3.PPO("MlpPolicy", "CartPole-v1"), "PPO has no replay buffer"),
        (lambda: sb3.DQN("MlpPolicy", "CartPole-v1", optimize_memory_usage=True,
                         replay_buffer_kwargs={"handle_timeout_termination": False}), "optimize_memory_usage"),
        (lambda: sb3.DQN("MlpPolicy", sb3.common.env_util.make_vec_env("CartPole-v1", 221)), "too few"),
    ],
)  # fmt: skip
def test_what_does_not_fit_a_model_is_said(
    make: Callable[[], Any], problem: str, record: Callable[[str], Path], tmp_path: Path
) -> None:
    export(record("CartPole"), tmp_path / "out.npz", "sb3")
    with pytest.raises(InvalidOption, match=problem):
        load_replay_buffer(tmp_path / "out.npz", make())


def test_what_is_something_else_is_refused(record: Callable[[str], Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad.npz"
    bad.write_bytes(b"no zip")
    with pytest.raises(UnreadableRecording, match=r"bad\.npz"):
        load_replay_buffer(bad)
    np.savez(bad, observations=np.zeros(3))
    with pytest.raises(UnreadableRecording, match=r"bad\.npz"):
        load_replay_buffer(bad)
    export(record("CartPole"), tmp_path / "out.npz", "sb3")
    for name, forged in (
        ("rewards", _npy(np.array([None] * 220))),
        ("rewards", _npy(np.zeros(219))),
        ("actions", _npy(np.zeros(220, np.int64))[:-8]),
        ("observations", b"\x93NUMPY\x01\x00"),
        ("observations", _npy(np.zeros((220, 4), np.float32)).replace(b"(220, 4)", b"(10**9,)")),
    ):
        shutil.copy(tmp_path / "out.npz", bad)
        _replace(bad, f"{name}.npy", forged)
        with pytest.raises(UnreadableRecording, match=r"bad\.npz"):
            load_replay_buffer(bad)
    with pytest.raises(FileNotFoundError):
        load_replay_buffer(tmp_path / "nowhere.npz")


def _npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def _replace(path: Path, member: str, data: bytes) -> None:
    with zipfile.ZipFile(path) as archive:
        kept = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**kept, member: data}.items():
            archive.writestr(name, content)


def test_the_example_trains(record: Callable[[str], Path]) -> None:
    command = [sys.executable, str(EXAMPLES / "train_sb3.py"), str(record("CartPole")), "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert " -> " in done.stdout


@pytest.mark.parametrize("kind", ["DummyVecEnv", "SubprocVecEnv"])
def test_the_environments_of_make_vec_env_record_into_one_directory(tmp_path: Path, kind: str) -> None:
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
