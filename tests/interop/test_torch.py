"""Batches through PyTorch's own loader: the same ones, each once, however many workers there are."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from traces import recorded

import gym_trace

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402

from gym_trace.exchange.torch import BatchItems, BatchStream, collated, tensors  # noqa: E402


def test_gym_trace_torch_is_there_without_an_import_of_its_own() -> None:
    script = "import gym_trace, sys; assert 'torch' not in sys.modules; gym_trace.exchange.torch.BatchStream"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return gym_trace.open_trace(recorded("CartPole-v1", 40, tmp_path_factory.mktemp("traces") / "cartpole"))


def pairs(loader: Any) -> list[tuple[int, int]]:
    return [pair for batch in in_order(loader) for pair in batch]


def in_order(loader: Any) -> list[list[tuple[int, int]]]:
    """The episode and the first step of each item, batch by batch."""
    names = ("episode", "first_step")
    return [list(zip(*(np.atleast_1d(batch[name]).tolist() for name in names))) for batch in loader]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Sixteen chunks of 2 MB, so that a stream has two strands."""
    directory = tmp_path_factory.mktemp("traces") / "pictures"
    for part in range(16):
        env = gym_trace.TraceRecordingWrapper(Pictures(), directory, on_exist="append")
        gym_trace.record_episodes(env, episodes=2, seed=part)
        env.close()
    return gym_trace.open_trace(directory)


class Pictures(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(0, 255, (128, 128), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return self.np_random.integers(0, 256, (128, 128), np.uint8), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return self.np_random.integers(0, 256, (128, 128), np.uint8), 0.0, False, self._steps == 64, {}


@pytest.mark.parametrize("cache", ["memory", "disk", None])
def test_batches_do_not_depend_on_the_number_of_workers_or_on_resuming(
    pictures: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str | None
) -> None:
    monkeypatch.setenv("GYM_TRACE_CACHE", str(tmp_path))

    def made() -> Any:
        return pictures.transitions(100, replacement=False, cache=cache, cache_bytes=128 << 20)

    whole = made()
    expected = [in_order(whole) for _ in range(3)]
    assert cache is not None or whole._blocks().strands == 2
    assert len(expected[0]) == 21
    assert expected[0] != expected[1]
    for workers, method in ((0, None), (1, "fork"), (4, "fork"), (2, "spawn")):
        batches = made()
        loader = DataLoader(BatchStream(batches), batch_size=None, num_workers=workers, multiprocessing_context=method)
        for epoch in [] if method == "spawn" else expected[:2]:  # it takes seconds to start
            assert in_order(loader) == epoch
        batches.load_state_dict({**batches.state_dict(), "epoch": 2, "number": 19})
        assert in_order(loader) == expected[2][19:]


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_items_are_the_same_with_any_number_of_workers(
    trace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    monkeypatch.setenv("GYM_TRACE_CACHE", str(tmp_path))
    items = BatchItems(trace.windows(5, cache=cache))
    assert items[3]["observations"].shape == (6, 4)
    found = []
    for workers, method in ((0, None), (1, "fork"), (4, "fork"), (2, "spawn"))[: None if cache == "disk" else 3]:
        shuffled = {"shuffle": True, "generator": torch.Generator().manual_seed(0)}
        how = {"num_workers": workers, "multiprocessing_context": method, "collate_fn": collated}
        found.append(in_order(DataLoader(items, 32, **shuffled, **how)))
    assert sorted(pair for batch in found[0] for pair in batch) == sorted(pairs(trace.windows(5, replacement=False)))
    assert found[1:] == found[:1] * (len(found) - 1)


def test_spawned_workers_of_several_ranks_have_the_share_of_their_rank(
    trace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for rank in range(2):
        # As where torch.distributed runs.
        monkeypatch.setattr(gym_trace.exchange.torch, "_rank", lambda rank=rank: (rank, 2))
        batches = pickle.loads(pickle.dumps(BatchStream(trace.windows(5, 32, replacement=False))))
        monkeypatch.undo()
        found += pairs(batches)
    assert sorted(found) == sorted(pairs(trace.windows(5, replacement=False)))


def test_a_data_loader_without_options_collates_items_as_well(trace: Any) -> None:
    items = BatchItems(trace.windows(5, cache="memory"))
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
