"""gym-trace cat --summary: one line per column of the selected steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import flip
from gym_trace_cli import show
from gymnasium import spaces
from scripted_env import CountingEnv, Result, ScriptedEnv, small_windows
from shell import ok, run, strict_json

from gym_trace import TraceRecordingWrapper, open_trace

BLOCKS = "▁▂▃▄▅▆▇█"


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A trace of two episodes of three steps: numbers with a NaN, an image, and text."""
    random = np.random.default_rng(0)
    space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (6, 6, 3), np.uint8),
            "text": spaces.Text(8),
            "place": spaces.Box(-9, 9, (2,), np.float64),
        }
    )

    def seen(step: int) -> dict[str, Any]:
        place = np.array([step, np.nan if step == 2 else -step], float)
        return {"image": random.integers(0, 256, (6, 6, 3), dtype=np.uint8), "text": f"say {step}", "place": place}

    script = [(seen(0), [Result(seen(step), float(step), step == 3) for step in (1, 2, 3)])] * 2
    with TraceRecordingWrapper(ScriptedEnv(space, spaces.Discrete(5), script), tmp_path / "mixed") as env:
        for _ in range(2):
            env.reset(seed=0)
            for action in (4, 2, 0):
                env.annotate(logprob=-0.5 * action)
                env.step(action)
    return tmp_path / "mixed"


def _summary(*arguments: object) -> dict[str, Any]:
    return {line["column"]: line for line in map(strict_json, ok(*arguments, "--json").stdout.splitlines())}


def test_each_number_has_its_min_mean_max_and_nan_count(mixed: Path) -> None:
    columns = _summary("cat", mixed, "--summary")
    rows = np.concatenate([episode.observations["place"] for episode in open_trace(mixed)])
    for i, known in enumerate(columns["observations/place"]["dimensions"]):
        good = rows[:, i][np.isfinite(rows[:, i])]
        assert (known["min"], known["max"], known["nan"]) == (good.min(), good.max(), len(rows) - len(good))
        assert known["mean"] == pytest.approx(good.mean())
    pixels = np.concatenate([episode.observations["image"] for episode in open_trace(mixed)])
    assert columns["observations/image"]["all"]["mean"] == pytest.approx(pixels.mean())
    assert columns["observations/text"]["distinct"] == 4
    assert columns["annotations/logprob"]["dimensions"][0]["min"] == -2
    assert columns["terminations"]["dimensions"][0]["mean"] == pytest.approx(1 / 3)


def test_only_the_chosen_steps_and_columns_count(mixed: Path) -> None:
    assert set(_summary("cat", mixed, "--summary", "--columns", "rewards")) == {"rewards"}
    columns = _summary("cat", mixed, "--summary", "--steps", "1:", "--episodes", "1")
    assert columns["rewards"]["rows"] == 2
    assert columns["rewards"]["dimensions"][0]["curve"] == [2.0, 3.0]
    columns = _summary("cat", mixed, "--summary", "--steps-where", "reward == 2", "--columns", "actions")
    assert columns["actions"]["dimensions"][0]["max"] == 2


def test_no_observation_counts_twice_where_an_episode_spans_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TraceRecordingWrapper(CountingEnv(length=50), tmp_path) as env:
        env.reset(seed=0)
        while not any(env.step(0)[2:4]):
            pass
    small_windows(monkeypatch, 7)
    assert _summary("cat", tmp_path, "--summary")["observations"]["rows"] == 51


def test_a_terminal_shows_a_sparkline_and_a_pipe_does_not(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not set(BLOCKS) & set(ok("cat", mixed, "--summary").stdout)
    monkeypatch.setattr(show, "can_chart", lambda: True)
    lines = ok("cat", mixed, "--summary").stdout.splitlines()
    (rewards,) = (line for line in lines if line.startswith("rewards"))
    assert rewards.split() == ["rewards", "1", "2", "3", "0", "▁▄█▁▄█"]
    assert any(line.startswith("observations/text") and "say 0" in line for line in lines)


def test_a_summary_has_no_csv(mixed: Path) -> None:
    result = run("cat", mixed, "--summary", "--format", "csv")
    assert result.exit_code == 2
    assert "--summary: excludes --format csv" in result.stderr


def test_a_summary_skips_damage_and_reports_it(mixed: Path) -> None:
    (batch,) = mixed.glob("*.gtb")
    flip(batch, 400)
    result = run("cat", mixed, "--summary")
    assert result.exit_code == 5
    assert "skipped: " in result.stderr


def test_an_empty_trace_has_an_empty_summary(tmp_path: Path) -> None:
    TraceRecordingWrapper(CountingEnv(), tmp_path).close()
    assert ok("cat", tmp_path, "--summary").stdout.split() == ["column", "min", "mean", "max", "nan"]


def test_a_condition_that_holds_at_no_step_is_noted(mixed: Path) -> None:
    assert "note: no step matches" in run("cat", mixed, "--steps-where", "reward == 99").stderr
    assert "no step matches" not in run("cat", mixed, "--steps-where", "reward == 2").stderr
