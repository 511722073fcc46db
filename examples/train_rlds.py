"""Clones the behaviour in a trace with discrete actions, with TensorFlow and its data sets, for 200 updates.

    python examples/train_rlds.py traces/cartpole

Takes tensorflow and tensorflow-datasets; the observations are to be numbers in one array.
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
    """All steps but the last of each episode, whose action means nothing, shuffled and 256 at a time."""
    episodes = tfds.builder_from_directory(str(path)).as_dataset(split="train")
    steps = episodes.flat_map(lambda episode: episode["steps"]).filter(lambda step: not step["is_last"])
    pairs = steps.map(lambda step: (tf.cast(step["observation"], tf.float32), step["action"]))
    return pairs.cache().shuffle(10_000, seed=0).repeat().batch(256)


def train(path: Path, actions: int) -> tuple[float, float]:
    """Fits a network of two layers; returns the loss of the first and of the last updates."""
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
