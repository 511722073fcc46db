"""Scan gives the steps of the episodes, in both orders, whatever is damaged, lost or unknown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from damage import flip, strip_parity
from gymnasium import spaces
from runs import place_of, record_lengths, record_nested
from scripted_env import CountingEnv, row_bits

from gym_trace import TraceRecordingVectorWrapper, TraceRecordingWrapper, import_trace, open_trace
from gym_trace.data.schema import WriterSchema
from gym_trace.errors import CorruptTrace
from gym_trace.exchange.formats.imported import Imported, NewEpisode, NewSteps, imported, new_schema
from gym_trace.format.batch_reader import Damage
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.row_types import row_types
from gym_trace.playback.scan import KEPT, LEFT_OUT, OMITTED, REPEATED, Scan, StepRuns
from gym_trace.playback.trace import Trace

COLUMNS = frozenset(("observations", "actions", "rewards", "terminations", "truncations"))
SAMPLES = sorted({path.parent for path in (Path(__file__).parents[2] / "sample_traces").rglob("*.manifest.jsonl")})
UNLIKE = "agents", "damaged", "mismatch", "values"  # damaged, or rows that differ from their space
ORDERS = "file", "episode"
Key = tuple[int, int]  # episode, first step


def runs_of(blocks: Iterable[StepRuns]) -> dict[Key, dict[Any, list[Any]]]:
    """Return the rows of runs of steps without a gap, by the place of their first step."""
    found: dict[Key, dict[Any, list[Any]]] = {}
    current: dict[int, Key] = {}
    for block in blocks:
        assert all(len(rows) == block.offsets(path)[-1] for path, rows in block.columns.items())
        for run in block.each():
            episode = int(run.episode[0])
            if run.opens[0]:
                current[episode] = episode, int(run.first_step[0])
                found[current[episode]] = defaultdict(list)
            rows = found[current[episode]]
            rows["steps"] += run.step.tolist()
            for path, column in run.columns.items():
                again = path[0] == "observations" and not run.opens[0] and bool(run.has_initial[0])
                rows[path] += [row_bits(value) for value in column[int(again) :]]
    return found


def expected(episodes: Iterable[Any]) -> dict[Key, dict[Any, list[Any]]]:
    found: dict[Key, dict[Any, list[Any]]] = {}
    for episode in episodes:
        rows = found[episode.index, episode.first_step] = defaultdict(list)
        rows["steps"] += range(episode.first_step, episode.first_step + len(episode))
        for name in COLUMNS:
            for path, column in leaves((name,), getattr(episode, name)):
                rows[path] += [row_bits(value) for value in column]
    return found


def leaves(path: tuple[Any, ...], tree: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(tree, (dict, tuple)):
        for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves((*path, key), child)
    else:
        yield path, tree


def same(found: dict[Key, Any], wanted: dict[Key, Any]) -> bool:
    def without_empty(runs: dict[Key, Any]) -> dict[Key, Any]:
        return {key: {path: rows for path, rows in run.items() if rows} for key, run in runs.items()}

    return without_empty(found) == without_empty(wanted)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "directory", [path for path in SAMPLES if path.name not in ("agents", "damaged", "mismatch", "values")]
)
def test_a_scan_gives_the_steps_of_each_episode(directory: Path, order: str) -> None:
    trace = open_trace(directory)
    assert same(runs_of(Scan(index_of(trace), COLUMNS, order=order)), expected(trace))
    some = np.arange(0, len(trace), 2)
    blocks = Scan(index_of(trace), COLUMNS, some, order=order, overlap=True)
    assert same(runs_of(blocks), expected(trace.scan(episodes=some)))


@pytest.mark.parametrize("order", ORDERS)
def test_leaves_can_be_scanned_alone(tmp_path: Path, order: str) -> None:
    record_nested(tmp_path)
    trace = open_trace(tmp_path)
    paths = ("observations", "image"), ("observations", "pair", 1)
    found = runs_of(Scan(index_of(trace), paths, order=order))
    whole = expected(trace)
    assert same(found, {key: {path: rows[path] for path in (*paths, "steps")} for key, rows in whole.items()})


def test_types_of_rows_are_the_same_by_the_index_and_by_the_chunks(tmp_path: Path) -> None:
    record_nested(tmp_path)
    trace = open_trace(tmp_path)
    by_index = row_types(trace)
    for batch in index_of(trace).readers[0].batches:
        assert batch.columns is not None
        batch.columns = None
    assert list(row_types(trace).items()) == list(by_index.items())


def test_order_episode_follows_the_indices_that_are_given(tmp_path: Path) -> None:
    record_lengths(tmp_path, [3, 0, 7, 2, 5], flush_after=4)
    content = index_of(open_trace(tmp_path))
    wanted = np.array([4, 1, 0, 4, 2])
    runs = [run for block in Scan(content, {"rewards"}, wanted, order="episode") for run in block.each()]
    assert [int(run.episode[0]) for run in runs] == wanted.tolist()
    assert [run.size for run in runs] == [5, 0, 3, 5, 7]
    cut = Scan(content, {"rewards"}, wanted, order="episode", steps=slice(1, 4))
    assert [(run.starts_at.tolist(), run.size) for block in cut for run in block.each()] == [
        ([1], 3),
        ([0], 0),
        ([1], 2),
        ([1], 3),
        ([1], 3),
    ]


def test_episodes_that_are_cut_out_of_several_chunks_together_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TraceRecordingVectorWrapper(gymnasium.make_vec("CartPole-v1", num_envs=6), tmp_path) as env:
        env.reset(seed=0)
        for number in range(120):
            env.step(np.full(6, number % 2))
            if number % 20 == 7:
                env.flush()  # ends a chunk
    content = index_of(open_trace(tmp_path))
    together = list(Scan(content, COLUMNS, order="episode"))
    monkeypatch.setattr("gym_trace.playback.ordered_scan._MOST_CUT", 1)
    apart = list(Scan(content, COLUMNS, order="episode"))
    assert len(together) < len(apart)
    assert same(runs_of(together), runs_of(apart))


def damaged(directory: Path) -> Trace:
    """Return a trace whose second and fourth chunk are unreadable."""
    record_lengths(directory, [3, 14, 2, 9, 4], flush_after=5)
    [batch] = directory.glob("*.gtb")
    strip_parity(batch)
    flip(batch, place_of(batch, 1, "observations"), place_of(batch, 3, "rewards"))
    return open_trace(directory)


@pytest.mark.filterwarnings("ignore:.*skipped bytes")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("overlap", [False, True])
def test_damage_loses_its_steps_and_the_one_after_it(tmp_path: Path, order: str, overlap: bool) -> None:
    trace = damaged(tmp_path)
    with pytest.raises(CorruptTrace):
        list(Scan(index_of(trace), COLUMNS, order=order))
    damage: list[Damage] = []
    found = runs_of(Scan(index_of(trace), COLUMNS, order=order, overlap=overlap, on_damage=damage.append))
    wanted = expected(trace.scan(columns=COLUMNS, on_damage="skip"))
    assert same({k: v for k, v in found.items() if v["steps"]}, {k: v for k, v in wanted.items() if v["steps"]})
    assert len(damage) == 2


class UnknownFinal:
    """An importer of one episode of three steps, whose final observation is not known."""

    name, extra = "unknown", ""

    def __init__(self, end: str):
        self.end = end

    def recognises(self, path: Path) -> bool:
        return False

    def read(self, path: Path) -> Imported:
        steps = NewSteps(np.array([0, 1, 2, 99]), np.zeros(3, np.int64), np.zeros(3))
        episode = NewEpisode(3, [steps], self.end, has_final_observation=False)
        schema = new_schema("unknown", spaces.Discrete(100), spaces.Discrete(2))
        return imported("unknown", iter([episode]), schema)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("finals", [KEPT, OMITTED, REPEATED, LEFT_OUT])
@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_unknown_final_observations_become_what_is_asked_for(tmp_path: Path, order: str, finals: str, end: str) -> None:
    if order == "episode" and finals == OMITTED:
        return
    import_trace(tmp_path / "source", tmp_path / "t", format=UnknownFinal(end))
    content = index_of(open_trace(tmp_path / "t"))
    [run] = Scan(content, COLUMNS, order=order, finals=finals)
    steps = 2 if finals == LEFT_OUT and end == "truncated" else 3
    assert run.size == steps
    assert (
        run.columns["observations",].tolist()
        == {
            KEPT: [0, 1, 2, 99],
            OMITTED: [0, 1, 2],
            REPEATED: [0, 1, 2, 2],
            LEFT_OUT: [0, 1, 2, 2][: steps + 1],
        }[finals]
    )
    assert run.final_known.tolist() == [steps == 2]
    assert (run.terminated.tolist(), run.truncated.tolist()) == (
        [end == "terminated"],
        [end == "truncated" and steps == 3],
    )


@pytest.mark.parametrize("order", ORDERS)
def test_steps_of_the_branched_episode_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    record_lengths(tmp_path, [2, 4, 9], flush_after=3)
    trace = open_trace(tmp_path)
    monkeypatch.setattr(WriterSchema, "prefix", 4)
    found = runs_of(Scan(index_of(trace), COLUMNS, order=order, prefix=False))
    assert {key: rows["steps"] for key, rows in found.items() if rows["steps"]} == {(2, 4): [4, 5, 6, 7, 8]}
    assert len(found[2, 4]["observations",]) == 6


def test_columns_come_in_one_order_however_episodes_are_read(tmp_path: Path) -> None:
    with TraceRecordingWrapper(CountingEnv(3), tmp_path, record_infos=True) as env:
        for _ in range(6):
            env.reset()
            for _ in range(3):
                env.annotate(b=1, a=2)
                env.step(0)
    content, columns = index_of(open_trace(tmp_path)), {*COLUMNS, "infos", "annotations"}
    together, *_ = Scan(content, columns, order="episode")
    alone, *_ = Scan(content, columns, np.array([0]), order="episode")
    assert list(together.columns) == list(alone.columns)
