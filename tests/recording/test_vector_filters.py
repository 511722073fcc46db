"""Filters of vector environments keep, lane by lane, the same steps as filters of single environments."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import vector
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_lanes import (
    ARRAYS,
    COUNT,
    DISABLED,
    MODES,
    NEXT_STEP,
    SAME_STEP,
    SPACES,
    STEPS,
    NumberedLaneEnv,
    batched_actions,
    check_lanes,
    make_vector_env,
    modes,
    parts_of,
    plain,
    record,
    step_lanes,
)
from scripted_env import bits

from gym_trace import TraceRecordingVectorWrapper, TraceRecordingWrapper, check_trace, open_trace
from gym_trace.errors import InvalidOption
from gym_trace.playback.episode_index import index_of


def recorded(directory: Path, mode: Any, *, observation: str = "box", **options: Any) -> Any:
    env = make_vector_env("sync", mode, True, SPACES[observation], SPACES["discrete"])
    record(env, directory, batched_actions(env, STEPS), **options)
    return open_trace(directory)


def closed_line(directory: Path) -> dict[str, Any]:
    (path,) = directory.glob("*.manifest.jsonl")
    line: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    return line


def checked_parts(trace: Any, lane: int | None = None) -> list[dict[str, Any]]:
    """Return the parts of an undamaged trace of a closed writer."""
    report = check_trace(trace.directory)
    assert (report.damages, report.remarks) == ([], [])
    assert all(part.start_time is not None and part.end_time >= part.start_time for part in trace)
    return parts_of(trace, lane)


def sliced(trace: Any, keeps_episode: Any, keeps_step: Any) -> list[dict[str, Any]]:
    """Return the parts that filters should keep of an unfiltered trace."""
    parts = []
    for episode, whole in zip(sorted(trace, key=lambda episode: episode.episode_id), checked_parts(trace)):
        if not keeps_episode(episode.episode_id):
            continue
        steps = [step for step in range(len(episode)) if keeps_step(step)]
        for first in (step for step in steps if step - 1 not in steps):
            end = next(step for step in range(first, len(episode) + 1) if step not in steps)
            part = {"first_step": first, "infos": plain(episode.infos[first:end])}
            for name in ARRAYS:
                part[name] = bits(getattr(episode, name)[first : end + (name == "observations")])
            parts.append({**whole, **part})
    return parts


@settings(max_examples=settings().max_examples // 2)
@given(
    st.sampled_from(MODES),
    st.sampled_from(["box", "frames", "text"]),
    st.sets(st.integers(0, 30), max_size=20) | st.none(),
    st.sets(st.integers(0, 4)) | st.none(),
    st.integers(1, STEPS),
)
def test_a_filtered_run_is_a_subset_of_the_unfiltered_run(
    tmp_path_factory: Any, mode: Any, observation: str, episodes: Any, steps: Any, flush_every: int
) -> None:
    keeps_episode = None if episodes is None else episodes.__contains__
    keeps_step = None if steps is None else steps.__contains__
    directory = tmp_path_factory.mktemp("traces")
    whole = recorded(directory / "whole", mode, observation=observation)
    some = recorded(
        directory / "some",
        mode,
        observation=observation,
        episode_filter=keeps_episode,
        frame_filter=keeps_step,
        flush_every=flush_every,
    )
    if steps is None:
        expected = [part for part in checked_parts(whole) if keeps_episode is None or part["episode_id"] in episodes]
    else:
        expected = sliced(whole, keeps_episode or (lambda episode: True), keeps_step)
    assert checked_parts(some) == expected


@modes
@pytest.mark.parametrize("steps", [{0, 2, 3}, {1}, {2, 3}, set(range(9))])
def test_a_vector_run_and_single_runs_keep_the_same_parts(tmp_path: Path, mode: Any, steps: set[int]) -> None:
    together = recorded(tmp_path / "vector", mode, frame_filter=steps.__contains__)
    actions = batched_actions(make_vector_env("sync", mode, True, SPACES["box"], SPACES["discrete"]), STEPS)
    for lane in range(COUNT):
        inner = NumberedLaneEnv(lane, SPACES["box"], SPACES["discrete"])
        env = TraceRecordingWrapper(inner, tmp_path / str(lane), record_infos=True, frame_filter=steps.__contains__)
        env.reset(seed=11 + lane, options={"level": 2})
        over = False
        for action in actions:
            if over and mode == NEXT_STEP:
                env.reset()
                over = False
                continue
            *_, terminated, truncated, _ = env.step(action[lane])
            over = terminated or truncated
            if over and mode != NEXT_STEP:
                env.reset(options={"level": 3} if mode == DISABLED else None)
        env.close()
        one, other = checked_parts(open_trace(tmp_path / str(lane))), checked_parts(together, lane)
        assert len(one) == len(other) > 2
        for part in (*one, *other):
            del part["episode_id"], part["lane"]
        assert one == other


@modes
def test_the_episode_filter_is_called_once_per_episode_by_start_then_lane(tmp_path: Path, mode: Any) -> None:
    asked: list[int] = []

    def is_wanted(episode: int) -> bool:
        asked.append(episode)
        return False

    trace = recorded(tmp_path / "t", mode, episode_filter=is_wanted)
    assert len(trace) == 0
    assert asked == list(range(len(recorded(tmp_path / "whole", mode))))
    assert [path.suffix for path in (tmp_path / "t").iterdir()] == [".jsonl"]  # no row was stored


@modes
def test_the_frame_filter_is_called_only_for_steps_of_recorded_episodes(tmp_path: Path, mode: Any) -> None:
    asked: list[int] = []
    whole = recorded(tmp_path / "whole", mode)
    recorded(tmp_path / "t", mode, episode_filter=lambda e: e % 2 == 1, frame_filter=asked.append)
    expected = Counter(step for episode in whole if episode.episode_id % 2 for step in range(len(episode)))
    assert Counter(asked) == expected


def test_reward_classes_with_a_frame_filter_raise(tmp_path: Path) -> None:
    env = make_vector_env("sync", NEXT_STEP, True, SPACES["box"], SPACES["discrete"])
    with pytest.raises(InvalidOption, match="cannot be combined with frame_filter"):
        TraceRecordingVectorWrapper(env, tmp_path / "t", reward_classes=[0.0], frame_filter=lambda step: True)
    assert not (tmp_path / "t").exists()


def test_reward_classes_of_one_lane_match_a_single_environment(tmp_path: Path) -> None:
    def maker() -> Any:
        return NumberedLaneEnv(2, SPACES["box"], SPACES["discrete"])

    options: dict[str, Any] = {"record_infos": True, "reward_classes": [2.125, 2.25, 2.5]}
    envs = vector.SyncVectorEnv([maker], autoreset_mode=SAME_STEP)
    many = TraceRecordingVectorWrapper(envs, tmp_path / "vector", **options)
    one = TraceRecordingWrapper(maker(), tmp_path / "single", **options)
    many.reset(seed=11)
    one.reset(seed=11)
    for action in np.random.default_rng(1).integers(-3, 6, 200):
        many.step(np.array([action]))
        *_, terminated, truncated, _ = one.step(action)
        if terminated or truncated:
            one.reset()
    many.close()
    one.close()
    parts = checked_parts(open_trace(tmp_path / "vector"))
    assert len(parts) > 20
    assert parts == checked_parts(open_trace(tmp_path / "single"))
    counts = [closed_line(tmp_path / name)["class_counts"] for name in ("vector", "single")]
    assert counts[0] == counts[1]


@modes
def test_reward_classes_keep_rare_rewards_of_any_lane(tmp_path: Path, mode: Any) -> None:
    whole = recorded(tmp_path / "whole", mode)
    trace = recorded(tmp_path / "t", mode, reward_classes=[0.1, 1.1, 2.1])
    line = closed_line(tmp_path / "t")
    rewards = [round(reward - 0.6) for episode in whole for reward in episode.rewards]
    assert sum(line["class_counts"]) == len(rewards)
    assert 0 < sum(map(len, trace)) < sum(map(len, whole))
    for part in trace:
        (real,) = (episode for episode in whole if episode.episode_id == part.episode_id)
        end = part.first_step + len(part)
        assert bits(part.rewards) == bits(real.rewards[part.first_step : end])
        assert bits(part.actions) == bits(real.actions[part.first_step : end])
        assert bits(part.observations) == bits(real.observations[part.first_step : end + 1])


def test_the_schema_describes_the_filters(tmp_path: Path) -> None:
    trace = recorded(tmp_path, NEXT_STEP, episode_filter=lambda episode: True, reward_classes=[1])
    options = index_of(trace).readers[0].schema["recorder"]
    assert (options["episode_filter"], options["frame_filter"], options["reward_classes"]) == (True, False, [1.0])


@modes
@pytest.mark.parametrize("name", ["episode_filter", "frame_filter"])
def test_an_exception_in_a_filter_reaches_the_caller_and_corrupts_nothing(tmp_path: Path, mode: Any, name: str) -> None:
    calls = 0

    def fails_once(number: int) -> bool:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise ZeroDivisionError
        return True

    env = make_vector_env("sync", mode, True, SPACES["box"], SPACES["discrete"])
    wrapped = TraceRecordingVectorWrapper(env, tmp_path / "t", record_infos=True, **{name: fails_once})
    failures = 0
    wrapped.reset(seed=11)
    for action in batched_actions(env, STEPS):
        try:
            step_lanes(wrapped, action)
        except ZeroDivisionError:
            failures += 1
            if mode == DISABLED:
                wrapped.reset()
    wrapped.close()
    trace = open_trace(tmp_path / "t")
    assert failures == 1
    assert set(check_lanes(trace).values()) == {1}
    assert len({part.episode_id for part in trace}) == len(trace) > 12
    assert {part.outcome for part in trace} <= {"cut", "terminated", "truncated", "closed"}


def test_annotations_stay_with_their_steps(tmp_path: Path) -> None:
    envs = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    env = TraceRecordingVectorWrapper(envs, tmp_path, frame_filter=lambda step: step % 3 != 1)
    env.reset(seed=0)
    for t in range(8):
        env.annotate(value=np.array([t, 10 + t]))
        env.step(np.array([t % 2, t % 2]))
    env.annotate(value=np.array([-1, -1]))
    env.reset(seed=1)
    env.step(np.array([0, 1]))
    env.close()
    for part in (part for part in open_trace(tmp_path) if part.episode_id < 2):
        steps = range(part.first_step, part.first_step + len(part))
        assert part.annotations["value"].tolist() == [10 * part.lane + step for step in steps]
    for part in (part for part in open_trace(tmp_path) if part.episode_id >= 2):
        assert part.annotations.get("value", np.array([None])).tolist() == [None]
