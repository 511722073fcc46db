"""Clone the recorded policy with TensorFlow Datasets, for 200 updates.

    python examples/train_rlds.py traces/cartpole

The trace must have discrete actions and one array of numbers as observation. Needs tensorflow and tensorflow-datasets.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import tensorflow as tf
import tensorflow_datasets as tfds

import gym_trace

UPDATES = 200


def steps_of(path: Path) -> tf.data.Dataset:
    """Return shuffled batches of 256 steps, without the last step of each episode: its action is a placeholder."""
    episodes = tfds.builder_from_directory(str(path)).as_dataset(split="train")
    steps = episodes.flat_map(lambda episode: episode["steps"]).filter(lambda step: not step["is_last"])
    pairs = steps.map(lambda step: (tf.cast(step["observation"], tf.float32), step["action"]))
    return pairs.cache().shuffle(10_000, seed=0).repeat().batch(256)


def train(path: Path, actions: int) -> tuple[float, float]:
    """Train a network with two layers; return the loss of the first and of the last updates."""
    tf.keras.utils.set_random_seed(0)
    policy = tf.keras.Sequential([tf.keras.layers.Dense(64, "relu"), tf.keras.layers.Dense(actions)])
    policy.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    told = policy.fit(steps_of(path), steps_per_epoch=UPDATES // 10, epochs=10, verbose=0).history["loss"]
    return told[0], told[-1]


def main(directory: str) -> None:
    trace = gym_trace.open_trace(directory)
    with tempfile.TemporaryDirectory() as place:
        report = gym_trace.export(trace, Path(place) / "rlds", "rlds")
        before, after = train(report.path, int(trace.action_space.n))
    print(f"{report.episodes} episodes, {report.steps} steps")
    print(f"loss of the first updates: {before:.4f}")
    print(f"loss of the last updates: {after:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
