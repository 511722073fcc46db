"""Options, errors and documentation of gym-trace train that do not need PyTorch."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gym_trace_cli.environments import NamedEnvironment
from gym_trace_cli.train import environment_of, trust_of
from shell import run

import gym_trace
from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.training import Run, Settings

TRAINING = (Path(__file__).parents[2] / "docs" / "reference" / "training.md").read_text(encoding="utf-8")
HAS_TORCH = importlib.util.find_spec("torch") is not None


def test_the_table_of_settings_is_that_of_the_code() -> None:
    told = re.findall(r"^\| `(\w+)` \| (\S+) \|", TRAINING, re.M)
    given = Settings().plain() | {"hidden": "64,64"}
    assert told[: len(given)] == [(name, str(value)) for name, value in given.items()]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "pass one of ENV_ID"),
        (["CartPole-v1", "--resume", "d"], "pass one of ENV_ID"),
        (["CartPole-v1", "--make", "os:getcwd", "--steps", 5], "pass one of ENV_ID"),
        (["CartPole-v1"], "no limit; pass"),
        (["--resume", "d", "--seed", 5], "--resume: --seed cannot change"),
        (["--verify", "d", "--seed", 5], "--verify: --seed cannot change"),
        (["CartPole-v1", "--steps", 5, "--learner-threads", 2], "is a setting; pass --set learner_threads=VALUE"),
        (["CartPole-v1", "--steps", 5, "--set", "seed=1"], "--set seed: is an option; pass --seed VALUE"),
        (["CartPole-v1", "--set", "steps=5"], "--set steps: is an option; pass --steps VALUE"),
        (["CartPole-v1", "--steps", 5, "--set", "keep=1"], "--set keep: is an option; pass --keep VALUE"),
        (["CartPole-v1", "--steps", 5, "--set", "quiet=true"], "--set quiet: is an option; pass --quiet"),
        (["CartPole-v1", "--steps", 5, "--set", "num_envs=4"], "--set num_envs: is an option; pass --num-envs VALUE"),
        (["CartPole-v1", "--set", "step=5"], "--set step: no setting; did you mean --steps VALUE"),
        (["CartPole-v1", "--set", "learningrate=5"], "learningrate: no setting; did you mean learning_rate?"),
        (["CartPole-v1", "--steps", 5, "--no-such-thing"], "no such option"),
        (["CartPole-v1", "--steps", 5, "--lag", 2], "is a setting; pass --set lag=VALUE"),
        (["CartPole-v1", "--steps", 5, "--cpus", "0"], "use the commands nice and taskset"),
    ],
)
def test_invalid_options_of_train_are_usage_errors(arguments: list[object], said: str) -> None:
    refused = run("train", *arguments)
    assert refused.exit_code == 2
    assert said in refused.output


def test_the_environment_of_a_run_is_shown_as_command_line() -> None:
    named = NamedEnvironment("ALE/Pong-v5", None, {"frameskip": 4}, ("ale_py",), ("my:Grey",), 99)
    assert named.command_line() == (
        "ALE/Pong-v5 --import ale_py --env-arg frameskip=4 --wrapper my:Grey --max-episode-steps 99"
    )
    assert NamedEnvironment(None, "my:make", {}).command_line() == "--make my:make"
    assert trust_of(named) == trust_of(NamedEnvironment(None, "my:make", {})) == " --trust"
    assert trust_of(NamedEnvironment("CartPole-v1", None, {})) == ""


def test_a_run_that_is_resumed_shows_every_argument_of_a_call_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"environment": {"make": "subprocess:call", "kwargs": {"args": ["sh", "-c", "echo"]}}}
    monkeypatch.setattr("gym_trace.training.run.runs_in", lambda directory: [SimpleNamespace(about=about)])
    with pytest.raises(InvalidOption) as caught:
        environment_of("somewhere", trust=False)
    assert "call subprocess:call(args=['sh', '-c', 'echo'])" in str(caught.value)
    assert environment_of("somewhere", trust=True)[0].factory == "subprocess:call"


def test_a_run_with_a_large_number_needs_trust_to_be_resumed() -> None:
    assert trust_of(NamedEnvironment("CartPole-v1", None, {"size": 8})) == ""
    assert trust_of(NamedEnvironment("CartPole-v1", None, {"size": 20_000})) == " --trust"


def test_options_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('environment = "CartPole-v1"\nset = {lerning_rate = 1}\nlag = "2"\n')
    refused = run("train", "--config", tmp_path / "run.toml", "--steps", 5)
    assert refused.exit_code == 2
    assert "lag" in refused.output


@pytest.mark.skipif(HAS_TORCH, reason="PyTorch is there")
def test_without_pytorch_it_says_what_to_install(tmp_path: Path) -> None:
    for refused in (
        run("train", "CartPole-v1", "-o", tmp_path / "r", "--steps", 5),
        run("record", "CartPole-v1", "-o", tmp_path / "t", "--policy", "run:r"),
    ):
        assert refused.exit_code == 1
        assert "pip install 'gym-trace[train]'" in refused.output
    with pytest.raises(MissingExtra):
        gym_trace.train(None, tmp_path / "r", steps=5)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (None, "resume=True"),
        ({"id": "CartPole-v1", "kwargs": {}, "imports": ["evil"]}, "import evil"),
        ({"id": "evil:Env-v0", "kwargs": {}}, "import evil"),
        ({"id": None, "kwargs": {}, "make": "evil:make"}, "call evil:make"),
        ({"id": "CartPole-v1", "kwargs": {"path": "/etc/passwd"}}, "pass path="),
        ({"id": 7, "kwargs": {}}, "invalid environment in run.json"),
        ({"id": "CartPole-v1", "kwargs": [], "more": 1}, "invalid environment in run.json"),
    ],
)
def test_an_untrusted_run_is_not_resumed_without_trust(tmp_path: Path, environment: Any, said: str) -> None:
    Run(tmp_path / "r").create(Settings(), 1, environment=environment)
    refused = run("train", "--resume", tmp_path / "r")
    assert refused.exit_code in (1, 2, 5)
    assert said in refused.output


def test_a_run_that_learnt_nothing_cannot_be_resumed(tmp_path: Path) -> None:
    Run(tmp_path / "r").create(Settings(), 1, learn=False)
    with pytest.raises(InvalidOption, match="nothing learned"):
        Run(tmp_path / "r").to_resume(None, trust=False)
