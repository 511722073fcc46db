"""Batches through PyTorch's own loader: the same ones, each once, however many workers there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import gym_trace

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402

from gym_trace.torch import BatchStream, Items, collated, tensors  # noqa: E402


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("traces") / "cartpole"
    env = gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), directory)
    gym_trace.record_episodes(env, episodes=40, seed=0)
    env.close()
    return gym_trace.open_trace(directory)


def pairs(loader: Any) -> list[tuple[int, int]]:
    return [
        pair
        for batch in loader
        for pair in zip(np.atleast_1d(batch["episode"]).tolist(), np.atleast_1d(batch["first_step"]).tolist())
    ]


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("cache", ["memory", "disk", None])
def test_workers_have_every_window_once_between_them(
    trace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, method: str, cache: str | None
) -> None:
    if method != "fork" and (workers != 1 or cache == "memory"):
        pytest.skip("one of each is enough: they start slowly")
    monkeypatch.setenv("GYM_TRACE_CACHE", str(tmp_path))
    expected = sorted(pairs(trace.windows(5, 32, replacement=False)))
    batches = trace.windows(5, 32, replacement=False, cache=cache, cache_bytes=1 << 20)
    context = method if workers else None
    loader = DataLoader(BatchStream(batches), batch_size=None, num_workers=workers, multiprocessing_context=context)
    assert sorted(pairs(loader)) == expected
    items = Items(trace.windows(5, cache="memory"))
    loader = DataLoader(items, 32, shuffle=True, num_workers=workers, collate_fn=collated)
    assert sorted(pairs(loader)) == expected
    assert items[3]["observations"].shape == (6, 4)


def test_a_data_loader_that_is_told_nothing_collates_items_as_well(trace: Any) -> None:
    items = Items(trace.windows(5, cache="memory"))
    for told, gathered in zip(DataLoader(items, 32), DataLoader(items, 32, collate_fn=collated), strict=True):
        assert told.keys() == gathered.keys()
        for name in told:
            assert torch.equal(told[name], gathered[name])


def test_tensors_share_memory_and_have_the_dtype_that_was_asked_for(trace: Any) -> None:
    batch = next(trace.windows(5, 4))
    same = tensors(batch)
    assert same["observations"].data_ptr() == batch["observations"].ctypes.data
    assert same["rewards"].dtype == torch.float64
    assert tensors(batch, dtype=torch.float32)["rewards"].dtype == torch.float32
    assert same["actions"].dtype == torch.int64
    assert same["terminations"].dtype == torch.bool
