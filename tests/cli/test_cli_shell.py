"""gym-trace shell: a prompt with the environment at a recorded step."""

import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
from shell import process, run
from terminals import Console

from gym_trace import TraceRecordingWrapper, open_trace, record_episodes
from gym_trace.errors import ReplayDiverged
from gym_trace.tools.playing.continued import Continued

# make docs installs IPython, whose prompt differs.
PLAIN = "import sys; sys.modules['IPython'] = None; from gym_trace_cli.main import cli; cli()"


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shell") / "trace"
    with TraceRecordingWrapper(gymnasium.make("CartPole-v1"), directory) as env:
        record_episodes(env, episodes=3, seed=0)
    return directory


def told(directory: Path, *options: str, typed: str) -> subprocess.CompletedProcess[str]:
    running = process("shell", directory, *options, script=PLAIN, stdin=subprocess.PIPE)
    output, errors = running.communicate(typed, timeout=120)
    return subprocess.CompletedProcess(running.args, running.returncode, output, errors)


def test_the_prompt_stands_at_the_step(cartpole: Path) -> None:
    typed = "import numpy as np\nnp.array_equal(env.step(episode.actions[3])[0], episode.observations[4])\nlen(trace)\n"
    done = told(cartpole, "--episode", "2", "--step", "3", typed=typed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.replace(">>> ", "").split() == ["True", f"{len(open_trace(cartpole))}"]
    assert "CartPole-v1 before step 3 of" in done.stderr


def test_exit_ends_the_prompt(cartpole: Path) -> None:
    assert told(cartpole, typed="exit(7)\n").returncode == 7


def test_ctrl_c_stays_in_the_prompt(cartpole: Path) -> None:
    with Console(sys.executable, "-c", PLAIN, "shell", str(cartpole), "--step", "2") as terminal:
        terminal.wait_for(">>>")
        terminal.send("1 +\x03")
        terminal.wait_for("KeyboardInterrupt")
        terminal.send("step * 21\n")
        terminal.wait_for("42")
        terminal.send("\x04")
        assert terminal.ended() == 0


def test_a_replay_that_differs_ends_with_3_and_the_first_difference(cartpole: Path) -> None:
    done = told(cartpole, "--step", "4", "--env-arg", "sutton_barto_reward=true", typed="")
    assert done.returncode == 3
    assert "at step 0, rewards: recorded 1.0, seen 0.0" in done.stderr


def test_shell_branch_render_and_play_take_the_comparison_of_verify(cartpole: Path, tmp_path: Path) -> None:
    changed = ("--env-arg", "sutton_barto_reward=true")
    assert told(cartpole, "--step", "4", *changed, "--ignore", "rewards", typed="").returncode == 0
    assert told(cartpole, "--step", "4", *changed, "--tolerance", "rewards=1", typed="").returncode == 0
    branch = ("branch", cartpole, "--step", "4", "--episodes", "1", *changed)
    assert run(*branch, "-o", tmp_path / "no").exit_code == 3
    assert run(*branch, "-o", tmp_path / "if", "--ignore", "rewards").exit_code == 0
    with pytest.raises(ReplayDiverged):
        Continued(cartpole, 0, 4, env_kwargs={"sutton_barto_reward": True})
    Continued(cartpole, 0, 4, env_kwargs={"sutton_barto_reward": True}, ignore=["rewards"]).close()
    done = run("verify", cartpole, *changed, "--ignore", "infos", "--tolerance", "rtol=1e-9")
    assert "--env-arg sutton_barto_reward=true --tolerance rtol=1e-09 --ignore infos\n" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--episode", "99"], "99: the trace has"), (["--step", "-1"], "step=-1: episode 0 has")],
)
def test_a_place_that_was_not_recorded_is_rejected(options: list[str], message: str, cartpole: Path) -> None:
    done = run("shell", cartpole, *options)
    assert done.exit_code == 2
    assert message in done.stderr
