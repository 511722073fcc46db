"""RLDS: what TensorFlow Datasets gives of an export, that datasets of its own are imported, and a training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds
from planted_defects import check_exporter
from tensorflow_datasets.rlds import rlds_base
from traces import run_example

import gym_trace
from gym_trace.data.layout import Layout, Leaf
from gym_trace.data.schema import Layouts
from gym_trace.exchange.formats.conformance import (
    Loaded,
    check_export,
    check_importer,
    check_round_trip,
)
from gym_trace.exchange.formats.foreign import all_from_json, unpacked
from gym_trace.exchange.formats.rlds.exporter import RldsExporter
from gym_trace.exchange.formats.rlds.features import name_of
from gym_trace.exchange.formats.rlds.importer import RldsImporter
from gym_trace.exchange.formats.rows import first_writer

features = tfds.features


def episodes(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The steps of each episode, one array a feature, and its metadata, as TensorFlow Datasets gives them."""
    builder = tfds.builder_from_directory(str(path))
    config = tfds.ReadConfig(interleave_cycle_length=1)
    for split in builder.info.splits:
        for episode in builder.as_dataset(split=split, read_config=config):
            count = int(episode["steps"].cardinality())
            yield next(iter(tfds.as_numpy(episode["steps"].batch(count)))), tfds.as_numpy(episode["episode_metadata"])


def load(path: Path) -> Iterator[Loaded]:
    """By the flags of each step and by those of RLDS, which have to agree."""
    layouts = layouts_of(path)
    for steps, known in episodes(path):
        last = len(steps["is_last"]) - 1
        assert np.flatnonzero(steps["is_last"]).tolist() == [last]
        assert np.flatnonzero(steps["is_first"]).tolist() == ([0] if known["first_step"] == 0 else [])
        ended = last > 0 and steps["terminated"][last - 1]
        assert np.flatnonzero(steps["is_terminal"]).tolist() == [last] * int(ended)
        discounts = np.arange(last) < last - int(ended)
        recorded = steps.get("annotations", {}).get("discount", discounts)
        assert steps["discount"][:last].tolist() == recorded[:last].tolist()
        infos = all_from_json(steps["info"][:-1]) if "info" in steps else []
        yield Loaded(
            arranged(layouts.observations, steps.get("observation")),
            arranged(layouts.actions, steps["action"], last),
            steps["reward"][:-1],
            steps["terminated"][:-1],
            steps["truncated"][:-1],
            outcome=known["outcome"].decode(),
            infos=infos or None,
            annotations={name: values(rows[:-1]) for name, rows in steps.get("annotations", {}).items()},
            identity=known["gym_trace"].decode(),
        )


def layouts_of(path: Path) -> Layouts:
    return first_writer(json.loads((path / "metadata.json").read_text())["gym_trace"])[1]


def arranged(layout: Layout, tree: Any, rows: int | None = None) -> Any:
    """Dicts of features as the space has them; `rows` rows of each."""
    if isinstance(layout, Leaf):
        return values(tree[:rows])
    parts = {key: arranged(child, tree[name_of(key)], rows) for key, child in layout.parts()}
    return tuple(parts.values()) if layout.keys is None else parts


def values(rows: Any) -> Any:
    return list(unpacked(rows)) if rows.dtype == object else rows


def test_right_traces_are_read_as_they_are_and_wrong_ones_are_not(tmp_path: Path) -> None:
    assert not check_exporter(RldsExporter(), load, tmp_path)


@pytest.mark.parametrize("images", ["png", "raw"])
def test_all_comes_back(tmp_path: Path, images: str) -> None:
    assert not check_importer(RldsExporter(images), RldsImporter(), tmp_path)


def test_real_environments(real: Path, tmp_path: Path) -> None:
    report = check_export(RldsExporter(), load, real, tmp_path / "out")
    assert not report.lost
    assert not check_round_trip(RldsExporter(), RldsImporter(), real, tmp_path / "again", tmp_path / "back")
    assert all(result.difference is None for result in gym_trace.diff_traces(real, tmp_path / "back"))


def test_steps_are_what_rlds_says(tmp_path: Path) -> None:
    """Episodes that terminate, are truncated and are cut; the action and reward of the last step mean nothing."""
    from camera_env import record

    trace = record(tmp_path / "trace")
    gym_trace.export(trace, tmp_path / "out", "rlds")
    found = list(episodes(tmp_path / "out"))
    assert [bool(steps["is_terminal"][-1]) for steps, _ in found] == [True, False, False, False]
    assert [len(steps["is_last"]) for steps, _ in found] == [len(episode) + 1 for episode in trace]
    for (steps, _), episode in zip(found, trace, strict=True):
        assert steps["is_last"][-1]
        assert steps["observation"]["state"].dtype == np.float64
        np.testing.assert_array_equal(steps["observation"]["state"], episode.observations["state"])
        np.testing.assert_array_equal(steps["observation"]["camera"], episode.observations["camera"])
        np.testing.assert_array_equal(steps["reward"], [*episode.rewards, 0])
    assert [int(known["seed"]) for _, known in found] == [-1] * 4
    assert json.loads(found[0][1]["gym_trace"])["seed"] == {"$int": hex(2**64 + 5)}


# -- what others have written -----------------------------------------------------------------------------------------

CONFIG = rlds_base.DatasetConfig(
    name="config",
    observation_info=features.FeaturesDict(
        {
            "state": features.Tensor(shape=(3,), dtype=np.float64, encoding="bytes"),
            "packed": features.Tensor(shape=(2, 2), dtype=np.int16, encoding="zlib"),
            "angles": features.Tensor(shape=(2,), dtype=np.float32),
            "image": features.Image(shape=(40, 30, 3), encoding_format="png"),
            "photo": features.Image(shape=(40, 30, 3), encoding_format="jpeg"),
            "label": features.ClassLabel(num_classes=4),
            "far": features.FeaturesDict({"count": np.uint64}),
        }
    ),
    action_info=features.Tensor(shape=(2,), dtype=np.float32),
    reward_info=np.float32,
    discount_info=np.float32,
    step_metadata_info={"instruction": features.Text()},
    episode_metadata_info={"episode_id": np.int64, "agent": features.Text()},
)


def make_episode(number: int, steps: int, ends: str) -> dict[str, Any]:
    random = np.random.default_rng(number)

    def step(at: int) -> dict[str, Any]:
        is_last = at == steps - 1 and ends != "unfinished"
        return {
            "observation": {
                "state": random.normal(size=3),
                "packed": random.integers(-9, 9, (2, 2), dtype=np.int16),
                "angles": random.normal(size=2).astype(np.float32),
                "image": random.integers(0, 256, (40, 30, 3), dtype=np.uint8),
                "photo": np.full((40, 30, 3), 50 * at, np.uint8),
                "label": at % 4,
                "far": {"count": np.uint64(2**64 - 1 - at)},
            },
            "action": np.full(2, 0 if is_last else at + 1, np.float32),
            "reward": 0.0 if is_last else 0.5 * at,
            "discount": 1.0,
            "is_first": at == 0,
            "is_last": is_last,
            "is_terminal": is_last and ends == "terminated",
            "instruction": "go on",
        }

    return {"steps": [step(at) for at in range(steps)], "episode_id": number, "agent": "random"}


EPISODES = {
    "train": [make_episode(0, 6, "terminated"), make_episode(1, 4, "truncated")],
    "validation": [make_episode(2, 5, "unfinished")],
}


class Robot(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A dataset as the builders of RLDS make it."""

    VERSION = tfds.core.Version("1.2.3")
    BUILDER_CONFIGS = [CONFIG]  # noqa: RUF012

    def _info(self) -> Any:
        return rlds_base.build_info(self.builder_config, self)

    def _split_generators(self, _: Any) -> Any:
        return {split: self._generate_examples(split) for split in EPISODES}

    def _generate_examples(self, split: str) -> Iterator[tuple[str, Any]]:
        for number, episode in enumerate(EPISODES[split]):
            yield f"{number}", episode


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    builder = Robot(data_dir=str(tmp_path_factory.mktemp("robot")))
    builder.download_and_prepare()
    return Path(builder.data_dir)


def test_a_data_set_of_others_is_imported_as_tensorflow_datasets_reads_it(robot: Path, tmp_path: Path) -> None:
    report = gym_trace.import_trace(robot, tmp_path / "back")
    trace = gym_trace.open_trace(tmp_path / "back")
    builder = tfds.builder_from_directory(str(robot))
    there = [
        [tfds.as_numpy(step) for step in episode["steps"]] + [int(episode["episode_id"])]
        for split in ("train", "validation")
        for episode in builder.as_dataset(split=split)
    ]
    assert report.steps == 5 + 3 + 5
    assert [episode.split for episode in trace] == ["train", "train", "validation"]
    for (*steps, number), episode in zip(there, trace, strict=True):
        rows = {key: np.stack([step["observation"][key] for step in steps]) for key in ("state", "packed", "angles")}
        for key, expected in rows.items():
            found = episode.observations[key][: len(steps)]
            assert (found.dtype, found.tobytes()) == (expected.dtype, expected.tobytes())
        counts = [step["observation"]["far"]["count"] for step in steps]
        assert episode.observations["far"]["count"][: len(steps)].tolist() == counts
        pictures = np.stack([step["observation"]["image"] for step in steps])
        np.testing.assert_array_equal(episode.observations["image"][: len(steps)], pictures)
        photos = np.stack([step["observation"]["photo"] for step in steps]).astype(int)
        assert np.abs(episode.observations["photo"][: len(steps)] - photos).max() <= 2  # JPEG decoders differ
        np.testing.assert_array_equal(episode.actions, [step["action"] for step in steps[: len(episode)]])
        np.testing.assert_array_equal(episode.rewards, [step["reward"] for step in steps[: len(episode)]])
        assert set(episode.annotations["instruction"]) == {"go on"}
        assert episode.reset_info == {"episode_id": number, "agent": "random"}
        assert episode.seed is None
    assert {(len(e), e.outcome) for e in trace} == {(5, "terminated"), (3, "truncated"), (5, "cut")}
    unfinished = next(episode for episode in trace if episode.outcome == "cut")
    assert np.isnan(unfinished.observations["state"][-1]).all()
    assert not unfinished.observations["packed"][-1].any()
    assert any("lack the observation after their last action" in text for text in report.warnings)


def test_an_imported_data_set_can_be_exported_again(robot: Path, tmp_path: Path) -> None:
    gym_trace.import_trace(robot, tmp_path / "back")
    check_export(RldsExporter(), load, tmp_path / "back", tmp_path / "out")


def test_a_policy_is_trained(record: Any) -> None:
    told = run_example("train_rlds", record("CartPole"))
    losses = [float(line.split()[-1]) for line in told.splitlines() if "loss" in line]
    assert losses[-1] < losses[0]
