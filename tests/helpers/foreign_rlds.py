"""Datasets of RLDS as others write them, without TensorFlow."""

import json
from pathlib import Path

import numpy as np

from gym_trace.data.values import Array
from gym_trace.exchange.formats.rlds.examples import ExampleWriter, RecordWriter
from gym_trace.exchange.formats.rlds.features import Feature, Features, features_json, tensor

_BOOL = Feature("tensor", np.dtype(np.bool_), ())


def write(
    target: Path,
    actions: list[Array],
    rewards: list[Array],
    terminal: bool = True,
    discount: float | None = None,
    template: str = "",
    shard: str = "robot-train.tfrecord-00000-of-00001",
) -> Path:
    """Writes episodes of which row t has the observation t, an action and a reward; the last one is_last.

    actions, rewards: of each episode, (rows, 2) and (rows,). discount: of each step. shard: the name of the file.
    """
    target.mkdir()
    number = Feature("tensor", np.dtype(np.float32), ())
    steps: Features = {
        "observation": {"state": tensor(np.dtype(np.float32), (3,))},
        "action": tensor(np.dtype(np.float32), (2,)),
        "reward": number,
        **dict.fromkeys(("is_first", "is_last", "is_terminal"), _BOOL),
        **({} if discount is None else {"discount": number}),
    }
    records = RecordWriter(target / shard)
    example = ExampleWriter()
    for acted, rewarded in zip(actions, rewards):
        rows = len(acted)
        states = np.arange(3 * rows, dtype=np.float32)
        example.floats("steps/observation/state", states)
        example.floats("steps/action", np.asarray(acted, np.float32).reshape(-1))
        example.floats("steps/reward", np.asarray(rewarded, np.float32))
        last = np.arange(rows) == rows - 1
        example.integers("steps/is_first", np.arange(rows) == 0)
        example.integers("steps/is_last", last)
        example.integers("steps/is_terminal", last & terminal)
        if discount is not None:
            example.floats("steps/discount", np.full(rows, discount, np.float32))
        example.finish(records)
    records.close()
    (target / "features.json").write_text(features_json({"steps": steps}, "steps"))
    split = {"name": "train", "shardLengths": [str(len(actions))], "filepathTemplate": template}
    said = {"name": "robot", "version": "1.0.0", "fileFormat": "tfrecord", "splits": [split]}
    (target / "dataset_info.json").write_text(json.dumps(said))
    return target
