"""A foreign Parquet table as a trace: columns are guessed by their names, or named by a mapping."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from gym_trace_cli.main import cli

from gym_trace import check_trace, import_trace, open_trace
from gym_trace.errors import InvalidOption, UnreadableRecording

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = 7  # in episodes of 3 and 4 steps
EPISODES = [5] * 3 + [9] * 4
STATES = np.arange(2.0 * ROWS, dtype=np.float32).reshape(ROWS, 2)
ACTIONS = list(range(ROWS))
REWARDS = [0.5 * number for number in range(ROWS)]


def written(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def usual(**more: Any) -> dict[str, Any]:
    """The columns of a table with names that are usual."""
    return {
        "observation": pa.array(STATES.tolist(), pa.list_(pa.float32())),
        "action": ACTIONS,
        "reward": REWARDS,
        "done": [number in (2, 6) for number in range(ROWS)],
        "truncated": [number == 6 for number in range(ROWS)],
        "episode_index": EPISODES,
        **more,
    }


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises((UnreadableRecording, InvalidOption)) as caught:
        import_trace(path, path.parent / "refused", **options)
    assert not (path.parent / "refused").exists()
    return str(caught.value)


def test_a_table_is_imported_without_pandas(tmp_path: Path) -> None:
    """In a new process, as Arrow looks for it once; pyarrow 23 needs it to name dtypes."""
    path = written(tmp_path / "a.parquet", **usual())
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "pandas.py").write_text("raise ModuleNotFoundError('pandas')")
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); import gym_trace; gym_trace.import_trace(*sys.argv[1:])"
    command = [sys.executable, "-c", code, tmp_path / "without", path, tmp_path / "trace"]
    subprocess.run(command, check=True, timeout=120)
    assert open_trace(tmp_path / "trace")[0].observations.dtype == np.float32


@pytest.mark.parametrize("rows", [1, 2, 8192])
def test_a_table_with_usual_names_is_imported_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr("gym_trace.exchange.formats.parquet.tables._MOST_ROWS", rows)
    report = import_trace(written(tmp_path / "a.parquet", **usual(lap=ACTIONS)), tmp_path / "t")
    assert (report.format, report.episodes, report.steps) == ("table", 2, ROWS)
    assert any("observations from observation, actions from action" in text for text in report.warnings)
    first, second = open_trace(tmp_path / "t")
    assert (first.outcome, second.outcome) == ("terminated", "truncated")
    assert np.array_equal(first.observations[:-1], STATES[:3])
    assert np.isnan(first.observations[-1]).all()
    assert not first.has_final_observation
    assert np.array_equal(second.observations[:-1], STATES[3:])
    assert second.actions.tolist() == ACTIONS[3:]
    assert second.rewards.tolist() == REWARDS[3:]
    assert second.annotations["lap"].tolist() == ACTIONS[3:]
    assert open_trace(tmp_path / "t").observation_space.dtype == np.float32
    assert not check_trace(tmp_path / "t").damages


def test_columns_that_rllib_writes_are_recognized(tmp_path: Path) -> None:
    ends = [step in (2, ROWS - 1) for step in range(ROWS)]
    columns = {"eps_id": ["b"] * 3 + ["a"] * 4, "agent_id": [None] * ROWS, "obs": STATES.tolist(), "actions": ACTIONS}
    columns |= {"rewards": REWARDS, "new_obs": (STATES + 1).tolist(), "terminateds": ends, "truncateds": [False] * ROWS}
    report = import_trace(written(tmp_path / "a.parquet", **columns), tmp_path / "t")
    assert any("next observations differ" in text for text in report.warnings)  # a trace has one after the other
    first, second = open_trace(tmp_path / "t")
    assert (len(first), first.outcome, second.outcome) == (3, "terminated", "terminated")
    assert np.array_equal(first.observations[-1], STATES[2] + 1)


def test_rewards_flags_and_numbers_of_steps_may_be_lists_of_one_number(tmp_path: Path) -> None:
    def ones(values: Any) -> Any:
        return pa.array([[value] for value in values], pa.list_(pa.float32(), 1))

    columns = {"episode_idx": EPISODES, "step_idx": ones(ACTIONS), "reward": ones(REWARDS), "action": ones(ACTIONS)}
    columns |= {"state": STATES.tolist(), "terminated": ones(number in (2, 6) for number in range(ROWS))}
    import_trace(written(tmp_path / "a.parquet", **columns), tmp_path / "t")
    first, second = open_trace(tmp_path / "t")
    assert (first.rewards.tolist(), first.rewards.dtype) == (REWARDS[:3], np.float32)
    assert (first.outcome, second.outcome, second.actions.shape) == ("terminated", "terminated", (4, 1))


def test_a_mapping_says_which_column_is_what(tmp_path: Path) -> None:
    names = {"x": STATES.tolist(), "u": ACTIONS, "r": REWARDS, "run": ["b"] * 3 + ["a"] * 4, "over": [False] * ROWS}
    path = written(tmp_path / "a.parquet", **names)
    expected = "its columns are x, u, r, run, over; map them: gym-trace import"
    assert expected in refusal(path)
    assert "-o DIR --map observations=COLUMN,actions=COLUMN,rewards=COLUMN,episode=COLUMN" in refusal(path)
    arguments = ["--map", "obs=x,acts=u", "--map", "reward=r,episode=run,done=over"]
    assert CliRunner().invoke(cli, ["import", str(path), "-o", str(tmp_path / "t"), *arguments]).exit_code == 0
    told = {"observations": "x", "actions": "u", "rewards": "r", "episode": "run"}
    import_trace(path, tmp_path / "again", "table", map=told)
    for directory in ("t", "again"):
        first, second = open_trace(tmp_path / directory)
        assert (len(first), len(second), first.outcome) == (3, 4, "cut")
        assert second.rewards.tolist() == REWARDS[3:]


def test_an_invalid_mapping_raises(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", **usual(time=pa.array([0] * ROWS, pa.timestamp("s"))))
    for told, problem in (
        ("obs=nothing", "has no column 'nothing'; its columns are observation, action"),
        ("colour=reward", "unknown name 'colour'; use observations, actions"),
        ("obs", "'obs': invalid; pass NAME=COLUMN"),
        ("obs=time", "the column time is timestamp[ms], which cannot be observations"),
        ("reward=*", "rewards takes one column"),
        ("episode=,done=,truncated=", "no columns found for episode"),
    ):
        assert problem in refusal(path, map=told)


def test_next_observations_give_the_final_one(tmp_path: Path) -> None:
    import_trace(written(tmp_path / "a.parquet", **usual(next_obs=(STATES + 100).tolist())), tmp_path / "t")
    first, _ = open_trace(tmp_path / "t")
    assert first.observations.tolist() == [*STATES[:3].tolist(), (STATES[2] + 100).tolist()]


def test_flags_end_episodes_where_no_column_has_their_ids(tmp_path: Path) -> None:
    columns = usual()
    del columns["episode_index"]
    columns["done"][6] = columns["truncated"][6] = False
    import_trace(written(tmp_path / "a.parquet", **columns), tmp_path / "t")
    assert [(len(episode), episode.outcome) for episode in open_trace(tmp_path / "t")] == [
        (3, "terminated"),
        (4, "cut"),
    ]


def test_several_columns_make_a_vector_or_a_dict(tmp_path: Path) -> None:
    columns = usual()
    del columns["observation"]
    vector = {f"obs_{number}": [number] * ROWS for number in (10, 9, 1)}
    import_trace(written(tmp_path / "a.parquet", **columns, **vector), tmp_path / "vector")
    assert open_trace(tmp_path / "vector")[0].observations[0].tolist() == [1, 9, 10]
    parts = {"observation.state": STATES.tolist(), "observation.goal": ["left"] * ROWS}
    import_trace(written(tmp_path / "b.parquet", **columns, **parts), tmp_path / "dict")
    observations = open_trace(tmp_path / "dict")[0].observations
    assert observations["state"].shape == (4, 2)
    assert list(observations["goal"]) == ["left"] * 3 + [""]
    import_trace(tmp_path / "a.parquet", tmp_path / "some", map="obs=obs_1*")
    assert open_trace(tmp_path / "some")[0].observations[0].tolist() == [1, 10]


def test_structs_tensors_and_nested_lists_keep_their_shape(tmp_path: Path) -> None:
    pictures = np.arange(ROWS * 6, dtype=np.uint8).reshape(ROWS, 2, 3)
    struct = [{"a": number, "b": {"c": [1.5, number]}} for number in range(ROWS)]
    for number, (column, form) in enumerate(
        (
            (pictures.tolist(), (2, 3)),
            (pa.FixedShapeTensorArray.from_numpy_ndarray(pictures), (2, 3)),
            (struct, None),
        )
    ):
        path = written(tmp_path / f"{number}.parquet", **usual(observation=column))
        import_trace(path, tmp_path / f"{number}")
        found = open_trace(tmp_path / f"{number}")[1].observations
        if form is None:
            assert found["b"]["c"][:-1, 1].tolist() == [3, 4, 5, 6]
        else:
            assert np.array_equal(found[:-1], pictures[3:])


def test_a_directory_of_files_is_one_table(tmp_path: Path) -> None:
    whole = pa.table(usual())
    for number, (begin, end) in enumerate(((0, 4), (4, 7))):
        (tmp_path / "data" / f"{number}").mkdir(parents=True)
        pq.write_table(whole.slice(begin, end - begin), tmp_path / "data" / f"{number}" / "part.parquet")
    assert import_trace(tmp_path / "data", tmp_path / "t").episodes == 2
    assert [len(episode) for episode in open_trace(tmp_path / "t")] == [3, 4]
    pq.write_table(whole.drop_columns(["reward"]), tmp_path / "data" / "other.parquet")
    assert "has other columns than" in refusal(tmp_path / "data")


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"episode_index": [1, 2, 1, 2, 2, 2, 2]}, "the rows of episode 1 are not consecutive; sort it by"),
        ({"frame_index": [0, 2, 1, 0, 1, 2, 3]}, "not in the order of frame_index; sort it, or --map step="),
        ({"observation": [[1.0]] * 6 + [[1.0, 2.0]]}, "observation: rows are not all of shape [1]"),
        ({"observation": [[1.0, 2.0], [1.0]] * 3 + [[1.0, 2.0]]}, "observation: rows are not all of shape [2]"),
        ({"action": [None, *ACTIONS[1:]]}, "action: some rows have no value"),
        ({"reward": ["much"] * ROWS}, "the column reward is string, which cannot be rewards"),
    ],
)
def test_a_table_without_episodes_and_steps_raises(tmp_path: Path, columns: Any, problem: str) -> None:
    assert problem in refusal(written(tmp_path / "a.parquet", **usual(**columns)))


def test_annotations_need_not_be_there_in_every_row(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", **usual(note=[None, "a", *[None] * 5], ragged=[[1], [], *[[2, 3]] * 5]))
    import_trace(path, tmp_path / "t")
    first, second = open_trace(tmp_path / "t")
    assert list(first.annotations["note"]) == [None, "a", None]
    assert list(second.annotations["ragged"]) == [[2, 3]] * 4


def test_an_empty_table_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table(usual()).slice(0, 0), tmp_path / "a.parquet")
    assert "has no rows" in refusal(tmp_path / "a.parquet")


def test_an_option_that_a_format_has_not_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", **usual())
    assert "minari has no option 'map'; it takes no options" in refusal(path, format="minari", map="obs=x")
