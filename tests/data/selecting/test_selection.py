"""Selecting episodes of real traces: Trace.select, views in any order, and command options."""

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from scripted_env import Result, ToyEnv
from shell import ok, run

import gym_trace
from gym_trace import Trace, TraceRecordingWrapper, open_trace
from gym_trace.errors import CorruptTrace, InvalidOption

SAMPLES = Path(__file__).parents[3] / "sample_traces" / "format-1.1"


class Lengths(ToyEnv):
    """Episodes with the length given in options, and a reward of 1 or of two objectives per step."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, several: bool = False):
        self._several = several

    def result(self, action: Any) -> Result:
        left = int(self.options.get("length", 3)) - self.t
        return Result(np.full(1, left, np.float64), np.array([1.0, -2.0 * left]) if self._several else 1.0, left == 0)


def record(directory: Path, resets: list[dict[str, Any]], several: bool = False, **options: Any) -> Trace:
    env = TraceRecordingWrapper(Lengths(several), directory, on_exist="append", **options)
    for given in resets:
        env.reset(**given)
        while not env.step(0)[2]:
            pass
    env.close()
    return open_trace(directory)


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """A trace of two writers with four episodes each."""
    resets = [{"seed": 2**70, "options": {"length": 5, "level": "hard"}}, {"options": {"length": 2, "level": 3}}, {}]
    record(tmp_path, [*resets, {"seed": 7, "options": {"length": 9}}], metadata={"lr": 0.1, "tags": ["a", "b"]})
    return record(tmp_path, [{"seed": s, "options": {"length": 1 + s}} for s in range(4)], split="eval", uid="second")


def places(trace: Trace, *args: Any, **options: Any) -> list[int]:
    return trace.select(*args, **options).indices.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("steps > 4", [0, 3]),
        ("return == steps and outcome == 'terminated'", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("seed is None", [1, 2]),
        (f"seed >= {2**70}", [0]),
        ("seed == 7 or seed in [0, 1]", [3, 4, 5]),
        ("split == 'eval' and 'second' in writer", [4, 5, 6, 7]),
        ("metadata.lr < 1", [0, 1, 2, 3]),
        ("metadata.tags[-1] == 'b'", [0, 1, 2, 3]),
        ("metadata is None", [4, 5, 6, 7]),
        ("options.length > 4", [0, 3]),
        ("options.level == 'hard' or options.level == 3", [0, 1]),
        ("options is None", [2]),
        ("start_time > '2020' and end_time >= start_time and duration >= 0", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("episode_id == 0 and lane == 0 and first_step == 0", [0, 4]),
        ("index % 7 == 0", [0, 7]),
    ],
)
def test_episodes_are_selected_by_condition(trace: Trace, where: str, expected: list[int]) -> None:
    assert places(trace, where) == expected


def test_selecting_from_a_view_keeps_the_index_of_the_trace(trace: Trace) -> None:
    view = trace.select(sort="-steps, index")
    assert view.indices.tolist() == [3, 0, 7, 2, 6, 1, 5, 4]
    assert [len(episode) for episode in view] == [9, 5, 4, 3, 3, 2, 2, 1]
    assert places(view, "index < 4") == [3, 0, 2, 1]
    assert sorted(places(view, sort="random:1")) == sorted(view.indices)
    assert view.select("split == 'eval'", limit=2).writers == ["second"]


def test_every_reader_keeps_the_order_of_a_sorted_view(trace: Trace, tmp_path: Path) -> None:
    view = trace.select(sort="-steps, index")
    expected = [9, 5, 4, 3, 3, 2, 2, 1]
    assert [len(e.actions) for e in view.scan(on_damage="skip")] == expected
    assert [e.index for e in view.scan(on_damage="skip")] == list(range(8))
    assert [e.observations[0, 0] for e in view.scan(columns="observations")] == expected
    seen: list[int] = []
    gym_trace.scan_recorded_traces(view, lambda observations, actions, rewards: seen.append(len(actions)))
    assert seen == expected
    assert all(found.difference is None for found in gym_trace.diff_traces(view, view))
    whole, summary = gym_trace.summarize(trace, columns=True), gym_trace.summarize(view, columns=True)
    assert summary["rewards"] == whole["rewards"]
    assert summary["return"] == whole["return"]
    verdicts = gym_trace.verify_trace(view[[2, 1]], make_env=Lengths)
    assert sorted((verdict.index, verdict.verdict) for verdict in verdicts) == [(0, "identical"), (1, "identical")]


def test_diff_pairs_episodes_of_a_reordered_view_by_content(tmp_path: Path) -> None:
    a, b = (record(tmp_path / name, [{"options": {"length": n}} for n in (1, 2, 3)], uid=name) for name in "ab")
    for sort in ("steps", "-steps"):
        found = list(gym_trace.diff_traces(a, b.select(sort=sort)))
        assert [(one.index, one.difference) for one in found] == [(0, None), (1, None), (2, None)]


def test_each_objective_of_a_return_can_be_selected_by(tmp_path: Path) -> None:
    trace = record(tmp_path, [{"options": {"length": n}} for n in (2, 5, 3)], several=True)
    for words in ({"where": "return > 2"}, {"sort": "-return"}):
        with pytest.raises(InvalidOption, match=r"several numbers each; write return\[0\]"):
            trace.select(**words)
    assert places(trace, "return[0] > 2 and return[1] < -6") == [1]
    assert places(trace.select(sort="-return[0]"), "return[1] < -2") == [1, 2]
    with pytest.raises(InvalidOption, match="0 to 1"):
        trace.select("return[2] > 0")
    assert places(trace[:0], "return[1] < 0") == []


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ("lenght > 3", "there are index, steps"),
        ("length > 3", "use steps"),
        ("retrun > 3", "did you mean 'return'"),
        ("metadata.lrr > 3", "did you mean 'lr'"),
        ("options.nothing > 3", "length, level"),
        ("steps[0] > 3", "a single value"),
        ("return[0] > 3", "single numbers"),
        ("metadata.lr", None),
    ],
)
def test_an_unknown_column_raises_and_suggests_a_name(trace: Trace, where: str, problem: str | None) -> None:
    if problem is None:
        assert places(trace, where) == []
        return
    with pytest.raises(InvalidOption, match=problem):
        trace.select(where)


@pytest.mark.parametrize("name", sorted(path.name for path in SAMPLES.iterdir() if path.is_dir()))
def test_episodes_of_every_sample_can_be_selected(name: str) -> None:
    trace = open_trace(SAMPLES / name)
    one = "return[0]" if name == "mismatch" else "return"  # the rewards of "mismatch" are two numbers
    assert len(trace.select(f"{one} > 0 or not {one} > 0", sort=f"-{one}, start_time, metadata")) == len(trace)
    try:
        chosen = trace.select("options is None or options is not None")
    except CorruptTrace:
        assert name == "damaged"
    else:
        assert len(chosen) == len(trace)


def test_traces_without_the_key_or_without_episodes_select_nothing(trace: Trace) -> None:
    record(trace.directory / "other", [{}])
    for words in (["--where", "metadata.lr > 0"], ["--episodes", "3"]):
        rows = ok("ls", trace.directory, trace.directory / "other", "--json", *words).output.splitlines()
        assert [json.loads(row)["episodes"] for row in rows] == [4 if "--where" in words else 1, 0]
    assert run("ls", trace.directory, trace.directory / "other", "--where", "steps > 'x'").exit_code == 2


def test_selecting_no_episodes_fails(trace: Trace) -> None:
    for command in ("verify", "diff", "render"):
        words = {"diff": [trace.directory], "render": ["-o", "v"]}.get(command, [])
        result = run(command, trace.directory, *words, "--where", "steps > 99")
        assert result.exit_code == 1
        assert "none of 8 episodes " in result.stderr


def with_stubs(directory: Path) -> Trace:
    """Returns 2, 5 and 3 of complete episodes, and 9 and 1 of episodes that were cut and closed."""
    env = TraceRecordingWrapper(Lengths(), directory)
    for length, steps in ((2, 2), (20, 9), (5, 5), (3, 3), (20, 1)):
        env.reset(options={"length": length})
        for _ in range(steps):
            env.step(0)
    env.close()
    return open_trace(directory)


def test_an_order_of_returns_has_incomplete_episodes_last(tmp_path: Path) -> None:
    trace = with_stubs(tmp_path)
    assert trace.select(sort="return").indices.tolist() == [0, 3, 2, 4, 1]
    assert trace.select(sort="-return", limit=1).indices.tolist() == [2]
    assert trace.select("outcome != 'lost'", sort="-return").indices.tolist() == [1, 2, 3, 0, 4]
    assert trace.select(sort="-steps", limit=1).indices.tolist() == [1]  # a length is that of the recording


def test_every_command_takes_the_best_and_the_worst(tmp_path: Path) -> None:
    trace = with_stubs(tmp_path / "t")
    for order, index, steps in (("-return", 2, 5), ("return", 0, 2)):
        words = ["--sort", order, "--limit", 1]
        for command in ("ls", "replay"):
            assert json.loads(ok(command, trace.directory, "--json", *words).stdout)["index"] == index
        assert json.loads(ok("stats", trace.directory, "--json", *words).stdout)["steps"] == steps
    ok("edit", "filter", trace.directory, "-o", tmp_path / "best", "--sort", "-return", "--limit", 2)
    assert open_trace(tmp_path / "best").episodes["return"].tolist() == [5.0, 3.0]


@pytest.mark.parametrize("command", ["ls", "stats", "cat", "replay"])
@pytest.mark.parametrize("words", [["--where", "steps > 99"], ["--episodes", "8:"]])
def test_a_report_of_no_episode_says_so(trace: Trace, command: str, words: list[str]) -> None:
    for form in ([], ["--json"]):
        result = ok(command, trace.directory, *words, *form)
        assert result.stderr == "none of 8 episodes matches\n"


def test_drawing_from_a_view_without_episodes_names_the_cause(trace: Trace) -> None:
    longest = f"no episode is long enough; the longest has {max(map(len, trace))} steps$"
    for view, cause in ((trace[:0], "the trace or view has no episodes"), (trace, longest)):
        with pytest.raises(InvalidOption, match=f"nothing to sample: {cause}"):
            next(iter(view.windows(10)))


def test_nothing_is_written_of_no_episode(trace: Trace, tmp_path: Path) -> None:
    for words in (["edit", "filter"], ["export", "--to", "jsonl"]):
        result = run(*words, trace.directory, "-o", tmp_path / "new", "--where", "steps > 99")
        assert (result.exit_code, result.stderr) == (1, "error: none of 8 episodes matches\n")
        assert not (tmp_path / "new").exists()


def test_reset_options_of_any_type_can_be_selected_by(tmp_path: Path) -> None:
    values = [np.arange(3), np.array(2), 10**30, {"deep": [1, 2]}, "text", None]
    trace = record(tmp_path, [{"options": {"v": value}} for value in values])
    assert places(trace, "options.v[1] == 1") == [0]
    assert places(trace, f"options.v == 2 or options.v == {10**30}") == [1, 2]
    assert places(trace, "options.v.deep[-1] == 2") == [3]
    assert places(trace, "options.v is None") == [5]
    assert places(trace[::-1], "options.v is not None") == [4, 3, 2, 1, 0]


def test_all_commands_select_the_same_episodes(trace: Trace) -> None:
    def indices(*words: Any) -> list[int]:
        lines = ok("replay", trace.directory, "--json", *words).output.splitlines()
        return [json.loads(line)["index"] for line in lines]

    assert indices("--episodes", "2:", "--where", "steps > 2", "--sort", "-steps", "--limit", 3) == [3, 7, 2]
    assert indices("--episodes", "7,1,7", "--where", "steps > 0") == [7, 1]
    assert len(indices("--where", "split == 'eval'", "--sort", "random:1", "--limit", 2)) == 2
    summary = json.loads(ok("stats", trace.directory, "--json", "--where", "steps > 4", "--by", "split").output)
    assert (summary["episodes"], summary["storage"]) == (2, None)
    assert "2 of 8 episodes" in ok("stats", trace.directory, "--where", "steps > 4").output
    diff = ok("diff", trace.directory, trace.directory, "--json", "--where", "steps > 4", "--sort", "-steps").output
    assert json.loads(diff)["episodes"] == [2, 2]
    nothing = run("diff", trace.directory, trace.directory, "--where", "steps > 40")
    assert "none of 8 episodes in A and 8 episodes in B matches" in nothing.stderr


@pytest.mark.parametrize(
    "words", [["--where", "steps >"], ["--where", "step > 3"], ["--sort", "return >"], ["--sort", "x"]]
)
def test_an_invalid_selection_is_a_usage_error_that_marks_its_position(trace: Trace, words: list[str]) -> None:
    result = run("replay", trace.directory, *words)
    assert result.exit_code == 2
    assert f"invalid value for '{words[0]}'" in result.stderr
    assert "^" in result.stderr


def test_invalid_selection_arguments_raise_and_are_quoted(tmp_path: Path) -> None:
    trace = record(tmp_path, [{}, {}])
    for words in ({"where": 5}, {"sort": ["return"]}, {"limit": 2.5}):
        with pytest.raises(InvalidOption, match="pass "):
            trace.select(**words)
    for index in (None, "a", 1.5):
        with pytest.raises(TypeError, match="pass an index"):
            trace[index]
    with pytest.raises(IndexError, match="no episode -3; the trace has 2"):
        trace[-3]
