"""Updates of any trainer are learned again from their log: like CleanRL's PPO, DQN, Stable-Baselines3, arrays alone."""

from __future__ import annotations

import itertools
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from forked_python import HELPERS
from shell import ok, run

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch
import trainers
from second_device import NAME, SecondDevice

import gym_trace
from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.proof import Steps, UpdateLog, verify
from gym_trace.training.proof.chain import chain_in
from gym_trace.training.proof.state import distance, generators, packed, set_generator, unpacked


def rewritten(directory: Path, change: Callable[[list[list[Any]]], None]) -> None:
    """Change the entries of a log, with valid digests."""
    chain = chain_in(directory)
    entries = [[entry.kind, entry.content] for entry in chain.entries()]
    change(entries)
    chain.path.unlink()
    with chain.open() as log:
        for kind, content in entries:
            log.append(kind, content)


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PPO in CartPole, 20 updates: trace, and trace.proof beside it. It is not to be changed."""
    directory = tmp_path_factory.mktemp("ppo")
    trainers.ppo(directory / "trace", "CartPole-v1", 20, overhead=1.0)
    return directory


def test_ppo_like_cleanrls_is_proved_from_another_seed(cartpole: Path) -> None:
    proof = verify(cartpole / "trace", *trainers.ppo_parts(seed=99))
    assert (proof.differs, proof.versions, proof.of) == ("", 20, 20)
    said = "\n".join(proof.proved)
    for line in (
        "20 of 20 updates learned again, bit for bit",
        "5,120 of 5,120 recorded steps learned from, each once",
        "played again in CartPole-v1",
        "files of the trace",
    ):
        assert line in said
    log = chain_in(cartpole / "trace.proof").path
    states = 2 * 3 * 4 * sum(p.numel() for p in trainers.ppo_parts()[0]["agent"].parameters())
    assert log.stat().st_size < states + 20 * (10_000 + 8 * trainers.LANES * trainers.STEPS)


def test_ppo_in_acrobot_is_proved(tmp_path: Path) -> None:
    trainers.ppo(tmp_path / "trace", "Acrobot-v1", 20)
    proof = verify(tmp_path / "trace", *trainers.ppo_parts("Acrobot-v1", 7))
    assert (proof.differs, proof.versions) == ("", 20)


def change_array(number: int, by: float) -> Callable[[list[list[Any]]], None]:
    """Return a change of one advantage of an update."""

    def changed(entries: list[list[Any]]) -> None:
        inputs = [content for kind, content in entries if kind == "update"][number]["inputs"]
        advantages = unpacked(inputs["advantages"])
        advantages.view(-1)[5] += by
        inputs["advantages"] = packed(advantages, "advantages")

    return changed


def test_an_advantage_changed_by_a_millionth_is_found_at_its_update(cartpole: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(cartpole, tmp_path / "copy")
    rewritten(copy / "trace.proof", change_array(13, 1e-6))
    differs = verify(copy / "trace", *trainers.ppo_parts(), replays=False).differs
    assert differs.startswith("update 13: the result/loss is ") or differs.startswith("update 13: the state differs")


def test_the_command_proves_and_names_what_differs(
    cartpole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(cartpole, "r")
    make = ["--make", "trainers:ppo_parts"]
    told = run("proof", "verify", "r/trace.proof", *make)
    assert "proved: 20 of 20 updates learned again, bit for bit" in told.output
    assert "not proved: where advantages of 20 updates came from: arrays in the log" in told.output
    assert told.exit_code == 5
    ok("proof", "anchor", "r/trace.proof", "anchor")
    told = run("proof", "verify", "r/trace", *make, "--anchor", "anchor", "--no-replay")
    assert "entries of the log are those of the anchor of anchor" in told.output
    rewritten(Path("r/trace.proof"), change_array(3, 1.0))
    differs = run("proof", "verify", "r/trace", *make, "--no-replay")
    assert differs.exit_code == 3
    assert "differs: update 3: the " in differs.output
    assert "is not the one of the anchor" in run("proof", "verify", "r/trace", *make, "--anchor", "anchor").output


def test_steps_that_are_not_those_of_the_trace_are_rejected_at_once(tmp_path: Path) -> None:
    parts, learn = trainers.dqn_parts()
    env = gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / "t")
    log = UpdateLog(env, parts, learn)
    seen, _ = env.reset(seed=1)
    after, *_ = env.step(1)
    batch = Steps(range(1), observations=torch.as_tensor(after)[None])
    with pytest.raises(
        InvalidOption, match=r"update 0: observations of steps 0 to 1 are not those of .*; pass the array"
    ):
        log.update(batch=batch)
    with pytest.raises(InvalidOption, match="cheese: no column of the trace"):
        log.update(batch=Steps(range(1), cheese=torch.zeros(1)))
    with pytest.raises(InvalidOption, match="lacks observations of steps 5 to 6"):
        log.update(batch=Steps(range(5, 6), observations=torch.as_tensor(seen)[None]))
    env.close()
    log.close()


def test_dqn_that_samples_by_indices_is_proved(tmp_path: Path) -> None:
    log = trainers.dqn(tmp_path / "trace", 400)
    assert log.updates == 84
    proof = verify(log.directory, *trainers.dqn_parts(seed=5))
    assert (proof.differs, proof.versions) == ("", 84)
    assert "what changed target before update" in "\n".join(proof.unproved)


def test_a_flipped_bit_in_the_trace_is_found(tmp_path: Path) -> None:
    log = trainers.dqn(tmp_path / "trace", 200)
    (path,) = (tmp_path / "trace").glob("*.gtb")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptTrace):
        verify(log.directory, *trainers.dqn_parts())


# -- arrays alone -----------------------------------------------------------------------------------------------------


def regression(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    parts = {"model": model, "optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 5)}

    def learn(model: Any, optimizer: Any, schedule: Any, generator: Any, x: Any, y: Any) -> Any:
        keep = torch.rand(len(x), generator=generator) < 0.9
        loss = (model(torch.as_tensor(x)[keep])[:, 0] - torch.as_tensor(y)[keep]).square().mean() * random.random()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss

    return {**parts, "generator": torch.Generator().manual_seed(seed)}, learn


def batches(count: int, seed: int = 3) -> list[dict[str, Any]]:
    generator = np.random.default_rng(seed)
    return [{"x": generator.random((16, 3), np.float32), "y": generator.random(16, np.float32)} for _ in range(count)]


def test_a_log_of_arrays_alone_is_proved_with_all_generators(tmp_path: Path) -> None:
    parts, learn = regression(1)
    random.seed(4)
    with UpdateLog(tmp_path / "log", parts, learn, overhead=1.0) as log:
        for number, batch in enumerate(batches(25)):
            torch.rand(number), random.random()  # as acting would
            log.update(**batch)
    proof = verify(tmp_path / "log", *regression(2))
    assert (proof.differs, proof.versions) == ("", 25)
    assert proof.unproved == [line for line in proof.unproved if "outside" not in line]
    with pytest.raises(InvalidOption, match="parts: pass model, optimizer, schedule, generator"):
        verify(tmp_path / "log", regression()[0] | {"more": torch.nn.Linear(1, 1)}, learn)


def test_a_global_value_that_changes_an_update_is_found(tmp_path: Path) -> None:
    parts, learn = regression(1)
    hidden = [1.0]

    def worse(**given: Any) -> Any:
        given["x"] = given["x"] * hidden[0]
        return learn(**given)

    with UpdateLog(tmp_path / "log", parts, worse, overhead=1.0) as log:
        for number, batch in enumerate(batches(10)):
            hidden[0] = 1.0 if number < 6 else 1.0001
            log.update(**batch)
    hidden[0] = 1.0
    differs = verify(tmp_path / "log", regression()[0], worse).differs
    assert differs.startswith("update 6: the result is another array in the log, and ")
    assert differs.endswith("; learned twice here from one state, it gives the same result")


@pytest.mark.parametrize("returns", [True, False])
def test_an_update_that_is_not_deterministic_is_named_with_its_distance(tmp_path: Path, returns: bool) -> None:
    parts, learn = regression(1)
    calls = itertools.count()

    def varying(**given: Any) -> Any:
        loss = learn(**given)
        with torch.no_grad():
            given["model"][0].bias[0] = 1.0 + next(calls) * 2.0**-22
        return loss if returns else None

    with UpdateLog(tmp_path / "log", parts, varying, overhead=1.0) as log:
        for batch in batches(3):
            log.update(**batch)
    differs = verify(tmp_path / "log", regression()[0], varying).differs
    assert differs.startswith("update 0: the state differs when learned again: the norm of model is ")
    assert differs.endswith("; it is not deterministic here: learned twice from one state, model/0.bias is "
                            "2.38e-07 away (2 ulps)")  # fmt: skip


def test_a_distance_is_in_units_in_the_last_place() -> None:
    one = np.ones(3, np.float32)
    assert distance(one, np.nextafter(one, one * 2)) == "1.19e-07 away (1 ulps)"
    tensor = torch.tensor([1.0, 256.0], dtype=torch.bfloat16)
    assert distance(tensor, tensor + torch.tensor([0, 4], dtype=torch.bfloat16)) == "4 away (2 ulps)"
    assert distance(torch.zeros(1), torch.tensor([1e-45])) == "1.4e-45 away (1 ulps)"
    assert distance(torch.tensor([3]), torch.tensor([5])) == "2 away"
    assert distance(torch.tensor([3j]), torch.tensor([5j])) == "2 away"
    assert distance(torch.zeros(2), torch.tensor([-0.0, torch.nan])) == "another NaN, infinity or sign of zero"
    assert distance(torch.zeros(1), torch.zeros(1).double()) == "of type torch.float64"


def test_a_script_that_is_started_again_continues_its_log(tmp_path: Path) -> None:
    parts, learn = regression(1)
    log = UpdateLog(tmp_path / "log", parts, learn)
    for batch in batches(5):
        log.update(**batch)
    log._log.close()  # as after a kill
    log.close()  # too late, and harmless
    assert any("log was not closed" in line for line in verify(tmp_path / "log", *regression()).unproved)
    with UpdateLog(tmp_path / "log", parts, learn) as log:
        assert log.updates == 5
        for batch in batches(5, 7):
            log.update(**batch)
    proof = verify(tmp_path / "log", *regression())
    assert (proof.differs, proof.versions) == ("", 10)
    assert not any("where the state" in line for line in proof.unproved)
    with UpdateLog(tmp_path / "log", *regression(5)) as log:
        log.update(**batches(1)[0])
    unproved = verify(tmp_path / "log", *regression()).unproved
    assert any("where the state before update 10 came from" in line for line in unproved)


def test_a_killed_script_leaves_a_log_of_all_finished_updates(tmp_path: Path) -> None:
    script = (
        "import sys, test_proof as t\nfrom gym_trace.proof import UpdateLog\n"
        "log = UpdateLog('log', *t.regression(1))\n"
        "for number, batch in enumerate(t.batches(100000)):\n    log.update(**batch)\n    print(number, flush=True)\n"
    )
    path = ":".join([str(Path(__file__).parent), HELPERS, *filter(None, sys.path)])
    env = {"PYTHONPATH": path, "PATH": ""}
    running = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=env)
    assert running.stdout is not None
    for _ in range(30):
        running.stdout.readline()
    running.kill()
    last = int((running.stdout.read().split("\n")[-2:-1] or ["29"])[0] or 29)
    running.wait()
    proof = verify(tmp_path / "log", *regression())
    assert not proof.differs
    assert proof.versions >= last


@pytest.mark.parametrize("value", [object(), np.array([object()]), {"a": [lambda: 0]}])
def test_an_argument_that_cannot_be_logged_is_named(tmp_path: Path, value: Any) -> None:
    parts, learn = regression()
    with UpdateLog(tmp_path / "log", parts, learn) as log, pytest.raises(InvalidOption, match=r"^x: a value of type"):
        log.update(x=value, y=1)
    with pytest.raises(InvalidOption, match="parts: n is a int without state_dict"):
        UpdateLog(tmp_path / "other", {"n": 1}, learn)


# -- another device ---------------------------------------------------------------------------------------------------


class Scale:
    """A part whose load_state_dict() keeps the tensor that it gets."""

    def __init__(self, device: str):
        self.factor = torch.ones(3, device=device)

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor = state["factor"]


def parts_on(device: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 1).to(device)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "scale": Scale(device)}, learn_there


def learn_there(model: Any, optimizer: Any, scale: Any, steps: Any, more: Any, here: Any) -> Any:
    assert more["x"][0].device == steps["observations"].device
    assert here.device.type == steps["rewards"].device.type == "cpu"
    scale.factor = scale.factor * 1.5
    loss = (model(steps["observations"]) * more["x"][0]).square().mean() * scale.factor.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {"loss": loss}


def log_of(directory: Path, device: str) -> None:
    parts, learn = parts_on(device, 1)
    env = gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), directory)
    log = UpdateLog(env, parts, learn, overhead=1.0)
    before, _ = env.reset(seed=1)
    for number in range(3):
        after, reward, *_ = env.step(number % 2)
        observations = torch.as_tensor(before)[None].to(device)
        steps = Steps(range(number, number + 1), observations=observations, rewards=torch.tensor([reward]))
        before = after
        log.update(steps=steps, more={"x": [torch.full((1, 1), 2.0, device=device)]}, here=torch.ones(1))
    env.close()
    log.close()


def test_tensors_come_back_on_the_device_that_they_had(tmp_path: Path) -> None:
    with SecondDevice():
        log_of(tmp_path / "t", NAME)
        assert (proof := verify(tmp_path / "t", *parts_on(NAME, 2))).differs == ""
        assert proof.versions == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and CUDA_VISIBLE_DEVICES=0")
def test_updates_on_a_gpu_are_proved_with_its_generators(tmp_path: Path) -> None:
    parts, learn = parts_on("cuda", 1)
    parts["scale"].factor = torch.rand(3, device="cuda")

    def noisy(**given: Any) -> Any:
        given["scale"].factor = given["scale"].factor + torch.rand(3, device="cuda")
        return learn(**given)

    def steps() -> Any:
        here = {"observations": torch.ones(1, 4, device="cuda"), "rewards": torch.ones(1)}
        return {"steps": here, "more": {"x": [torch.ones(1, 1, device="cuda")]}, "here": torch.ones(1)}

    with UpdateLog(tmp_path / "log", parts, noisy, overhead=1.0) as log:
        for _ in range(3):
            torch.rand(5, device="cuda")  # as acting would
            log.update(**steps())
    proof = verify(tmp_path / "log", parts_on("cuda", 2)[0], noisy)
    assert (proof.differs, proof.versions) == ("", 3)


def test_device_moves_the_tensors_that_were_elsewhere(tmp_path: Path) -> None:
    with SecondDevice():
        log_of(tmp_path / "t", NAME)
    assert verify(tmp_path / "t", *parts_on("cpu", 2), device="cpu").differs == ""
    assert verify(tmp_path / "t", *parts_on("cpu", 2), device={NAME: "cpu", "cuda:0": "cuda:1"}).differs == ""
    missing = r"device: the log has values of meta, and cuda:99 cannot be used here: .*; pass another device"
    with pytest.raises(InvalidOption, match=missing):
        verify(tmp_path / "t", *parts_on("cpu", 2), device={NAME: "cuda:99"})


def test_generators_of_a_gpu_that_is_missing_need_another_device() -> None:
    before, state = generators(), bytes(16)
    set_generator("cuda:99", state, "cpu")
    set_generator("cuda:99", state, {"cuda:99": "cpu"})
    assert generators() == before
    missing = r"^device: the log has values of cuda:99, and cuda:99 cannot be used here: PyTorch finds \d+ GPUs; pass"
    with pytest.raises(InvalidOption, match=missing):
        set_generator("cuda:99", state, {"cuda:0": "cpu"})


def test_an_inference_tensor_is_an_argument_like_any_other(tmp_path: Path) -> None:
    parts, learn = regression(1)
    with UpdateLog(tmp_path / "log", parts, learn, overhead=1.0) as log:
        for batch in batches(2):
            with torch.inference_mode():
                given = {name: torch.from_numpy(array) * 2 for name, array in batch.items()}
            log.update(**given)
    assert verify(tmp_path / "log", *regression(2)).differs == ""


# -- Stable-Baselines3 ------------------------------------------------------------------------------------------------


def sb3_model(kind: str, seed: int) -> Any:
    sb3 = pytest.importorskip("stable_baselines3")
    if kind == "PPO":
        return sb3.PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, n_epochs=2, seed=seed, device="cpu")
    if kind == "DQN":
        more = {"learning_starts": 50, "buffer_size": 150, "target_update_interval": 40}
        return sb3.DQN("MlpPolicy", "CartPole-v1", seed=seed, device="cpu", **more)
    return sb3.SAC("MlpPolicy", "Pendulum-v1", learning_starts=50, batch_size=16, seed=seed, device="cpu")


@pytest.mark.parametrize(("kind", "steps"), [("PPO", 64 * 20), ("DQN", 300), ("SAC", 90)])
def test_a_model_of_stable_baselines3_is_proved_by_a_callback(kind: str, steps: int, tmp_path: Path) -> None:
    model = sb3_model(kind, 1)
    from gym_trace.exchange.sb3 import UpdateLogCallback, update_parts

    model.learn(steps, callback=UpdateLogCallback(tmp_path / "log", overhead=1.0))
    assert "train" not in vars(model)
    proof = verify(tmp_path / "log", *update_parts(sb3_model(kind, 2)))
    assert proof.differs == ""
    assert proof.versions == {"PPO": 20, "DQN": 63, "SAC": 40}[kind]
    state, again = model.policy.state_dict(), sb3_model(kind, 3)
    assert not torch.equal(next(iter(state.values())), next(iter(again.policy.state_dict().values())))


def test_a_model_with_and_without_the_callback_learns_the_same(tmp_path: Path) -> None:
    plain, logged = sb3_model("PPO", 1), sb3_model("PPO", 1)
    from gym_trace.exchange.sb3 import UpdateLogCallback

    plain.learn(256)
    logged = sb3_model("PPO", 1)
    logged.learn(256, callback=UpdateLogCallback(tmp_path / "log"))
    for mine, other in zip(plain.policy.state_dict().values(), logged.policy.state_dict().values(), strict=True):
        assert torch.equal(mine, other)
