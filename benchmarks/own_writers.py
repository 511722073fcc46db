"""Each library's own writer of its format, which exporting.py compares with ours.

OWN["format"].write(trace, out, workload) writes the episodes of a trace to the new path out, as an expert user of the
library would: lossless where possible. The workload is "cartpole" or "pong". This module runs in a separate process, in
the environment of the format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from gym_trace import Trace


class Own(NamedTuple):
    """A library's own writer.

    Attributes:
        title: name of the writer.
        part: fraction of the steps to measure by workload, if all would take hours.
    """

    title: str
    write: Callable[[Trace, Path, str], None]
    part: Mapping[str, float] = MappingProxyType({})


def _minari(data_format: str) -> Callable[[Trace, Path, str], None]:
    def write(trace: Trace, out: Path, workload: str) -> None:
        from minari.data_collector.episode_buffer import EpisodeBuffer
        from minari.dataset.minari_storage import MinariStorage

        def buffers() -> Iterator[Any]:
            for number, episode in enumerate(trace):
                yield EpisodeBuffer(
                    id=number,
                    seed=episode.seed,
                    observations=episode.observations,
                    actions=episode.actions,
                    rewards=episode.rewards,
                    terminations=episode.terminations,
                    truncations=episode.truncations,
                    infos={},
                )

        storage = MinariStorage.new(
            out, trace.observation_space, trace.action_space, data_format=data_format, jpeg_encoding=False
        )
        storage.update_episodes(buffers())

    return write


def _lerobot(trace: Trace, out: Path, workload: str) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    frames = workload == "pong"
    name = "observation.image" if frames else "observation.state"
    shape = trace[0].observations.shape[1:]
    kind = (
        {"dtype": "image", "names": ["height", "width", "channels"]} if frames else {"dtype": "float32", "names": None}
    )
    number = {"shape": (1,), "names": None}
    features = {
        name: {"shape": shape, **kind},
        "action": {"dtype": "int64", **number},
        "next.reward": {"dtype": "float32", **number},
        "next.done": {"dtype": "bool", **number},
    }
    dataset = LeRobotDataset.create("own/writer", fps=30, features=features, root=out, use_videos=False)
    for episode in trace:
        last = len(episode) - 1
        for step, (observation, action, reward) in enumerate(
            zip(episode.observations, episode.actions, episode.rewards)
        ):
            dataset.add_frame(
                {
                    name: observation,
                    "action": np.array([action]),
                    "next.reward": np.array([reward], np.float32),
                    "next.done": np.array([step == last]),
                    "task": "play",
                }
            )
        dataset.save_episode()
    dataset.finalize()


def _parquet(trace: Trace, out: Path, workload: str) -> None:
    """Write one table per episode with pyarrow; vectors and frames are fixed-size lists."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer = None
    for number, episode in enumerate(trace):
        rows = np.ascontiguousarray(episode.observations[:-1])
        flat = pa.array(rows.reshape(-1))
        steps = len(episode)
        table = pa.table(
            {
                "episode": np.full(steps, number),
                "step": np.arange(steps),
                "observation": pa.FixedSizeListArray.from_arrays(flat, rows[0].size if steps else 1),
                "action": episode.actions,
                "reward": episode.rewards,
                "terminated": episode.terminations,
                "truncated": episode.truncations,
            }
        )
        writer = pq.ParquetWriter(out, table.schema, compression="zstd") if writer is None else writer
        writer.write_table(table)
    assert writer is not None
    writer.close()


OWN = {
    "minari": Own("Minari's MinariStorage, hdf5", _minari("hdf5"), {"cartpole": 0.1}),
    "minari-arrow": Own("Minari's MinariStorage, arrow", _minari("arrow"), {"cartpole": 0.1}),
    "minari-parquet": Own("Minari's MinariStorage, parquet", _minari("parquet"), {"cartpole": 0.1}),
    "lerobot": Own("LeRobotDataset.add_frame, PNG", _lerobot, {"cartpole": 0.01}),
    "parquet": Own("pyarrow, one table per episode", _parquet),
}
# The export to compare with: a format, and its options.
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "minari-arrow": ("minari", {"kind": "arrow"}),
    "minari-parquet": ("minari", {"kind": "parquet"}),
}
