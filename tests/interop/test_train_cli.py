"""gym-trace train, and the tables of docs/reference/training.md, with PyTorch."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from shell import ok, process, run, wait_for
from test_train_kills import does, of_session

import gym_trace
from gym_trace.playback.episode_index import index_of
from gym_trace.training import Exchange, Run

DOCUMENT = (Path(__file__).parents[2] / "docs" / "reference" / "training.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight versions, with checkpoints of the newest. It is not to be changed."""
    directory = tmp_path_factory.mktemp("runs") / "cp"
    argv = ["--steps", 2048, "--num-envs", 4, "--set", "rollout=32", "--workers", 2, "--seed", 1, "--quiet"]
    argv += ["--set", "hidden=16", "--set", "minibatches=4"]
    ok("train", "CartPole-v1", "-o", directory, *argv, "--tensorboard", directory.parent / "board")
    return directory


def test_the_table_of_exchanges_is_that_of_the_code() -> None:
    told = re.findall(r"^\| `(\w+)` \| (\S+) \|", DOCUMENT, re.M)
    assert told[-len(Exchange().plain()) :] == [(name, str(value)) for name, value in Exchange().plain().items()]


def test_a_run_that_is_done_says_so_and_does_not_start_again(trained: Path) -> None:
    before = (trained / "updates.msgpack").read_bytes()
    told = "nothing to do: the run is done, at version 8, of 2,048 steps; --steps N extends it"
    assert told in ok("train", "--resume", trained).output
    refused = run("train", "CartPole-v1", "-o", trained, "--steps", 10)
    assert refused.exit_code == 2
    assert "gym-trace train --resume" in refused.output
    assert (trained / "updates.msgpack").read_bytes() == before


def test_a_run_that_is_done_is_extended_and_proved_as_a_whole(trained: Path, tmp_path: Path) -> None:
    copy = copy_of(trained, tmp_path / "copy")
    refused = run("train", "--resume", copy, "--steps", 2048)
    assert refused.exit_code == 2
    assert "steps=2048: the run has learned from 2,048 steps already; pass more" in refused.output
    assert "version 17, of 4,096 steps" in ok("train", "--resume", copy, "--steps", 4000).output
    assert [update.changed for update in Run(copy).updates()] == [{}] * 9 + [{"steps": 4096}] + [{}] * 8
    assert "the end: done after 4,096 steps" in ok("train", "--verify", copy).output
    assert "nothing to do" in ok("train", "--resume", copy).output


def test_scalars_are_written(trained: Path) -> None:
    assert importlib.util.find_spec("tensorboardX") is None or list((trained.parent / "board").iterdir())


def test_a_population_of_a_file_in_one_process_has_curves_for_each_policy(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'environment = "CartPole-v1"\nsteps = 600\nworkers = 0\npolicies = 2\nnum-envs = 4\nseed = 1\n'
        'set = {hidden = "8", rollout = 32, epochs = 1, reward_shaping = {alive = 1}}\n'
        '[pbt]\nperiod = 200\nobjective = "length"\nmutated = 1\n'
    )
    argv = ["--config", tmp_path / "run.toml", "-o", tmp_path / "r", "--tensorboard", tmp_path / "board", "--json"]
    done = json.loads(ok("train", *argv).stdout)
    assert [policy["steps"] for policy in (done, *done["others"])] == [640, 640]
    if importlib.util.find_spec("tensorboardX"):
        for policy in ("policy-0", "policy-1"):
            (file,) = (tmp_path / "board" / policy).iterdir()
            for tag in (b"train/return/mean", b"train/length/max", b"train/steps_per_second", b"train/lag/mean"):
                assert tag in file.read_bytes()
    told = json.loads((tmp_path / "r" / "policy-1" / "run.json").read_text())
    assert (told["exchange"]["objective"], told["exchange"]["period"]) == ("length", 200)
    proof = run("train", "--verify", tmp_path / "r")
    assert (proof.exit_code, "has other settings" in proof.output) == (5, True), proof.output


OWN = """
import torch


class Own(torch.nn.Module):
    features = 6

    def __init__(self, leaves, actions, settings):
        super().__init__()
        self.inner = torch.nn.Linear(leaves[0].shape[0], self.features)
        self.head = torch.nn.Linear(self.features, sum(actions.choices))
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, observations):
        return self.inner(observations[0])

    def policy(self, features):
        return self.head(features)

    def loss(self, loss, batch):
        assert batch["features"].shape == (len(batch["observations"][0]), 6)
        shapes = {batch[name].shape for name in ("advantages", "targets", "values", "old_values", "logprob")}
        assert shapes == {batch["distribution"].log_prob(batch["actions"]).shape}
        return 0 * loss + self.head.weight.sum()
"""


def test_a_trusted_custom_network_learns_and_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_nets.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    argv = ["--steps", 1024, "--num-envs", 16, "--set", "rollout=32", "--seed", 1, "--workers", 0]
    ok("train", "CartPole-v1", "-o", "r", *argv, "--set", "model=own_nets:Own")
    for argv in (
        ["train", "--verify", "r"],
        ["record", "CartPole-v1", "-o", "t", "--policy", "run:r", "--episodes", 1],
    ):
        refused = run(*argv)
        assert refused.exit_code in (1, 2)
        assert "own_nets:Own" in refused.output
    assert "note" not in ok("train", "--verify", "r", "--trust").output
    ok("record", "CartPole-v1", "-o", "t", "--policy", "run:r?trust", "--episodes", 1)
    losses = [update.results["loss"] for update in Run("r").updates()[1:]]
    assert losses[0] <= 0.0
    assert losses[1] < losses[0]
    (tmp_path / "own_nets.py").write_text(OWN.replace("weight.sum()", "bias.sum()"))
    _, errors = process("train", "--verify", "r", "--trust", cwd=tmp_path).communicate(timeout=120)
    assert "note: the source of own_nets:Own has changed" in errors
    assert "version 1 differs when relearned" in errors


def copy_of(trained: Path, to: Path) -> Path:
    subprocess.run(["cp", "-r", trained, to], check=True)
    return to


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def forge_checkpoint(copy: Path) -> None:
    flip(copy / "checkpoints" / "000000008.safetensors", -100)


def forge_trace(copy: Path) -> None:
    for path in (copy / "trace").glob("*.gtb"):
        path.unlink()


def forge_seed(copy: Path) -> None:
    about = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**about, "seed": 2}))


@pytest.mark.parametrize("forge", [forge_checkpoint, forge_trace, forge_seed])
def test_verify_finds_what_was_changed(trained: Path, tmp_path: Path, forge: Callable[[Path], None]) -> None:
    told = json.loads(ok("train", "--verify", trained, "--json").stdout)
    assert told["versions"] == told["of"] == 9
    copy = copy_of(trained, tmp_path / "copy")
    forge(copy)
    differs = run("train", "--verify", copy)
    assert differs.exit_code in (3, 5), differs.output
    assert differs.exit_code == 3 or forge is not forge_checkpoint


def test_a_version_acts_whether_there_is_a_checkpoint_of_it_or_not(trained: Path, tmp_path: Path) -> None:
    for number, name in enumerate((f"run:{trained}", f"run:{trained}@5", f"run:{trained}@5?sample")):
        ok("record", "CartPole-v1", "-o", tmp_path / str(number), "--policy", name, "--episodes", 2, "--seed", 3)
    ok("record", "CartPole-v1", "-o", tmp_path / "j", "--policy", name, "--episodes", 2, "--seed", 3, "-j", 1,
       "--num-envs", 2)  # fmt: skip
    ok("record", "CartPole-v1", "-o", tmp_path / "n", "--policy", name, "--episodes", 2, "--seed", 3, "--num-envs", 2)
    for other in ("j", "n"):
        assert "2 episodes, identical" in ok("diff", tmp_path / "2", tmp_path / other).output
    said = [
        index_of(gym_trace.open_trace(tmp_path / n)).readers[0].schema["provenance"]["policy"] for n in ("0", "1", "j")
    ]
    assert said == [f"run:{trained}@8", f"run:{trained}@5", f"run:{trained}@5?sample"]
    seen = gym_trace.open_trace(tmp_path / "2")[0]
    chances = seen.annotations["probabilities"]
    np.testing.assert_allclose(np.log(chances[range(len(seen)), seen.actions]), seen.annotations["logprob"], rtol=1e-4)
    np.testing.assert_allclose(-(chances * np.log(chances)).sum(axis=1), seen.annotations["entropy"], rtol=1e-4)
    for name, why in (("@99", "no version 99"), ("@best", "no best version yet")):
        refused = run("record", "CartPole-v1", "-o", tmp_path / "no", "--policy", f"run:{trained}{name}")
        assert why in refused.output or name == "@best"
    refused = run("record", "Acrobot-v1", "-o", tmp_path / "no", "--policy", f"run:{trained}")
    assert "observations of this environment differ from those in training" in refused.output


def test_a_run_that_begins_with_the_weights_of_another_is_reproducible(trained: Path, tmp_path: Path) -> None:
    argv = ["--steps", 256, "--num-envs", 4, "--workers", 1, "--set", "hidden=16", "--set", "rollout=16"]
    ok("train", "CartPole-v1", "-o", tmp_path / "r", *argv, "--weights", f"{trained}@5")
    first = Run(tmp_path / "r").updates()[1]
    assert not first.rollouts
    assert first.changed["checkpoint"] == "begin.safetensors"
    proof = run("train", "--verify", tmp_path / "r")
    assert "not proved: how the weights of begin.safetensors were learned: another run" in proof.output
    assert proof.exit_code == 5
    other = run("train", "CartPole-v1", "-o", tmp_path / "no", "--steps", 256, "--weights", trained)
    assert other.exit_code == 2
    assert "another network" in other.output
    assert not (tmp_path / "no").exists()


def test_episodes_of_versions_are_those_whose_steps_were_learnt_from(trained: Path) -> None:
    whole = Run(trained).episodes()
    for view in (Run(trained).episodes(slice(3, 5)), Run(trained).episodes(4)):
        versions = np.concatenate([episode.annotations["version"] for episode in view])
        assert len(view) < len(whole)
        assert 3 in versions  # with lag 1, version 4 was learnt from what version 2 or 3 has collected
    drawn = Run(trained).episodes(slice(2, 3), collected=True)
    assert all(2 in episode.annotations["version"] for episode in drawn)


def test_collecting_only_learns_nothing(tmp_path: Path) -> None:
    make_env = partial(gymnasium.make, "CartPole-v1")
    done = gym_trace.train(make_env, tmp_path / "r", steps=1024, num_envs=4, learn=False)
    assert (done.version, done.steps) == (0, 1024)


def test_an_environment_that_raises_ends_the_run_with_what_it_said(tmp_path: Path) -> None:
    (tmp_path / "falling.py").write_text(
        "import gymnasium\n\n\nclass Falling(gymnasium.Wrapper):\n    def step(self, action):\n"
        "        raise ValueError('the floor is gone')\n"
    )
    argv = ["--steps", 2048, "--workers", 1, "--wrapper", "falling:Falling"]
    running = process("train", "CartPole-v1", "-o", tmp_path / "r", *argv, cwd=tmp_path)
    _, errors = running.communicate(timeout=120)
    assert running.returncode == 1
    place = r"in step 0 of episode \d+ \(seed \d+, action [01]\)"
    assert re.search(rf"error: worker 0: ValueError: the floor is gone, {place}; it failed 4 times", errors)
    assert "events.jsonl of the run has the traceback" in errors
    assert f"gym-trace train --resume {tmp_path / 'r'} --trust resumes it" in errors
    events = (tmp_path / "r" / "events.jsonl").read_text()
    assert "falling.py" in events
    assert (events.count('"restart"'), events.count('"death"')) == (3, 1)


def test_ctrl_c_saves_everything_and_resume_goes_on(tmp_path: Path) -> None:
    running = process("train", "CartPole-v1", "-o", tmp_path / "r", "--until-return", 1e9, "--seed", 1)
    wait_for(lambda: Run(tmp_path / "r").exists)
    for versions in (1, 4):  # processes import PyTorch before there is the first
        wait_for(lambda versions=versions: len(Run(tmp_path / "r").updates()) >= versions)
    os.kill(running.pid, signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert f"interrupted; gym-trace train --resume {tmp_path / 'r'} resumes it" in errors
    assert "Traceback" not in errors
    before = len(Run(tmp_path / "r").updates())
    assert "learned from" in ok("train", "--resume", tmp_path / "r", "--until-return", 5).output
    assert len(Run(tmp_path / "r").updates()) > before
    ok("train", "--verify", tmp_path / "r")


def test_a_signal_while_the_learner_starts_is_not_waited_for(trained: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(trained, tmp_path / "r")
    (directory / "done").unlink()
    with Run(directory).open_log():  # as the previous learner has it, for which the new one waits
        running = process("train", "--resume", directory, start_new_session=True)
        wait_for(lambda: any(does(pid, "learner") for pid in of_session(running.pid)))
        began = time.monotonic()
        running.send_signal(signal.SIGTERM)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 143
    assert f"terminated; gym-trace train --resume {directory} resumes it" in errors
    assert time.monotonic() - began < 15
    wait_for(lambda: not of_session(running.pid))
