"""Columns are computed by functions, added and renamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import flip
from echo_env import EchoEnv
from runs import chunks_of, record_lengths
from scripted_env import CountingEnv
from shell import ok, run
from trace_contents import check_clean, contents

from gym_trace import Episode, TraceRecordingWrapper, edit, open_trace, repair_trace, verify_trace
from gym_trace.errors import InvalidOption, TraceError
from gym_trace.playback.episode_index import index_of

PLAIN = ("observations", "actions", "terminations", "truncations")


def record_annotated(directory: Path, writers: int = 2, steps: int = 5) -> None:
    """Record two episodes per writer, in chunks of three steps, so that episodes lie in several."""
    for number in range(writers):
        env = TraceRecordingWrapper(EchoEnv(length=steps + 1), directory, on_exist="append", record_infos=True)
        for _ in range(2):
            env.reset(seed=number)
            for step in range(steps):
                env.annotate(**{"value": float(step), "log.prob": 0.5})
                env.step(0)
                if step % 3 == 2:
                    env.flush()
        env.close()


def scaled(episode: Episode) -> Any:
    return np.asarray(episode.rewards, np.float64) * 2 - episode.episode_id


def reward_to_go(episode: Episode) -> Any:
    return np.cumsum(episode.rewards[::-1])[::-1]


def check_same_steps(new: Any, old: Any) -> None:
    for a, b in zip(new, old, strict=True):
        assert (a.writer, a.episode_id, a.seed, a.outcome, a.start_time) == (
            b.writer,
            b.episode_id,
            b.seed,
            b.outcome,
            b.start_time,
        )
        for name in PLAIN:
            assert getattr(a, name).tobytes() == getattr(b, name).tobytes()


@pytest.mark.parametrize("compacted", [False, True])
def test_map_replaces_rewards_and_returns_and_nothing_else(tmp_path: Path, compacted: bool) -> None:
    record_annotated(tmp_path / "t")
    source = tmp_path / "t"
    if compacted:
        edit.compact(source, tmp_path / "c")
        source = tmp_path / "c"
    report = edit.map(source, {"rewards": scaled, "annotations.log.prob": lambda e: list(e.rewards)}, tmp_path / "m")
    old, new = open_trace(source), open_trace(tmp_path / "m")
    check_clean(tmp_path / "m", report.episodes)
    check_same_steps(new, old)
    for a, b in zip(new, old, strict=True):
        assert a.rewards.tolist() == (b.rewards * 2 - b.episode_id).tolist()
        assert a.annotations["log.prob"].tolist() == b.rewards.tolist()
        assert a.annotations["value"].tolist() == b.annotations["value"].tolist()
        assert a.infos == b.infos
    assert new.episodes["return"].tolist() == [float(episode.rewards.sum()) for episode in new]
    assert len(list((tmp_path / "m").glob("*.gtb"))) == (1 if compacted else 2)


def test_map_and_add_take_the_selected_episodes_only(tmp_path: Path) -> None:
    record_annotated(tmp_path / "t")
    old = open_trace(tmp_path / "t")
    edit.map(old, {"rewards": scaled}, tmp_path / "m", episodes=[1, 2])
    edit.add(old[1:3], {"togo": reward_to_go}, tmp_path / "a")
    mapped, added = open_trace(tmp_path / "m"), open_trace(tmp_path / "a")
    check_same_steps(mapped, old[1:3])
    check_same_steps(added, old[1:3])
    assert [e.rewards.tolist() for e in mapped] == [scaled(e).tolist() for e in old[1:3]]
    assert [e.annotations["togo"].tolist() for e in added] == [reward_to_go(e).tolist() for e in old[1:3]]


def test_only_the_named_columns_are_decoded(tmp_path: Path) -> None:
    record_lengths(tmp_path / "t", [9, 4], flush_after=3)
    old = index_of(open_trace(tmp_path / "t")).readers[0]
    report = edit.map(tmp_path / "t", {"rewards": lambda episode: np.ones(len(episode), np.float32)}, tmp_path / "m")
    assert (report.encoded, report.chunks) == (0, old.chunk_count)
    (batch,) = index_of(open_trace(tmp_path / "m")).readers[0].batches
    assert batch.totals["observations",] == old.batches[0].totals["observations",]


def test_annotations_are_renamed_without_being_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_annotated(tmp_path / "t")
    monkeypatch.setattr("gym_trace.format.batch_reader.Chunk.array", None)
    edit.rename(tmp_path / "t", {"value": "log.prob", "annotations.log.prob": "value"}, tmp_path / "r")
    monkeypatch.undo()
    old, new = open_trace(tmp_path / "t"), open_trace(tmp_path / "r")
    check_same_steps(new, old)
    for a, b in zip(new, old, strict=True):
        assert a.annotations["log.prob"].tobytes() == b.annotations["value"].tobytes()
        assert a.annotations["value"].tobytes() == b.annotations["log.prob"].tobytes()


def test_infos_are_mapped_to_other_dicts(tmp_path: Path) -> None:
    record_annotated(tmp_path / "t", writers=1)
    edit.map(tmp_path / "t", {"infos": lambda episode: [{"n": i} for i in range(len(episode))]}, in_place=True)
    assert [episode.infos for episode in open_trace(tmp_path / "t")] == [[{"n": i} for i in range(5)]] * 2


def test_each_edit_is_named_in_the_provenance_of_every_writer(tmp_path: Path) -> None:
    record_annotated(tmp_path / "t")
    edit.compact(tmp_path / "t", tmp_path / "c")
    edit.map(tmp_path / "c", {"rewards": scaled}, tmp_path / "m")
    edit.rename(tmp_path / "m", {"value": "critic"}, tmp_path / "r")
    by = f"{__name__}:scaled"
    for reader in index_of(open_trace(tmp_path / "r")).readers:
        assert reader.schema["provenance"]["edits"] == [
            {"edit": "map", "column": "rewards", "by": by},
            {"edit": "rename", "column": "annotations.value", "to": "annotations.critic"},
        ]
        assert reader.about.edits_of("rewards") == [f"map by {by}"]
    with pytest.raises(TraceError, match="with different metadata"):
        edit.merge([tmp_path / "c", tmp_path / "m"], tmp_path / "both")


def test_verify_says_that_the_differing_rewards_were_edited(tmp_path: Path) -> None:
    import gymnasium

    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / "t")
    env.reset(seed=4)
    for _ in range(5):
        env.step(0)
    env.close()
    edit.map(tmp_path / "t", {"rewards": lambda episode: episode.rewards + 1}, tmp_path / "m")
    (verdict,) = verify_trace(tmp_path / "m")
    assert verdict.verdict == "differs"
    assert verdict.reason.startswith("not as recorded: rewards edited (map by ")
    assert [one.verdict for one in verify_trace(tmp_path / "m", ignore=["rewards"])] == ["identical"]


def test_a_step_whose_observation_is_lost_has_no_computed_reward(tmp_path: Path) -> None:
    record_lengths(tmp_path / "t", [9], flush_after=3)
    path = next((tmp_path / "t").glob("*.gtb"))
    flip(path, chunks_of(path)[1][1] - 40)
    repair_trace(tmp_path / "t", tmp_path / "r")
    edit.map(tmp_path / "r", {"rewards": lambda e: np.arange(len(e)) + e.first_step}, tmp_path / "m")
    old, new = open_trace(tmp_path / "r"), open_trace(tmp_path / "m")
    check_same_steps(new, old)
    assert [e.rewards.tolist() for e in new] == [list(range(e.first_step, e.first_step + len(e))) for e in old]


def two_dtypes(episode: Episode) -> Any:
    return np.zeros(len(episode), np.float32 if episode.episode_id else np.float64)


@pytest.mark.parametrize(
    ("column", "function", "problem"),
    [
        ("rewards", lambda e: e.rewards[1:], r"returned 4 rows for episode 0; return one for each of the 5 steps"),
        ("rewards", lambda e: 1.0, "returned a single value for episode 0; return one row per step"),
        ("rewards", lambda e: ["a"] * len(e), "returned values of other types for episode 0; return one real number"),
        ("rewards", lambda e: np.zeros(len(e), complex), r"returned complex128 rows .*; return one real number"),
        ("rewards", lambda e: np.zeros((len(e), 0)), r"rows of shape \(0,\) .*; return one real number"),
        ("rewards", lambda e: np.ma.array(e.rewards, mask=True), r"returned a masked array .*; return a plain one"),
        ("rewards", two_dtypes, r"returned float32 rows .* episode 1; return one type \(float64 rows .* episode 0\)"),
        ("annotations.value", lambda e: [object()] * len(e), "a value that cannot be stored"),
        (
            "annotations.value",
            lambda e: "x" * len(e),
            "returned a str for episode 0; return an array, or a list of one",
        ),
        ("annotations.value", lambda e: dict.fromkeys(range(len(e))), "returned a dict for episode 0; return an array"),
        ("infos", lambda e: [1] * len(e), "return one dict per step"),
        ("observations", scaled, "observations: cannot be mapped; columns that can be mapped: rewards, infos, ann"),
        ("annotations.nothing", scaled, "'annotations.nothing': this trace has no such column"),
    ],
)
def test_a_wrong_column_or_result_is_named_and_nothing_written(
    tmp_path: Path, column: str, function: Callable[[Episode], Any], problem: str
) -> None:
    record_annotated(tmp_path / "t", writers=1)
    with pytest.raises(InvalidOption, match=problem):
        edit.map(tmp_path / "t", {column: function}, tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def doubled_in_place(episode: Episode) -> Any:
    episode.rewards[:] *= 2
    return episode.rewards


def test_a_function_sees_no_change_that_another_one_makes(tmp_path: Path) -> None:
    record_annotated(tmp_path / "t")
    edit.add(tmp_path / "t", {"doubled": doubled_in_place, "same": lambda episode: episode.rewards}, tmp_path / "a")
    for old, new in zip(open_trace(tmp_path / "t"), open_trace(tmp_path / "a"), strict=True):
        assert new.annotations["doubled"].tolist() == (old.rewards * 2).tolist()
        assert new.annotations["same"].tolist() == new.rewards.tolist() == old.rewards.tolist()


def test_an_error_of_the_function_names_it_and_the_episode(tmp_path: Path) -> None:
    record_annotated(tmp_path / "t", writers=1)
    with pytest.raises(TraceError, match=r"rewards: .*<lambda> raised .*, for episode 0"):
        edit.map(tmp_path / "t", {"rewards": lambda episode: 1 / 0}, in_place=True)
    check_clean(tmp_path / "t", 2)


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ({"rewards": "r"}, "rewards: has a fixed name; columns that can be renamed: annotations.log.prob, ann"),
        ({"valu": "v"}, "'valu': this trace has no such annotation"),
        ({"value": "log.prob"}, "'log.prob': this trace has an annotation of this name"),
        ({"value": "v", "log.prob": "annotations.v"}, "two annotations would get the same name"),
        ({"value": "v", "annotations.value": "w"}, "annotations.value is renamed twice"),
        ({"value": "rewards"}, "'rewards': invalid name"),
        ({"value": "states/environment"}, "invalid name"),
        ({}, "name the annotations to rename"),
    ],
)
def test_an_invalid_new_name_raises(tmp_path: Path, names: dict[str, str], problem: str) -> None:
    record_annotated(tmp_path / "t", writers=1)
    with pytest.raises(InvalidOption, match=problem):
        edit.rename(tmp_path / "t", names, tmp_path / "r")


def test_an_annotation_that_exists_is_not_added(tmp_path: Path) -> None:
    record_annotated(tmp_path / "t", writers=1)
    with pytest.raises(InvalidOption, match=r"'annotations\.value': this trace has an annotation of"):
        edit.add(tmp_path / "t", {"annotations.value": scaled}, tmp_path / "a")


def test_an_annotation_is_not_added_twice(tmp_path: Path) -> None:
    record_annotated(tmp_path / "t", writers=1)
    with pytest.raises(InvalidOption, match="columns: two annotations would get the same name"):
        edit.add(tmp_path / "t", {"togo": scaled, "annotations.togo": reward_to_go}, tmp_path / "a")


def test_commands_map_add_and_rename_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def twice(episode):\n    return episode.rewards * 2\n")
    monkeypatch.chdir(tmp_path)
    with TraceRecordingWrapper(CountingEnv(4), tmp_path / "t") as env:
        for seed in range(3):
            env.reset(seed=seed)
            for _ in range(4):
                env.step(1)
    ok("edit", "map", "t", "-o", "m", "rewards=mine:twice")
    ok("edit", "add", "m", "--in-place", "doubled=mine:twice")
    ok("edit", "rename", "m", "-o", "r", "doubled=again")
    old, new = open_trace("t"), open_trace("r")
    assert [e.rewards.tolist() for e in new] == [(e.rewards * 2).tolist() for e in old]
    assert [e.annotations["again"].tolist() for e in new] == [(e.rewards * 4).tolist() for e in old]
    edited = (
        "rewards by mine:twice; annotations.doubled by mine:twice; annotations.doubled renamed to annotations.again"
    )
    assert edited in ok("info", "r").stdout
    for words, problem in (
        (["map", "t", "-o", "n", "rewards"], "is not of the form COLUMN=MODULE:FUNCTION"),
        (["map", "t", "-o", "n", "rewards=mine:none"], "mine:none"),
        (["map", "t", "-o", "n", "rewards=mine:twice", "rewards=mine:twice"], "named twice"),
        (["rename", "t", "-o", "n", "a"], "is not of the form OLD=NEW"),
    ):
        done = run("edit", *words)
        assert done.exit_code == 2
        assert problem in done.output


def test_a_map_that_changes_nothing_keeps_every_bit(tmp_path: Path) -> None:
    record_annotated(tmp_path / "t")
    edit.map(tmp_path / "t", {"rewards": lambda episode: episode.rewards}, tmp_path / "m")
    expected, found = contents(tmp_path / "t"), contents(tmp_path / "m")
    for key in expected:
        for episode in (expected[key], found[key]):
            episode.pop("schema")
    assert found == expected
