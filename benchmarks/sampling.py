"""Sampling batches for training: gym-trace, a gather from raw files, and other libraries, in CPU ms per batch.

    python benchmarks/sampling.py TRACE [--length 64] [--size 256] [--batches 50] [--seconds 3] [--only floor,ours]

Batches of 256 windows and of 256 transitions (--size), all columns, in turns in one process, in blocks of some batches.
Prints medians, the range of 9 of 10 blocks, and the median ratio to the floor in the same turn. The floor gathers rows
of random windows, within episodes, from one np.memmap per column. Streams may take a tenth of the decoded size.
Libraries that are not installed are skipped.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import gym_trace

COLUMNS = ("observations", "actions", "rewards", "terminations", "truncations")
Draw = Callable[[], Any]


def floor(trace: gym_trace.Trace, folder: Path, length: int, size: int) -> Iterator[tuple[str, Draw, Draw]]:
    columns: dict[str, Any] = {}
    for episode in trace.scan():
        for name in COLUMNS:
            columns.setdefault(name, []).append(getattr(episode, name))
    lengths = trace.episodes["steps"]
    first = np.append(0, np.cumsum(lengths))
    mapped = {}
    for name, parts in columns.items():
        array = np.concatenate(parts)
        array.tofile(folder / name)
        mapped[name] = np.memmap(folder / name, array.dtype, "r", 0, array.shape)
    del columns
    counts = np.maximum(lengths - length + 1, 0)
    ends = np.cumsum(counts)
    random = np.random.default_rng(0)

    def windows() -> Any:
        item = random.integers(0, ends[-1], size)
        episode = np.searchsorted(ends, item, side="right")
        at = first[episode] + item - (ends[episode] - counts[episode])
        steps = at[:, None] + np.arange(length)
        seen = (at + episode)[:, None] + np.arange(length + 1)
        return {name: array[seen if name == "observations" else steps] for name, array in mapped.items()}

    def transitions() -> Any:
        item = random.integers(0, first[-1], size)
        seen = item + np.searchsorted(first, item, side="right") - 1
        batch = {name: array[item] for name, array in mapped.items() if name != "observations"}
        return batch | {"observations": mapped["observations"][seen], "next": mapped["observations"][seen + 1]}

    yield "floor: np.memmap", windows, transitions


def ours(trace: gym_trace.Trace, folder: Path, length: int, size: int) -> Iterator[tuple[str, Draw, Draw]]:
    os.environ["GYM_TRACE_CACHE"] = str(folder / "cache")
    decoded = sum((folder / name).stat().st_size for name in COLUMNS)  # as in the floor
    for name, options in (
        ("memory", {"cache": "memory"}),
        ("disk", {"cache": "disk"}),
        ("stream, a tenth of the memory", {"cache": None, "cache_bytes": decoded // 10}),
    ):
        begin = time.process_time()
        windows = trace.windows(length, size, **options)
        next(windows)
        print(f"first batch, {name}: {time.process_time() - begin:.3f} s")
        transitions = trace.transitions(size, **options)
        yield f"gym-trace, {name}", windows.__next__, transitions.__next__

    def sliced() -> Any:
        random = np.random.default_rng(0)
        long = np.flatnonzero(trace.episodes["steps"] >= length)
        for _ in range(size // 16):  # a 16th of a batch
            episode = trace[int(random.choice(long))]
            start = int(random.integers(0, len(episode) - length + 1))
            window = episode[start : start + length]
            _ = window.observations, window.actions, window.rewards

    yield "gym-trace, episode[a:b] (a 16th of a batch)", sliced, sliced


def torch_loader(trace: gym_trace.Trace, folder: Path, length: int, size: int) -> Iterator[tuple[str, Draw, Draw]]:
    from torch.utils.data import DataLoader

    from gym_trace.exchange.torch import BatchItems, BatchStream, collated

    loaders = [
        iter(DataLoader(BatchStream(batches), batch_size=None))
        for batches in (trace.windows(length, size), trace.transitions(size))
    ]
    yield "DataLoader of whole batches", loaders[0].__next__, loaders[1].__next__

    def endless(batches: Any) -> Iterator[Any]:
        items = BatchItems(batches)
        while True:
            yield from DataLoader(items, size, shuffle=True, collate_fn=collated, drop_last=True)

    windows, transitions = endless(trace.windows(length)), endless(trace.transitions())
    yield "DataLoader of items", windows.__next__, transitions.__next__


def torchrl(trace: gym_trace.Trace, folder: Path, length: int, size: int) -> Iterator[tuple[str, Draw, Draw]]:
    """A storage of TorchRL's own, filled from the trace."""
    from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler

    from gym_trace.exchange.torchrl import TraceStorage

    recorded = TraceStorage(trace.transitions())
    storage = LazyTensorStorage(len(recorded))
    sampler = SliceSampler(slice_len=length, traj_key="episode", cache_values=True)
    windows = ReplayBuffer(storage=storage, sampler=sampler, batch_size=size * length)
    for start in range(0, len(recorded), 10_000):
        windows.extend(recorded[start : start + 10_000])
    transitions = ReplayBuffer(storage=storage, batch_size=size)
    yield "TorchRL", windows.sample, transitions.sample


def d3rlpy(trace: gym_trace.Trace, folder: Path, length: int, size: int) -> Iterator[tuple[str, Draw, Draw]]:

    buffer = gym_trace.exchange.d3rlpy.replay_buffer(trace)
    yield (
        "d3rlpy",
        lambda: buffer.sample_trajectory_batch(size, length),
        lambda: buffer.sample_transition_batch(size),
    )


def minari(trace: gym_trace.Trace, folder: Path, length: int, size: int) -> Iterator[tuple[str, Draw, Draw]]:
    """Cut windows by hand from loaded episodes."""
    from minari.dataset.minari_dataset import MinariDataset

    gym_trace.export(trace, folder / "minari", "minari")
    [data] = (folder / "minari").rglob("data")
    dataset = MinariDataset(data)
    random = np.random.default_rng(0)

    def cut(length: int) -> Draw:
        long = np.flatnonzero(trace.episodes["steps"] >= length)

        def draw() -> Any:
            for episode in dataset.iterate_episodes(random.choice(long, size // 16).tolist()):  # a sixteenth
                at = int(random.integers(0, len(episode.rewards) - length + 1))
                _ = episode.observations[at : at + length + 1], episode.actions[at : at + length]

        return draw

    yield "Minari, cut by hand (a 16th of a batch)", cut(length), cut(1)


def lerobot(trace: gym_trace.Trace, folder: Path, length: int, size: int) -> Iterator[tuple[str, Draw, Draw]]:
    """Load items with PyTorch's DataLoader, as for training its policies; windows are delta_timestamps."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from torch.utils.data import DataLoader

    fps = 20
    gym_trace.export(trace, folder / "lerobot", "lerobot", fps=fps)
    ahead = {"observation.state": length + 1, "action": length, "next.reward": length, "next.done": length}

    def endless(deltas: dict[str, list[float]] | None) -> Iterator[Any]:
        dataset = LeRobotDataset("local", root=folder / "lerobot", delta_timestamps=deltas)
        loader = DataLoader(dataset, size // 16, shuffle=True, drop_last=True)  # a sixteenth
        while True:
            yield from loader

    windows = endless({name: [k / fps for k in range(steps)] for name, steps in ahead.items()})
    yield "LeRobot, DataLoader (a 16th of a batch)", windows.__next__, endless(None).__next__


def measured(contestants: list[tuple[str, Draw, Draw]], batches: int, seconds: float) -> list[list[list[float]]]:
    """Return CPU seconds per batch by contestant and kind, one number per block."""
    found: list[list[list[float]]] = [[[], []] for _ in contestants]
    for contestant in contestants:
        for draw in contestant[1:]:
            draw()
    end = time.monotonic() + seconds * len(contestants)
    while time.monotonic() < end:
        for (_, *draws), times in zip(contestants, found):
            for draw, blocks in zip(draws, times):
                begin = time.process_time()
                done = 0
                while done < batches and time.process_time() - begin < 0.2:
                    draw()
                    done += 1
                blocks.append((time.process_time() - begin) / done)
    return found


def _own_memory() -> float:
    """Return the anonymous memory of this process in MB; mapped files do not count."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trace")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--size", type=int, default=256, help="batch size")
    parser.add_argument("--only", default="", help="some of: floor,ours,torch_loader,torchrl,d3rlpy,minari,lerobot")
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=3)
    options = parser.parse_args()
    trace = gym_trace.open_trace(options.trace)
    print(f"{len(trace):,} episodes, {int(trace.episodes['steps'].sum()):,} steps")
    with tempfile.TemporaryDirectory() as folder:
        contestants = []
        makers = (floor, ours, torch_loader, torchrl, d3rlpy, minari, lerobot)
        for maker in [m for m in makers if m.__name__ in (options.only or m.__name__).split(",")]:
            before = _own_memory()
            try:
                contestants += list(maker(trace, Path(folder), options.length, options.size))
                for contestant in contestants[-1:]:
                    _ = [draw() for draw in contestant[1:]]
                print(f"memory added, {maker.__name__}: {_own_memory() - before:.0f} MB")
            except ImportError as missing:
                print(f"skipped: {maker.__name__}: {missing}")
        found = measured(contestants, options.batches, options.seconds)
    print(f"{'CPU ms per batch':<45} {'windows':>32} {'transitions':>32}")
    for (name, *_), times in zip(contestants, found):
        shown = [
            f"{np.median(t) * 1e3:.2f} ({np.quantile(t, 0.05) * 1e3:.2f}-{np.quantile(t, 0.95) * 1e3:.2f})"
            f" {np.median(np.array(t) / np.array(base)):.2f}"
            for t, base in zip(times, found[0])
        ]
        print(f"{name:<45} {shown[0]:>32} {shown[1]:>32}")


if __name__ == "__main__":
    main()
