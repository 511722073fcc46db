"""Processes of a policy: with a server of actions, which a GPU would need; on chosen processors; all in one process."""

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
from gym_trace.training.processes.policy_processes import InlineProcesses, PolicyProcesses

SMALL: dict[str, Any] = {"num_envs": 4, "rollout": 8, "epochs": 1, "minibatches": 2, "hidden": (8,), "rnn_size": 8}
SERVER: dict[str, Any] = {**SMALL, "inference": "server", "stall_timeout": 300.0}


CARTPOLE = partial(gymnasium.make, "CartPole-v1")


def digests(directory: Path) -> list[str]:
    return [update.digest for update in Run(directory).updates()]


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
def test_experience_of_a_server_is_learnt_again(tmp_path: Path, lag: Any, make: Any, given: dict[str, Any]) -> None:
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
        train(CARTPOLE, tmp_path / name, steps=200, seed=3, workers=1, **SERVER)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_a_server_that_is_killed_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[Any] = []
    start = PolicyProcesses._start_server

    def kept(cell: PolicyProcesses) -> None:
        start(cell)
        servers.append(cell._processes._workers["server"][0])

    monkeypatch.setattr(PolicyProcesses, "_start_server", kept)
    killed: list[int] = []

    def kills(progress: Trained) -> bool:
        if progress.version >= 2 and not killed:
            killed.append(progress.version)
            servers[0].kill()
        return len(servers) > 1 and progress.version > killed[0] + 3

    done = train(CARTPOLE, tmp_path, until_return=1e9, seed=3, workers=2, splits=2,
                 on_progress=kills, **SERVER)  # fmt: skip
    assert killed
    assert len(servers) == 2
    assert "server 0: its process ended with exit code -9" in done.trouble
    assert verify_run(tmp_path).differs == ""


class Reporting(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole whose first observation reports niceness, processor and threads of its process."""

    def reset(self, **options: Any) -> Any:
        seen, info = super().reset(**options)
        seen[:3] = os.nice(0), min(os.sched_getaffinity(0)), int(os.environ["OMP_NUM_THREADS"])
        return seen, info


def reporting() -> Any:
    return Reporting(gymnasium.make("CartPole-v1"))


def test_niceness_processors_and_checkpoint_options_are_applied(tmp_path: Path) -> None:
    cpu, before = max(os.sched_getaffinity(0)), os.nice(0)
    often: dict[str, Any] = {"checkpoint_seconds": 1e-3, "keep": 2, "milestone_seconds": 1e-3}
    train(
        reporting, tmp_path, steps=320, seed=3, workers=1, cpus=[cpu], niceness=1, stall_timeout=300.0, **often, **SMALL
    )
    for episode in Run(tmp_path).episodes():
        assert episode.observations[0][:3].tolist() == [before + 1, cpu, 1]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names[:2] == ["000000009.safetensors", "000000010.safetensors"]
    assert names[2:] == [f"milestone-{version:09d}.safetensors" for version in range(1, 11)]
    assert verify_run(tmp_path).checkpoints == 12


@pytest.mark.parametrize("device", ["cuda:99", "nonsense"])
def test_a_missing_device_raises_before_the_run_is_created(tmp_path: Path, device: str) -> None:
    with pytest.raises(InvalidOption, match=f"device='{device}'"):
        train(CARTPOLE, tmp_path / "r", steps=100, device=device)
    assert not (tmp_path / "r").exists()


# -- in one process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"lag": 0}, {"lag": 1, "splits": 2}, {"lag": "any", "rnn": "gru"}])
def test_one_process_learns_what_several_would(tmp_path: Path, given: dict[str, Any]) -> None:
    pid = os.getpid()

    def make() -> Any:
        assert os.getpid() == pid
        return gymnasium.make("CartPole-v1")

    train(make, tmp_path / "here", steps=200, seed=3, workers=0, **SMALL, **given)
    assert verify_run(tmp_path / "here").differs == ""
    if given["lag"] == 1:
        train(CARTPOLE, tmp_path / "there", steps=200, seed=3, workers=1, **SMALL, **given)
        assert digests(tmp_path / "here") == digests(tmp_path / "there")


def test_an_error_in_one_process_is_raised_and_the_run_resumes(tmp_path: Path) -> None:
    count = 0

    class Falling(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            nonlocal count
            count += 1
            if count == 100:
                raise KeyError("floor")
            return super().step(action)

    def make() -> Any:
        return Falling(gymnasium.make("CartPole-v1"))

    with pytest.raises(KeyError, match="floor"):
        train(make, tmp_path, steps=200, seed=3, workers=0, **SMALL)
    assert len(list(Run(tmp_path).updates())) == 4
    assert Run(tmp_path).log.end is not None
    assert Run(tmp_path).log.end["stopped"] == "failed: KeyError: 'floor'"
    assert train(CARTPOLE, tmp_path, resume=True).steps == 224


def test_experience_that_is_too_old_is_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poll = InlineProcesses.poll

    def eager(cell: InlineProcesses, seconds: float) -> Any:
        """Two rollouts for each update that takes one."""
        next(cell._rollouts)
        return poll(cell, seconds)

    monkeypatch.setattr(InlineProcesses, "poll", eager)
    options = {**SMALL, "workers": 0, "lag": "any", "max_lag": 0}
    done = train(CARTPOLE, tmp_path, steps=320, seed=3, **options)
    assert done.dropped in (8, 9, 10)
    assert all(o.version == update.version - 1 for update in Run(tmp_path).updates() for o in update.rollouts)
    assert verify_run(tmp_path).differs == ""


def test_a_server_needs_a_process(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="inference='actor'"):
        train(CARTPOLE, tmp_path, steps=200, workers=0, inference="server")
