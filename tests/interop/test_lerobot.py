"""LeRobot datasets as LeRobotDataset loads them, and what LeRobot has written as a trace."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lerobot.datasets.lerobot_dataset")

import torch
from lerobot.datasets.compute_stats import (
    aggregate_stats,
    auto_downsample_height_width,
    get_feature_stats,
    sample_indices,
)
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from planted_defects import check_exporter

import gym_trace
from gym_trace.data.values import ABSENT
from gym_trace.exchange.formats.conformance import Loaded, check_export, check_round_trip
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.lerobot.exporter import LeRobotExporter
from gym_trace.exchange.formats.lerobot.features import ABOUT, Feature, values_of
from gym_trace.exchange.formats.lerobot.importer import LeRobotImporter, shaped_pictures
from gym_trace.exchange.formats.rows import first_writer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def opened(path: Path, **options: Any) -> LeRobotDataset:
    return LeRobotDataset("local", root=path, video_backend="pyav", **options)


def load(path: Path) -> Iterator[Loaded]:
    """Episodes as LeRobotDataset has them: rows by its own table, before they become tensors; pictures from items."""
    dataset = opened(path, return_uint8=True)
    kept = json.loads((path / ABOUT).read_text())
    features = [Feature.from_json(fields) for fields in kept["features"]]
    layouts = first_writer(kept[KEY])[1]
    table = dataset.hf_dataset.with_format(None)
    for episode in dataset.meta.episodes:
        begin, end = episode["dataset_from_index"], episode["dataset_to_index"]
        rows = table[begin:end]
        assert rows["frame_index"] == list(range(end - begin))
        assert set(rows["episode_index"]) == {episode["episode_index"]}
        known = {feature.path: column(feature, rows, dataset, begin, end) for feature in features}
        infos = known.get(("infos",))
        yield Loaded(
            layouts.observations.join(iter([known[leaf.path] for leaf in layouts.observations.leaves()])),
            layouts.actions.join(iter([known[leaf.path] for leaf in layouts.actions.leaves()])),
            known["rewards",],
            np.array(rows["next.terminated"]),
            np.array(rows["next.truncated"]),
            infos=None if infos is None or infos[0] is ABSENT else infos,
            annotations={path[1]: value for path, value in known.items() if path[0] == "annotations"},
            identity=episode[KEY],
        )


def column(feature: Feature, rows: dict[str, Any], dataset: LeRobotDataset, begin: int, end: int) -> Any:
    if feature.is_text:
        return values_of(rows[feature.name], feature.kind, feature.name)
    if feature.kind == "image":
        pictures = np.stack([np.asarray(picture) for picture in rows[feature.name]]).reshape(-1, *feature.stored_shape)
        return shaped_pictures(feature, pictures)
    if feature.kind == "video":
        items = np.stack([dataset[place][feature.name].numpy() for place in range(begin, end)])
        return shaped_pictures(feature, np.moveaxis(items, 1, -1))
    return np.array(rows[feature.name], feature.dtype).reshape(-1, *feature.shape)


@pytest.mark.parametrize("video", [False, True])
def test_it_is_what_the_contract_says(tmp_path: Path, video: bool) -> None:
    refused = check_exporter(LeRobotExporter(video=video), load, tmp_path, run_how_to_load=not video)
    assert not refused


def test_real_environments_are_loaded_and_come_back(real: Path, tmp_path: Path) -> None:
    check_export(LeRobotExporter(), load, real, tmp_path / "out")
    check_round_trip(LeRobotExporter(), LeRobotImporter(), real, tmp_path / "again", tmp_path / "back")


def test_pictures_in_videos_are_what_they_were(record: Any, tmp_path: Path) -> None:
    check_export(LeRobotExporter(video=True), load, record("Pong"), tmp_path / "out")


@pytest.mark.parametrize("name", ["Pendulum", "Pong", "nested"])
def test_statistics_are_those_of_lerobot(record: Any, tmp_path: Path, name: str) -> None:
    gym_trace.export(record(name), tmp_path / "out", "lerobot")
    dataset = opened(tmp_path / "out")
    table = dataset.hf_dataset.with_format(None)
    found = []
    for episode in dataset.meta.episodes:
        rows = table[episode["dataset_from_index"] : episode["dataset_to_index"]]
        found.append({key: measured(dataset, key, values) for key, values in rows.items()})
    for key, known in aggregate_stats(found).items():
        spread = np.max(known["max"] - known["min"]) + 1e-9
        for name, value in known.items():
            ours = dataset.meta.stats[key][name]
            assert ours.shape == np.atleast_1d(value).shape, (key, name)
            tolerance = spread / 2000 if name.startswith("q") else 1e-6 * spread  # theirs are of bins
            np.testing.assert_allclose(ours, value, rtol=1e-6, atol=tolerance, err_msg=f"{key} {name}")


def measured(dataset: LeRobotDataset, key: str, values: list[Any]) -> dict[str, Any]:
    if key not in dataset.meta.camera_keys:
        rows = np.array(values, np.float64)
        return get_feature_stats(rows, axis=0, keepdims=rows.ndim == 1)
    frames = [np.moveaxis(np.asarray(values[place]), -1, 0) for place in sample_indices(len(values))]
    pictures = np.stack([auto_downsample_height_width(frame) for frame in frames]).astype(np.float64)  # not in 32 bits
    stats = get_feature_stats(pictures, axis=(0, 2, 3), keepdims=True)
    return {name: value if name == "count" else np.squeeze(value / 255, axis=0) for name, value in stats.items()}


def test_items_are_tensors_in_time(record: Any, tmp_path: Path) -> None:
    trace = gym_trace.open_trace(record("Pendulum"))
    gym_trace.export(trace, tmp_path / "out", "lerobot", fps=20, task="swing up")
    ahead = {"action": [0, 0.05, 0.1], "observation.state": [-0.05, 0]}
    dataset = opened(tmp_path / "out", delta_timestamps=ahead)
    item = dataset[1]
    assert item["task"] == "swing up"
    assert item["observation.state"].dtype == torch.float32
    np.testing.assert_array_equal(item["observation.state"].numpy(), trace[0].observations[:2])
    np.testing.assert_array_equal(item["action"].numpy(), trace[0].actions[1:4, 0])
    assert item["next.reward"].item() == np.float32(trace[0].rewards[1])
    last = dataset[len(trace[0]) - 1]
    assert last["action_is_pad"].tolist() == [False, True, True]
    assert last["next.done"].item()
    assert dataset[len(trace[0])]["observation.state_is_pad"].tolist() == [True, False]
    batches = torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2)
    assert sum(len(batch["action"]) for batch in batches) == len(dataset) == trace.episodes["steps"].sum()
    assert opened(tmp_path / "out", episodes=[1]).num_frames == len(trace[1])


def test_pictures_are_what_policies_take(record: Any, tmp_path: Path) -> None:
    trace = gym_trace.open_trace(record("Pong"))
    for video in (False, True):
        gym_trace.export(trace, tmp_path / f"out-{video}", "lerobot", video=video)
        dataset = opened(tmp_path / f"out-{video}")
        assert dataset.meta.camera_keys == ["observation.image"]
        picture = dataset[3]["observation.image"]
        assert picture.dtype == torch.float32
        expected = np.moveaxis(trace[0].observations[3], -1, 0).astype(np.float32) / 255
        np.testing.assert_array_equal(picture.numpy(), expected)


FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (4,), "names": None},
    "observation.images.top": {"dtype": "image", "shape": (24, 32, 3), "names": ["height", "width", "channels"]},
    "action": {"dtype": "float64", "shape": (1,), "names": None},
    "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
    "next.done": {"dtype": "bool", "shape": (1,), "names": None},
    "next.success": {"dtype": "bool", "shape": (1,), "names": None},
    "note": {"dtype": "string", "shape": (1,), "names": None},
    "matrix": {"dtype": "int64", "shape": (2, 3), "names": None},
}


def recorded_by_lerobot(root: Path, video: bool) -> list[list[dict[str, Any]]]:
    """Two episodes of 5 and 7 steps."""
    features = {name: dict(feature) for name, feature in FEATURES.items()}
    features["observation.images.top"]["dtype"] = "video" if video else "image"
    dataset = LeRobotDataset.create("local", fps=10, features=features, root=root, use_videos=video)
    rng = np.random.default_rng(0)
    episodes = []
    for steps in (5, 7):
        frames = []
        for step in range(steps):
            frames.append(
                {
                    "observation.state": rng.normal(size=4).astype(np.float32),
                    "observation.images.top": rng.integers(0, 255, (24, 32, 3)).astype(np.uint8),
                    "action": rng.normal(size=1),
                    "next.reward": np.array([step / 4], np.float32),
                    "next.done": np.array([step == 4]),
                    "next.success": np.array([step == 3]),
                    "note": f"step {step}",
                    "matrix": rng.integers(0, 9, (2, 3)),
                    "task": "push" if steps == 5 else "pull",
                }
            )
            dataset.add_frame(dict(frames[-1]))
        dataset.save_episode()
        episodes.append(frames)
    dataset.finalize()
    return episodes


@pytest.mark.parametrize("video", [False, True])
def test_a_data_set_of_lerobot_becomes_a_trace(tmp_path: Path, video: bool) -> None:
    episodes = recorded_by_lerobot(tmp_path / "data", video)
    report = gym_trace.import_trace(tmp_path / "data", tmp_path / "trace")
    assert (report.format, report.episodes, report.steps) == ("lerobot", 2, 12)
    trace, dataset = gym_trace.open_trace(tmp_path / "trace"), opened(tmp_path / "data", return_uint8=True)
    assert [episode.outcome for episode in trace] == ["terminated", "cut"]
    assert trace.facts == {"fps": 10}
    assert trace.metadata["tasks"] == ["push", "pull"]
    place = 0
    for episode, frames in zip(trace, episodes):
        assert episode.seed is None
        state, pictures = episode.observations["state"], episode.observations["images.top"]
        assert np.array_equal(state[:-1], [frame["observation.state"] for frame in frames])
        assert np.isnan(state[-1]).all()
        if not video:
            assert np.array_equal(pictures[:-1], [frame["observation.images.top"] for frame in frames])
        else:
            items = [dataset[place + step]["observation.images.top"].numpy() for step in range(len(frames))]
            assert np.array_equal(np.moveaxis(pictures[:-1], -1, 1), items)
        for name, rows in (("action", episode.actions), ("matrix", episode.annotations["matrix"])):
            assert np.array_equal(rows, [frame[name] for frame in frames])
            assert rows.dtype == frames[0][name].dtype
        assert np.array_equal(episode.rewards, [frame["next.reward"][0] for frame in frames])
        assert list(episode.annotations["note"]) == [frame["note"] for frame in frames]
        assert set(episode.annotations["task_index"].tolist()) == {episode.index}
        place += len(frames)


def test_lerobot_trains_on_it(record: Any) -> None:
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    from train_lerobot import train

    first, last = train(str(record("Pendulum")))
    assert last < first / 2
