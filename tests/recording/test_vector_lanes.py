"""Some lanes of a vector environment, recorded as if the others were not there."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces, vector
from numbered_lanes import (
    COUNT,
    DISABLED,
    NEXT_STEP,
    SAME_STEP,
    SPACES,
    STEPS,
    FixedResultEnv,
    NumberedLaneEnv,
    batched_actions,
    make_vector_env,
    modes,
    parts_of,
    record,
)

from gym_trace import TraceRecordingVectorWrapper, check_trace, open_trace, repair_trace, verify_trace
from gym_trace.errors import InvalidOption
from gym_trace.format.ring.lanes import layout as ring_layout
from gym_trace.playback.episode_index import index_of


def parts_by_lane(trace: Any, lanes: list[int]) -> list[list[dict[str, Any]]]:
    """Return the parts of some lanes, each lane's in their order, without their ids, which count all episodes."""
    assert check_trace(trace.directory).damages == []
    found = [parts_of(trace, lane) for lane in lanes]
    for part in (part for parts in found for part in parts):
        del part["episode_id"]
    return found


def recorded(directory: Path, mode: Any, name: str, **options: Any) -> Any:
    env = make_vector_env("sync", mode, True, SPACES[name], SPACES["dict" if name == "dict" else "discrete"])
    record(env, directory, batched_actions(env, STEPS), **options)
    return open_trace(directory)


@modes
@pytest.mark.parametrize("name", ["box", "dict", "text", "frames"])
def test_chosen_lanes_have_the_parts_that_a_trace_of_all_lanes_has(tmp_path: Path, name: str, mode: Any) -> None:
    whole = recorded(tmp_path / "whole", mode, name)
    some = recorded(tmp_path / "some", mode, name, lanes=[0, 2])
    assert {episode.lane for episode in some} == {0, 2}
    assert parts_by_lane(some, [0, 2]) == parts_by_lane(whole, [0, 2])


@modes
def test_filters_see_only_the_chosen_lanes(tmp_path: Path, mode: Any) -> None:
    def keep(step: int) -> bool:
        return step != 1

    whole = recorded(tmp_path / "whole", mode, "box", frame_filter=keep)
    some = recorded(tmp_path / "some", mode, "box", frame_filter=keep, lanes=[1, 2])
    assert parts_by_lane(some, [1, 2]) == parts_by_lane(whole, [1, 2])


@pytest.mark.parametrize(
    ("lanes", "numbers"),
    [
        (3, [0, 2, 5]),
        (np.int64(1), [0]),
        (8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (slice(1, None, 3), [1, 4, 7]),
        (slice(None, None, -4), [3, 7]),
        ([6, 2, 2], [2, 6]),
        (np.arange(8) % 3 == 1, [1, 4, 7]),
        ([True, False] * 4, [0, 2, 4, 6]),
    ],
)
def test_lanes_are_chosen_by_count_slice_mask_or_numbers(tmp_path: Path, lanes: Any, numbers: list[int]) -> None:
    envs = gymnasium.make_vec("CartPole-v1", num_envs=8, vectorization_mode="sync")
    env = TraceRecordingVectorWrapper(envs, tmp_path / "t", lanes=lanes)
    env.reset(seed=40)
    env.step(np.zeros(8, np.int64))
    env.close()
    found = [(episode.lane, episode.seed) for episode in open_trace(tmp_path / "t")]
    assert found == [(number, 40 + number) for number in numbers]


@pytest.mark.parametrize(
    ("lanes", "problem"),
    [
        (0, "lanes=0: pass a count from 1 to 3"),
        (4, "lanes=4: pass a count from 1 to 3"),
        (-1, "pass a count from 1 to 3"),
        ([], "no lane of 3"),
        (slice(3, None), "no lane of 3"),
        ([False] * 3, "no lane of 3"),
        ([0, 3], "no lane 3; pass numbers from 0 to 2"),
        ([-1, 0], "no lane -1; pass numbers from 0 to 2"),
        ([True, False], "pass a slice, a mask of 3 lanes"),
        ([0.5], "pass a slice, a mask of 3 lanes"),
        ("all", "pass a slice, a mask of 3 lanes"),
        (True, "pass a slice, a mask of 3 lanes"),
    ],
)
def test_lanes_that_make_no_sense_raise_and_leave_no_files(tmp_path: Path, lanes: Any, problem: str) -> None:
    with pytest.raises(InvalidOption, match=problem):
        TraceRecordingVectorWrapper(FixedResultEnv(), tmp_path / "t", lanes=lanes)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_chosen_lanes_are_verified(tmp_path: Path, mode: str) -> None:
    envs = gymnasium.make_vec("CartPole-v1", num_envs=5, vectorization_mode=mode)
    env = TraceRecordingVectorWrapper(envs, tmp_path / "t", lanes=[1, 4])
    env.reset(seed=3)
    envs.action_space.seed(3)
    for _ in range(60):
        env.step(envs.action_space.sample())
    env.close()
    verdicts = list(verify_trace(open_trace(tmp_path / "t")))
    assert {(verdict.lane, verdict.verdict) for verdict in verdicts} == {(1, "identical"), (4, "identical")}


def test_states_are_those_of_the_chosen_lanes(tmp_path: Path) -> None:
    class Told(NumberedLaneEnv):
        def get_state(self) -> Any:
            return bytes([self.lane, self.t])

        def set_state(self, state: Any) -> None:
            self.lane, self.t = state

    makers = [lambda lane=lane: Told(lane, SPACES["box"], SPACES["discrete"]) for lane in range(COUNT)]  # type: ignore[misc]
    env = TraceRecordingVectorWrapper(vector.SyncVectorEnv(makers), tmp_path / "t", lanes=[2], states=2)
    env.reset(seed=3)
    for _ in range(4):
        env.step(np.zeros(COUNT, np.int64))
    env.close()
    kept = [
        (step, list(state["state"]))
        for episode in open_trace(tmp_path / "t")
        for step, state in enumerate(episode.states["environment"])
        if state is not None
    ]
    assert kept
    assert all(state == [2, step] for step, state in kept)


def test_annotations_have_a_row_for_each_lane_of_the_environment(tmp_path: Path) -> None:
    env = TraceRecordingVectorWrapper(FixedResultEnv(), tmp_path / "t", lanes=[0, 2])
    env.reset()
    env.annotate(value=np.array([5.0, 6.0, 7.0]), word=["a", "b", "c"])
    env.step(np.zeros(3, np.int64))
    with pytest.raises(InvalidOption, match="2 rows for 3 lanes"):
        env.annotate(value=np.zeros(2))
    env.close()
    found = [(e.lane, e.annotations["value"].tolist(), list(e.annotations["word"])) for e in open_trace(tmp_path / "t")]
    assert found == [(0, [5.0], ["a"]), (2, [7.0], ["c"])]


def test_info_values_with_as_many_rows_as_chosen_lanes_go_whole_to_each(tmp_path: Path) -> None:
    infos = {"pair": [1, 2], "each": np.arange(3), "odd": np.arange(3), "_odd": np.array([True, True, False])}
    env = TraceRecordingVectorWrapper(FixedResultEnv(infos=infos), tmp_path / "t", lanes=[0, 2], record_infos=True)
    env.reset()
    env.step(np.zeros(3, np.int64))
    env.close()
    first, second = (episode.infos[0] for episode in open_trace(tmp_path / "t"))
    assert first == {"pair": [1, 2], "each": 0, "odd": 0}
    assert second == {"pair": [1, 2], "each": 2}


@pytest.mark.parametrize("name", ["obs", "rewards", "ends"])
def test_as_many_rows_as_chosen_lanes_are_not_taken_for_theirs(tmp_path: Path, name: str) -> None:
    envs = FixedResultEnv()
    env = TraceRecordingVectorWrapper(envs, tmp_path / "t", lanes=[0, 2])
    env.reset()
    env.step(np.zeros(3, np.int64))
    rows = {"obs": np.zeros((2, 2), np.float32), "rewards": np.zeros(2), "ends": np.zeros(2, np.bool_)}
    envs.result = {**envs.result, name: rows[name]}
    env.step(np.zeros(3, np.int64))
    with pytest.warns(UserWarning, match="not one per lane"):
        env.step(np.zeros(3, np.int64))
    env.close()
    assert [(episode.lane, len(episode)) for episode in open_trace(tmp_path / "t")] == [(0, 1), (2, 1)]


class ResetRows(vector.VectorWrapper):  # type: ignore[type-arg]
    """Answers a masked reset with rows of the lanes that were reset, as EnvPool does."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        mask = None if options is None else options.get("reset_mask")
        observations, _ = self.env.reset(seed=seed, options=options)
        return (observations, {}) if mask is None else (observations[mask], {})


def test_a_masked_reset_may_answer_with_rows_of_the_lanes_that_it_resets(tmp_path: Path) -> None:
    found = []
    for around in (lambda env: env, ResetRows):
        env = make_vector_env("sync", DISABLED, True, SPACES["box"], SPACES["discrete"])
        wrapped = TraceRecordingVectorWrapper(around(env), tmp_path / str(len(found)), lanes=[0, 2])
        wrapped.reset(seed=11)
        over = np.zeros(COUNT, np.bool_)
        for mask in ([True, True, False], [False, True, False], [False, True, True], [True, True, True]):
            *_, terminations, truncations, _ = wrapped.step(np.zeros(COUNT, np.int64))
            over = terminations | truncations
            mask = (over | mask).tolist()
            wrapped.reset(options={"reset_mask": np.array(mask)})
        wrapped.close()
        found.append(parts_of(open_trace(wrapped.directory)))
    assert found[0] == found[1]
    assert {part["lane"] for part in found[0]} == {0, 2}
    assert len(found[0]) > 5


def test_a_copy_records_the_same_lanes(tmp_path: Path) -> None:
    wrapped = TraceRecordingVectorWrapper(FixedResultEnv(), tmp_path / "t", lanes=[2])
    wrapped.reset(seed=11)
    wrapped.step(np.zeros(COUNT, np.int64))
    other = copy.deepcopy(wrapped)
    other.reset()
    for each in (wrapped, other):
        each.step(np.ones(COUNT, np.int64))
        each.close()
    found = [(episode.lane, episode.actions.tolist()) for episode in open_trace(tmp_path / "t")]
    assert sorted(found) == [(2, [0, 1]), (2, [1])]


class Dies(FixedResultEnv):
    """Exits in its third step, as if killed."""

    def step(self, actions: Any) -> Any:
        if self.steps == 2:
            os._exit(9)
        return super().step(actions)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_run_keeps_its_lane_numbers_and_pending_actions(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        env = TraceRecordingVectorWrapper(Dies(), tmp_path / "t", lanes=[0, 2])
        env.reset()
        for action in range(4):
            env.step(np.arange(3) + action)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    repair_trace(tmp_path / "t", tmp_path / "repaired")
    for name in ("t", "repaired"):
        trace = open_trace(tmp_path / name)
        assert [(episode.lane, episode.actions.tolist()) for episode in trace] == [(0, [0, 1]), (2, [2, 3])]
        pending = [(one.lane, one.step, one.leaves[0]) for reader in index_of(trace).readers for one in reader.pending]
        assert pending == [(0, 2, 2), (2, 2, 4)]


@pytest.mark.parametrize("numbers", [[1], [1, 1], [2, 1], [0, -1], [0, True], [0, 1 << 32], "ab", None])
def test_malformed_numbers_of_lanes_in_a_ring_raise(numbers: Any) -> None:
    described = ring_layout.LaneLayout(2, 3, "NextStep", False, [], [], np.array([3, 9])).described()
    assert ring_layout.lane_layout(described, 1 << 20).numbers is not None
    with pytest.raises((ring_layout.CorruptTrace, TypeError)):
        ring_layout.lane_layout({**described, "numbers": numbers}, 1 << 20)


# -- devices ----------------------------------------------------------------------------------------------------------


class OnDevice:
    """Like an array on a device: rows are taken there, and copying all of them is counted."""

    copied: list[int] = []  # noqa: RUF012

    def __init__(self, array: Any):
        self._array = np.asarray(array)

    shape = property(lambda self: self._array.shape)

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, place: Any) -> OnDevice:
        return OnDevice(self._array[place])

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self.copied.append(len(self._array))
        return self._array


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_rows_on_a_device_are_gathered_before_they_are_copied(tmp_path: Path, mode: Any) -> None:
    count = 1000

    class OfDevice(FixedResultEnv):
        metadata = {"autoreset_mode": mode}  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.num_envs = count

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return OnDevice(np.ones((count, 2), np.float32)), {"each": OnDevice(np.arange(count))}

        def step(self, actions: Any) -> Any:
            rows = np.repeat(np.arange(count, dtype=np.float32), 2).reshape(count, 2)
            infos = {"each": OnDevice(np.arange(count)), "final_obs": OnDevice(-rows)}
            flags = [OnDevice(np.arange(count) == lane) for lane in (7, 900)]
            return OnDevice(rows), OnDevice(np.arange(count)), *flags, infos

    OnDevice.copied.clear()
    env = TraceRecordingVectorWrapper(OfDevice(), tmp_path / "t", lanes=[7, 8, 900], record_infos=["each"])
    env.reset()
    env.annotate(value=OnDevice(np.arange(count) / 2))
    env.step(OnDevice(np.arange(count)))
    env.close()
    assert max(OnDevice.copied) == 3
    first = [episode for episode in open_trace(tmp_path / "t") if episode.episode_id < 3]
    assert [episode.lane for episode in first] == [7, 8, 900]
    assert [episode.outcome for episode in first] == ["terminated", "closed", "truncated"]
    for episode in first:
        sign = -1 if mode == SAME_STEP and episode.lane != 8 else 1
        assert episode.observations.tolist() == [[1, 1], [sign * episode.lane] * 2]
        assert (episode.actions[0], episode.rewards[0]) == (episode.lane, episode.lane)
        assert episode.annotations["value"].tolist() == [episode.lane / 2]
        assert episode.infos[0] == {"each": episode.lane}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torch_tensors_of_chosen_lanes_are_recorded_bit_for_bit(tmp_path: Path, device: str) -> None:
    torch = pytest.importorskip("torch")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    count, lanes = 64, [0, 21, 63]
    generator = torch.Generator(device).manual_seed(0)

    class Batched(vector.VectorEnv):  # type: ignore[type-arg]
        metadata = {"autoreset_mode": NEXT_STEP}  # noqa: RUF012
        num_envs = count
        single_observation_space = spaces.Box(-np.inf, np.inf, (5,), np.float32)
        single_action_space = spaces.Box(-1, 1, (2,), np.float32)
        observation_space = spaces.Box(-np.inf, np.inf, (count, 5), np.float32)
        action_space = spaces.Box(-1, 1, (count, 2), np.float32)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self.observations = torch.randn(count, 5, generator=generator, device=device)
            return self.observations, {}

        def step(self, actions: Any) -> Any:
            self.observations[:, :2] += actions  # in place, as simulators on a GPU do
            never = torch.zeros(count, dtype=torch.bool, device=device)
            return self.observations, self.observations.sum(1), never, never, {}

    env = TraceRecordingVectorWrapper(Batched(), tmp_path / "t", lanes=lanes)
    rows: dict[str, list[Any]] = {"observations": [env.reset()[0].cpu().numpy().copy()], "actions": [], "rewards": []}
    for _ in range(9):
        actions = torch.randn(count, 2, generator=generator, device=device, requires_grad=True)
        observations, rewards, *_ = env.step(actions.detach() if _ % 2 else actions)
        for name, tensor in zip(rows, (observations, actions, rewards)):
            rows[name].append(tensor.detach().cpu().numpy().copy())
    env.close()
    trace = open_trace(tmp_path / "t")
    assert [episode.lane for episode in trace] == lanes
    for episode in trace:
        for name, kept in rows.items():
            assert getattr(episode, name).tobytes() == np.array(kept)[:, episode.lane].tobytes()
