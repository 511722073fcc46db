"""What d3rlpy's own loader makes of an export, and what its algorithms learn from it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from gymnasium import spaces
from zoo import ScriptedEnv, Told

from gym_trace import TraceRecordingWrapper, export, open_trace
from gym_trace.errors import InvalidOption
from gym_trace.interop.conformance import Loaded, check_export, check_exporter
from gym_trace.interop.learners.d3rlpy import D3rlpyExporter

d3rlpy = pytest.importorskip("d3rlpy")
EXAMPLES = Path(__file__).parents[2] / "examples"
REFUSED = {"dict", "integers", "several-rewards"}  # Dict actions, negative ones, several rewards a step


def load(path: Path) -> Iterator[Loaded]:
    with open(path, "rb") as file:
        episodes = d3rlpy.dataset.load(d3rlpy.dataset.Episode, file)
    with h5py.File(path, "r") as file:
        identities = file["gym_trace_episodes"].asstr()[()]
        described = json.loads(file["gym_trace_observations"].asstr()[()])
    assert len(identities) == len(episodes)
    for episode, identity in zip(episodes, identities):
        assert episode.rewards.dtype == np.float32
        assert episode.rewards.shape == (len(episode), 1)
        assert episode.actions.ndim == 2
        ends = np.zeros((2, len(episode)), np.bool_)
        ends[:, -1] = episode.terminated, not episode.terminated
        is_one = isinstance(episode.observations, np.ndarray)
        arrays = [episode.observations] if is_one else episode.observations
        back = tuple(as_recorded(array, **told) for array, told in zip(arrays, described))
        actions = episode.actions[:, 0] if episode.actions.shape[1] == 1 else episode.actions
        actions = episode.actions if episode.actions.dtype.kind == "f" else actions
        observations = back[0] if is_one else back
        yield Loaded(observations, actions, episode.rewards[:, 0], *ends, identity=identity)


def as_recorded(rows: Any, name: str, dtype: str, shape: list[int], recorded: str) -> Any:
    """What the file says of how observations were recorded, undone."""
    assert rows.dtype == np.dtype(dtype)
    if recorded == "channels_last":
        assert rows.shape[1:] == (shape[2], *shape[:2])
        rows = np.moveaxis(rows, 1, -1)
    return rows.reshape(len(rows), *shape)


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_what_d3rlpy_loads_is_the_trace(compression: str, tmp_path: Path) -> None:
    exporter = D3rlpyExporter(compression=compression)
    assert set(check_exporter(exporter, load, tmp_path, suffix=".h5")) == REFUSED


def test_what_d3rlpy_loads_of_a_real_environment_is_the_trace(real: Path, tmp_path: Path) -> None:
    check_export(D3rlpyExporter(), load, real, tmp_path / "out.h5")


def buffer_of(path: Path) -> Any:
    with open(path, "rb") as file:
        return d3rlpy.dataset.ReplayBuffer.load(file, d3rlpy.dataset.InfiniteBuffer())


def explicit(how_to_load: str) -> Any:
    names: dict[str, Any] = {}
    exec(how_to_load, names)
    return names["dataset"]


def test_transitions_end_where_episodes_do(record: Callable[[str], Path], tmp_path: Path) -> None:
    trace = open_trace(record("CartPole"))
    export(trace, tmp_path / "out.h5", "d3rlpy")
    buffer = buffer_of(tmp_path / "out.h5")
    table = trace.episodes
    terminated = table["outcome"] == "terminated"
    assert buffer.transition_count == int(table["steps"].sum() - np.count_nonzero(~terminated))
    for episode, known in zip(buffer.episodes, trace):
        last = buffer.transition_picker(episode, episode.transition_count - 1)
        assert last.terminal == (known.outcome == "terminated")
        if last.terminal:
            assert not last.next_observation.any()
        else:
            assert np.array_equal(last.next_observation, known.observations[len(known) - 1])


def test_the_action_space_is_said_where_it_would_be_guessed_wrongly(tmp_path: Path) -> None:
    for name, space, action, known in (
        ("never", spaces.Discrete(5), np.int64(1), ("DISCRETE", 5)),
        ("whole", spaces.Box(-1, 1, (2,), np.float32), np.ones(2, np.float32), ("CONTINUOUS", 2)),
    ):
        observation = np.zeros(2, np.float32)
        said = [(observation, [Told(observation)] * 3)]
        env = TraceRecordingWrapper(ScriptedEnv(spaces.Box(-1, 1, (2,)), space, said), tmp_path / name)
        env.reset()
        for _ in range(3):
            env.step(action)
        env.close()
        report = export(tmp_path / name, tmp_path / f"{name}.h5", "d3rlpy")
        info, guessed = explicit(report.how_to_load).dataset_info, buffer_of(report.path).dataset_info
        assert (info.action_space.name, info.action_size) == known
        assert (guessed.action_space.name, guessed.action_size) != known


@pytest.mark.parametrize(
    ("name", "algorithm"), [("CartPole", "DiscreteCQL"), ("Pendulum", "CQL"), ("HalfCheetah", "CQL")]
)
def test_its_algorithms_fit(name: str, algorithm: str, record: Callable[[str], Path], tmp_path: Path) -> None:
    dataset = explicit(export(record(name), tmp_path / "out.h5", "d3rlpy").how_to_load)
    made = getattr(d3rlpy.algos, f"{algorithm}Config")(batch_size=32).create()
    nowhere = d3rlpy.logging.NoopAdapterFactory()
    made.fit(dataset, n_steps=20, n_steps_per_epoch=10, show_progress=False, logger_adapter=nowhere)
    assert made.predict(dataset.episodes[0].observations[:4]).shape[0] == 4


def test_a_picture_of_a_dict_trains_alone(record: Callable[[str], Path], tmp_path: Path) -> None:
    report = export(record("nested"), tmp_path / "out.h5", "d3rlpy", observation="camera")
    assert any("'camera' alone; left out are" in str(loss) for loss in report.lost)
    dataset = explicit(report.how_to_load)
    assert dataset.dataset_info.observation_signature.shape[0] == (3, 12, 16)
    episode, known = dataset.episodes[0], open_trace(record("nested"))[0]
    assert np.array_equal(np.moveaxis(episode.observations, 1, -1), known.observations["camera"][:-1])


def test_a_part_that_is_not_there_is_refused(record: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="camera"):
        export(record("nested"), tmp_path / "out.h5", "d3rlpy", observation="picture")
    assert not (tmp_path / "out.h5").exists()


def test_the_example_trains(record: Callable[[str], Path]) -> None:
    command = [sys.executable, str(EXAMPLES / "train_d3rlpy.py"), str(record("CartPole")), "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert " -> " in done.stdout
