"""Final observations that an import did not find: they are absent to everybody, whatever the placeholder looks like."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from gym_trace_cli.main import cli
from gymnasium import spaces

from gym_trace import (
    Hindsight,
    ReplayEnv,
    check_trace,
    diff_traces,
    edit,
    export,
    import_trace,
    open_trace,
    repair_trace,
)
from gym_trace.errors import InvalidOption
from gym_trace.exchange.formats.imported import Imported, NewEpisode, NewSteps, imported, new_schema
from gym_trace.playback.trace import Trace
from gym_trace.tools.statistics.summary import summarize

STEPS = 6
SPACE = spaces.Dict({"x": spaces.Box(-1e3, 1e3, (2,), np.float32), "n": spaces.Discrete(1000), "t": spaces.Text(9)})
BOX = spaces.Box(-1e3, 1e3, (2,), np.float32)
PLACEHOLDER = {"x": np.nan, "n": 0, "t": ""}
ENDS = ("terminated", "truncated", "cut", "terminated")
KNOWN = (False, False, False, True)
NAMES = ("episode", "first_step", "terminations", "truncations")


def rows(episode: int, is_box: bool) -> Any:
    """Observations whose every value says where it is from; the last one of some is a placeholder."""
    numbers = 100 * (episode + 1) + np.arange(STEPS + 1)
    x, n, t = np.stack([numbers, -numbers], 1).astype(np.float32), numbers.copy(), [f"t{number}" for number in numbers]
    if not KNOWN[episode]:
        x[-1], n[-1], t[-1] = PLACEHOLDER["x"], PLACEHOLDER["n"], PLACEHOLDER["t"]
    return x if is_box else {"n": n, "t": t, "x": x}


class FourEpisodes:
    """An importer of four episodes, three of which do not have their final observation."""

    name, extra = "four", ""

    def __init__(self, is_box: bool):
        self.is_box = is_box

    def recognises(self, path: Path) -> bool:
        return False

    def read(self, path: Path) -> Imported:
        schema = new_schema("four", BOX if self.is_box else SPACE, spaces.Box(-1, 1, (1,), np.float32))
        return imported("four", self.episodes(), schema)

    def episodes(self) -> Iterator[NewEpisode]:
        for number, (end, known) in enumerate(zip(ENDS, KNOWN)):
            actions, rewards = np.full((STEPS, 1), number / 10, np.float32), np.arange(STEPS, dtype=np.float64)
            steps = NewSteps(rows(number, self.is_box), actions, rewards)
            yield NewEpisode(STEPS, [steps], end, has_final_observation=known)


def four(tmp_path: Path, is_box: bool = False) -> Trace:
    (tmp_path / "source").mkdir(exist_ok=True)
    import_trace(tmp_path / "source", tmp_path / "trace", FourEpisodes(is_box))
    return open_trace(tmp_path / "trace")


def finals(trace: Trace) -> list[bool]:
    found: list[bool] = trace.episodes["has_final_observation"].tolist()
    assert found == [episode.has_final_observation for episode in trace]
    return found


# -- what a trace says ------------------------------------------------------------------------------------------------


def test_an_episode_says_that_its_final_observation_is_a_placeholder(tmp_path: Path) -> None:
    trace = four(tmp_path)
    assert finals(trace) == list(KNOWN)
    assert len(trace[0].observations["n"]) == STEPS + 1
    assert trace[0][:STEPS].has_final_observation is False
    assert trace[0][: STEPS - 1].has_final_observation is True
    assert len(trace.select("not has_final_observation")) == 3
    assert trace.select(sort="-has_final_observation, index").indices.tolist() == [3, 0, 1, 2]


def test_edits_and_repairs_keep_what_is_known_of_final_observations(tmp_path: Path) -> None:
    trace = four(tmp_path)
    edit.filter(trace, tmp_path / "filtered", trace.episodes["index"] > 0)
    assert finals(open_trace(tmp_path / "filtered")) == [False, False, True]
    edit.merge([trace, tmp_path / "filtered"], tmp_path / "merged")
    edit.compact(tmp_path / "merged", tmp_path / "compact")
    repair_trace(tmp_path / "compact", tmp_path / "repaired")
    assert finals(open_trace(tmp_path / "repaired")) == list(KNOWN)
    assert not check_trace(tmp_path / "repaired").damages


def test_a_diff_compares_what_is_known_and_not_placeholders(tmp_path: Path) -> None:
    trace = four(tmp_path)
    export(trace, tmp_path / "lines.jsonl", "jsonl")  # which has no placeholders, so that other ones come back
    import_trace(tmp_path / "lines.jsonl", tmp_path / "again")
    assert finals(open_trace(tmp_path / "again")) == list(KNOWN)
    assert [one.difference for one in diff_traces(trace, tmp_path / "again")] == [None] * 4


def test_replay_env_returns_the_last_known_observation_and_says_so(tmp_path: Path) -> None:
    env = ReplayEnv(four(tmp_path), episodes=[0])
    env.reset()
    for _ in range(STEPS):
        observation, _, terminated, _, info = env.step(np.zeros(1, np.float32))
    assert terminated
    assert info == {"final_observation_unknown": True}
    assert (observation["n"], observation["t"]) == (100 + STEPS - 1, f"t{100 + STEPS - 1}")


def test_statistics_leave_placeholders_out(tmp_path: Path) -> None:
    trace = four(tmp_path)
    described = summarize(trace, columns=True)["observations"]
    assert [one["rows"] for one in described] == [4 * STEPS + 1] * 3
    assert "[0, 3]" not in json.dumps(described[0])
    assert [one["nan"] for one in described[2]["dimensions"]] == [0, 0]
    moments = trace.normalization()
    assert moments["observations"]["n"].count == moments["observations"]["x"].count == 4 * STEPS + 1
    assert moments["observations"]["n"].min == 100
    assert np.isfinite(moments["observations"]["x"].mean).all()
    assert moments["rewards"].count == 4 * STEPS


def test_cat_shows_no_placeholders(tmp_path: Path) -> None:
    trace = four(tmp_path)
    run = CliRunner()
    told = run.invoke(cli, ["cat", str(trace.directory), "--format", "jsonl"]).output
    lines = [json.loads(line) for line in told.splitlines()]
    last = [line for line in lines if line["type"] == "step" and line["step"] == STEPS - 1]
    assert [line["observations"] is None for line in last] == [not known for known in KNOWN]
    said = [line.get("has_final_observation", True) for line in lines if line["type"] == "episode"]
    assert said == list(KNOWN)
    told = run.invoke(cli, ["cat", str(trace.directory), "--format", "csv"]).output
    table = [row for row in csv.DictReader(io.StringIO(told)) if row["step"] == str(STEPS - 1)]
    assert [row["observations/n"] == row["observations/x[0]"] == "" for row in table] == [not known for known in KNOWN]
    told = run.invoke(cli, ["cat", str(trace.directory)]).output
    assert told.count("not known") == 9  # three columns of three episodes


# -- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["memory", None])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_transitions_leave_out_steps_to_unknown_observations(tmp_path: Path, cache: str | None, n_steps: int) -> None:
    trace = four(tmp_path)
    found = list(trace.transitions(5, n_steps=n_steps, replacement=False, cache=cache))
    batch = {name: np.concatenate([one[name] for one in found]) for name in NAMES}
    mask = np.concatenate([one["next_observation_mask"] for one in found])
    before, after = (np.concatenate([one[f"{name}observations"]["n"] for one in found]) for name in ("", "next_"))
    counts = np.bincount(batch["episode"], minlength=4).tolist()
    assert counts == [STEPS, STEPS - 1, STEPS - 1, STEPS]  # terminated episodes need no next observation
    ends = np.array([STEPS, STEPS - 1, STEPS - 1, STEPS])[batch["episode"]]
    expected = 100 * (batch["episode"] + 1) + np.minimum(batch["first_step"] + n_steps, ends)
    assert (after[mask] == expected[mask]).all()
    assert (after[~mask] == 100 + STEPS - 1).all()
    assert batch["terminations"][~mask].all()
    assert not batch["truncations"].any()  # the truncated step is left out, and no other was truncated
    assert (~mask).sum() == n_steps
    assert (before >= 100).all()
    texts = np.concatenate([one["next_observations"]["t"] for one in found])
    assert [int(text[1:]) for text in texts] == after.tolist()
    assert all(np.isfinite(one["next_observations"]["x"]).all() for one in found)


@pytest.mark.parametrize("cache", ["memory", None])
def test_windows_and_trajectories_mask_unknown_observations(tmp_path: Path, cache: str | None) -> None:
    trace = four(tmp_path)
    for batches in (
        trace.trajectories(4, replacement=False, cache=cache),
        trace.windows(STEPS, 4, replacement=False, cache=cache, strict_length=False),
    ):
        batch = next(iter(batches))
        order = np.argsort(batch["episode"])
        assert batch["mask"].sum(1)[order].tolist() == [STEPS, STEPS - 1, STEPS - 1, STEPS]
        assert batch["next_observation_mask"].sum(1)[order].tolist() == [STEPS - 1, STEPS - 1, STEPS - 1, STEPS]
        assert np.isfinite(batch["observations"]["x"]).all()
        assert batch["observations"]["n"][order[0], -1] == 100 + STEPS - 1


class WithGoals(FourEpisodes):
    """Observations with goals."""

    def read(self, path: Path) -> Imported:
        space = spaces.Dict(dict.fromkeys(("achieved_goal", "desired_goal", "observation"), BOX))
        return imported("four", self.episodes(), new_schema("four", space, spaces.Box(-1, 1, (1,), np.float32)))

    def episodes(self) -> Iterator[NewEpisode]:
        for episode in super().episodes():
            [steps] = episode.parts
            tree = dict.fromkeys(("achieved_goal", "desired_goal", "observation"), steps.observations)
            yield episode._replace(parts=[steps._replace(observations=tree)])


@pytest.mark.parametrize("strategy", ["future", "final", "random"])
def test_hindsight_never_uses_an_unknown_observation(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "source").mkdir()
    import_trace(tmp_path / "source", tmp_path / "trace", WithGoals(is_box=True))
    goals = Hindsight(strategy, lambda achieved, desired, infos: np.isfinite(achieved + desired).all(axis=1), ratio=1)
    [batch] = open_trace(tmp_path / "trace").transitions(99, goals=goals, replacement=False)
    assert np.bincount(batch["episode"]).tolist() == [STEPS - 1, STEPS - 1, STEPS - 1, STEPS]
    assert batch["rewards"].all()


def test_batches_of_a_complete_trace_have_no_mask_of_next_observations(tmp_path: Path) -> None:
    trace = four(tmp_path)
    assert "next_observation_mask" not in next(iter(trace.select("has_final_observation").transitions(2)))
    truncated = trace.select('outcome == "truncated"')
    assert "next_observation_mask" not in next(iter(truncated.transitions(2)))


def test_a_cache_on_disk_holds_no_placeholders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYM_TRACE_CACHE", str(tmp_path / "cache"))
    trace = four(tmp_path, is_box=True)
    for _ in range(2):
        for batch in trace.transitions(5, replacement=False, cache="disk"):
            assert np.isfinite(batch["next_observations"]).all()


# -- exports ----------------------------------------------------------------------------------------------------------

SAYS_IT = ("csv", "jsonl", "npz", "parquet")  # formats that can
LEAVES_OUT = ("d4rl",)
STANDS_IN = ("mcap", "minari", "rlds")
NO_FINALS = ("lerobot",)


@pytest.mark.parametrize("form", [*SAYS_IT, *LEAVES_OUT, *STANDS_IN, *NO_FINALS])
def test_an_export_says_what_becomes_of_unknown_observations(tmp_path: Path, form: str) -> None:
    for package in ("h5py", "pyarrow", "PIL", "mcap"):
        pytest.importorskip(package)
    trace = four(tmp_path, is_box=True)
    report = export(trace, tmp_path / "out", form)
    told = [loss.why for loss in report.lost if "unknown final observation in 3 episodes" in loss.why]
    assert len(told) == (form in LEAVES_OUT or form in STANDS_IN)
    assert report.steps == 4 * STEPS - 2 * (form in LEAVES_OUT)
    if told:
        with pytest.raises(InvalidOption, match="unknown final observation"):
            export(trace, tmp_path / "strict", form, strict=True)
    if form in ("d4rl", "jsonl", "lerobot", "minari", "parquet", "rlds"):
        import_trace(tmp_path / "out", tmp_path / "again")
        again = open_trace(tmp_path / "again")
        left = form in LEAVES_OUT
        assert finals(again) == [False, left, left, True]
        assert [len(episode) for episode in again] == [STEPS, STEPS - left, STEPS - left, STEPS]


def test_exported_transitions_repeat_the_last_known_observation_at_the_end(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    export(four(tmp_path, is_box=True), tmp_path / "out.hdf5", "d4rl")
    with h5py.File(tmp_path / "out.hdf5") as file:
        after, terminals, timeouts = (file[name][()] for name in ("next_observations", "terminals", "timeouts"))
    assert np.isfinite(after).all()
    assert np.flatnonzero(terminals).tolist() == [STEPS - 1, 4 * STEPS - 3]
    assert np.flatnonzero(timeouts).tolist() == [2 * STEPS - 2, 3 * STEPS - 3]
    assert after[STEPS - 1, 0] == 100 + STEPS - 1


# -- imports ----------------------------------------------------------------------------------------------------------


def test_d4rl_without_next_observations_has_no_final_ones(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "data.hdf5", "w") as file:
        file["observations"], file["actions"] = np.ones((9, 3), np.int64), np.zeros((9, 2))
        file["rewards"], file["terminals"] = np.zeros(9), np.arange(9) % 3 == 2
        file["timeouts"] = np.zeros(9, bool)
    report = import_trace(tmp_path / "data.hdf5", tmp_path / "trace")
    trace = open_trace(tmp_path / "trace")
    assert finals(trace) == [False] * 3
    assert any("has_final_observation is False" in text for text in report.warnings)
    for batch in trace.transitions(9, replacement=False):
        assert (batch["next_observations"] == 1).all()


def test_d4rl_with_next_observations_has_final_ones(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    trace = four(tmp_path, is_box=True)[[3]]
    export(trace, tmp_path / "out.hdf5", "d4rl")
    import_trace(tmp_path / "out.hdf5", tmp_path / "again")
    assert finals(open_trace(tmp_path / "again")) == [True]
