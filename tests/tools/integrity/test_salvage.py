"""repair_trace(salvage=True): the intact columns of damaged chunks are kept, and nothing is made up for the others."""

import json
from pathlib import Path
from typing import Any

import numbered_env
import numpy as np
import pytest
from batch_forgery import taken_apart
from shell import run

from gym_trace import check_trace, open_trace, repair_trace
from gym_trace.data.episode import Episode, infos_of
from gym_trace.data.values import ABSENT

BROKEN = 5  # the chunk that is damaged; it has steps 0 to 1 of the third episode


def broken(directory: Path, *columns: tuple[Any, ...], every: bool = False, **options: Any) -> Path:
    """A trace with a flipped bit in these columns of a chunk, or of all."""
    batch = numbered_env.record(directory, **options)
    forged = taken_apart(batch)
    for chunk in forged.chunks if every else [forged.chunks[BROKEN]]:
        for path in columns:
            if path in chunk.columns and (blob := chunk.blobs[chunk.columns[path]]):
                chunk.blobs[chunk.columns[path]] = bytes([blob[0] ^ 1]) + blob[1:]
    batch.write_bytes(forged.data(reindexed=False))
    return directory


def columns_of(episode: Episode) -> dict[str, Any]:
    told = {name: getattr(episode, name) for name in ("observations", "actions", "rewards", "terminations")}
    notes = episode.annotations.get("note", [None] * len(episode))
    told |= {"notes": list(notes), "infos": infos_of(episode), "options": [episode.options], "seed": [episode.seed]}
    return {name: list(values) for name, values in told.items()}


def same(one: list[Any], other: list[Any]) -> list[bool]:
    return [repr(a) == repr(b) for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize(
    ("path", "name", "lost"),
    [
        (("observations",), "observations", np.full(3, np.nan, np.float32)),
        (("actions",), "actions", ABSENT),
        (("rewards",), "rewards", np.float64(np.nan)),
        (("infos",), "infos", ABSENT),
        (("annotations", "note"), "notes", None),
    ],
)
def test_only_the_damaged_column_of_a_chunk_is_lost(tmp_path: Path, path: Any, name: str, lost: Any) -> None:
    numbered_env.record(tmp_path / "whole")
    broken(tmp_path / "t", path)
    report = repair_trace(tmp_path / "t", tmp_path / "r", salvage=True)
    assert (report.losses, report.orphans, report.steps) == ([], [], numbered_env.STEPS)
    ((damage, columns, (steps,)),) = report.salvaged
    assert (report.found.damages, columns) == ([damage], ["/".join(path)])
    assert (check_trace(tmp_path / "r").damages, check_trace(tmp_path / "r").remarks) == ([], [])
    repaired = open_trace(tmp_path / "r")
    for whole, kept in zip(open_trace(tmp_path / "whole"), repaired, strict=True):
        expected, found = columns_of(whole), columns_of(kept)
        for other in expected.keys() - {name}:
            assert all(same(expected[other], found[other])), other
        first = steps.first_step + (name == "observations" and steps.first_step > 0)
        rows = range(first, steps.first_step + steps.steps + (name == "observations"))
        for row, is_same in enumerate(same(expected[name], found[name])):
            if whole.episode_id == steps.episode_id and row in rows and not is_same:
                assert repr(found[name][row]) == repr(lost)
            else:
                assert is_same
    said = {"columns": ["/".join(path)], **steps._asdict()}
    assert repaired.facts["salvaged"]["steps"] == [said]
    assert "NaN" in repaired.facts["salvaged"]["note"]


def test_lost_values_are_never_values_of_their_space(tmp_path: Path) -> None:
    trace = repaired_of(broken(tmp_path / "t", ("actions",), ("observations",), every=True), tmp_path / "r")
    for episode in trace:
        assert np.isnan(episode.observations).all()
        assert episode.observations.dtype == np.float32
        assert all(action is ABSENT for action in episode.actions)
        assert episode.rewards.tolist() == [numbered_env.reward_at(episode.episode_id, s) for s in range(len(episode))]


def repaired_of(directory: Path, destination: Path) -> Any:
    repair_trace(directory, destination, salvage=True)
    assert check_trace(destination).damages == []
    return open_trace(destination)


def test_episodes_with_lost_starts_have_neither_seed_nor_options(tmp_path: Path) -> None:
    trace = repaired_of(broken(tmp_path / "t", ("starts",), every=True), tmp_path / "r")
    assert trace.episodes["steps"].tolist() == list(numbered_env.LENGTHS)
    for episode in trace:
        assert (episode.seed, episode.options, episode.start_time) == (None, None, None)
        assert episode.rewards.tolist() == [numbered_env.reward_at(episode.episode_id, s) for s in range(len(episode))]


def test_a_chunk_of_which_no_column_is_intact_is_lost_as_without_salvage(tmp_path: Path) -> None:
    names = [("observations",), ("actions",), ("rewards",), ("infos",), ("annotations", "note"), ("starts",)]
    broken(tmp_path / "t", *names)
    plain = repair_trace(tmp_path / "t", tmp_path / "p")
    report = repair_trace(tmp_path / "t", tmp_path / "r", salvage=True)
    assert (report.salvaged, report.losses, report.steps) == ([], plain.losses, plain.steps)
    assert plain.steps < numbered_env.STEPS


def test_repair_keeps_damaged_chunks_only_with_salvage(tmp_path: Path) -> None:
    broken(tmp_path / "t", ("observations",))
    done = run("edit", "repair", tmp_path / "t", "-o", tmp_path / "r")
    assert (done.exit_code, "salvaged" in open_trace(tmp_path / "r").facts) == (0, False)
    assert "lost: episode" in done.stdout
    told = run("edit", "repair", tmp_path / "t", "-o", tmp_path / "s", "--salvage").stdout
    assert "kept without observations" in told
    assert "without them: episode" in told
    assert f"{numbered_env.STEPS} steps of 1 writer" in told
    plain = json.loads(run("edit", "repair", tmp_path / "t", "-o", tmp_path / "j", "--salvage", "--json").stdout)
    assert plain["salvaged"][0]["columns"] == ["observations"]
