"""branch: new episodes from a recorded step on."""

import math
from collections.abc import Callable
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils import seeding
from vector_wrapper import TraceRecordingVectorWrapper

import gym_trace
from gym_trace import Trace, TraceRecordingWrapper, edit, open_trace, record_episodes, verify_trace
from gym_trace.envs.seeding import episode_seed, policy_seed
from gym_trace.errors import EnvironmentUnavailable, InvalidOption, ReplayDiverged, TraceExists
from gym_trace.exchange.episodes import finished, lengths, scanned
from gym_trace.playback.episode_index import index_of

CARTPOLE, LAKE = "CartPole-v1", "FrozenLake-v1"


def recorded(env_id: str, directory: Path, episodes: int = 5, **options: Any) -> Trace:
    with TraceRecordingWrapper(gymnasium.make(env_id), directory, **options) as env:
        record_episodes(env, episodes=episodes, seed=1)
    return open_trace(directory)


def longest(trace: Trace) -> int:
    return int(np.argmax(trace.episodes["steps"]))


def simulated(env: Any, policy: Callable[[Any], Any] | None, seed: int, count: int) -> list[float]:
    """Return the returns of continuations in copies of an environment, each with seeds of its own."""
    returns = []
    for number in range(count):
        copy = deepcopy(env)
        copy.unwrapped.np_random.bit_generator.state = seeding.np_random(episode_seed(seed, number))[
            0
        ].bit_generator.state
        copy.action_space.seed(policy_seed(seed, number))
        total, over = 0.0, False
        observation: Any = None
        while not over:
            action = copy.action_space.sample() if policy is None else policy(observation)
            observation, reward, terminated, truncated, _ = copy.step(action)
            total, over = total + reward, terminated or truncated
        returns.append(total)
    return returns


def test_returns_equal_those_of_copies_of_the_environment(tmp_path: Path) -> None:
    trace = recorded(CARTPOLE, tmp_path / "trace")
    index = longest(trace)
    step = len(trace[index]) - 6  # the pole is about to fall
    done = gym_trace.branch(trace, index, step, directory=tmp_path / "if", episodes=40, seed=3)
    assert done.returns.tolist() == simulated(gym_trace.env_at(trace, index, step), None, 3, 40)
    assert len(set(done.returns.tolist())) > 5
    assert done.recorded_return == done.recorded_length == 6
    assert done.lengths.tolist() == done.returns.tolist()
    assert done.drew is False


def always_right(_: Any) -> int:
    return 2


def test_a_reseeded_environment_repeats_its_luck(tmp_path: Path) -> None:
    trace = recorded(LAKE, tmp_path / "trace")
    index = longest(trace)
    done = gym_trace.branch(trace, index, 3, always_right, tmp_path / "if", episodes=30, seed=9)
    assert done.drew is True
    assert done.returns.tolist() == simulated(gym_trace.env_at(trace, index, 3), always_right, 9, 30)
    assert len(set(done.lengths.tolist())) > 3
    assert {verdict.verdict for verdict in verify_trace(tmp_path / "if")} == {"identical"}


def test_without_a_seed_the_environment_continues_with_its_own_generator(tmp_path: Path) -> None:
    trace = recorded(LAKE, tmp_path / "trace")
    done = gym_trace.branch(trace, longest(trace), 3, always_right, tmp_path / "if", episodes=4)
    assert len(set(done.lengths.tolist())) == 1
    assert done.drew is None
    assert "generator" not in open_trace(tmp_path / "if")[0].states


@pytest.mark.parametrize("env_id", [CARTPOLE, LAKE])
def test_new_episodes_verify_from_their_reset(env_id: str, tmp_path: Path) -> None:
    trace = recorded(env_id, tmp_path / "trace")
    index = longest(trace)
    done = gym_trace.branch(trace, index, 4, None, tmp_path / "if", episodes=6, seed=0)
    new = open_trace(tmp_path / "if")
    assert [verdict.verdict for verdict in verify_trace(new)] == ["identical"] * 6
    for episode, total, length in zip(new, done.returns, done.lengths):
        assert episode.prefix == 4
        assert np.array_equal(episode.observations[:5], trace[index].observations[:5])
        rest = episode[episode.prefix :]
        assert (rest.total_reward, len(rest), rest.prefix) == (total, length, 0)
    for index in range(6):  # each can be continued as recorded
        env = gym_trace.env_at(new, index, 5)
        assert np.array_equal(env.step(new[index].actions[5])[0], new[index].observations[6])


def test_an_unseeded_episode_branches_through_its_generator(tmp_path: Path) -> None:
    with TraceRecordingWrapper(gymnasium.make(CARTPOLE), tmp_path / "trace") as env:
        env.action_space.seed(3)
        for _ in range(3):
            env.reset()
            while not any(env.step(env.action_space.sample())[2:4]):
                pass
    gym_trace.branch(tmp_path / "trace", 2, 5, None, tmp_path / "if", episodes=3)
    assert {verdict.verdict for verdict in verify_trace(tmp_path / "if")} == {"identical"}


def test_a_lane_branches_as_a_single_environment(tmp_path: Path) -> None:
    envs = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make(CARTPOLE)] * 2)
    recorder = TraceRecordingVectorWrapper(envs, tmp_path / "trace")
    recorder.action_space.seed(2)
    recorder.reset(seed=4)
    for _ in range(60):
        recorder.step(recorder.action_space.sample())
    recorder.close()
    trace = open_trace(tmp_path / "trace")
    assert trace[-1].seed is None  # an autoreset: the generator comes from the episodes before it
    for index in (0, len(trace) - 1):
        done = gym_trace.branch(trace, index, 1, None, tmp_path / f"if-{index}", episodes=3, seed=1)
        assert {verdict.verdict for verdict in verify_trace(done.directory)} == {"identical"}


def test_a_branch_of_a_branch_repeats_the_reseeding(tmp_path: Path) -> None:
    trace = recorded(LAKE, tmp_path / "trace")
    gym_trace.branch(trace, longest(trace), 2, None, tmp_path / "one", episodes=8, seed=1)
    one = open_trace(tmp_path / "one")
    index = longest(one)
    gym_trace.branch(one, index, 4, None, tmp_path / "two", episodes=5, seed=2)
    two = open_trace(tmp_path / "two")
    assert {verdict.verdict for verdict in verify_trace(two)} == {"identical"}
    assert two[0].states["generator"][2] == one[index].states["generator"][2]
    assert two[0].states["generator"][4] is not None


def test_the_new_trace_says_where_it_branched(tmp_path: Path) -> None:
    trace = recorded(CARTPOLE, tmp_path / "trace")
    gym_trace.branch(trace, -1, 4, None, tmp_path / "if", episodes=1, seed=5)
    origin = index_of(open_trace(tmp_path / "if")).readers[0].about.branch
    assert origin == {"writer": trace[-1].writer, "episode_id": 4, "step": 4, "seed": 5}


def test_without_the_prefix_episodes_begin_at_the_step(tmp_path: Path) -> None:
    trace = recorded(CARTPOLE, tmp_path / "trace")
    done = gym_trace.branch(trace, 0, 4, None, tmp_path / "if", episodes=3, prefix=False)
    new = open_trace(tmp_path / "if")
    assert [episode.first_step for episode in new] == [4, 4, 4]
    assert [episode.prefix for episode in new] == [0, 0, 0]
    assert new.episodes["return"].tolist() == done.returns.tolist()
    assert np.array_equal(new[0].observations[0], trace[0].observations[4])


def test_edits_keep_the_prefix_and_the_generator(tmp_path: Path) -> None:
    trace = recorded(LAKE, tmp_path / "trace")
    gym_trace.branch(trace, longest(trace), 3, None, tmp_path / "if", episodes=4, seed=1)
    edit.merge([tmp_path / "trace", tmp_path / "if"], tmp_path / "merged")
    edit.compact(tmp_path / "merged", tmp_path / "compact")
    for name in ("merged", "compact"):
        new = open_trace(tmp_path / name)
        assert [episode.prefix for episode in new.scan()] == [0] * 5 + [3] * 4
        assert {verdict.verdict for verdict in verify_trace(new)} == {"identical"}


def test_the_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    from gym_trace.tools.branching import Branched

    random, covered = np.random.default_rng(0), 0
    for seed in range(50):
        returns = random.exponential(10.0, 60)
        done = Branched(Path(), seed, False, None, returns, returns.astype(np.int64), 0.0, 0, "cut")
        low, high = done.interval() or (math.nan, math.nan)
        covered += bool(low <= 10.0 <= high)
    assert 43 <= covered <= 49


def test_a_result_ends_the_run_early(tmp_path: Path) -> None:
    trace = recorded(CARTPOLE, tmp_path / "trace")
    done = gym_trace.branch(trace, 0, 4, None, tmp_path / "if", episodes=10**6, on_progress=lambda *_: True)
    assert len(done.returns) <= 1
    assert done.interval() is None


def test_a_different_environment_diverges_before_anything_is_recorded(tmp_path: Path) -> None:
    trace = recorded(CARTPOLE, tmp_path / "trace")
    with pytest.raises(ReplayDiverged, match=r"at step 0, rewards: recorded 1.0, seen 0.0"):
        gym_trace.branch(trace, 0, 4, None, tmp_path / "if", env_kwargs={"sutton_barto_reward": True})
    assert not (tmp_path / "if").exists()


def test_invalid_options_are_refused(tmp_path: Path) -> None:
    trace = recorded(CARTPOLE, tmp_path / "trace")
    steps = len(trace[0])
    for options, message in (
        ({"step": steps}, f"step={steps}: episode 0 has ended there; pass 0 to {steps - 1}"),
        ({"step": steps + 1}, f"step={steps + 1}: episode 0 has {steps} steps; pass 0 to {steps}"),
        ({"step": -1}, f"step=-1: episode 0 has {steps} steps; pass 0 to {steps}"),
        ({"episodes": 0}, "episodes=0: pass 1 or more"),
        ({"seed": -1}, "seed=-1: pass 0 or more"),
        ({"frame_filter": len}, "frame_filter: not supported by branch; omit it"),
        ({"policy": "best"}, "policy='best': pass random"),
    ):
        with pytest.raises(InvalidOption, match=rf"^{message}"):
            gym_trace.branch(trace, **{"episode": 0, "step": 2, "directory": tmp_path / "if", **options})
    with pytest.raises(IndexError):
        gym_trace.branch(trace, 9, 2, None, tmp_path / "if")
    with pytest.raises(TraceExists):
        gym_trace.branch(trace, 0, 2, None, tmp_path / "trace")


def test_filtered_steps_cannot_be_repeated(tmp_path: Path) -> None:
    trace = recorded(CARTPOLE, tmp_path / "trace", 1, frame_filter=lambda step: step > 3)
    with pytest.raises(EnvironmentUnavailable, match="cannot be replayed by itself: earlier steps were filtered out"):
        gym_trace.branch(trace, 0, 2, None, tmp_path / "if")


def test_a_recorder_repeats_its_reseeding_when_it_is_replayed(tmp_path: Path) -> None:
    with TraceRecordingWrapper(gymnasium.make(LAKE), tmp_path / "trace") as env:
        env.reset(seed=1)
        for step in range(12):
            if step == 3:
                env.reseed(8)
                expected = env.unwrapped.np_random.bit_generator.state
            if any(env.step(step % 2)[2:4]):
                break
    trace = open_trace(tmp_path / "trace")
    assert trace[0].states["generator"][3] == expected
    assert trace[0].annotations == {}
    assert [verdict.verdict for verdict in verify_trace(trace)] == ["identical"]


# -- repeated steps ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """A trace, and episodes that branch from step 7 of one of them, together."""
    base = tmp_path_factory.mktemp("both")
    trace = recorded(CARTPOLE, base / "trace")
    gym_trace.branch(trace, longest(trace), 7, directory=base / "if", episodes=4, seed=3)
    edit.merge([base / "trace", base / "if"], base / "both")
    merged = open_trace(base / "both")
    assert sum(episode.prefix for episode in merged) == 4 * 7
    return merged


def new_parts(trace: Trace) -> list[Any]:
    return [episode[episode.prefix :] for episode in trace]


def test_statistics_count_repeated_steps_once(both: Trace) -> None:
    summary = gym_trace.summarize(both, columns=True)
    new = new_parts(both)
    steps = sum(map(len, new))
    assert (summary["steps"], summary["repeated_steps"]) == (steps, 28)
    assert summary["rewards"]["count"] == summary["actions"][0]["rows"] == steps
    seen = np.concatenate([part.observations for part in new])
    (observations,) = summary["observations"]
    assert observations["rows"] == len(seen)
    assert observations["dimensions"][2]["mean"] == pytest.approx(seen[:, 2].mean(dtype=np.float64))
    assert summary["length"]["max"] == max(map(len, both))  # lengths and returns are those of whole episodes


def test_moments_count_repeated_steps_once(both: Trace) -> None:
    new = new_parts(both)
    found = both.normalization(["observations", "actions"])
    for name in ("observations", "actions"):
        rows = np.concatenate([getattr(part, name) for part in new]).astype(np.float64)
        assert found[name].count == len(rows)
        assert np.allclose(found[name].mean, rows.mean(axis=0))


@pytest.mark.parametrize("cache", ["memory", "disk", None])
def test_batches_have_no_repeated_steps(cache: str | None, both: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYM_TRACE_CACHE", str(both.directory.parent / "cache"))
    new, prefixes = new_parts(both), [episode.prefix for episode in both]
    options: dict[str, Any] = {"seed": 0, "cache": cache, "replacement": False}
    places = set()
    for batch in islice(both.transitions(7, **options), -(-sum(map(len, new)) // 7)):  # an epoch
        places |= set(zip(batch["episode"].tolist(), batch["first_step"].tolist()))
    assert places == {(part.index, part.first_step + step) for part in new for step in range(len(part))}
    for batch in both.windows(8, 4, strict_length=False, span=True, **options):
        assert all(first >= prefixes[episode] for episode, first in zip(batch["episode"], batch["first_step"]))
    begun = [(int(e), int(f)) for batch in both.windows(4, 2, stride=3, strict_length=False, **options)
             for e, f in zip(batch["episode"], batch["first_step"])]  # fmt: skip
    assert sorted(begun) == sorted(
        (part.index, part.first_step + step) for part in new for step in range(0, max(1, len(part) - 3), 3)
    )
    strict = sum(len(batch["episode"]) for batch in both.windows(4, 2, strict_length=True, **options))
    assert strict == sum(max(0, len(part) - 3) for part in new)
    whole = {}
    for batch in islice(both.trajectories(2, **options), 5):
        lengths_here = batch["mask"].sum(axis=1).tolist()
        whole |= dict(zip(batch["episode"].tolist(), zip(batch["first_step"].tolist(), lengths_here)))
    assert whole == {part.index: (part.first_step, len(part)) for part in new}


@pytest.mark.parametrize("form", ["parquet", "minari", "rlds"])
def test_exports_leave_repeated_steps_out(form: str, both: Trace, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    report = gym_trace.export(both, tmp_path / "out", form)
    assert report.steps == sum(map(len, new_parts(both)))
    assert "28 steps that repeat the episode branched from are left out" in [str(loss) for loss in report.lost]
    gym_trace.import_trace(tmp_path / "out", tmp_path / "again", form)
    again = open_trace(tmp_path / "again")
    assert sorted(map(len, again)) == sorted(map(len, new_parts(both)))
    for found, part in zip(again, new_parts(both)):
        assert (found.first_step, found.total_reward) == (part.first_step, part.total_reward)
        assert np.array_equal(found.observations, part.observations)
    assert gym_trace.summarize(again)["steps"] == report.steps
    verdicts = [verdict.verdict for verdict in verify_trace(again)]
    assert verdicts == ["unverifiable" if part.first_step else "identical" for part in new_parts(both)]


def test_json_lines_hold_all_steps(both: Trace, tmp_path: Path) -> None:
    report = gym_trace.export(both, tmp_path / "out.jsonl")
    assert (report.steps, [loss.what for loss in report.lost]) == (sum(map(len, both)), ["states"])
    gym_trace.import_trace(tmp_path / "out.jsonl", tmp_path / "again")
    assert [episode.prefix for episode in open_trace(tmp_path / "again")] == [episode.prefix for episode in both]


def test_learning_libraries_get_no_repeated_steps(both: Trace) -> None:
    chosen = finished(both)
    assert (
        [len(episode) for episode, _ in scanned(chosen)] == lengths(chosen).tolist() == list(map(len, new_parts(both)))
    )


@pytest.mark.parametrize("step", [0, 3])
def test_lint_accepts_short_or_reseeded_continuations(step: int, tmp_path: Path) -> None:
    trace = recorded(LAKE, tmp_path / "trace")
    gym_trace.branch(trace, longest(trace), step, always_right, tmp_path / "if", episodes=12, seed=5)
    edit.merge([tmp_path / "trace", tmp_path / "if"], tmp_path / "both")
    for path in ("if", "both"):
        assert [found.code for found in gym_trace.lint_trace(tmp_path / path) if found.code.startswith("T6")] == []
