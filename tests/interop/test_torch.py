"""Batches through PyTorch's own loader: the same ones, each once, however many workers there are."""

from __future__ import annotations

import contextlib
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

from gym_trace.errors import CorruptTrace, InvalidOption  # noqa: E402
from gym_trace.exchange.torch import BatchItems, BatchStream, collated, tensors  # noqa: E402
from gym_trace.playback.sampling.on_device import _packed  # noqa: E402
from gym_trace.playback.sampling.rows import DecodePlan  # noqa: E402


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
    for unknown in (np.ones(2, np.longdouble), np.ones(2, ">f4")):
        assert tensors({"rows": unknown})["rows"] is unknown


# -- on a device ------------------------------------------------------------------------------------------------------


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and CUDA_VISIBLE_DEVICES=0")
GPU = pytest.param("cuda", marks=NEEDS_GPU)


class Mixed(gymnasium.Env[Any, Any]):
    """Episodes of 1 to 9 steps, with leaves of several dtypes."""

    observation_space = gymnasium.spaces.Dict(
        {
            "vector": gymnasium.spaces.Box(-9, 9, (3,), np.float32),
            "counts": gymnasium.spaces.Box(0, 60000, (2, 2), np.uint16),
            "said": gymnasium.spaces.Text(5),
        }
    )
    action_space = gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(4), gymnasium.spaces.MultiBinary(2)])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self._left = int(self.np_random.integers(1, 10))
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self._left -= 1
        ends = not self._left and self.np_random.random() < 0.5
        return self.observation_space.sample(), self.np_random.normal(), ends, not ends and not self._left, {}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("traces") / "mixed"
    with gym_trace.TraceRecordingWrapper(Mixed(), directory) as env:
        for seed in range(30):
            env.reset(seed=seed)
            env.action_space.seed(seed)
            ended = False
            while not ended:
                env.annotate(logprob=np.float32(seed / 7))
                *_, terminated, truncated, _ = env.step(env.action_space.sample())
                ended = terminated or truncated
    return gym_trace.open_trace(directory)


KINDS: dict[str, Any] = {
    "windows": lambda trace, **options: trace.windows(3, 16, **options),
    "padded windows": lambda trace, **options: trace.windows(5, 16, strict_length=False, span=True, **options),
    "transitions": lambda trace, **options: trace.transitions(16, **options),
    "returns of stacked frames": lambda trace, **options: trace.transitions(16, n_steps=3, n_frames=2, **options),
    "episodes": lambda trace, **options: trace.trajectories(4, **options),
    "weighted": lambda trace, **options: trace.transitions(16, weights=np.arange(len(trace)), **options),
    "a view with repetitions": lambda trace, **options: trace[[3, 3, 9, 4, 3]].windows(2, 8, **options),
    "some columns": lambda trace, **options: trace.windows(3, 8, columns=("rewards", "annotations"), **options),
}


def assert_same(batch: Any, arrays: Any) -> None:
    """Assert that tensors have the values and dtypes of arrays, bit for bit; objects are equal."""
    assert type(batch) is type(arrays) or isinstance(batch, torch.Tensor)
    if isinstance(arrays, dict):
        assert batch.keys() == arrays.keys()
        for name, part in arrays.items():
            assert_same(batch[name], part)
    elif isinstance(arrays, tuple):
        for part, other in zip(batch, arrays, strict=True):
            assert_same(part, other)
    elif arrays.dtype.kind in "OTU":
        assert batch.tolist() == arrays.tolist()
    else:
        found = batch.cpu().numpy()
        assert (found.dtype, found.shape, found.tobytes()) == (arrays.dtype, arrays.shape, arrays.tobytes())


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_on_a_device_give_the_same_batches(mixed: Any, kind: str, device: str) -> None:
    there, here = KINDS[kind](mixed, cache=device, seed=3), KINDS[kind](mixed, cache="memory", seed=3)
    for _ in range(5):
        assert_same(next(there), next(here))
    assert there.state_dict()["number"] == 5
    chosen = np.array([2, 0, 1])
    assert_same(there.take(chosen), here.take(chosen))
    again = pickle.loads(pickle.dumps(there))
    assert_same(next(again), next(here))


class Stream:
    """A stream of CUDA that is not there; notes what is asked of it."""

    def __init__(self, calls: list[str]):
        self.calls, self.events = calls, 0

    def record_event(self) -> str:
        self.events += 1
        self.calls.append(f"recorded {self.events}")
        return f"event {self.events}"

    def wait_event(self, event: str) -> None:
        self.calls.append(f"wait for {event}")


@pytest.fixture
def stream_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the calls of streams by BatchStream(device="cpu"), as if the CPU had some."""
    calls: list[str] = []
    side, consumer = Stream(calls), Stream(calls)

    @contextlib.contextmanager
    def used(stream: Any) -> Any:
        assert stream is side
        calls.append("side stream")
        yield
        calls.append("consumer")

    class Transfers(gym_trace.exchange.torch._Transfers):
        def __init__(self, *args: Any):
            super().__init__(*args)
            self._stream: Any = side

    monkeypatch.setattr(gym_trace.exchange.torch, "_Transfers", Transfers)
    monkeypatch.setattr(torch.cuda, "stream", used)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: consumer)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: calls.append("held"))
    return calls


@pytest.mark.parametrize("where", ["the CPU", "the CPU, as if it had streams", GPU])
@pytest.mark.parametrize("cache", ["memory", "disk", "cpu", None])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_to_a_device_gives_the_same_batches(
    mixed: Any,
    kind: str,
    cache: str | None,
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    device = "cuda" if where == "cuda" else "cpu"
    if "streams" in where:
        request.getfixturevalue("stream_calls")
    monkeypatch.setenv("GYM_TRACE_CACHE", str(tmp_path))
    options: dict[str, Any] = {"cache": cache, "seed": 3}
    if kind != "weighted":
        options["replacement"] = False
    elif cache is None:
        pytest.skip("streams have no weights")
    if cache == "disk" and kind != "some columns":  # files hold no texts
        options["columns"] = ("actions", "rewards", "terminations", "truncations", "annotations")
    batches = KINDS[kind](mixed, **options)
    expected = KINDS[kind](mixed, **{**options, "cache": "memory" if cache == "cpu" else cache})
    for _ in range(1 if kind == "weighted" else 2):  # epochs
        for number, (batch, arrays) in enumerate(zip(BatchStream(batches, device=device), expected, strict=False)):
            assert_same(batch, arrays)
            assert batches.state_dict()["number"] == expected.state_dict()["number"] == number + 1
            if kind == "weighted":
                for one in (batches, expected):
                    one.update_priorities(batch["index"], batch["weight"] * 0.5 + 1)
                if number == 8:
                    break


def test_a_stream_to_a_device_continues_where_its_batches_are(mixed: Any, stream_calls: list[str]) -> None:
    batches, expected = mixed.windows(2, 4, replacement=False), mixed.windows(2, 4, replacement=False)
    stream = iter(BatchStream(batches, device="cpu", dtype=torch.float16))
    assert next(stream)["observations"]["vector"].dtype == torch.float16
    batches.load_state_dict({**batches.state_dict(), "number": 7})
    assert torch.equal(next(stream)["first_step"], torch.from_numpy(expected.at(7)["first_step"]))
    assert batches.state_dict()["number"] == 8


@pytest.mark.parametrize("strategy", ["future", "final", "random"])
def test_a_stream_to_a_device_relabels_goals(tmp_path: Path, stream_calls: list[str], strategy: str) -> None:
    random = np.random.default_rng(0)
    observations = {key: random.normal(size=(31, 2, 3)) for key in ("observation", "achieved_goal", "desired_goal")}
    zeros = np.zeros((30, 2))
    with gym_trace.TraceWriter(tmp_path) as writer:
        writer.rollouts(observations, zeros, zeros, random.random((30, 2)) < 0.2, zeros)
    goals = gym_trace.Hindsight(strategy, lambda achieved, desired, infos: (achieved * desired).sum(axis=1))
    batches, expected = (gym_trace.open_trace(tmp_path).transitions(8, goals=goals) for _ in range(2))
    for batch, arrays, _ in zip(BatchStream(batches, device="cpu"), expected, range(4), strict=False):
        assert_same(batch, arrays)


def test_copies_have_a_stream_of_their_own_that_the_consumer_waits_for(mixed: Any, stream_calls: list[str]) -> None:
    stream = iter(BatchStream(mixed.transitions(4, columns="rewards"), device="cpu"))
    columns = len(next(stream))
    copied = [["side stream", f"recorded {number}", "consumer"] for number in range(1, 5)]
    held = ["held"] * columns
    assert stream_calls == [*copied[0], *copied[1], *copied[2], "wait for event 1", *held]
    stream_calls.clear()
    next(stream)
    assert stream_calls == [*copied[3], "wait for event 2", *held]


def test_an_error_ahead_is_raised_after_the_batches_before_it(mixed: Any, stream_calls: list[str]) -> None:
    batches = mixed.transitions(4, columns="rewards")
    at, loaded = batches.at, []

    def failing(number: int, epoch: int = 0) -> Any:
        if number == 2:
            raise CorruptTrace("damaged")
        return at(number, epoch)

    batches.at = failing
    with pytest.raises(CorruptTrace, match="damaged"):
        loaded.extend(BatchStream(batches, device="cpu"))
    assert len(loaded) == 2
    assert_same(loaded[1], mixed.transitions(4, columns="rewards").at(1))


def test_small_arrays_are_copied_together() -> None:
    random = np.random.default_rng(0)
    arrays = [
        random.integers(0, 2, (3, 5)).astype(dtype) for dtype in ("?", "u1", "i2", "u4", "i8", "f2", "f8", "c16")
    ] + [np.zeros((4, 0)), np.arange(7)[::2]]
    found = _packed(arrays, torch.device("cpu"))
    for tensor, array in zip(found, arrays, strict=True):
        assert_same(tensor, array)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1


def test_a_device_that_is_missing_or_too_small_is_named(mixed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidOption, match=r"^cache='cuda:77': .*; pass \"auto\", .*, a device of PyTorch"):
        mixed.windows(2, cache="cuda:77")
    with pytest.raises(InvalidOption, match=r"^cache='memroy': "):
        mixed.windows(2, cache="memroy")
    with pytest.raises(InvalidOption, match=r"^cache=7: pass"):
        mixed.windows(2, cache=7)
    with pytest.raises(InvalidOption, match=r"^device='cuda:77': .*; pass \"cpu\""):
        next(iter(BatchStream(mixed.windows(2), device="cuda:77")))
    monkeypatch.setattr(DecodePlan, "size_of", lambda *_: 1 << 60)
    with pytest.raises(InvalidOption, match=r"^cache='cpu': decoded rows take 1.15e\+09 GB, which cpu does not have"):
        mixed.windows(2, cache="cpu")
