"""What imitation's own loader makes of an export, what behavioural cloning learns from it, and what datasets reads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from zoo import ScriptedEnv, Told

from gym_trace import TraceRecordingWrapper, export, open_trace
from gym_trace.errors import InvalidOption
from gym_trace.interop.conformance import Loaded, check_export, check_exporter
from gym_trace.interop.identity import flags_of, read_identity
from gym_trace.interop.learners.imitation import ImitationExporter

serialize = pytest.importorskip("imitation.data.serialize")
datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()
EXAMPLES = Path(__file__).parents[2] / "examples"
REFUSED = {"dict", "tuple", "text", "several-rewards"}


def load(path: Path) -> Iterator[Loaded]:
    identities = (path / "gym_trace.jsonl").read_text().splitlines()
    trajectories = serialize.load_with_rewards(path)
    assert len(trajectories) == len(identities)
    for trajectory, identity in zip(trajectories, identities):
        assert len(trajectory.obs) == len(trajectory) + 1
        flags = flags_of(read_identity(identity), len(trajectory))
        assert flags is not None
        assert trajectory.terminal == bool(flags[0][-1] or flags[1][-1])
        yield Loaded(
            trajectory.obs, trajectory.acts, trajectory.rews, *flags, infos=list(trajectory.infos), identity=identity
        )


def test_what_imitation_loads_is_the_trace(tmp_path: Path) -> None:
    assert set(check_exporter(ImitationExporter(), load, tmp_path)) == REFUSED


@pytest.mark.parametrize("name", ["CartPole", "Pendulum", "continuing", "HalfCheetah", "Taxi", "Pong"])
def test_what_imitation_loads_of_a_real_environment_is_the_trace(
    name: str, record: Callable[[str], Path], tmp_path: Path
) -> None:
    trace = open_trace(record(name))
    few = trace[:1] if name == "Pong" else trace  # it makes an int of each number of an image
    check_export(ImitationExporter(), load, few, tmp_path / "out")


@pytest.mark.parametrize("name", ["Blackjack", "MiniGrid", "nested"])
def test_observations_of_several_arrays_are_refused_with_the_names_of_these(
    name: str, record: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(InvalidOption, match=r"observation=KEY .*: [\w/]+, "):
        export(record(name), tmp_path / "out", "imitation")
    assert not (tmp_path / "out").exists()


def test_one_array_of_a_dict_is_exported_where_it_is_named(record: Callable[[str], Path], tmp_path: Path) -> None:
    trace = open_trace(record("MiniGrid"))
    export(trace, tmp_path / "out", "imitation", observation="image")
    for trajectory, episode in zip(serialize.load(tmp_path / "out"), trace):
        assert np.array_equal(trajectory.obs, episode.observations["image"])


def test_the_files_have_the_dtypes_that_the_loader_widens(record: Callable[[str], Path], tmp_path: Path) -> None:
    export(record("CartPole"), tmp_path / "out", "imitation")
    table = datasets.load_from_disk(str(tmp_path / "out")).with_format("arrow")[:]
    assert str(table.schema.field("obs").type) == "list<item: fixed_size_list<item: float>[4]>"
    assert str(table.schema.field("acts").type) == "list<item: int64>"
    assert str(table.schema.field("rews").type) == "list<item: double>"


def test_datasets_can_work_with_it(record: Callable[[str], Path], tmp_path: Path) -> None:
    export(record("CartPole"), tmp_path / "out", "imitation")
    data = datasets.load_from_disk(str(tmp_path / "out"))
    long = data.filter(lambda row: len(row["acts"]) > 20, keep_in_memory=True)
    assert len(long) == sum(len(episode) > 20 for episode in open_trace(record("CartPole")))
    data.to_parquet(str(tmp_path / "out.parquet"))
    again = datasets.Dataset.from_parquet(str(tmp_path / "out.parquet"), cache_dir=str(tmp_path / "cache"))
    assert again[0] == data[0]


def test_other_contents_have_another_fingerprint(record: Callable[[str], Path], tmp_path: Path) -> None:
    trace = open_trace(record("CartPole"))
    prints = []
    for number, view in enumerate((trace, trace, trace[:2], trace[1::-1])):
        export(view, tmp_path / str(number), "imitation")
        prints.append(datasets.load_from_disk(str(tmp_path / str(number)))._fingerprint)
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_infos_cannot_call_anything_when_they_are_loaded(tmp_path: Path) -> None:
    bad = {"py/object": "pathlib.Path", "deep": [{"py/reduce": [{"py/type": "builtins.exit"}, {"py/tuple": [3]}]}]}
    space, observation = spaces.Box(-1, 1, (2,)), np.zeros(2, np.float32)
    env = ScriptedEnv(space, spaces.Discrete(2), [(observation, [Told(observation, info=bad, terminated=True)])])
    wrapped = TraceRecordingWrapper(env, tmp_path / "trace", record_infos=True)
    wrapped.reset()
    wrapped.step(0)
    wrapped.close()
    export(tmp_path / "trace", tmp_path / "out", "imitation")
    assert serialize.load(tmp_path / "out")[0].infos[0] == bad


def test_a_long_episode_waits_in_a_file(
    record: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_trace.interop.learners.imitation._IN_MEMORY", 1 << 9)
    check_export(ImitationExporter(), load, record("CartPole"), tmp_path / "out")
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".arrow", ".json", ".jsonl"}


@pytest.mark.parametrize("name", ["CartPole", "HalfCheetah"])
def test_behavioural_cloning_trains(name: str, record: Callable[[str], Path], tmp_path: Path) -> None:
    bc = pytest.importorskip("imitation.algorithms.bc")
    trace = open_trace(record(name))
    export(trace, tmp_path / "out", "imitation")
    env = trace.make_env()
    trainer = bc.BC(
        observation_space=env.observation_space,
        action_space=env.action_space,
        demonstrations=serialize.load(tmp_path / "out"),
        rng=np.random.default_rng(0),
        batch_size=16,
    )
    trainer.train(n_batches=10, progress_bar=False)
    action, _ = trainer.policy.predict(trace[0].observations[0])
    assert env.action_space.contains(action)
    env.close()


def test_the_example_trains(record: Callable[[str], Path]) -> None:
    command = [sys.executable, str(EXAMPLES / "train_imitation.py"), str(record("CartPole")), "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert " -> " in done.stdout
