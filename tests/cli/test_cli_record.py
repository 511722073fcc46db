"""gym-trace record: options, output and exit codes."""

import os
import re
import shutil
import signal
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gym_trace_cli.options import EnvArg
from shell import HEARING, ok, process, run, wait_for
from terminals import written

import gym_trace
from gym_trace.recording.collecting.rollout import episode_seed

pytestmark = pytest.mark.usefixtures("forked_workers")

needs_vectors = pytest.mark.skipif(not hasattr(gymnasium.vector, "AutoresetMode"), reason="needs gymnasium 1.1")


def test_record_writes_the_episodes_and_says_what_to_do_next(here: Path) -> None:
    output = ok("record", "CartPole-v1", "--episodes", 3, "--seed", 5).output
    trace = gym_trace.open_trace(here / "traces" / "CartPole-v1")
    assert [episode.seed for episode in trace] == [episode_seed(5, k) for k in range(3)]
    assert trace.metadata == {"seed": 5}
    steps = sum(map(len, trace))
    assert f"recorded 3 episodes: {steps} steps" in output
    assert "gym-trace replay traces/CartPole-v1" in output


def test_the_next_commands_import_what_registers_the_environment(here: Path) -> None:
    (here / "registering.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Mine-v0', 'gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=5)\n"
    )
    output = ok("record", "Mine-v0", "--import", "registering", "-o", "t", "--episodes", 1).output
    assert "gym-trace verify t --import registering\n" in output


def test_record_without_a_limit_records_ten_episodes_and_prints_the_seed(here: Path) -> None:
    output = ok("record", "CartPole-v1", "-o", "t").output
    trace = gym_trace.open_trace("t")
    assert len(trace) == 10
    assert f"seed {trace.metadata['seed']}" in output


def test_the_same_seed_records_the_same_episodes(here: Path) -> None:
    ok("record", "CartPole-v1", "-o", "a", "--seed", 1, "--episodes", 4)
    ok("record", "CartPole-v1", "-o", "b", "--seed", 1, "--steps", 30)
    for first, second in zip(gym_trace.open_trace("a"), gym_trace.open_trace("b")):
        n = len(second)
        np.testing.assert_array_equal(first.observations[: n + 1], second.observations)
        np.testing.assert_array_equal(first.actions[:n], second.actions)


def test_an_episode_cut_by_a_limit_is_reported(here: Path) -> None:
    output = ok("record", "clicks:CliClock-v0", "-o", "t", "--steps", 25).output
    assert "recorded 3 episodes, the last one cut short: 25 steps" in output
    assert gym_trace.open_trace("t").episodes["outcome"].tolist() == ["terminated", "terminated", "closed"]


def test_options_reach_the_recorder_and_the_environment(here: Path) -> None:
    arguments = ["--infos", "--split", "eval", "--env-arg", "length=4", "--episodes", 1]
    ok("record", "CliClock-v0", "--import", "clicks", "-o", "t", *arguments)
    episode = gym_trace.open_trace("t")[0]
    assert (len(episode), episode.split) == (4, "eval")
    assert [info["steps"] for info in episode.infos] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("a=1", ("a", 1)),
        ("a=1.5", ("a", 1.5)),
        ("a=true", ("a", True)),
        ("a=[1, 2]", ("a", [1, 2])),
        ('a="1"', ("a", "1")),
        ("render_mode=rgb_array", ("render_mode", "rgb_array")),
        ("a=b=c", ("a", "b=c")),
        ("a=", ("a", "")),
    ],
)
def test_arguments_of_the_environment_are_json_or_else_text(text: str, pair: tuple[str, object]) -> None:
    assert EnvArg().convert(text, None, None) == pair


def test_an_argument_of_lists_nested_too_deeply_is_a_usage_error() -> None:
    brackets = "[" * 60_000 + "]" * 60_000
    done = run("record", "CartPole-v1", "-o", "t", "--env-arg", f"x={brackets}")
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (
        2, "error: invalid value for '--env-arg': x: nested too deep"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "actions"), [("ones", [1, 1, 1, 1]), ("Alternating", [0, 1, 0, 1]), ("Plain", [1, 1, 1, 1])]
)
def test_a_policy_is_a_function_or_a_class_in_a_module_nearby(here: Path, policy: str, actions: list[int]) -> None:
    arguments = ["--policy", f"clicks:{policy}", "--env-arg", "length=4", "--episodes", 2]
    ok("record", "clicks:CliClock-v0", "-o", "t", *arguments)
    assert [episode.actions.tolist() for episode in gym_trace.open_trace("t")] == [actions, actions]


@pytest.mark.parametrize("policy", ["clicks", "nowhere:f", "clicks:nothing", "clicks:not_callable"])
def test_a_missing_policy_is_a_usage_error_and_nothing_is_recorded(here: Path, policy: str) -> None:
    result = run("record", "CartPole-v1", "-o", "t", "--policy", policy)
    assert result.exit_code == 2
    assert "invalid value for '--policy'" in result.stderr
    assert not Path("t").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["Nope-v1"], "--import MODULE"),
        (["BabyAI-Nope-v0"], "--import minigrid"),
        (["Cartpole-v1"], "Did you mean: `CartPole`?\n"),
        (["CartPole-v999"], "Environment version `v999`"),
        (["clicks:Clock"], "Pass --make clicks:Clock\n"),
        (["clicks:Nope-v0"], "or --make clicks:FUNCTION\n"),
        (["CartPole-v1", "--env-arg", "nope=1"], "CartPole-v1 cannot be made: "),
        (["CartPole-v1", "--import", "nowhere"], "--import nowhere: No module named 'nowhere'"),
    ],
    ids=lambda value: " ".join(value),
)
def test_an_environment_that_cannot_be_made_is_one_line(here: Path, arguments: list[str], said: str) -> None:
    result = run("record", *arguments, "-o", "t")
    assert result.exit_code == 1
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not Path("t").exists()


def test_an_existing_run_of_several_processes_raises_with_advice_to_resume(here: Path) -> None:
    arguments = ["record", "CartPole-v1", "-o", "t", "--episodes", 1]
    ok(*arguments)
    result = run(*arguments, "-j", 1)
    assert "pass --on-exist append" in result.stderr
    assert "on_exist" not in result.stderr
    shutil.rmtree("t")
    ok(*arguments, "-j", 1)
    result = run(*arguments, "-j", 1)
    assert result.exit_code == 1
    assert "pass --resume to continue its run" in result.stderr
    assert "--on-exist append" in result.stderr
    assert "on_exist" not in result.stderr


def test_an_existing_trace_is_kept_unless_on_exist_allows_more(here: Path) -> None:
    arguments = ["record", "CartPole-v1", "-o", "t", "--episodes", 1]
    ok(*arguments)
    result = run(*arguments)
    assert result.exit_code == 1
    assert "--on-exist append" in result.stderr
    assert "--on-exist replace" in result.stderr
    assert "on_exist" not in result.stderr
    ok(*arguments, "--on-exist", "append")
    assert len(gym_trace.open_trace("t")) == 2
    ok(*arguments, "--on-exist", "replace")
    assert len(gym_trace.open_trace("t")) == 1


def test_a_file_in_the_place_of_the_trace_is_one_line(here: Path) -> None:
    result = run("record", "CartPole-v1", "-o", "clicks.py")
    assert result.exit_code == 2
    assert result.stderr == f"error: {here / 'clicks.py'}: is a file; pass a directory\n"


def test_steps_before_a_failure_of_the_environment_are_kept(here: Path) -> None:
    result = run("record", "clicks:CliClock-v0", "-o", "t", "--env-arg", "fail_at=6")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0] == "steps before the error are in t"
    assert result.stderr.splitlines()[1].startswith("error: ZeroDivisionError: the simulator broke (")
    (episode,) = gym_trace.open_trace("t")
    assert (len(episode), episode.outcome) == (5, "closed")


def test_quiet_says_nothing(here: Path) -> None:
    assert ok("record", "CartPole-v1", "-o", "t", "--quiet").output == ""


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal")
def test_on_a_terminal_progress_is_one_line_that_is_gone_in_the_end(here: Path) -> None:
    terminal, theirs = os.openpty()
    arguments = ["-o", "t", "--env-arg", "delay=0.05", "--episodes", 1]
    environ = {**os.environ, "TERM": "xterm"}
    with process("record", "clicks:CliClock-v0", *arguments, stderr=theirs, env=environ) as running:
        os.close(theirs)
        assert running.stdout is not None
        output = running.stdout.read()
    drawn = written(terminal).decode()
    assert "steps/s" in drawn
    assert drawn.rstrip().endswith("\x1b[2K")
    assert "\x1b" not in output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_seal_every_step_taken(here: Path, number: int, code: int) -> None:
    arguments = ["-o", "t", "--env-arg", "delay=0.002", "--env-arg", "length=100000", "--seconds", 60]
    with process("record", "clicks:CliClock-v0", *arguments) as running:
        wait_for(lambda: list(Path().glob("t/*.ring")) and sum(gym_trace.open_trace("t").episodes["steps"]))
        running.send_signal(number)
        output, errors = running.communicate()
    assert running.returncode == code
    assert "every step up to here is saved" in errors
    assert not [*Path("t").glob("*.part"), *Path("t").glob("*.ring")]
    (episode,) = gym_trace.open_trace("t")
    assert episode.outcome == "closed"
    assert f"recorded 1 episode, the last one cut short: {len(episode):,} step" in output


def test_a_second_ctrl_c_does_not_wait_for_an_environment_that_hangs(here: Path) -> None:
    with process("record", "clicks:CliClock-v0", "-o", "t", "--env-arg", "hang_at=4", script=HEARING) as running:
        wait_for(Path("hangs").exists)
        running.send_signal(signal.SIGINT)
        wait_for(Path("heard").exists)
        running.send_signal(signal.SIGINT)
        assert running.communicate()[1] == "interrupted\n"
    assert running.returncode == 130
    (episode,) = gym_trace.open_trace("t")
    assert (len(episode), episode.outcome) == (3, "closed")


@needs_vectors
def test_ctrl_c_in_all_processes_of_a_vector_environment_ends_cleanly(here: Path) -> None:
    arguments = ["-o", "t", "--num-envs", 2, "--vectorization-mode", "async", "--seconds", 60]
    with process("record", "CartPole-v1", *arguments, start_new_session=True) as running:
        wait_for(lambda: list(Path().glob("t/*.ring")) and sum(gym_trace.open_trace("t").episodes["steps"]))
        os.killpg(running.pid, signal.SIGINT)
        output, errors = running.communicate()
    assert running.returncode == 130
    assert errors == "interrupted; every step up to here is saved\n"
    cut = (gym_trace.open_trace("t").episodes["outcome"] == "closed").sum()  # the episode of a lane may have just ended
    assert ("cut short" in output) == bool(cut)
    assert f"the last {cut} cut short" in output or cut < 2


@needs_vectors
@pytest.mark.parametrize(
    "words", [(), ("--vectorization-mode", "async"), ("--vectorization-mode", "vector_entry_point")]
)  # fmt: skip
def test_vector_runs_count_the_steps_and_episodes_that_they_record(here: Path, words: tuple[str, ...]) -> None:
    output = ok("record", "CartPole-v1", "-o", "t", "--num-envs", 3, "--steps", 200, "--seed", 5, *words).output
    trace = gym_trace.open_trace("t")
    told = re.search(r"recorded (\d+) episodes, the last (?:(\d+)|one) cut short: (\d+) steps", output)
    assert told is not None
    assert int(told[3]) == sum(map(len, trace)) in (200, 201, 202)
    assert int(told[1]) == len(trace) > 5
    assert int(told[2] or 1) == (trace.episodes["outcome"] == "closed").sum()
    if "vector_entry_point" not in words:
        seeds = {episode.lane: episode.seed for episode in trace if episode.seed is not None}
        assert seeds == {lane: episode_seed(5, lane) for lane in range(3)}


def test_options_of_vector_runs_need_a_number_of_environments(here: Path) -> None:
    result = run("record", "CartPole-v1", "--vectorization-mode", "async")
    assert result.exit_code == 2
    assert "needs --num-envs" in result.output


def test_record_and_stats_tell_the_mean_of_the_same_episodes(here: Path) -> None:
    recorded = ok("record", "CliClock-v0", "--import", "clicks", "-o", "t", "--steps", 25).output
    assert "recorded 3 episodes, the last one cut short" in recorded
    assert "return of complete episodes: 10 on average, from 10 to 10" in recorded
    shown = ok("stats", "t").output
    assert "2: return and length count only these; see --by outcome" in shown
    assert gym_trace.summarize(gym_trace.open_trace("t"))["return"]["mean"] == 10
    assert gym_trace.load_results("t")["episode_rewards"] == [10, 10]
