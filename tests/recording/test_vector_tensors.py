"""Vector environments that return tensors of any library, lists, or unexpected shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import vector
from numbered_lanes import (
    DISABLED,
    NEXT_STEP,
    SPACES,
    STEPS,
    FixedResultEnv,
    batched_actions,
    check,
    expected,
    make_vector_env,
    modes,
    plain,
    record_and_check,
    record_result,
)
from scripted_env import bits

from gym_trace import TraceRecordingVectorWrapper, open_trace
from gym_trace.data.values import Unstored
from gym_trace.errors import InvalidOption

vector_wrappers = pytest.importorskip("gymnasium.wrappers.vector")


class Tensor:
    """Like a tensor: wraps an array, its rows are tensors, and bool() raises."""

    def __init__(self, array: Any):
        self._array = np.array(array)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._array.astype(dtype) if dtype else self._array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, place: Any) -> Tensor:
        return Tensor(self._array[place])

    def __bool__(self) -> bool:
        if self._array.size != 1:
            raise RuntimeError("the truth of many values is ambiguous")
        return bool(self._array)


def as_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_tensors(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(as_tensors, value))
    if isinstance(value, np.ndarray) and value.dtype == object:
        rows = np.full(len(value), None, object)
        for i, row in enumerate(value):
            rows[i] = None if row is None else as_tensors(row)
        return rows
    return Tensor(value) if isinstance(value, (np.ndarray, np.generic)) else value


def as_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_arrays(item) for key, item in value.items()}
    return tuple(map(as_arrays, value)) if isinstance(value, tuple) else np.asarray(value)


class InTensors(vector.VectorWrapper):  # type: ignore[type-arg]
    """Tensors in, tensors out."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        mask = {} if not options or "reset_mask" not in options else {"reset_mask": np.array(options["reset_mask"])}
        return as_tensors(self.env.reset(seed=seed, options=options and {**options, **mask}))

    def step(self, actions: Any) -> Any:
        return as_tensors(self.env.step(as_arrays(actions)))


@modes
@pytest.mark.parametrize("name", ["box", "discrete", "dict", "tuple", "frames"])
def test_tensors_are_split_by_lane(tmp_path: Path, name: str, mode: Any) -> None:
    space = action_space = SPACES[name]
    env = make_vector_env("sync", mode, True, space, action_space)
    actions, batch = batched_actions(env, STEPS), env.action_space
    wrapped = TraceRecordingVectorWrapper(InTensors(env), tmp_path / "t", record_infos=True)
    wrapped.reset(seed=11, options={"level": 2})
    for action in actions:
        *_, terminations, truncations, _ = wrapped.step(as_tensors(action))
        over = np.asarray(terminations) | np.asarray(truncations)
        if mode == DISABLED and over.any():
            wrapped.reset(options={"reset_mask": Tensor(over), "level": 3})
    wrapped.close()
    check(tmp_path / "t", expected(mode, space, action_space, actions, batch), space, action_space)


def test_torch_tensors_are_split_by_lane(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("array_api_compat")
    mode, space, action_space = NEXT_STEP, SPACES["dict"], SPACES["box"]
    env = make_vector_env("sync", mode, True, space, action_space)
    actions, batch = batched_actions(env, STEPS), env.action_space
    wrapped = TraceRecordingVectorWrapper(vector_wrappers.NumpyToTorch(env), tmp_path / "t", record_infos=True)
    wrapped.reset(seed=11)
    for action in actions:
        wrapped.step(torch.from_numpy(action))
    wrapped.close()
    check(tmp_path / "t", expected(mode, space, action_space, actions, batch), space, action_space)


@modes
def test_a_list_of_infos_has_one_info_per_lane(tmp_path: Path, mode: Any) -> None:
    around = vector_wrappers.DictInfoToList
    record_and_check(tmp_path / "t", mode, SPACES["box"], SPACES["discrete"], around=around)


def infos_of(directory: Path, infos: Any) -> list[Any]:
    return [plain(episode.infos[0]) for episode in record_result(directory, True, infos=infos)]


def test_info_values_without_one_row_per_lane_go_whole_to_each_lane(tmp_path: Path) -> None:
    infos = {
        "config": {"rate": 0.5, "mode": "abc"},
        "history": [1, 2, 3, 4],
        "table": np.arange(5),
        "word": "abc",
        "total": Tensor(7.0),
    }
    assert infos_of(tmp_path / "t", infos) == [plain({**infos, "table": [0, 1, 2, 3, 4], "total": 7.0})] * 3


def test_info_values_with_one_row_per_lane_are_split_in_any_container(tmp_path: Path) -> None:
    infos = {
        "list": ["a", "b", "c"],
        "pair": (np.arange(3), Tensor([[1], [2], [3]])),
        "deep": {"deeper": {"tensor": Tensor([4, 5, 6]), "_tensor": Tensor([True, False, True])}},
        "_not_a_mask": 1,
    }
    first, second, third = infos_of(tmp_path / "t", infos)
    assert first == {"list": "a", "pair": [0, [1]], "deep": {"deeper": {"tensor": 4}}, "_not_a_mask": 1}
    assert second == {"list": "b", "pair": [1, [2]], "deep": {"deeper": {}}, "_not_a_mask": 1}
    assert third["deep"] == {"deeper": {"tensor": 6}}


@pytest.mark.parametrize(
    "values",
    [
        {"ends": np.zeros((3, 2), np.bool_)},
        {"ends": np.zeros(2, np.bool_)},
        {"rewards": np.zeros(5)},
        {"rewards": 1.0},
        {"obs": np.zeros((2, 2), np.float32)},
        {"obs": None},
    ],
    ids="-".join,
)
def test_steps_of_the_wrong_shape_are_skipped_without_false_data(tmp_path: Path, values: Any) -> None:
    envs = FixedResultEnv()
    env = TraceRecordingVectorWrapper(envs, tmp_path / "t")
    env.reset()
    env.step(np.zeros(3, np.int64))
    usual, envs.result = envs.result, {**envs.result, **values}
    env.step(np.zeros(3, np.int64))
    with pytest.warns(UserWarning, match="not one per lane"):
        env.step(np.zeros(3, np.int64))
    env.step(np.zeros(3, np.int64))
    envs.result = usual
    env.step(np.zeros(3, np.int64))
    env.reset()
    env.step(np.zeros(3, np.int64))
    env.close()
    assert envs.steps == 6
    found = [(episode.outcome, len(episode)) for episode in open_trace(tmp_path / "t")]
    assert found == [("cut", 1)] * 3 + [("closed", 1)] * 3


def test_actions_of_the_wrong_shape_reach_the_environment(tmp_path: Path) -> None:
    envs = FixedResultEnv()
    env = TraceRecordingVectorWrapper(envs, tmp_path / "t")
    env.reset()
    env.step(None)
    with pytest.warns(UserWarning, match="the actions of a step: not one per lane"):
        env.step(None)
    env.close()
    assert envs.steps == 2
    assert [len(episode) for episode in open_trace(tmp_path / "t")] == [0] * 3


@pytest.mark.parametrize("mode", ["SameStep", "SAME_STEP", "same_step", vector.AutoresetMode.SAME_STEP, None])
def test_the_autoreset_mode_may_be_text(tmp_path: Path, mode: Any) -> None:
    envs = FixedResultEnv(ends=np.ones(3, np.bool_), infos={"final_obs": np.ones((3, 2), np.float32)})
    envs.metadata = {"autoreset_mode": mode}
    env = TraceRecordingVectorWrapper(envs, tmp_path / "t")
    env.reset()
    env.step(np.zeros(3, np.int64))
    env.step(np.zeros(3, np.int64))
    env.close()
    steps = [1, 0] if mode is None else [1, 1, 0]  # which is NEXT_STEP
    assert [len(episode) for episode in open_trace(tmp_path / "t") if episode.lane == 0] == steps


def test_an_unknown_autoreset_mode_raises(tmp_path: Path) -> None:
    envs = FixedResultEnv()
    envs.metadata = {"autoreset_mode": "sometimes"}
    with pytest.raises(
        InvalidOption, match=r"FixedResultEnv has the autoreset_mode 'sometimes' .* NextStep, SameStep, Disabled"
    ):
        TraceRecordingVectorWrapper(envs, tmp_path / "t")


def test_infos_that_cannot_be_split_lose_no_step(tmp_path: Path) -> None:
    infos: dict[str, Any] = {}
    infos["itself"] = infos
    with pytest.warns(UserWarning, match="infos: a value of type builtins.dict cannot be stored"):
        episodes = record_result(tmp_path / "t", True, infos=infos)
    found = [(len(episode), type(episode.infos[0])) for episode in episodes]
    assert found == [(1, Unstored)] * 3


class OnDevice(Tensor):
    """Like a tensor whose array must be requested."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise TypeError("lies on a device")

    def detach(self) -> OnDevice:
        return self

    def numpy(self) -> Any:
        return self._array


def test_a_reset_mask_may_be_a_tensor(tmp_path: Path) -> None:
    env = TraceRecordingVectorWrapper(FixedResultEnv(), tmp_path / "t", episode_filter=lambda _: True)
    env.reset()
    env.reset(options={"reset_mask": OnDevice([True, False, True])})
    env.step(np.zeros(3, np.int64))
    env.reset(options={"reset_mask": np.ones(7, np.bool_)})
    with pytest.warns(UserWarning, match="the flags in a reset_mask: not one per lane"):
        env.step(np.zeros(3, np.int64))
    env.close()
    found = [(episode.lane, episode.outcome, len(episode)) for episode in open_trace(tmp_path / "t")]
    assert sorted(found) == [(0, "cut", 0), (0, "cut", 1), (1, "cut", 1), (2, "cut", 0), (2, "cut", 1)]


def test_rewards_of_varying_shapes_are_kept(tmp_path: Path) -> None:
    rewards = [np.zeros(2), np.zeros(3), 1.0]
    kept = [episode.rewards[0] for episode in record_result(tmp_path / "t", rewards=rewards)]
    assert [bits(np.asarray(reward)) for reward in kept] == [bits(np.asarray(reward)) for reward in rewards]


def test_an_annotation_without_rows_raises(tmp_path: Path) -> None:
    env = TraceRecordingVectorWrapper(FixedResultEnv(), tmp_path / "t")
    env.reset()
    for value in (1.0, Tensor(1.0), None, {"mean": 1, "std": 2, "entropy": 3}, "abc", {1, 2, 3}):
        with pytest.raises(InvalidOption, match="pass one per lane"):
            env.annotate(value=value)
    env.close()
