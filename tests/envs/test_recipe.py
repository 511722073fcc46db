"""Ordinary environments of other people, recorded and made again from the trace alone, or with what the error names."""

import enum
import functools
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import ClipAction, FlattenObservation, RecordEpisodeStatistics, RescaleAction, TimeLimit
from rendered_env import make_rendered
from scripted_env import OddSpace, Result, ScriptedEnv, ToyEnv

import gym_trace
from gym_trace import ReplayEnv, TraceRecordingWrapper, open_trace, verify_trace
from gym_trace.data.values import Unstored
from gym_trace.envs.identity import installed_versions, versions_of
from gym_trace.errors import EnvironmentUnavailable, RenderingError
from gym_trace.playback.episode_index import index_of
from gym_trace.tools.video.simulate import play_for_humans

IS_NEW = hasattr(gymnasium.wrappers, "AddRenderObservation")  # since 1.0
needs_vectors = pytest.mark.skipif(not hasattr(gymnasium.vector, "AutoresetMode"), reason="needs gymnasium 1.1")


class Keeps(ToyEnv):
    """Keeps what it was made with."""

    observation_space = action_space = spaces.Discrete(9)

    def __init__(self, **kwargs: Any):
        self.kwargs = kwargs

    def result(self, action: Any) -> Result:
        return Result(int(self.np_random.integers(9)))


class Silent(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Does not say what it was made with."""

    def __init__(self, env: Any, factor: float = 1.0):
        super().__init__(env)
        self.factor = factor

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return (observation, float(reward) * self.factor, *rest)


class Bare(Silent):
    """Takes no arguments."""

    def __init__(self, env: Any):
        super().__init__(env, 2.0)


class Scaled(TimeLimit):
    """Only the arguments of its base class are known."""

    def __init__(self, env: Any, max_episode_steps: int, scale: float = 1.0):
        super().__init__(env, max_episode_steps)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Any:
    def register(entry_point: Any, **options: Any) -> str:
        spec = gymnasium.envs.registration.EnvSpec("Kept-v0", entry_point=entry_point, **options)
        monkeypatch.setitem(gymnasium.registry, "Kept-v0", spec)
        return "Kept-v0"

    return register


def record(env: Any, directory: Path, steps: int = 20, **options: Any) -> Path:
    recorder: Any = TraceRecordingWrapper
    if isinstance(env, gymnasium.vector.VectorEnv):
        recorder = gym_trace.TraceRecordingVectorWrapper
    env = recorder(env, directory, **options)
    env.action_space.seed(1)
    env.reset(seed=3)
    for _ in range(steps):
        env.step(env.action_space.sample())
    env.close()
    return directory


def verdicts(directory: Path, **options: Any) -> set[str]:
    return {verdict.verdict for verdict in verify_trace(directory, **options)}


ARGUMENTS = {
    "pair": (2, 5),
    "nested": {"a": [(1, 2), {"b": (3,)}]},
    "single": np.float32(0.1),
    "array": np.arange(6.0).reshape(2, 3),
    "dtype": np.dtype("<f4"),
    "kind": np.uint8,
    "builtin": float,
    "big": 2**80,
    "bigger": 10**5000,
    "nan": float("nan"),
    "name": "8x8",
    "none": None,
}


@pytest.mark.parametrize("entry_point", [Keeps, lambda **kwargs: Keeps(**kwargs), "test_recipe:Keeps"])
def test_arguments_come_back_as_they_were(tmp_path: Path, register: Any, entry_point: Any) -> None:
    record(gymnasium.make(register(entry_point), **ARGUMENTS), tmp_path)
    made = open_trace(tmp_path).make_env(trust=True).unwrapped.kwargs  # for 2**80, which may be the size of something
    assert made.keys() == ARGUMENTS.keys()
    for name, value in ARGUMENTS.items():
        assert type(made[name]) is type(value), name
        assert np.array_equal(made[name], value) if name == "array" else made[name] == value or name == "nan", name
    assert verdicts(tmp_path, trust=True) == {"identical"}
    assert json.loads(next(tmp_path.glob("*.jsonl")).read_text().splitlines()[0])


def test_a_path_comes_back_with_trust(tmp_path: Path, register: Any) -> None:
    record(gymnasium.make(register(Keeps), place=Path("some/where")), tmp_path)
    with pytest.raises(EnvironmentUnavailable, match="place="):
        open_trace(tmp_path).make_env()
    assert open_trace(tmp_path).make_env(trust=True).unwrapped.kwargs == {"place": Path("some/where")}
    assert open_trace(tmp_path).make_env(place=1).unwrapped.kwargs == {"place": 1}


def test_an_argument_that_cannot_be_stored_is_named_with_the_way_out(tmp_path: Path, register: Any) -> None:
    record(gymnasium.make(register(Keeps), act=lambda: 1), tmp_path)
    with pytest.raises(EnvironmentUnavailable, match=r"act.*could not be stored.*function.*--make.*make_env="):
        open_trace(tmp_path).make_env()
    assert open_trace(tmp_path).make_env(act=3).unwrapped.kwargs == {"act": 3}
    assert verdicts(tmp_path, make_env=Keeps) == {"identical"}


def test_a_class_that_differs_from_the_recorded_one_warns(tmp_path: Path, register: Any) -> None:
    record(gymnasium.make(register(lambda: Keeps())), tmp_path)
    register("gymnasium.envs.classic_control.cartpole:CartPoleEnv")
    with pytest.warns(UserWarning, match=r"recorded was test_recipe\.Keeps, made here is .*CartPoleEnv"):
        open_trace(tmp_path).make_env()


class Mode(enum.Enum):
    EASY, HARD = 1, 2


class Level(enum.IntEnum):
    LOW, HIGH = 1, 2


class Table:
    """Compares as a DataFrame does: element by element."""

    def __init__(self, *values: float):
        self.values = np.array(values)

    def __eq__(self, other: object) -> Any:
        return self.values == other.values  # type: ignore[attr-defined]

    def equals(self, other: Any) -> bool:
        return np.array_equal(self.values, other.values)


class Settings:
    """Says nothing of equality."""

    def __init__(self, **values: Any):
        self.values = values


REGISTERED = {
    "mode": Mode.EASY,
    "level": Level.LOW,
    "table": Table(1.0, 2.0),
    "settings": Settings(table=Table(3.0), names=["a"]),
    "nested": {"modes": [Mode.EASY]},
    "parts": functools.partial(max, 1),
}


def test_arguments_that_are_registered_need_not_be_stored(tmp_path: Path, register: Any) -> None:
    record(gymnasium.make(register(Keeps, kwargs=REGISTERED)), tmp_path)
    stored = index_of(open_trace(tmp_path)).readers[0].schema["environment"]["made"]["kwargs"]
    assert {name: form for name, (form, _) in stored.items()} == {
        "mode": "enum",
        "level": "value",
        "table": "registered",
        "settings": "registered",
        "nested": "registered",
        "parts": "unknown",  # its contents cannot be compared
    }
    made = open_trace(tmp_path).make_env(env_kwargs={"parts": None}).unwrapped.kwargs
    assert (made["mode"], type(made["level"]), made["nested"]) == (Mode.EASY, Level, {"modes": [Mode.EASY]})
    assert made["table"].equals(REGISTERED["table"])
    assert verdicts(tmp_path, env_kwargs={"parts": None}) == {"identical"}


@pytest.mark.parametrize("name", ["table", "settings", "nested"])
def test_arguments_that_replace_registered_ones_cannot_be_left_out(tmp_path: Path, register: Any, name: str) -> None:
    settings = Settings(table=Table(4.0), names=["a"])
    others = {"table": Table(9.0), "settings": settings, "nested": {"modes": [Mode.HARD]}}
    kept = register(Keeps, kwargs={name: REGISTERED[name]})
    record(gymnasium.make(kept, **{name: others[name]}), tmp_path)
    with pytest.raises(EnvironmentUnavailable, match="could not be stored"):
        open_trace(tmp_path).make_env()


def test_a_member_of_the_enum_that_is_registered_is_found_by_its_name(tmp_path: Path, register: Any) -> None:
    record(gymnasium.make(register(Keeps, kwargs={"mode": Mode.EASY}), mode=Mode.HARD), tmp_path)
    assert open_trace(tmp_path).make_env().unwrapped.kwargs["mode"] is Mode.HARD
    register(Keeps, kwargs={"mode": Level.LOW})
    with pytest.raises(EnvironmentUnavailable, match="mode could not be stored"):
        open_trace(tmp_path).make_env()


@pytest.mark.parametrize(
    "stored", [["enum", 3], ["enum", ["test_recipe.Mode", []]], ["enum", ["test_recipe.Mode", "__class__"]]], ids=str
)
def test_a_member_that_the_enum_has_not_is_refused(
    tmp_path: Path, register: Any, monkeypatch: pytest.MonkeyPatch, stored: Any
) -> None:
    record(gymnasium.make(register(Keeps, kwargs={"mode": Mode.EASY})), tmp_path)
    trace = open_trace(tmp_path)
    monkeypatch.setitem(index_of(trace).readers[0].schema["environment"]["made"]["kwargs"], "mode", stored)
    with pytest.raises(EnvironmentUnavailable, match="could not be stored"):
        trace.make_env()


def test_atari_with_a_tuple_is_made_again(tmp_path: Path) -> None:
    gymnasium.register_envs(pytest.importorskip("ale_py"))
    record(gymnasium.make("ALE/Pong-v5", frameskip=(2, 5)), tmp_path)
    assert verdicts(tmp_path) == {"identical"}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda env: TimeLimit(TimeLimit(env, 5), 50),
        lambda env: gymnasium.wrappers.DtypeObservation(env, np.float16) if IS_NEW else ClipAction(env),
        lambda env: RescaleAction(env, np.float32(-1), np.float32(1)),
        lambda env: RecordEpisodeStatistics(FlattenObservation(env)),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_wrappers_of_gymnasium_are_made_again_without_a_word(tmp_path: Path, wrap: Any) -> None:
    env = wrap(gymnasium.make("Pendulum-v1"))
    record(env, tmp_path, 4)
    assert str(open_trace(tmp_path).make_env()) == str(env)
    assert verdicts(tmp_path) == {"identical"}


def test_a_wrapper_without_recorded_arguments_is_named_with_advice(tmp_path: Path) -> None:
    inner = gymnasium.make("CartPole-v1")
    for number, env in enumerate([Silent(inner, 2.0), Scaled(inner, 9)]):
        record(env, tmp_path / str(number), 5)
        name = type(env).__name__
        with pytest.raises(
            EnvironmentUnavailable, match=rf"test_recipe:{name} did not store its arguments .*--make MODULE:FUNC"
        ):
            list(verify_trace(tmp_path / str(number), trust=True))
        assert verdicts(tmp_path / str(number), make_env=lambda env=env: env) == {"identical"}


def test_trust_is_not_suggested_where_it_cannot_help(tmp_path: Path) -> None:
    inner = gymnasium.make("CartPole-v1")
    record(Silent(inner, 2.0), tmp_path / "silent", 5)
    record(gymnasium.wrappers.TransformReward(inner, lambda reward: reward), tmp_path / "lambda", 5)
    for name, problem in (("silent", "did not store its arguments"), ("lambda", "could not be stored")):
        with pytest.raises(EnvironmentUnavailable, match=problem) as raised:
            list(verify_trace(tmp_path / name))
        assert "--trust" not in str(raised.value)


class Monitor(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Does what Stable-Baselines3's Monitor does, which make_vec_env puts around each environment."""

    __module__ = "stable_baselines3.common.monitor"

    def __init__(self, env: Any, filename: Any = None, info_keywords: Any = ()):
        super().__init__(env)
        self.rewards: list[float] = []

    def reset(self, **kwargs: Any) -> Any:
        self.rewards = []
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.rewards.append(float(reward))
        if terminated or truncated:
            info["episode"] = {"r": round(sum(self.rewards), 6), "l": len(self.rewards), "t": 0.25}
        return observation, reward, terminated, truncated, info


@pytest.mark.parametrize("infos", [False, True])
def test_a_recording_inside_the_sb3_monitor_verifies_without_trust(tmp_path: Path, infos: bool) -> None:
    env = TraceRecordingWrapper(
        gymnasium.wrappers.ClipAction(Monitor(gymnasium.make("Pendulum-v1", max_episode_steps=7))),
        tmp_path,
        record_infos=infos,
    )
    for seed in range(2):
        env.reset(seed=seed)
        for _ in range(7):
            env.step(np.array([1.5], np.float32))
    env.close()
    assert verdicts(tmp_path) == {"identical"}
    assert verdicts(tmp_path, make_env=lambda: gymnasium.make("Pendulum-v1", max_episode_steps=7)) == {"identical"}


def test_a_version_is_the_same_whether_its_package_is_imported_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch's, which says more when it is imported."""
    here = np.__version__
    monkeypatch.setattr(np, "__version__", f"{here}+cu130")
    assert versions_of(None)["numpy"] == here
    monkeypatch.setattr(np, "__version__", "0.1+cu130")  # another distribution's
    assert versions_of(None)["numpy"] == "0.1+cu130"


def test_a_module_version_is_found_under_another_package_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"odd_module": ["numpy"]})
    recorded = {"odd_module": ["1.0"], "absent": ["1.0"]}
    assert installed_versions(recorded) == {"odd_module": np.__version__, "absent": None}


def test_two_packages_of_one_module_are_not_taken_for_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pygame and pygame-ce, of which metadata does not tell whose files are there."""
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"twin": ["first-twin", "second-twin"]})
    monkeypatch.setattr(
        importlib.metadata, "version", {"twin": "2.6.1", "first-twin": "2.6.1", "second-twin": "2.5.8"}.get
    )
    assert [installed_versions({"twin": [version]})["twin"] for version in ("2.5.8", "2.6.1", "2.0")] == [
        "2.5.8",
        "2.6.1",
        "2.6.1",
    ]


def test_a_wrapper_that_takes_nothing_is_made_with_trust(tmp_path: Path) -> None:
    record(Bare(gymnasium.make("CartPole-v1")), tmp_path, 5)
    with pytest.raises(EnvironmentUnavailable, match=r"call the wrapper test_recipe:Bare\(\).*--trust"):
        list(verify_trace(tmp_path))
    assert verdicts(tmp_path, trust=True) == {"identical"}


def test_wrappers_that_the_entry_point_makes_are_not_made_twice(tmp_path: Path, register: Any) -> None:
    record(TimeLimit(gymnasium.make(register(lambda: Silent(Keeps(), 2.0))), 30), tmp_path)
    assert str(open_trace(tmp_path).make_env()).count("Silent") == 1
    assert verdicts(tmp_path) == {"identical"}
    register(lambda: Bare(Keeps()))
    with pytest.raises(EnvironmentUnavailable, match="is in Bare here"):
        open_trace(tmp_path).make_env()


def test_minigrid_with_its_wrappers_is_verified_with_trust_and_replayed(tmp_path: Path) -> None:
    gymnasium.register_envs(minigrid := pytest.importorskip("minigrid"))
    env = minigrid.wrappers.ImgObsWrapper(gymnasium.make("MiniGrid-Empty-5x5-v0"))
    record(env, tmp_path / "image")
    assert verdicts(tmp_path / "image", trust=True) == {"identical"}
    record(gymnasium.make("MiniGrid-Empty-5x5-v0"), tmp_path / "mission")
    replayed = ReplayEnv(tmp_path / "mission")
    observation, _ = replayed.reset()
    assert observation in replayed.observation_space
    assert observation["mission"] == open_trace(tmp_path / "mission")[0].observations["mission"][0]


def test_a_replay_env_stands_in_for_spaces_that_it_cannot_have(tmp_path: Path) -> None:
    odd = OddSpace()
    env = TraceRecordingWrapper(ScriptedEnv(odd, odd, [(odd.sample(), [Result(odd.sample())])]), tmp_path)
    env.reset()
    env.step(odd.sample())
    env.close()
    replayed = ReplayEnv(tmp_path)
    observation, _ = replayed.reset()
    assert observation in replayed.observation_space
    assert "OddSpace" in repr(replayed.observation_space)
    with pytest.raises(EnvironmentUnavailable, match=r"OddSpace.*action_space="):
        replayed.action_space.sample()
    assert ReplayEnv(tmp_path, observation_space=odd, action_space=odd).action_space is odd


# -- render modes -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not IS_NEW, reason="needs gymnasium 1.0")
def test_observations_made_of_renderings_are_verified(tmp_path: Path) -> None:
    env = make_rendered(render_mode="rgb_array")
    record(gymnasium.wrappers.AddRenderObservation(env), tmp_path, 4)
    assert verdicts(tmp_path) == {"identical"}


@pytest.mark.parametrize("mode", ["human", "rgb_array_list"])
def test_nobody_is_shown_what_is_verified(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record(make_rendered(render_mode=mode), tmp_path, 4)
    made: list[Any] = []
    make = gymnasium.make
    monkeypatch.setattr(gymnasium, "make", lambda *args, **kwargs: made.append(make(*args, **kwargs)) or made[-1])
    assert verdicts(tmp_path) == {"identical"}
    assert [env.render_mode for env in made] == [None] if mode == "human" else ["rgb_array"]


def test_a_window_that_cannot_be_opened_is_an_error(tmp_path: Path, register: Any) -> None:
    class Windowed(Keeps):
        metadata = {"render_modes": ["human"]}  # noqa: RUF012

        def __init__(self, render_mode: Any = None):
            self.render_mode = render_mode

        def step(self, action: Any) -> Any:
            if self.render_mode == "human":
                raise gymnasium.error.DependencyNotInstalled("pygame is not installed")
            return super().step(action)

    record(gymnasium.make(register(Windowed)), tmp_path)
    with pytest.raises(RenderingError, match="pygame is not installed"):
        list(play_for_humans(open_trace(tmp_path), [0]))


# -- vectors ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["sync", "async"])
def mode(request: Any) -> Any:
    return request.param


@needs_vectors
def test_wrappers_of_lanes_are_made_again(tmp_path: Path, mode: str) -> None:
    wrappers = [functools.partial(TimeLimit, max_episode_steps=4), FlattenObservation]
    envs = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode=mode, wrappers=wrappers)
    record(envs, tmp_path)
    trace = open_trace(tmp_path)
    assert set(trace.episodes["steps"][trace.episodes["outcome"] == "truncated"]) == {4}
    assert "FlattenObservation<TimeLimit<TimeLimit" in str(trace.make_env())
    assert verdicts(tmp_path) == {"identical"}


@needs_vectors
def test_arguments_of_make_inside_make_vec_do_not_reach_the_environment(tmp_path: Path, mode: str) -> None:
    options: dict[str, Any] = {"max_episode_steps": 4, "disable_env_checker": True}
    record(gymnasium.make_vec("Pendulum-v1", 2, vectorization_mode=mode, **options), tmp_path)
    trace = open_trace(tmp_path)
    assert set(trace.episodes["steps"][trace.episodes["outcome"] == "truncated"]) == {4}
    assert str(trace.make_env()).count("TimeLimit") == 1
    assert "PassiveEnvChecker" not in str(trace.make_env())
    assert verdicts(tmp_path) == {"identical"}


@needs_vectors
def test_functions_around_lanes_that_cannot_be_looked_into_are_named(tmp_path: Path, mode: str) -> None:
    wrappers = [lambda env: TimeLimit(env, 4)]
    record(gymnasium.make_vec("CartPole-v1", 2, vectorization_mode=mode, wrappers=wrappers), tmp_path)
    if mode == "sync":
        assert verdicts(tmp_path) == {"identical"}
        return
    with pytest.raises(EnvironmentUnavailable, match=r"lambda.*--make MODULE:FUNCTION"):
        list(verify_trace(tmp_path))
    assert verdicts(tmp_path, make_env=lambda: TimeLimit(gymnasium.make("CartPole-v1"), 4)) == {"identical"}


@needs_vectors
def test_lanes_that_are_not_alike_are_made_each_as_it_was(tmp_path: Path) -> None:
    makers = [functools.partial(gymnasium.make, "Pendulum-v1", g=g) for g in (9.0, 10.0, 11.0)]
    record(gymnasium.vector.SyncVectorEnv(makers), tmp_path)
    assert verdicts(tmp_path) == {"identical"}


@needs_vectors
def test_lanes_made_by_functions_in_other_processes_need_to_be_told(tmp_path: Path) -> None:
    makers = [functools.partial(gymnasium.make, "Pendulum-v1", g=9.0)] * 2
    record(gymnasium.vector.AsyncVectorEnv(makers), tmp_path)
    with pytest.raises(EnvironmentUnavailable, match=r"--env ID.*--make MODULE:FUNCTION.*make_env="):
        list(verify_trace(tmp_path))
    assert verdicts(tmp_path, make_env=makers[0]) == {"identical"}


@needs_vectors
def test_a_wrapper_around_all_lanes_makes_them_unverifiable(tmp_path: Path) -> None:
    envs = gymnasium.make_vec("Pendulum-v1", 2, vectorization_mode="sync")
    record(gymnasium.wrappers.vector.ClipReward(envs, -1, 0), tmp_path)
    (reason,) = {(verdict.verdict, verdict.reason) for verdict in verify_trace(tmp_path)}
    assert reason[0] == "unverifiable"
    assert "ClipReward wrapped all its lanes" in reason[1]


class Handed(Keeps):
    """Hands out what cannot be stored."""

    def step(self, action: Any) -> Any:
        return (*super().step(action)[:4], {"hand": object(), "more": [object(), {"a": object()}]})


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_infos_that_could_not_be_stored_are_compared_by_type(tmp_path: Path) -> None:
    record(Handed(), tmp_path, 3, record_infos=True)
    assert verdicts(tmp_path, make_env=Handed) == {"identical"}
    assert verdicts(tmp_path, make_env=Keeps) == {"differs"}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_actions_that_could_not_be_stored_cannot_be_verified(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(Keeps(), tmp_path)
    env.reset(seed=1)
    env.step(Unstored("builtins.object", "<object object>"))
    env.close()
    (verdict,) = verify_trace(tmp_path, make_env=Keeps)
    assert (verdict.verdict, verdict.reason) == ("unverifiable", "its action at step 0 could not be stored")


def test_writers_in_several_processes_store_the_same_moved_module(tmp_path: Path, register: Any) -> None:
    kept = []
    for _ in range(2):
        kept += [OddSpace(), lambda **kwargs: Keeps(**kwargs), lambda: 1]  # at other addresses than before
        env = gymnasium.make(register(kept[-2]), act=kept[-1], disable_env_checker=True)
        env.unwrapped.observation_space = kept[-3]
        record(env, tmp_path, 3, on_exist="append")
    trace = open_trace(tmp_path)
    assert trace.env_spec["id"] == "Kept-v0"
    assert ReplayEnv(trace).observation_space


# -- several writers --------------------------------------------------------------------------------------------------


def test_each_writer_is_verified_in_its_own_environment(tmp_path: Path) -> None:
    record(gymnasium.make("FrozenLake-v1"), tmp_path, 0)
    for name in ("Pendulum-v1", "CartPole-v1"):
        record(gymnasium.make(name), tmp_path, 5, on_exist="append")
    record(Keeps(), tmp_path, 5, on_exist="append")
    told = list(verify_trace(tmp_path))
    assert [verdict.verdict for verdict in told] == ["identical"] * 3 + ["unverifiable"]
    assert "--make MODULE:FUNCTION" in told[-1].reason
    assert [verdict.verdict for verdict in verify_trace(tmp_path, workers=2)] == [v.verdict for v in told]
