"""Who acts and who learns: a server of actions, as a GPU has it, here on the CPU; processes as they are told."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

pytest.importorskip("torch")

from gym_trace.errors import InvalidOption
from gym_trace.training import Run, Trained, train, verify_run
from gym_trace.training.processes.cell import Cell

SMALL: dict[str, Any] = {"num_envs": 4, "rollout": 8, "epochs": 1, "minibatches": 2, "hidden": (8,), "rnn_size": 8}
SERVER: dict[str, Any] = {**SMALL, "inference": "server", "stall_timeout": 300.0}


def pictures() -> gymnasium.Env[Any, Any]:
    """CartPole seen as a picture of noise, as bright as the pole is tilted."""

    def seen(observation: Any) -> Any:
        noise = np.random.default_rng(int(abs(observation[0]) * 1e6)).integers(0, 64, (12, 12, 1))
        return (noise + 128 * (observation[2] > 0)).astype(np.uint8)

    space = gymnasium.spaces.Box(0, 255, (12, 12, 1), np.uint8)
    return gymnasium.wrappers.TransformObservation(gymnasium.make("CartPole-v1"), seen, space)


@pytest.mark.parametrize(
    ("lag", "make", "given"),
    [
        (0, "Pendulum-v1", {"rnn": "gru"}),
        (1, pictures, {}),
        (1, "CartPole-v1", {"workers": 1, "splits": 1}),
        ("any", "CartPole-v1", {"rnn": "lstm", "batch": 96}),
    ],
)
def test_what_a_server_drew_comes_out_again(tmp_path: Path, lag: Any, make: Any, given: dict[str, Any]) -> None:
    if isinstance(make, str):
        make = partial(gymnasium.make, make)
    options = {**SERVER, "workers": 2, "splits": 2, "lag": lag, **given}
    done = train(make, tmp_path, steps=900, seed=3, **options)
    assert done.restarts == 0
    assert verify_run(tmp_path).differs == ""
    updates = list(Run(tmp_path).updates())
    if lag != "any":
        lags = {update.version - 1 - origin.version for update in updates for origin in update.rollouts}
        assert lags == ({0} if lag == 0 else {0, 1})
    for episode in Run(tmp_path).episodes():  # each step says which weights drew it
        assert set(episode.annotations["version"].tolist()) <= set(range(len(updates)))
        assert np.isfinite(episode.annotations["logprob"]).all()


def test_with_one_split_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(partial(gymnasium.make, "CartPole-v1"), tmp_path / name, steps=200, seed=3, workers=1, **SERVER)
    one, two = ([update.digest for update in Run(tmp_path / name).updates()] for name in ("a", "b"))
    assert one == two


def test_a_server_that_is_killed_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[Any] = []
    start = Cell._start_server

    def kept(cell: Cell) -> None:
        start(cell)
        servers.append(cell._processes._workers["server"][0])

    monkeypatch.setattr(Cell, "_start_server", kept)
    killed: list[int] = []

    def kills(progress: Trained) -> bool:
        if progress.version >= 2 and not killed:
            killed.append(progress.version)
            servers[0].kill()
        return len(servers) > 1 and progress.version > killed[0] + 3

    done = train(partial(gymnasium.make, "CartPole-v1"), tmp_path, until_return=1e9, seed=3, workers=2, splits=2,
                 on_progress=kills, **SERVER)  # fmt: skip
    assert killed
    assert len(servers) == 2
    assert "server 0: its process ended with exit code -9" in done.trouble
    assert verify_run(tmp_path).differs == ""


class Told(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole that says how its process runs."""

    def reset(self, **options: Any) -> Any:
        seen, info = super().reset(**options)
        seen[:3] = os.nice(0), min(os.sched_getaffinity(0)), int(os.environ["OMP_NUM_THREADS"])
        return seen, info


def told() -> Any:
    return Told(gymnasium.make("CartPole-v1"))


def test_processes_run_as_they_are_told_and_leave_the_checkpoints_that_are_wanted(tmp_path: Path) -> None:
    cpu, before = max(os.sched_getaffinity(0)), os.nice(0)
    often = {"checkpoint_seconds": 1e-3, "keep": 2, "milestone_seconds": 1e-3}
    train(told, tmp_path, steps=320, seed=3, workers=1, cpus=[cpu], niceness=1, stall_timeout=300.0, **often, **SMALL)
    for episode in Run(tmp_path).episodes():
        assert episode.observations[0][:3].tolist() == [before + 1, cpu, 1]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names[:2] == ["000000009.safetensors", "000000010.safetensors"]
    assert names[2:] == [f"milestone-{version:09d}.safetensors" for version in range(1, 11)]
    assert verify_run(tmp_path).checkpoints == 12


@pytest.mark.parametrize("device", ["cuda:99", "nonsense"])
def test_a_device_that_there_is_not_is_refused_before_there_is_a_run(tmp_path: Path, device: str) -> None:
    with pytest.raises(InvalidOption, match=f"device='{device}'"):
        train(partial(gymnasium.make, "CartPole-v1"), tmp_path / "r", steps=100, device=device)
    assert not (tmp_path / "r").exists()
