"""Minari: what its own loader gives of an export, and what becomes of datasets that it has written itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import minari
import numpy as np
import pytest
from gymnasium import spaces
from planted_defects import check_exporter
from traces import run_example

import gym_trace
from gym_trace.data.packing import pack
from gym_trace.exchange.formats.conformance import (
    Loaded,
    check_export,
    check_importer,
    check_round_trip,
)
from gym_trace.exchange.formats.minari.dataset import MinariExporter, MinariImporter
from gym_trace.format.facts import write_facts
from gym_trace.storage.local import LocalStorage

KINDS = ["hdf5", "arrow", "parquet"]
of_each_kind = pytest.mark.parametrize("kind", KINDS)


def load(path: Path) -> Iterator[Loaded]:
    """The episodes as minari.MinariDataset gives them."""
    dataset = minari.MinariDataset(path / "data")
    assert dataset.total_steps == sum(map(len, dataset.iterate_episodes()))
    assert len(dataset.sample_episodes(1)) == 1
    metadata = dataset.storage.get_episode_metadata(dataset.episode_indices)
    for episode, said in zip(dataset.iterate_episodes(), metadata, strict=True):
        assert said["total_steps"] == len(episode)
        assert said["id"] == episode.id
        repr(episode)
        columns = dict(episode.infos)
        annotations = columns.pop("annotations", {})
        for name in [name for name in columns if name.startswith("annotations/")]:  # arrow columns
            annotations[name.removeprefix("annotations/")] = columns.pop(name)
        rows = [{name: column[i + 1] for name, column in columns.items()} for i in range(len(episode))]
        yield Loaded(
            episode.observations,
            episode.actions,
            episode.rewards,
            episode.terminations,
            episode.truncations,
            seed=said.get("seed"),
            options=said.get("options"),
            infos=rows,
            annotations={name: column[1:] for name, column in annotations.items()},
            identity=said["gym_trace"],
        )


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which Minari looks for datasets."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "sets"))
    (tmp_path / "sets").mkdir()
    return tmp_path / "sets"


# -- out --------------------------------------------------------------------------------------------------------------


@of_each_kind
def test_minari_reads_what_was_recorded(tmp_path: Path, kind: str) -> None:
    refused = check_exporter(MinariExporter(kind), load, tmp_path)
    assert set(refused) == ({"several-rewards"} if kind != "hdf5" else set())


@of_each_kind
def test_an_export_comes_back_bit_for_bit(tmp_path: Path, kind: str) -> None:
    check_importer(MinariExporter(kind), MinariImporter(), tmp_path)


@of_each_kind
def test_traces_of_real_environments_go_out_and_come_back(real: Path, tmp_path: Path, kind: str) -> None:
    check_export(MinariExporter(kind), load, real, tmp_path / "out")
    check_round_trip(MinariExporter(kind), MinariImporter(), real, tmp_path / "other", tmp_path / "back")
    one, other = gym_trace.open_trace(real), gym_trace.open_trace(tmp_path / "back")
    for before, after in zip(one, other, strict=True):
        assert (before.writer, before.episode_id, before.outcome) == (after.writer, after.episode_id, after.outcome)
        assert (before.seed, before.start_time, before.end_time) == (after.seed, after.start_time, after.end_time)
        for name in ("observations", "actions", "rewards", "terminations", "truncations", "rng_state", "reset_info"):
            assert pack(getattr(before, name)) == pack(getattr(after, name)), name
    assert one.env_spec == other.env_spec
    verdicts = [[v.verdict for v in gym_trace.verify_trace(trace, trust=True)] for trace in (one, other)]
    assert verdicts[0] == verdicts[1]


def test_the_environment_is_recovered(record: Callable[[str], Path], root: Path) -> None:
    gym_trace.export(record("HalfCheetah"), root / "mujoco" / "halfcheetah" / "random-v0", "minari")
    dataset = minari.load_dataset("mujoco/halfcheetah/random-v0")
    env = dataset.recover_environment()
    assert (env.spec.id, env.spec.max_episode_steps) == ("HalfCheetah-v5", 60)
    assert dataset.observation_space == env.observation_space
    assert dataset.action_space == env.action_space
    first = next(dataset.iterate_episodes())
    env.reset(seed=10)
    for action, observation, reward in zip(first.actions, first.observations[1:], first.rewards):
        seen = env.step(action)
        assert np.array_equal(seen[0], observation)
        assert seen[1] == reward


def test_infos_begin_with_that_of_the_reset(record: Callable[[str], Path], root: Path) -> None:
    trace = gym_trace.open_trace(record("Taxi"))
    report = gym_trace.export(trace, root / "taxi-v0", "minari")
    assert "reset_info" not in {loss.what for loss in report.lost}
    for episode, loaded in zip(trace, minari.load_dataset("taxi-v0"), strict=True):
        infos = [episode.reset_info, *episode.infos]
        assert loaded.infos["action_mask"].tolist() == [info["action_mask"].tolist() for info in infos]
        assert loaded.infos["prob"].tolist() == [info["prob"] for info in infos]


def test_minaris_command_line_lists_and_shows_it(
    record: Callable[[str], Path], root: Path, tmp_path: Path
) -> None:  # fmt: skip
    facts = {
        "author": "Ada [Lovelace]",
        "algorithm": "by hand",
        "code": "https://example.org/code",
        "description": "poles",
        "reference_scores": {"random": 20.0, "expert": 500.0},
    }
    trace = tmp_path / "trace"
    gym_trace.export(record("CartPole"), tmp_path / "first", "minari")
    gym_trace.import_trace(tmp_path / "first", trace)
    write_facts(LocalStorage(trace), facts)
    gym_trace.export(trace, root / "cartpole" / "random-v0", "minari")
    told = [_minari("list", "local"), _minari("show", "cartpole/random-v0")]
    assert "cartpole/random-v0" in told[0]
    assert "Ada" in told[0]
    for said in ("Ada", "by hand", "https://example.org/code", "poles", "CartPole-v1", "0.5.4"):
        assert said in told[1]
    dataset = minari.load_dataset("cartpole/random-v0")
    assert minari.get_normalized_score(dataset, np.array([20.0, 500.0])).tolist() == [0, 1]
    back = tmp_path / "back"
    gym_trace.import_trace(root / "cartpole" / "random-v0", back)
    assert gym_trace.open_trace(back).facts == facts


def _minari(*words: str) -> str:
    env = {**os.environ, "COLUMNS": "200", "MINARI_REMOTE": "none://"}
    command = [sys.executable, "-m", "minari.cli", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=300).stdout


def test_minari_goes_on_with_what_was_exported(record: Callable[[str], Path], root: Path) -> None:
    gym_trace.export(record("CartPole"), root / "cartpole-v0", "minari")
    dataset = minari.load_dataset("cartpole-v0")
    before = len(dataset)
    collector = minari.DataCollector(dataset.recover_environment(), jpeg_encoding=False)
    _collect(collector, 2)
    collector.add_to_dataset(dataset)
    assert len(minari.load_dataset("cartpole-v0")) == before + 2
    trace, _ = _imported(root / "cartpole-v0")
    assert len(trace) == before + 2
    assert len(trace.writers) == 2


@of_each_kind
def test_long_episodes_are_read_whole_or_refused(tmp_path: Path, kind: str) -> None:
    trace = tmp_path / "trace"
    with gym_trace.TraceRecordingWrapper(gymnasium.make("Pendulum-v1", max_episode_steps=-1), trace) as env:
        env.action_space.seed(0)
        for steps in (131_071, 5):
            env.reset(seed=0)
            for action in np.linspace(-2, 2, steps, dtype=np.float32)[:, None]:
                env.step(action)
    check_export(MinariExporter(kind), load, trace, tmp_path / "out")


# -- in ---------------------------------------------------------------------------------------------------------------


def _collect(collector: minari.DataCollector, episodes: int, most: int = 1000, **options: Any) -> None:
    """Collects episodes of up to `most` steps."""
    collector.action_space.seed(0)
    for _ in range(episodes):
        collector.reset(**options)
        for _ in range(most):
            _, _, terminated, truncated, _ = collector.step(collector.action_space.sample())
            if terminated or truncated:
                break


def _by_minari(
    env: Any, name: str, kind: str, episodes: int = 3, jpeg: bool = False, infos: bool = True, **options: Any
) -> Any:
    """A dataset that Minari has made itself."""
    collector = minari.DataCollector(env, record_infos=infos, data_format=kind, jpeg_encoding=jpeg)
    _collect(collector, episodes, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return collector.create_dataset(name, algorithm_name="random", author="Ada", code_permalink="https://x.org")


def _imported(path: Path) -> tuple[gym_trace.Trace, gym_trace.results.ImportReport]:
    report = gym_trace.import_trace(path, path.parent.parent / "imported")
    return gym_trace.open_trace(report.destination), report


@of_each_kind
def test_minaris_own_data_set_is_a_trace_that_verifies(root: Path, kind: str) -> None:
    dataset = _by_minari(gymnasium.make("CartPole-v1"), "cartpole-v0", kind, options={"low": -0.01, "high": 0.02})
    trace, report = _imported(root / "cartpole-v0")
    assert report.kinds == ["Minari"]
    assert trace.facts == {"author": "Ada", "algorithm": "random", "code": "https://x.org"}
    metadata = list(dataset.storage.get_episode_metadata(range(3)))
    for episode, wanted, said in zip(trace, dataset, metadata, strict=True):
        assert np.array_equal(episode.observations, wanted.observations)
        assert np.array_equal(episode.actions, wanted.actions)
        assert np.array_equal(episode.rewards, wanted.rewards)
        assert (episode.seed, episode.options) == (said["seed"], {"low": -0.01, "high": 0.02})
        assert episode.outcome == "terminated"
        assert episode.start_time is None
    assert [v.verdict for v in gym_trace.verify_trace(trace)] == ["identical"] * 3


@of_each_kind
def test_infos_that_minari_kept_are_compared_when_it_is_verified(root: Path, kind: str) -> None:
    dataset = _by_minari(gymnasium.make("Taxi-v4", max_episode_steps=30), "taxi-v0", kind)
    trace, _ = _imported(root / "taxi-v0")
    assert trace[0].reset_info["prob"] == 1.0
    assert trace[0].infos[0]["action_mask"].tolist() == dataset[0].infos["action_mask"][1].tolist()
    assert [v.verdict for v in gym_trace.verify_trace(trace)] == ["identical"] * 3


class Everything(gymnasium.Env[Any, Any]):
    """Dict in Tuple in Dict, text, and each kind of number."""

    observation_space = spaces.Dict(
        {
            "numbers": spaces.Tuple((spaces.Box(-1, 1, (2, 3), np.float32), spaces.Discrete(5, start=-1))),
            "bits": spaces.MultiBinary(4),
            "choice": spaces.MultiDiscrete([3, 4]),
            "mission": spaces.Text(8),
            "inner": spaces.Dict({"scalar": spaces.Box(-1, 1, (), np.float64)}),
        }
    )
    action_space = spaces.Tuple((spaces.Box(-1, 1, (2,), np.float64), spaces.Discrete(3)))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self._left = 4
        return self.observation_space.sample(), {"left": 4}

    def step(self, action: Any) -> Any:
        self._left -= 1
        return self.observation_space.sample(), 0.5, self._left == 0, False, {"left": self._left}


@of_each_kind
def test_spaces_of_all_kinds_come_from_minari(root: Path, kind: str) -> None:
    dataset = _by_minari(Everything(), "everything-v0", kind, seed=3)
    trace, _ = _imported(root / "everything-v0")
    assert trace.observation_space == dataset.observation_space
    assert trace.action_space == dataset.action_space
    for episode, wanted in zip(trace, dataset, strict=True):
        for found, expected in ((episode.observations, wanted.observations), (episode.actions, wanted.actions)):
            assert str(_plain(found)) == str(_plain(expected))
        assert [int(info["left"]) for info in episode.infos] == [3, 2, 1, 0]
    made = gym_trace.verify_trace(trace, make_env=Everything)
    assert [v.verdict for v in made] == ["identical"] * 3
    check_export(MinariExporter(kind), load, trace, root / "again-v0")


def _plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _plain(tree[key]) for key in sorted(tree)}
    return tuple(map(_plain, tree)) if isinstance(tree, tuple) else [np.asarray(row).tolist() for row in tree]


@of_each_kind
@pytest.mark.parametrize("jpeg", [False, True])
def test_pictures_are_what_minari_gives(root: Path, kind: str, jpeg: bool) -> None:
    gymnasium.register_envs(pytest.importorskip("ale_py"))
    env = gymnasium.make("ALE/Pong-v5", max_episode_steps=12)
    dataset = _by_minari(env, "pong-v0", kind, episodes=2, jpeg=jpeg, infos=False)
    trace, report = _imported(root / "pong-v0")
    assert any("JPEG" in text for text in report.warnings) is jpeg
    for episode, wanted in zip(trace, dataset, strict=True):
        assert np.array_equal(episode.observations, wanted.observations)
    verdicts = [v.verdict for v in gym_trace.verify_trace(trace, ignore=["observations"] if jpeg else [])]
    assert verdicts == ["identical"] * 2


@of_each_kind
def test_episodes_that_minari_had_truncated_are_truncated(root: Path, kind: str) -> None:
    collector = minari.DataCollector(gymnasium.make("Pendulum-v1"), data_format=kind)
    _collect(collector, 2, most=5, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector.create_dataset("pendulum-v0")
    trace, report = _imported(root / "pendulum-v0")
    assert [episode.outcome for episode in trace] == ["truncated"] * 2
    assert any("DataCollector" in text for text in report.warnings)
    assert [v.verdict for v in gym_trace.verify_trace(trace, ignore=["truncations"])] == ["identical"] * 2


def test_behaviour_is_cloned(record: Callable[[str], Path]) -> None:
    told = run_example("train_minari", record("CartPole"), options=())
    before, after = re.search(r"before ([\d.]+), after \d+ steps ([\d.]+)", told).groups()
    assert float(after) < float(before)
