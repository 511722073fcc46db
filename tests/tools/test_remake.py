"""gym_trace.remake: recorded episodes played again in a changed environment, and recorded."""

import gc
import json
import struct
import sys
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import AddRenderObservation, TimeAwareObservation
from scripted_env import Result, ToyEnv
from shell import run
from vector_wrapper import TraceRecordingVectorWrapper

from gym_trace import TraceRecordingWrapper, TraceWriter, audit, branch, edit, open_trace, remake, verify_trace
from gym_trace.errors import CorruptTrace, EnvironmentUnavailable, InvalidOption, RecordingError, TraceExists
from gym_trace.playback.episode_index import index_of


class Cart(ToyEnv):
    """Moves by its action and some noise, and ends beyond a limit."""

    observation_space = Dict({"position": Box(-np.inf, np.inf, (1,)), "resets": Discrete(1000)})
    action_space = Discrete(3)

    def __init__(self, limit: float = 4.0, pay: float = 1.0, fail_at: int = -1, actions: int = 3):
        self.limit, self.pay, self.fail_at = limit, pay, fail_at
        self.action_space = Discrete(actions)

    def result(self, action: Any) -> Result:
        if action is None:
            self.place = 0.0
        elif self.t == self.fail_at:
            raise ZeroDivisionError("the cart broke")
        else:
            self.place += float(action) - 0.5 + self.noise()
        seen = {"position": np.array([self.place], np.float32), "resets": self.shown_resets()}
        return Result(seen, self.pay * self.place, abs(self.place) > self.limit, False, {"place": self.place})

    def noise(self) -> float:
        return float(self.np_random.normal(scale=0.1))

    def shown_resets(self) -> int:
        return 0

    def get_state(self) -> bytes:
        return struct.pack("<d", self.place)

    def set_state(self, state: bytes) -> None:
        (self.place,) = struct.unpack("<d", state)


class Counting(Cart):
    """Shows the number of resets before, which no seed decides."""

    def shown_resets(self) -> int:
        return self.episode


class Windy(Cart):
    """Its wind is another one today."""

    wind = 0.0

    def noise(self) -> float:
        return self.wind


class Camera(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Adds a picture to the observation, and removes the number of resets."""

    def __init__(self, env: Any):
        super().__init__(env)
        self.observation_space = Dict({"position": env.observation_space["position"], "camera": Box(0, 9, (2, 2))})

    def observation(self, observation: Any) -> Any:
        picture = np.full((2, 2), abs(observation["position"][0]) % 9, np.float32)
        return {"position": observation["position"], "camera": picture}


def recorded(env: Any, directory: Path, episodes: int = 3, steps: int = 8, seeded: bool = True, **options: Any) -> Path:
    with TraceRecordingWrapper(env, directory, **options) as recorder:
        recorder.action_space.seed(1)
        for episode in range(episodes):
            recorder.reset(seed=episode if seeded else None)
            for step in range(steps):
                recorder.annotate(value=np.float32(step / 2), note="odd" if step % 2 else None)
                if any(recorder.step(recorder.action_space.sample())[2:4]):
                    break
    return directory


def verdicts(directory: Path, **options: Any) -> list[str]:
    return [verdict.verdict for verdict in verify_trace(directory, **options)]


def test_another_sensor_leaves_what_both_have_the_same(tmp_path: Path) -> None:
    trace = recorded(Cart(), tmp_path / "trace", record_infos=True)
    report = remake(trace, tmp_path / "new", make_env=Cart, wrappers=[Camera])
    assert [str(episode) for episode in report.episodes] == [f"episode {i} is the same" for i in range(3)]
    assert report.uncompared == ("observations/resets",)
    old, new = open_trace(trace), open_trace(tmp_path / "new")
    assert new[1].observations["camera"].shape == (len(old[1]) + 1, 2, 2)
    assert new[1].observations["position"].tobytes() == old[1].observations["position"].tobytes()
    assert verdicts(tmp_path / "new", make_env=lambda: Camera(Cart())) == ["identical"] * 3


def test_infos_annotations_states_and_ids_are_those_of_the_recording(tmp_path: Path) -> None:
    options = {"record_infos": ["place"], "states": 2, "split": "eval", "metadata": {"run": 5}}
    trace = recorded(Cart(), tmp_path / "trace", **options)
    edit.annotate(trace, {"author": "Ada", "reference_scores": {"random": 1.0}})
    remake(trace, tmp_path / "new", make_env=Cart, episodes=[0, 2])
    old, new = open_trace(trace), open_trace(tmp_path / "new")
    assert [episode.episode_id for episode in new] == [0, 2]
    assert new.facts == {"author": "Ada"}
    assert new.metadata == [{"run": 5}] or new.metadata == {"run": 5}
    for before, after in zip((old[0], old[2]), new):
        assert (after.split, after.seed, after.infos) == ("eval", before.seed, before.infos)
        assert after.annotations["value"].dtype == np.float32
        assert after.annotations["note"].tolist() == before.annotations["note"].tolist()
        assert [*map(bool, after.states["environment"])] == [*map(bool, before.states["environment"])]


def test_the_first_difference_of_each_column_and_the_lengths_are_named(tmp_path: Path) -> None:
    trace = recorded(Cart(), tmp_path / "trace", steps=30)
    old = open_trace(trace)
    shorter = remake(trace, tmp_path / "shorter", make_env=partial(Cart, limit=2.0)).episodes[0]
    step = int(np.argmax(np.abs(old[0].rewards) > 2))
    assert str(shorter) == (
        f"episode 0 differs first at step {step}, terminations: recorded False, now True; "
        f"ends after {step + 1} of {len(old[0])} steps"
    )
    assert len(open_trace(tmp_path / "shorter")[0]) == shorter.steps == step + 1
    longer = remake(trace, tmp_path / "longer", make_env=partial(Cart, limit=99, pay=2.0)).episodes[0]
    assert [difference.column for difference in longer.differences] == ["rewards", "terminations"]
    assert str(longer).endswith(
        f"; terminations from step {len(old[0]) - 1}; has not ended after its {len(old[0])} steps"
    )
    assert open_trace(tmp_path / "longer")[0].outcome == "cut"


def test_ignored_columns_are_not_compared(tmp_path: Path) -> None:
    trace = recorded(Cart(), tmp_path / "trace")
    report = remake(trace, tmp_path / "new", make_env=partial(Cart, pay=-1.0), ignore=["rewards"])
    assert report.same == 3
    assert open_trace(tmp_path / "new")[0].rewards[0] == -open_trace(trace)[0].rewards[0]


def test_steps_from_recorded_states_do_not_add_up_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = recorded(Windy(limit=99), tmp_path / "trace", steps=30, states=1)
    monkeypatch.setattr(Windy, "wind", 0.001)
    making = {"make_env": partial(Windy, limit=99)}
    with pytest.raises(EnvironmentUnavailable, match="pass --trust"):
        remake(trace, tmp_path / "states", start="states", **making)
    making["trust"] = True
    assert remake(trace, tmp_path / "replay", **making).same == 0
    assert remake(trace, tmp_path / "states", start="states", atol=0.0011, **making).same == 3
    old, replayed, new = (open_trace(path)[2] for path in (trace, tmp_path / "replay", tmp_path / "states"))
    assert replayed.rewards[-1] - old.rewards[-1] == pytest.approx(0.03)
    assert np.abs(old.rewards - new.rewards) == pytest.approx(np.full(30, 0.001))
    assert new.states["environment"].tolist() == old.states["environment"].tolist()
    sparse = recorded(Windy(limit=99), tmp_path / "sparse", steps=30, states=10)
    with pytest.warns(UserWarning, match="states=10: steps between the recorded states follow one another"):
        remake(sparse, tmp_path / "between", start="states", **making)


@pytest.mark.parametrize(("chosen", "seeded"), [(None, True), ([2], True), ([1, 3], True), ([3], False)])
def test_an_episode_that_needs_earlier_ones_gets_them_played_first(
    tmp_path: Path, chosen: list[int] | None, seeded: bool
) -> None:
    trace = recorded(Counting(), tmp_path / "trace", episodes=4, seeded=seeded)
    report = remake(trace, tmp_path / "new", make_env=Counting, episodes=chosen)
    assert report.same == len(report.episodes) == len(open_trace(tmp_path / "new")) == len(chosen or range(4))


def test_the_lanes_of_a_vector_environment_become_single_episodes(tmp_path: Path) -> None:
    envs = TraceRecordingVectorWrapper(SyncVectorEnv([Cart] * 2), tmp_path / "trace", record_infos=True)
    envs.reset(seed=0)
    for _ in range(30):
        envs.step(np.array([2, 1]))
    envs.close()
    report = remake(tmp_path / "trace", tmp_path / "new", make_env=Cart)
    old, new = open_trace(tmp_path / "trace"), open_trace(tmp_path / "new")
    assert report.same == len(old) > 4
    assert [origin["lane"] for origin in map(made_from, index_of(new).readers)] == [0, 1]
    by_lane = [episode for lane in range(2) for episode in old if episode.lane == lane]
    assert [episode.rewards.tolist() for episode in new] == [episode.rewards.tolist() for episode in by_lane]


class Rendering(Cart):
    """Shows the number of contexts that were freed while it was there, as MuJoCo's black frames do."""

    there: ClassVar[set[int]] = set()
    freed = 0

    def __init__(self) -> None:
        super().__init__()
        self.itself, self.freed_before = self, Rendering.freed
        Rendering.there.add(id(self))

    def shown_resets(self) -> int:
        gc.collect()
        return Rendering.freed - self.freed_before

    def close(self) -> None:
        Rendering.there.discard(id(self))

    def __del__(self) -> None:
        Rendering.freed += bool(Rendering.there)


def test_no_environment_is_freed_while_another_one_renders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco.egl", sys)
    for _ in range(3):
        recorded(Cart(), tmp_path / "trace", episodes=3, steps=2, on_exist="append")
    chosen = [0, 2, 3, 4, 5, 6, 8]
    assert remake(tmp_path / "trace", tmp_path / "new", make_env=Rendering, episodes=chosen).same == len(chosen)


def made_from(reader: Any) -> Any:
    return reader.about.raw["provenance"]["made_from"]


def test_a_branch_stays_a_branch(tmp_path: Path) -> None:
    trace = recorded(Cart(), tmp_path / "trace")
    branch(trace, 0, 2, None, tmp_path / "if", episodes=1, seed=3, make_env=Cart)
    assert remake(tmp_path / "if", tmp_path / "new", make_env=Cart).same == 1
    assert open_trace(tmp_path / "new")[0].prefix == 2
    assert verdicts(tmp_path / "new", make_env=Cart) == ["identical"]


def test_an_error_of_the_environment_ends_its_episode(tmp_path: Path) -> None:
    trace = recorded(Cart(limit=99), tmp_path / "trace")
    report = remake(trace, tmp_path / "new", make_env=partial(Cart, limit=99, fail_at=5))
    assert str(report.episodes[2]) == "episode 2 differs first at step 4: ZeroDivisionError: the cart broke"
    assert [len(episode) for episode in open_trace(tmp_path / "new")] == [4, 4, 4]


def test_episodes_without_a_known_start_are_left_out(tmp_path: Path) -> None:
    trace = recorded(Cart(limit=99), tmp_path / "trace", frame_filter=lambda step: step != 3, episodes=1)
    report = remake(trace, tmp_path / "new", make_env=partial(Cart, limit=99))
    assert [episode.reason for episode in report.episodes] == [
        "", "cannot be made: earlier steps were filtered out or lost"
    ]  # fmt: skip
    assert [len(episode) for episode in open_trace(tmp_path / "new")] == [3]
    with pytest.raises(EnvironmentUnavailable, match=r"^episode 1 cannot be made: .*; nothing written"):
        remake(trace, tmp_path / "none", make_env=Cart, episodes=[1])
    assert not (tmp_path / "none").exists()


def test_running_episodes_are_skipped(tmp_path: Path) -> None:
    recorder = TraceRecordingWrapper(Cart(), tmp_path / "trace")
    for _ in range(2):
        recorder.reset(seed=0)
        recorder.step(0)
    report = remake(tmp_path / "trace", tmp_path / "new", make_env=Cart)
    assert (len(report.episodes), report.running) == (1, 1)
    with pytest.raises(InvalidOption, match="the selected episodes are still running, wait for their end"):
        remake(tmp_path / "trace", tmp_path / "none", make_env=Cart, episodes=[1])
    recorder.close()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"start": "auto"}, InvalidOption, 'start=\'auto\': pass "replay" or "states"'),
        ({"start": "states"}, EnvironmentUnavailable, "episode 0 cannot be made: no states of it were recorded"),
        ({"episodes": [9]}, InvalidOption, "the trace has 3 episodes, 0 to 2"),
        ({"episodes": []}, InvalidOption, "no episodes selected"),
        ({"ignore": ["colour"]}, InvalidOption, "unknown column 'colour'"),
        ({"make_env": partial(Cart, actions=2)}, EnvironmentUnavailable, "the recorded action 2 is not in Discrete"),
        ({"make_env": None}, EnvironmentUnavailable, "does not describe how to make"),
        ({"wrappers": [lambda env: 3]}, EnvironmentUnavailable, "TypeError: returned int"),
    ],
)
def test_a_wrong_use_writes_nothing(tmp_path: Path, options: Any, error: Any, message: str) -> None:
    trace = recorded(Cart(), tmp_path / "trace")
    with pytest.raises(error, match=message):
        remake(trace, tmp_path / "new", **{"make_env": Cart, **options})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace"]


def test_the_output_must_be_new_and_not_in_the_trace(tmp_path: Path) -> None:
    trace = recorded(Cart(), tmp_path / "trace")
    remake(trace, tmp_path / "new", make_env=Cart)
    with pytest.raises(TraceExists):
        remake(trace, tmp_path / "new", make_env=Cart)
    for inside in (trace, trace / "new"):
        with pytest.raises(InvalidOption, match="lies in the source"):
            remake(trace, inside, make_env=Cart)


@pytest.mark.parametrize("method", ["reset", "step"])
def test_a_full_disk_ends_it_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    trace = recorded(Cart(), tmp_path / "old")

    def full(*_: Any, **__: Any) -> None:
        raise RecordingError("no space left")

    monkeypatch.setattr(TraceRecordingWrapper, method, full)
    with pytest.raises(RecordingError, match="no space left"):
        remake(trace, tmp_path / "new", make_env=Cart)
    assert not (tmp_path / "new").exists()
    with pytest.raises(RecordingError, match="no space left"):
        audit(Cart, episodes=1, steps=1)


def test_damage_ends_it_and_nothing_is_written(tmp_path: Path) -> None:
    trace = recorded(Cart(), tmp_path / "trace")
    (batch,) = trace.glob("*.gtb")
    content = bytearray(batch.read_bytes())
    content[200:] = bytes(len(content) - 200)
    batch.write_bytes(content)
    with pytest.raises(CorruptTrace):
        remake(trace, tmp_path / "new", make_env=Cart)
    assert not (tmp_path / "new").exists()


def test_a_trace_without_an_environment_says_what_to_pass(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace", action_space=Discrete(3)) as writer:
        writer.begin(0.0, seed=1)
        writer.step(1, 1.0, 0.5)
    with pytest.raises(EnvironmentUnavailable, match="--make MODULE:FUNCTION"):
        remake(tmp_path / "trace", tmp_path / "new")


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(gymnasium.make("CartPole-v1"), tmp_path_factory.mktemp("remake") / "trace", steps=99)


def test_the_new_trace_verifies_and_names_its_origin(cartpole: Path, tmp_path: Path) -> None:
    wrapper = "gymnasium.wrappers:TimeAwareObservation"
    new = tmp_path / "new"
    done = run(
        "remake",
        cartpole,
        "-o",
        new,
        "--wrapper",
        wrapper,
        "--env-arg",
        "sutton_barto_reward=true",
        "--ignore",
        "rewards",
    )
    assert done.exit_code == 0, done.output
    assert done.stdout == (
        "not compared, as dtype or shape changed: observations\n"
        f"3 episodes in {new}: 3 same\n"
    )  # fmt: skip
    assert "3 identical, bit for bit" in run("verify", new).output
    (writer,) = open_trace(cartpole).writers
    name = f"{TimeAwareObservation.__module__}:{TimeAwareObservation.__qualname__}"
    line = f"replay of writer {writer}: sutton_barto_reward=True, in {name}"
    assert line in run("info", new).stdout


def test_a_camera_keeps_the_state_under_its_key(cartpole: Path, tmp_path: Path) -> None:
    pytest.importorskip("pygame")
    report = remake(
        cartpole,
        tmp_path / "new",
        env_kwargs={"render_mode": "rgb_array"},
        wrappers=[partial(AddRenderObservation, render_only=False)],
        episodes=[0],
    )
    assert (report.same, report.uncompared) == (1, ())
    assert verdicts(tmp_path / "new") == ["identical"]


def test_differences_end_the_command_with_3(cartpole: Path, tmp_path: Path) -> None:
    words = ("remake", cartpole, "--env-arg", "max_episode_steps=9")
    done = run(*words, "-o", tmp_path / "new")
    steps = [len(episode) for episode in open_trace(cartpole)]
    assert done.exit_code == 3
    assert done.stdout.splitlines()[0] == (
        f"episode 0 differs first at step 8, truncations: recorded False, now True; ends after 9 of {steps[0]} steps"
    )
    assert done.stdout.splitlines()[-1] == f"3 episodes in {tmp_path / 'new'}: 3 different"
    as_json = json.loads(run(*words, "-o", tmp_path / "json", "--json").stdout)
    assert [episode["steps"] for episode in as_json["episodes"]] == [9, 9, 9]
    assert as_json["episodes"][0]["differences"][0]["column"] == "truncations"


def test_a_named_environment_is_stored_for_verify(cartpole: Path, tmp_path: Path) -> None:
    making = ("--make", "gymnasium.envs.classic_control.cartpole:CartPoleEnv", "--env-arg", "sutton_barto_reward=true")
    run("remake", cartpole, "-o", tmp_path / "new", *making)
    environment = index_of(open_trace(tmp_path / "new")).readers[0].about.environment
    assert environment["factory"]["id"] == making[1]
    assert "3 identical, bit for bit" in run("verify", tmp_path / "new", "--trust").output
