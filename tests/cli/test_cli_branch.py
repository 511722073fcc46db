"""gym-trace branch: new episodes that branch off at a recorded step, and a table of their returns."""

import json
from pathlib import Path

import gymnasium
import pytest
from shell import run

from gym_trace import TraceRecordingWrapper, open_trace, record_episodes


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("branch") / "trace"
    with TraceRecordingWrapper(gymnasium.make("CartPole-v1"), directory) as env:
        record_episodes(env, episodes=3, seed=0)
    return directory


def test_a_table_compares_the_returns_from_the_step_on(cartpole: Path, tmp_path: Path) -> None:
    done = run(
        "branch", cartpole, "--episode", "2", "--step", "5", "--episodes", "30", "--seed", "1", "-o", tmp_path / "if"
    )
    assert done.exit_code == 0, done.stderr
    title, headings, recorded, new, *rest = done.stdout.splitlines()
    assert title == "from step 5 of episode 2 on"
    assert headings.split("  ")[0] == "policy"
    assert headings.endswith("95 % interval  min  max  mean steps")
    assert recorded.split() == ["recorded", "1", *[str(len(open_trace(cartpole)[2]) - 5)] * 2]
    assert new.split()[:2] == ["random", "30"]
    assert rest[0] == "interval of the mean: percentile bootstrap, 10,000 resamples"
    assert rest[1].startswith("the environment drew nothing from the seeded generator")
    verified = run("verify", tmp_path / "if")
    assert "30 episodes replayed: 30 identical, bit for bit" in verified.output
    assert f"step 5 of episode 2 of {open_trace(cartpole).writers[0]}" in run("info", tmp_path / "if").stdout


def test_json_has_every_return(cartpole: Path, tmp_path: Path) -> None:
    done = run("branch", cartpole, "--step", "5", "--episodes", "3", "--json", "--no-prefix", "-o", tmp_path / "if")
    told = json.loads(done.stdout)
    new = open_trace(tmp_path / "if")
    assert told["returns"] == new.episodes["return"].tolist()
    assert told["lengths"] == new.episodes["steps"].tolist()
    assert told["interval"][0] <= told["mean"] <= told["interval"][1]
    assert [episode.first_step for episode in new] == [5, 5, 5]


def test_a_replay_that_differs_ends_with_3_and_records_nothing(cartpole: Path, tmp_path: Path) -> None:
    done = run("branch", cartpole, "--step", "4", "--env-arg", "sutton_barto_reward=true", "-o", tmp_path / "if")
    assert done.exit_code == 3
    assert "at step 0, rewards: recorded 1.0, seen 0.0" in done.stderr
    assert not (tmp_path / "if").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--episode", "99"], "99: the trace has"),
        (["--step", "-1"], "step=-1: episode 0 has"),
        (["--on-exist", "x"], "x"),
    ],
)
def test_invalid_options_are_refused(options: list[str], message: str, cartpole: Path, tmp_path: Path) -> None:
    done = run("branch", cartpole, *options, "-o", tmp_path / "if")
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_directory_with_a_trace_needs_on_exist(cartpole: Path, tmp_path: Path) -> None:
    words = ("branch", cartpole, "--step", "2", "--episodes", "2", "--quiet", "-o", tmp_path / "if")
    assert run(*words).exit_code == 0
    assert "--on-exist append" in run(*words).stderr
    assert run(*words, "--on-exist", "append").exit_code == 0
    assert len(open_trace(tmp_path / "if")) == 4
