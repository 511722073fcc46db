"""Vector environments are recorded as if each lane had been recorded alone, in every autoreset mode."""

from __future__ import annotations

import fractions
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from batch_forgery import DTYPE, taken_apart
from gymnasium import spaces, vector
from long_tests import LONG
from numbered_lanes import (
    COUNT,
    DISABLED,
    NEXT_STEP,
    SAME_STEP,
    SPACES,
    FixedResultEnv,
    NumberedLaneEnv,
    batched_actions,
    make_vector_env,
    modes,
    record_and_check,
    step_lanes,
)
from scripted_env import CountingEnv, bits

from gym_trace import TraceRecordingVectorWrapper, TraceRecordingWrapper, check_trace, open_trace
from gym_trace.errors import RecordingError, TraceExists, UnstorableValue
from gym_trace.format import wire
from gym_trace.playback.episode_index import index_of

vector_wrappers = pytest.importorskip("gymnasium.wrappers.vector")


@pytest.mark.parametrize("kind", ["sync", "async", "async-no-shared"])
@modes
@pytest.mark.parametrize("copy", [True, False])
def test_episodes_are_exact(tmp_path: Path, kind: str, mode: Any, copy: bool) -> None:
    record_and_check(tmp_path / "t", mode, SPACES["dict"], SPACES["discrete"], kind=kind, copy=copy)


@modes
@pytest.mark.parametrize("name", SPACES)
def test_every_space_round_trips(tmp_path: Path, name: str, mode: Any) -> None:
    record_and_check(tmp_path / "t", mode, SPACES[name], SPACES[name])


def test_a_with_statement_closes_the_trace_and_the_environments(tmp_path: Path) -> None:
    envs = vector.SyncVectorEnv([CountingEnv] * 2)
    with TraceRecordingVectorWrapper(envs, tmp_path / "t") as recorded:
        recorded.reset(seed=0)
        recorded.step(recorded.action_space.sample())
    assert envs.closed
    assert open_trace(tmp_path / "t").episodes["outcome"].tolist() == ["closed", "closed"]


@modes
@pytest.mark.parametrize("flush_every", [1, 5, 1000])
def test_episodes_do_not_depend_on_when_they_are_written(tmp_path: Path, mode: Any, flush_every: int) -> None:
    record_and_check(tmp_path / "t", mode, SPACES["frames"], SPACES["box"], flush_every=flush_every)


@modes
@pytest.mark.parametrize(
    ("space", "table", "values"),
    [
        (space, *limits)
        for number, space in enumerate(("box", "mixed", "frames"))
        for place, limits in enumerate([(2, 2000), (9, 3000), (10**6, 1200)])
        if LONG or number == place
    ],
)
def test_writers_respect_even_tiny_reader_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any, table: int, values: int, space: str
) -> None:
    monkeypatch.setattr(wire, "MAX_TABLE", table)
    monkeypatch.setattr(wire, "MAX_VALUES", values)
    record_and_check(tmp_path / "t", mode, SPACES[space], SPACES["box"], flush_every=1000)


class _Bandits(vector.VectorEnv[Any, Any, Any]):
    """2,000 lanes with equal values and episodes of one step."""

    metadata = {"autoreset_mode": SAME_STEP}  # noqa: RUF012 - as gymnasium has it
    num_envs = 2000
    single_observation_space = spaces.Box(-1, 1, (1,), np.float32)
    single_action_space = spaces.Discrete(2)
    observation_space = vector.utils.batch_space(single_observation_space, num_envs)
    action_space = vector.utils.batch_space(single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros((self.num_envs, 1), np.float32), {}

    def step(self, actions: Any) -> Any:
        over = np.ones(self.num_envs, bool)
        seen = np.zeros((self.num_envs, 1), np.float32)
        return seen, np.ones(self.num_envs), over, ~over, {"final_obs": seen}


def test_many_short_episodes_stay_within_reader_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "TABLE_ROWS", 0)
    env = TraceRecordingVectorWrapper(_Bandits(), tmp_path)
    env.reset()
    for _ in range(30):
        env.step(np.zeros(env.num_envs, np.int64))
    env.flush()
    running = open_trace(tmp_path)
    assert (len(running), running.damage) == (62_000, [])
    env.close()
    trace = open_trace(tmp_path)
    assert (len(trace), trace.damage, check_trace(tmp_path).damages) == (62_000, [], [])
    assert trace.episodes["steps"].sum() == 60_000


@modes
def test_a_vector_run_and_single_runs_give_the_same_episodes(tmp_path: Path, mode: Any) -> None:
    envs = gymnasium.make_vec(
        "CartPole-v1", num_envs=4, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}
    )
    wrapped = TraceRecordingVectorWrapper(envs, tmp_path / "vector")
    actions = batched_actions(envs, 150)
    wrapped.reset(seed=3)
    for action in actions:
        step_lanes(wrapped, action)
    wrapped.close()
    for lane in range(4):
        env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / str(lane))
        env.reset(seed=3 + lane)
        over = False
        for action in actions:
            if over:
                env.reset()
                over = False
                if mode == NEXT_STEP:
                    continue
            *_, terminated, truncated, _ = env.step(action[lane])
            over = terminated or truncated
            if over and mode == NEXT_STEP:
                continue
        env.close()
        alone = list(open_trace(tmp_path / str(lane)))
        together = [episode for episode in open_trace(tmp_path / "vector") if episode.lane == lane]
        together = [episode for episode in together if len(episode)]
        assert len(alone) == len(together) > 5
        for one, other in zip(alone, together):
            for name in ("observations", "actions", "rewards", "terminations", "truncations"):
                assert bits(getattr(one, name)) == bits(getattr(other, name))
            assert (one.seed, one.outcome) == (other.seed, other.outcome)


def doubled(env: Any) -> Any:
    return vector_wrappers.TransformReward(env, lambda rewards: 2 * rewards)


@pytest.mark.parametrize(
    ("mode", "wrapper"),
    [
        (NEXT_STEP, vector_wrappers.RecordEpisodeStatistics),
        (NEXT_STEP, vector_wrappers.NormalizeObservation),
        (NEXT_STEP, vector_wrappers.NormalizeReward),
        (NEXT_STEP, vector_wrappers.FlattenObservation),
        (SAME_STEP, vector_wrappers.RecordEpisodeStatistics),
        (SAME_STEP, doubled),
    ],
)
def test_other_vector_wrappers_work_around_and_under_it(tmp_path: Path, mode: Any, wrapper: Any) -> None:
    def envs() -> Any:
        kwargs = {"autoreset_mode": mode}
        return gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync", vector_kwargs=kwargs)

    def run(env: Any) -> list[Any]:
        values = [bits(env.reset(seed=1)[0])]
        env.action_space.seed(0)
        for _ in range(60):
            observations, rewards, terminations, truncations, infos = env.step(env.action_space.sample())
            values.append(bits((observations, rewards, terminations, truncations, sorted(infos))))
        env.close()
        return values

    plain = run(wrapper(envs()))
    assert run(wrapper(TraceRecordingVectorWrapper(envs(), tmp_path / "inside"))) == plain
    assert run(TraceRecordingVectorWrapper(wrapper(envs()), tmp_path / "outside")) == plain
    for place in ("inside", "outside"):
        assert (open_trace(tmp_path / place).episodes["outcome"] == "terminated").sum() > 3
        assert check_trace(tmp_path / place).damages == []


@pytest.mark.parametrize("around", [False, True])
def test_stacked_and_normalized_observations_are_recorded_as_returned(tmp_path: Path, around: bool) -> None:
    def maker() -> Any:
        return gymnasium.wrappers.FrameStackObservation(gymnasium.make("CartPole-v1"), 3)

    envs: Any = vector.SyncVectorEnv([maker] * 2)
    if around:
        env: Any = vector_wrappers.NormalizeObservation(TraceRecordingVectorWrapper(envs, tmp_path))
    else:
        env = TraceRecordingVectorWrapper(vector_wrappers.NormalizeObservation(envs), tmp_path)
    bare: Any = vector.SyncVectorEnv([maker] * 2)
    bare = bare if around else vector_wrappers.NormalizeObservation(bare)
    seen = [bare.reset(seed=3)[0].copy()]
    env.reset(seed=3)
    for t in range(7):
        action = np.array([t % 2, 1 - t % 2])
        env.step(action)
        seen.append(bare.step(action)[0].copy())
    env.close()
    for episode in open_trace(tmp_path):
        assert bits(episode.observations) == bits(np.array(seen)[:, episode.lane])


def test_an_environment_without_final_observations_gives_a_warning(tmp_path: Path) -> None:
    class Secretive(vector.SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            *told, infos = super().step(actions)
            return *told, {key: value for key, value in infos.items() if "final" not in key}

    makers: Any = [lambda: NumberedLaneEnv(0, SPACES["box"], SPACES["discrete"])] * 2
    env = TraceRecordingVectorWrapper(Secretive(makers, autoreset_mode="SameStep"), tmp_path)
    env.reset(seed=1)
    env.step(np.array([0, 0]))
    with pytest.warns(UserWarning, match="no final_obs in infos"):
        env.step(np.array([0, 0]))
    env.close()
    first, _, second, _ = sorted(open_trace(tmp_path), key=lambda episode: episode.episode_id)
    assert len(first) == 1
    assert np.isnan(first.observations[1]).all()
    assert (first.has_final_observation, second.has_final_observation) == (False, True)


@modes
def test_the_autoreset_mode_is_where_vector_environments_have_it(tmp_path: Path, mode: Any) -> None:
    envs = make_vector_env("sync", mode, True, SPACES["box"], SPACES["discrete"])
    env = TraceRecordingVectorWrapper(envs, tmp_path / "t")
    assert env.autoreset_mode is envs.autoreset_mode is mode
    env.close()


def test_a_full_reset_cuts_open_episodes_and_closing_closes_them(tmp_path: Path) -> None:
    envs = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    env = TraceRecordingVectorWrapper(envs, tmp_path)
    for length in (3, 4):
        env.reset(seed=[7, None])
        for _ in range(length):
            env.step(np.zeros(2, np.int64))
    env.close()
    env.close()
    outcomes = [(e.lane, e.episode_id, len(e), e.outcome, e.seed) for e in open_trace(tmp_path)]
    assert sorted(outcomes) == [
        (0, 0, 3, "cut", 7), (0, 2, 4, "closed", 7), (1, 1, 3, "cut", None), (1, 3, 4, "closed", None)
    ]  # fmt: skip


def test_lanes_seeded_together_store_the_given_seed(tmp_path: Path) -> None:
    for kind, seeds in (("vector_entry_point", [5, 5, 5]), ("sync", [5, 6, 7])):
        envs = gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode=kind)
        env = TraceRecordingVectorWrapper(envs, tmp_path / kind)
        env.reset(seed=5)
        env.close()
        assert [episode.seed for episode in open_trace(tmp_path / kind)] == seeds


def test_annotations_have_one_row_per_lane(tmp_path: Path) -> None:
    envs = gymnasium.make_vec("CartPole-v1", num_envs=2)
    env = TraceRecordingVectorWrapper(envs, tmp_path)
    env.reset(seed=0)
    for t in range(5):
        env.annotate(value=np.array([t, 10.0 + t]), word=[f"a{t}", f"b{t}"])
        env.step(np.array([t % 2, t % 2]))
    with pytest.raises(ValueError, match="3 rows for 2 lanes"):
        env.annotate(value=[1, 2, 3])
    with pytest.raises(UnstorableValue):
        env.annotate(value=[object(), 1])
    env.close()
    one, other = open_trace(tmp_path)
    assert (one.annotations["value"].tolist(), other.annotations["value"][-1]) == ([0, 1, 2, 3, 4], 14.0)
    assert other.annotations["word"].tolist() == [f"b{t}" for t in range(5)]


@pytest.mark.parametrize("lanes", [3, 5], ids=["rewards", "actions"])
def test_annotations_of_an_unrecorded_step_do_not_reach_the_next_step(tmp_path: Path, lanes: int) -> None:
    envs = FixedResultEnv(rewards=np.zeros(8 - lanes))
    env = TraceRecordingVectorWrapper(envs, tmp_path)
    env.reset()
    env.annotate(value=np.array([1.0, 2.0, 3.0]))
    env.step(np.zeros(lanes, np.int64))
    envs.result["rewards"] = np.zeros(3)
    with pytest.warns(UserWarning, match="not one per lane"):
        env.reset(options={"reset_mask": np.ones(3, np.bool_)})
    env.step(np.zeros(3, np.int64))
    env.close()
    found = [(len(episode), dict(episode.annotations)) for episode in open_trace(tmp_path)]
    assert found == [(0, {})] * 3 + [(1, {})] * 3


def test_annotations_stay_typed_when_lanes_are_reset_between_steps(tmp_path: Path) -> None:
    envs = make_vector_env("sync", DISABLED, True, SPACES["box"], spaces.Discrete(2))
    env = TraceRecordingVectorWrapper(envs, tmp_path)
    env.reset(seed=0)
    for _ in range(5):
        env.annotate(value=np.zeros(envs.num_envs, np.float32))
        *_, terminations, truncations, _ = env.step(np.zeros(envs.num_envs, np.int64))
        env.reset(options={"reset_mask": terminations | truncations | (np.arange(envs.num_envs) == 0)})
    env.close()
    (batch,) = tmp_path.rglob("*.gtb")
    chunks = [chunk for chunk in taken_apart(batch).chunks if ("annotations", "value") in chunk.columns]
    kinds = {chunk.metadata["columns"][chunk.columns["annotations", "value"]][DTYPE] for chunk in chunks}
    assert kinds == {"<f4"}


@pytest.mark.filterwarnings("ignore:rewards")
@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        (np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], order="F"), "[3. 4.]"),
        (np.array([None, "x", None], object), "x"),
        (np.array([0, 2**70, 0], object), str(2**70)),
        (np.zeros(3, [("a", "<i4"), ("b", "<f8")]), "('b', '<f8')"),
        ([fractions.Fraction(1), fractions.Fraction(1, 3), fractions.Fraction(1)], "Fraction(1, 3)"),
        ([[1.0], [2.0, 3.0], [4.0]], "[2.0, 3.0]"),
        (np.ma.MaskedArray([1.0, 2.0, 3.0], [False, True, False]), "--"),
        (np.array([1.5, 2.5, 3.5], ">f8"), "2.5"),
    ],
)
def test_rewards_of_the_wrong_shape_do_not_stop_the_run(tmp_path: Path, rewards: Any, kept: str) -> None:
    env = TraceRecordingVectorWrapper(FixedResultEnv(rewards=rewards), tmp_path / "t")
    env.reset()
    for _ in range(3):
        env.annotate(value=np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], order="F"))
        env.step(np.zeros(3, np.int64))
    env.close()
    other = open_trace(tmp_path / "t")[1]
    assert [kept in getattr(reward, "text", str(reward)) for reward in other.rewards] == [True] * 3
    assert other.annotations["value"].tolist() == [[3.0, 4.0]] * 3


@pytest.mark.filterwarnings("ignore:actions. got values outside the space")
def test_actions_in_fortran_order_and_of_another_width_are_stored_exactly(tmp_path: Path) -> None:
    envs = make_vector_env("sync", NEXT_STEP, True, SPACES["box"], spaces.MultiDiscrete([3, 3]))
    env = TraceRecordingVectorWrapper(envs, tmp_path / "t")
    env.reset()
    lanes = env.num_envs
    actions = np.asfortranarray(np.arange(2 * lanes, dtype=np.int32).reshape(lanes, 2) % 3)
    env.step(actions)
    env.close()
    assert [bits(episode.actions[0]) for episode in open_trace(tmp_path / "t")] == [bits(row) for row in actions]


@pytest.mark.filterwarnings("ignore:actions. got values outside the space")
def test_scalar_actions_in_a_list_keep_their_width(tmp_path: Path) -> None:
    env = TraceRecordingVectorWrapper(vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2), tmp_path / "t")
    env.reset(seed=0)
    env.step([np.int32(1), np.int32(0)])
    env.step([1, 0])
    env.close()
    kept = [[action.dtype for action in episode.actions] for episode in open_trace(tmp_path / "t")]
    assert kept == [[np.dtype(np.int32), np.dtype(np.int64)]] * 2


class Narrow(vector.VectorEnv[Any, Any, Any]):
    """Batches with a narrower dtype than the spaces, as in EnvPool; some steps have the full width."""

    num_envs = 2
    metadata = {"autoreset_mode": DISABLED}  # noqa: RUF012
    single_observation_space = single_action_space = spaces.Discrete(9)
    observation_space = action_space = spaces.MultiDiscrete([9, 9])
    wide = False

    def reset(self, **_: Any) -> Any:
        return np.array([1, 2], np.int32), {}

    def step(self, actions: Any) -> Any:
        flags = np.zeros(2, np.bool_)
        return np.array([3, 4], np.int64 if self.wide else np.int32), np.zeros(2), flags, flags, {}


@pytest.mark.filterwarnings("ignore:.*got values outside the space")
@pytest.mark.parametrize("wide", [False, True])
def test_integers_of_another_width_than_their_space_keep_their_width(tmp_path: Path, wide: bool) -> None:
    env = TraceRecordingVectorWrapper(Narrow(), tmp_path)
    env.reset()
    env.step(np.array([5, 6], np.int16))
    Narrow.wide = wide
    env.step([7, 8])
    Narrow.wide = False
    env.close()
    first, _ = open_trace(tmp_path)
    last = np.int64(3) if wide else np.int32(3)
    assert [bits(row) for row in first.observations] == [bits(row) for row in (np.int32(1), np.int32(3), last)]
    assert [bits(row) for row in first.actions] == [bits(row) for row in (np.int16(5), np.int64(7))]


def test_actions_outside_their_space_round_trip(tmp_path: Path) -> None:
    envs = make_vector_env("sync", NEXT_STEP, True, SPACES["box"], spaces.Box(-1, 1, (2,), np.float32))
    env = TraceRecordingVectorWrapper(envs, tmp_path)
    env.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env.step(np.full((COUNT, 2), 0.1))
        env.step(np.full((COUNT, 2), 0.5, np.float32))
        env.close()
    assert [str(warning.message) for warning in caught if "actions" in str(warning.message)] != []
    (actions,) = {bits(e.actions[0]) for e in open_trace(tmp_path) if e.episode_id < COUNT}
    assert actions == bits(np.full(2, 0.1))


def test_an_existing_trace_raises_and_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    envs = gymnasium.make_vec("CartPole-v1", num_envs=2)
    env = TraceRecordingVectorWrapper(envs, tmp_path)
    env.reset(seed=0)
    with pytest.raises(TraceExists):
        TraceRecordingVectorWrapper(envs, tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.write", full)
    env.step(np.zeros(2, np.int64))
    with pytest.raises(RecordingError, match="No space left"):
        env.flush()
    env.step(np.zeros(2, np.int64))
    env.close()


@pytest.mark.parametrize(("least", "groups"), [(1 << 30, [8]), (3000, [3, 3, 2]), (1, [1] * 8)])
def test_lanes_of_small_rows_are_stored_in_groups_of_similar_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int, groups: list[int]
) -> None:
    monkeypatch.setattr("gym_trace.format.ring.chunk_builder._SMALL_GROUP", least)
    envs = vector.SyncVectorEnv([lambda: CountingEnv(6)] * 8)
    wrapped = TraceRecordingVectorWrapper(envs, tmp_path)
    wrapped.reset(seed=0)
    for _ in range(30):
        wrapped.step(np.zeros(8, np.int64))
    wrapped.close()
    (reader,) = index_of(open_trace(tmp_path)).readers
    lanes = [sorted(set(block.table["lane"].tolist())) for block in reader.blocks()]
    assert [len(some) for some in lanes] == groups
    assert [lane for some in lanes for lane in some] == list(range(8))
    assert [len(episode) for episode in open_trace(tmp_path)] == [6, 6, 6, 6, 2] * 8


def test_episodes_are_cut_at_a_reset_that_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    envs = vector.SyncVectorEnv([lambda: CountingEnv(length=4)] * 2)
    env = TraceRecordingVectorWrapper(envs, tmp_path / "t")
    env.reset(seed=0)
    env.step(np.array([0, 1]))
    monkeypatch.setattr(envs, "reset", lambda **_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        env.reset()
    for _ in range(8):
        env.step(np.array([0, 1]))
    env.close()
    episodes = list(open_trace(tmp_path / "t"))
    assert [(len(episode), episode.outcome) for episode in episodes[:2]] == [(1, "cut")] * 2
    assert len(episodes) == 4
