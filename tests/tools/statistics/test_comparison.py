"""Comparisons of runs: their statistics, intervals and curves, and how the command shows them."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gym_trace_cli import show
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from runs import record_lengths
from scripted_env import Result, ToyEnv
from shell import ok, run, strict_json

from gym_trace import TraceRecordingWrapper, compare, open_trace
from gym_trace.errors import InvalidOption, TraceNotFound
from gym_trace.playback.writer_reader import WriterReader
from gym_trace.tools.statistics import comparison


class Returns(ToyEnv):
    """Episodes with these returns, of STEPS steps each."""

    observation_space = action_space = spaces.Discrete(4)

    def __init__(self, returns: Sequence[float], env_id: str = "Returns-v0"):
        self._returns, self.spec = returns, EnvSpec(env_id, entry_point="nowhere:Returns")

    def result(self, action: Any) -> Result:
        return Result(0, self._returns[self.episode] / STEPS, self.t == STEPS)


STEPS = 2


def record(directory: Path, returns: Sequence[float], steps_after: int = 0, **env: Any) -> Path:
    """Record an episode for each return, and steps of one more that does not end."""
    with TraceRecordingWrapper(Returns([*returns, 0.0], **env), directory) as recorded:
        for number in range(len(returns)):
            recorded.reset(seed=number)
            for _ in range(STEPS):
                recorded.step(0)
        if steps_after:
            recorded.reset()
            recorded.step(1)
    return directory


def test_the_samples_of_several_runs_are_their_means(tmp_path: Path) -> None:
    returns = {"a": [1, 3], "b": [4, 4, 4], "c": [12], "d": [100, 100]}
    traces = [record(tmp_path / name, given) for name, given in returns.items()]
    (group,) = compare({"all": traces}).groups
    assert group.returns.tolist() == [2, 4, 12, 100]
    assert (group.over, group.mean.value, group.median.value, group.iqm.value) == ("runs", 29.5, 8, 8)
    assert group.complete.tolist() == [2, 3, 1, 2]
    assert group.steps.tolist() == [4, 6, 2, 4]
    assert group.environments == ("Returns-v0",)


def test_the_interval_of_three_runs_goes_from_the_worst_to_the_best(tmp_path: Path) -> None:
    """Each of them fills a resample in one of 27, which is more than 2.5 %."""
    (group,) = compare({"x": [record(tmp_path / f"{i}", [float(i)]) for i in (1, 5, 6)]}).groups
    for estimate in (group.mean, group.median, group.iqm):
        assert (estimate.low, estimate.high) == (1, 6)


def test_the_samples_of_a_single_run_are_its_episodes(tmp_path: Path) -> None:
    returns = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 100.0, 50.0]
    (group,) = compare([record(tmp_path / "t", returns)]).groups
    assert (group.name, group.over) == (str(tmp_path / "t"), "episodes")
    assert (group.mean.value, group.median.value) == (pytest.approx(178 / 9), 5)
    assert group.iqm.value == 5  # the mean from 3 to 7: a quarter of 9 is 2
    assert 2 <= group.iqm.low < 5 < group.iqm.high <= 50
    assert compare([tmp_path / "t"]).groups[0].iqm == group.iqm


def test_samples_are_drawn_among_those_of_the_same_environment(tmp_path: Path) -> None:
    traces = [record(tmp_path / f"{i}{j}", [100.0 * i], env_id=f"E{i}-v0") for i in range(2) for j in range(3)]
    (group,) = compare({"x": traces}).groups
    assert group.mean == (50, 50, 50)


def test_intervals_are_those_of_the_bootstrap_distribution() -> None:
    samples = np.random.default_rng(5).normal(size=100)
    mean, _, _ = comparison._estimates(samples, np.zeros(100, int))
    deviation = samples.std() / 10
    assert mean.low == pytest.approx(samples.mean() - 1.96 * deviation, abs=0.1 * deviation)
    assert mean.high == pytest.approx(samples.mean() + 1.96 * deviation, abs=0.1 * deviation)


def test_a_single_sample_has_no_interval(tmp_path: Path) -> None:
    (group,) = compare([record(tmp_path / "t", [3.0])]).groups
    assert group.mean.value == 3
    assert math.isnan(group.mean.low)
    assert math.isnan(group.mean.high)


def test_a_curve_is_the_mean_of_a_window_at_the_steps_of_its_end(tmp_path: Path) -> None:
    short, long = record(tmp_path / "a", list(range(20))), record(tmp_path / "b", [8.0] * 20 + [0.0] * 20, 1)
    compared = compare({"x": [short, long]}, threshold=17.5)
    (group,) = compared.groups
    assert compared.window == 3  # a tenth of the median run
    assert compared.grid[[0, -1]].tolist() == [0, 81]  # the unfinished episode has a step
    at = np.searchsorted(compared.grid, 20)  # ten episodes have ended, the last with a return of 9
    assert group.curves[:, at].tolist() == [8, 8]
    assert np.isnan(group.curves[:, compared.grid < 6]).all()
    assert np.isnan(group.curves[0, compared.grid > 40]).all()
    ended = compared.grid > 40
    assert np.isnan(group.curve[ended]).all()  # a mean of other runs than before would jump
    known = ~np.isnan(group.curve)
    np.testing.assert_array_equal(group.curve[known], group.curves.mean(axis=0)[known])
    assert (group.low[known] <= group.curve[known]).all()
    assert group.steps_to_threshold.tolist() == [40, math.inf]  # 17, 18, 19: the twentieth episode


def test_curves_are_over_episodes_or_time_if_asked_for(tmp_path: Path) -> None:
    trace = open_trace(record(tmp_path / "t", [1.0] * 10))
    assert compare([trace], x="episodes").grid[-1] == 10
    table = trace.episodes
    seconds = (table["end_time"].max() - table["start_time"].min()) / np.timedelta64(1, "s")
    timed = compare([trace], x="time")
    assert timed.grid[-1] == pytest.approx(seconds)
    assert timed.groups[0].seconds.tolist() == [pytest.approx(seconds)]


@pytest.mark.filterwarnings("ignore:rewards")
def test_comparing_reads_no_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "t", [1.0, 2.0])
    with TraceRecordingWrapper(Returns([1.0]), tmp_path / "objectives") as env:
        env.reset()
        env.unwrapped.result = lambda action: Result(0, np.ones(2), True)
        env.step(0)
    monkeypatch.setattr(WriterReader, "chunk", None)
    one, other = compare([tmp_path / "t", tmp_path / "objectives"]).groups
    assert (one.mean.value, one.complete.tolist()) == (1.5, [2])
    assert (math.isnan(other.mean.value), other.complete.tolist(), other.episodes.tolist()) == (True, [0], [1])


def test_a_comparison_as_json_has_no_nan(tmp_path: Path) -> None:
    record(tmp_path / "t", [1.0, math.nan, math.inf, 1e308, 1e308])
    TraceRecordingWrapper(Returns([]), tmp_path / "empty").close()
    first, empty = strict_json(ok("compare", tmp_path / "t", tmp_path / "empty", "--json").stdout)["groups"]
    assert (first["complete"], first["mean"]["value"]) == ([3], None)
    assert (empty["episodes"], empty["iqm"]["value"], empty["curve"]) == ([0], None, [None] * 100)


def test_wrong_arguments_of_compare_raise(tmp_path: Path) -> None:
    trace = open_trace(record(tmp_path / "t", [1.0]))
    for wrong, problem in (([], "none given;"), ({"x": []}, "none given for 'x'"), ([trace, trace], "same name")):
        with pytest.raises(InvalidOption, match=problem):
            compare(wrong)
    with pytest.raises(InvalidOption, match="x='years': invalid; pass one of steps, episodes, time"):
        compare([trace], x="years")
    with pytest.raises(TraceNotFound):
        compare({"x": tmp_path / "nothing"})  # type: ignore[dict-item]  # one trace instead of a list is accepted


# -- gym-trace compare ------------------------------------------------------------------------------------------------


@pytest.fixture
def seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Seeds of two settings, in the current directory."""
    for name, factor in (("ppo", 1), ("dqn", 10)):
        for seed in range(2):
            record(tmp_path / "runs" / f"{name}-{seed}", [factor * (seed + 1.0)] * 10)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def row(output: str, label: str) -> list[str]:
    (line,) = (line for line in output.splitlines() if line.startswith(label))
    return line.removeprefix(label).split()


def test_a_name_or_a_pattern_or_a_directory_is_a_setting(seeds: Path) -> None:
    by_name = ok("compare", "p=runs/ppo-0", "p=runs/ppo-1", "d=runs/dqn-*", "--threshold", 12).stdout
    assert row(by_name, "runs") == ["2", "2"]
    assert row(by_name, "mean return") == ["1.5", "[1,", "2]", "15", "[10,", "20]"]
    assert row(by_name, "intervals over") == ["2", "runs", "2", "runs"]
    assert row(by_name, "steps to 12, mean of 1") == ["-", "(0", "of", "2", "runs)", "-", "(1", "of", "2", "runs)"]
    below = ok("compare", "runs", "runs/ppo-0").stdout
    assert row(below, "runs  ") == ["4", "1"]
    assert "runs/ppo-0" in below.splitlines()[0]


def test_a_directory_with_an_equals_sign_is_not_a_name(seeds: Path) -> None:
    (seeds / "runs" / "ppo-0").rename(seeds / "lr=1")
    assert ok("compare", "lr=1").stdout.splitlines()[0].split() == ["lr=1"]


@pytest.mark.parametrize("word", ["nothing", "x=nothing-*", "x=runs/nothing"])
def test_a_setting_without_traces_is_an_error(seeds: Path, word: str) -> None:
    done = run("compare", "runs/ppo-0", word)
    assert done.exit_code == 1
    assert word.removeprefix("x=") in done.stderr


def test_selected_episodes_are_compared(seeds: Path) -> None:
    output = ok("compare", "runs/ppo-0", "--episodes", "-3:").stdout
    assert row(output, "intervals over") == ["3", "complete", "episodes"]


def test_curves_are_drawn_in_braille_on_a_terminal(seeds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "can_chart", lambda: True)
    lines = ok("compare", "p=runs/ppo-*", "d=runs/dqn-*").stdout.splitlines()
    chart = [line for line in lines if "▕" in line]
    assert [chart[0].split("▕")[0], chart[-1].split("▕")[0]] == [" 15 ", "1.5 "]
    assert set(chart[0].split("▕")[1].strip()) <= set("⢀⠈⠉⠁")
    assert "return over environment steps (means of 1 complete episode)" in lines
    assert lines[-1].endswith("━━ d")


def test_a_chart_joins_neighbours_and_leaves_gaps() -> None:
    assert show.chart([[0.0, 1.0, None, None]], 2, 1) == ["\x1b[36m⣸\x1b[0m "]


def test_returns_of_different_environments_get_a_note(tmp_path: Path) -> None:
    traces = [record(tmp_path / name, [1.0], env_id=f"{name}-v0") for name in ("A", "B")]
    assert "note: returns of different environments: A-v0, B-v0" in run("compare", *traces).stderr


# -- gym-trace diff ---------------------------------------------------------------------------------------------------


def test_diff_of_two_policies_on_the_same_seeds_compares_runs(tmp_path: Path) -> None:
    for name, other in (("a", 0), ("b", 1)):
        with TraceRecordingWrapper(Returns([5.0] * 3), tmp_path / name) as env:
            for seed in range(3):
                env.reset(seed=seed)
                for step in range(STEPS):
                    env.step(other if seed and step else 0)
    output = run("diff", tmp_path / "a", tmp_path / "b").stdout.splitlines()
    assert output[:2] == ["episode 1 differs at step 1, actions: A has 0, B has 1", "… and 1 more episode"]
    words = f"'gym-trace compare {tmp_path / 'a'} {tmp_path / 'b'}'"
    assert output[2] == f"the seeds agree, the policies do not; compared as runs, see {words}:"
    assert row("\n".join(output), "mean return") == ["5", "[5,", "5]", "5", "[5,", "5]"]
    ignoring = run("diff", tmp_path / "a", tmp_path / "b", "--ignore", "seed").stdout
    assert "3 episodes, of which 1 are the same" in ignoring


# -- plots ------------------------------------------------------------------------------------------------------------


def test_a_plot_has_a_mean_a_band_and_a_line_for_each_run(seeds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from gym_trace.tools.statistics import plot

    compared = compare({"p": [*Path("runs").glob("ppo-*")], "one": ["runs/dqn-0"]}, threshold=4.0)
    axis: Any = plot._runs_figure(compared).axes[0]
    assert len(axis.lines) == 3 + 1 + 1  # two runs and their mean; one run; the threshold
    assert len(axis.collections) == 1
    assert axis.get_ylabel() == "return"
    assert axis.get_legend().get_texts()[0].get_text() == "p (2 runs)"
    np.testing.assert_array_equal(axis.lines[2].get_ydata(), compared.groups[0].curve)
    output = ok("compare", "runs/ppo-0", "--plot", "p.svg").stdout
    assert output.splitlines()[-1] == f"plot: {seeds / 'p.svg'}"


def test_a_plot_of_odd_runs_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    record(tmp_path / "huge_$x^2$", [1e300, 1.0])
    record_lengths(tmp_path / "cut", [3])
    named = {f"{number}": [tmp_path / "huge_$x^2$"] for number in range(9)}
    from gym_trace import plot_runs

    plot_runs(compare({**named, "_$x$": [tmp_path / "cut"]}), tmp_path / "p.png")
    plot_runs(compare([tmp_path / "cut"]), tmp_path / "p.svg")
    assert "no values" in (tmp_path / "p.svg").read_text()
