"""Compacted traces: few files, in which every episode stays that of the writer that recorded it."""

import pickle
import shutil
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from damage import flip
from echo_env import EchoEnv, try_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from rings import Run, killed
from runs import chunks_of, record_lengths, record_nested, recorded
from scripted_env import CountingEnv, ImageEnv
from trace_contents import SAMPLES, check_clean, contents, record_anything

from gym_trace import (
    TraceRecordingWrapper,
    TraceWriter,
    check_trace,
    diff_traces,
    edit,
    open_trace,
    repair_trace,
    scan_recorded_traces,
    verify_trace,
)
from gym_trace.data.origins import ID_BITS, ORIGINS, packed_origins
from gym_trace.data.packing import pack_lenient
from gym_trace.errors import CorruptTrace, InvalidOption, TraceError, UnsupportedTrace
from gym_trace.format import wire
from gym_trace.format.batch_files import BatchFiles
from gym_trace.playback.episode_index import index_of
from gym_trace.storage.local import LocalStorage
from gym_trace.tools.statistics.describe import describe
from gym_trace.tools.statistics.summary import summarize


def record_many(directory: Path, writers: int, episodes: int = 2, **options: Any) -> None:
    for number in range(writers):
        record_lengths(
            directory, [3 + number % 4] * episodes, on_exist="append", metadata={"worker": number}, **options
        )


def chunks_of_size(size: int) -> Any:
    """Have compact() write chunks of this size."""
    return mock.patch.multiple("gym_trace.format.ring.chunk_builder", SMALL_CHUNK=size, FULL_CHUNK=size)


def size_of(directory: Path) -> int:
    return LocalStorage(directory).allocated()


@settings(max_examples=settings().max_examples // 5)
@given(st.integers(0, 1 << 30))
def test_compacting_and_merging_pieces_keeps_random_traces_equal(seed: int) -> None:
    random = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as name, mock.patch("gym_trace.format.batch_files.BATCH_FRAGMENTS", 6):
        where = Path(name)
        for _ in range(int(random.integers(1, 4))):
            record_anything(where / "t", random)
        expected = contents(where / "t")
        edit.compact(where / "t", where / "c")
        check_clean(where / "c", len(expected))
        assert contents(where / "c") == expected
        one, other = open_trace(where / "t"), open_trace(where / "c")
        assert other.episodes.tobytes() == one.episodes.tobytes()
        assert other.writers == one.writers
        if not expected:
            return
        half = random.random(len(other)) < 0.5
        pieces = [where / "left", where / "right"]
        for piece, mask in zip(pieces, (half, ~half)):
            if mask.any():
                edit.filter(other, piece, mask)
        edit.merge([piece for piece in pieces if piece.exists()], where / "back")
        assert contents(where / "back") == expected
        edit.compact(where / "c", where / "again")
        assert contents(where / "again") == expected


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_every_sample_trace_is_compacted_without_a_change(sample: Path, tmp_path: Path) -> None:
    if sample.name == "damaged":
        with pytest.raises(CorruptTrace, match="checksum mismatch"):
            edit.compact(sample, tmp_path / "new")
        assert not list(tmp_path.iterdir())
        return
    edit.compact(sample, tmp_path / "new")
    assert contents(tmp_path / "new") == contents(sample)


def test_many_short_writers_compact_to_a_tenth_of_the_bytes(tmp_path: Path) -> None:
    record_many(tmp_path / "t", 60)
    report = edit.compact(tmp_path / "t", tmp_path / "c")
    (batch,) = (tmp_path / "c").glob("*.gtb")
    assert len(chunks_of(batch)) == 1
    assert size_of(tmp_path / "c") == report.bytes < size_of(tmp_path / "t") / 8
    assert report.episodes == 120
    assert len(report.writers) == 60


def test_writers_of_a_compacted_trace_say_what_they_said(tmp_path: Path) -> None:
    record_many(tmp_path / "t", 3, split="eval")
    record_nested(tmp_path / "n")
    shutil.copytree(tmp_path / "n", tmp_path / "t", dirs_exist_ok=True)
    edit.compact(tmp_path / "t", tmp_path / "c")
    old, new = open_trace(tmp_path / "t"), open_trace(tmp_path / "c")
    for a, b in zip(old, new, strict=True):
        assert (a.writer, a.episode_id, a.split, a.seed) == (b.writer, b.episode_id, b.split, b.seed)
    for i in range(len(old)):
        mine, other = (index_of(trace).locate(i)[0] for trace in (old, new))
        assert mine.metadata == other.metadata
        assert mine.observation_space == other.observation_space
        assert {**mine.schema, "batch": 0} == {**other.schema, "batch": 0}
    assert describe(new)["bytes"] == size_of(tmp_path / "c")
    assert [one["state"] for one in describe(new)["writers"]] == ["closed"] * 4
    assert len(list((tmp_path / "c").glob("*.gtb"))) == 2  # spaces that differ are not in one file


def test_episodes_of_a_compacted_trace_can_be_had_in_any_way(tmp_path: Path) -> None:
    record_many(tmp_path / "t", 5)
    edit.compact(tmp_path / "t", tmp_path / "c")
    trace = open_trace(tmp_path / "c")
    firsts = [episode.observations[:, 0].tolist() for episode in trace]
    assert firsts == [list(range(len(episode) + 1)) for episode in trace]
    assert [trace[i].observations[:, 0].tolist() for i in (9, 0, 4)] == [firsts[i] for i in (9, 0, 4)]
    assert trace[3][1:3].observations[:, 0].tolist() == firsts[3][1:4]
    arrays: list[Any] = []
    scan_recorded_traces(trace, lambda observations, actions, rewards: arrays.append(observations[:, 0].tolist()))
    assert arrays == firsts
    again = pickle.loads(pickle.dumps(trace[[7, 2]]))
    assert [episode.observations[:, 0].tolist() for episode in again] == [firsts[7], firsts[2]]
    assert pickle.loads(pickle.dumps(trace[6])).observations[:, 0].tolist() == firsts[6]
    trace[0].observations[:] = 99
    for episode in trace:
        episode.observations[:] = 99  # which is the caller's own
    assert [episode.observations[:, 0].tolist() for episode in trace] == firsts
    assert trace.refresh() == 0


def test_readers_of_steps_give_the_same_where_writers_share_chunks(tmp_path: Path) -> None:
    for number in range(5):
        env = TraceRecordingWrapper(EchoEnv(length=9), tmp_path / "t", on_exist="append", record_infos=True)
        for episode in range(3):
            env.reset(seed=number, options={"level": episode} if episode else None)
            for step in range(4 + number):
                env.annotate(value=float(step))
                env.step(step % 3)
        env.close()
    edit.compact(tmp_path / "t", tmp_path / "c")
    old, new = open_trace(tmp_path / "t"), open_trace(tmp_path / "c")
    assert [reader.rows_before(0)[2] for reader in index_of(new).readers] == [0, 3, 6, 9, 12]
    for a, b in zip(old.scan(), new.scan(), strict=True):
        assert (a.options, a.infos) == (b.options, b.infos)
        assert a.annotations["value"].tolist() == b.annotations["value"].tolist()
    windows = [list(islice(trace.windows(3, batch_size=7, seed=2), 9)) for trace in (old, new)]
    for one, other in zip(*windows, strict=True):
        assert pack_lenient(one)[0] == pack_lenient(other)[0]
    found = [trace.find_steps("reward > 0") for trace in (old, new)]
    assert np.array_equal(*found)
    assert summarize(old, columns=True)["rewards"] == summarize(new, columns=True)["rewards"]


def test_a_compacted_trace_that_others_record_into_is_refreshed(tmp_path: Path) -> None:
    record_many(tmp_path / "t", 3)
    edit.compact(tmp_path / "t", tmp_path / "c")
    trace = open_trace(tmp_path / "c")
    last = trace[5]
    recorded(tmp_path / "c", on_exist="append")
    assert trace.refresh() == 1
    assert len(trace.writers) == 4
    assert len(last.observations) == len(last) + 1


def test_replays_of_a_compacted_trace_verify_with_unseeded_resets_too(tmp_path: Path) -> None:
    import gymnasium

    for number in range(4):
        env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / "t", on_exist="append")
        env.action_space.seed(number)
        for episode in range(3):
            env.reset(seed=number if episode == 0 else None)
            done = False
            while not done:
                *_, terminated, truncated, _ = env.step(env.action_space.sample())
                done = terminated or truncated
        env.close()
    edit.compact(tmp_path / "t", tmp_path / "c")
    verdicts = list(verify_trace(tmp_path / "c"))
    assert [verdict.verdict for verdict in verdicts] == ["identical"] * 12
    assert [found.difference for found in diff_traces(tmp_path / "t", tmp_path / "c")] == [None] * 12


def test_rings_of_killed_writers_are_compacted_with_their_pending_actions(tmp_path: Path) -> None:
    for name, action in (("v", 3), ("w", 4)):
        run = Run().play(5, 100, 7, open_end=True)
        run.slab.ask(action)
        killed(tmp_path / "t", run, written=1, name=name)
    old = contents(tmp_path / "t")
    assert [episode.pending_action for episode in open_trace(tmp_path / "t")] == [None, None, 3, None, None, 4]
    edit.compact(tmp_path / "t", tmp_path / "c")
    check_clean(tmp_path / "c", 6)
    assert contents(tmp_path / "c") == old
    assert len(list((tmp_path / "c").glob("*.gtb"))) == 1
    assert not list((tmp_path / "c").glob("*.ring*"))
    assert [one["state"] for one in describe(tmp_path / "c")["writers"]] == ["killed"] * 2


def test_small_chunks_of_one_writer_merge_and_large_ones_are_copied(tmp_path: Path) -> None:
    with mock.patch("gym_trace.format.batch_files.BATCH_FRAGMENTS", 4):
        record_lengths(tmp_path / "t", [40] * 20, flush_after=10)
    old = open_trace(tmp_path / "t")
    assert sum(reader.chunk_count for reader in index_of(old).readers) > 20 < 2 * len(index_of(old).readers[0].batches)
    edit.compact(tmp_path / "t", tmp_path / "c")
    (reader,) = index_of(open_trace(tmp_path / "c")).readers
    assert (len(reader.batches), reader.chunk_count, reader.has_own_files) == (1, 1, True)
    assert contents(tmp_path / "c") == contents(tmp_path / "t")
    with (
        mock.patch("gym_trace.format.rewrite._WELL_FILLED", 1 << 30),
        mock.patch("gym_trace.format.batch_reader.Chunk.array", side_effect=AssertionError("decoded")),
    ):
        edit.compact(tmp_path / "t", tmp_path / "copied")
    assert contents(tmp_path / "copied") == contents(tmp_path / "t")


@pytest.mark.parametrize(("info", "count"), [(None, 1), ({"value": "text"}, 8)])
def test_values_of_any_type_keep_their_chunks_small(tmp_path: Path, info: Any, count: int) -> None:
    with TraceWriter(tmp_path / "t", uid="w", record_infos=bool(info)) as writer:
        for episode in range(8):
            writer.begin(episode)
            for step in range(9):
                writer.step(step, step, 1.0, terminated=step == 8, info=info)
            writer.flush()
    with mock.patch("gym_trace.format.ring.chunk_builder.SMALL_CHUNK", 700):
        edit.compact(tmp_path / "t", tmp_path / "c")
    (path,) = (tmp_path / "c").glob("*.gtb")
    assert len(chunks_of(path)) == count
    assert contents(tmp_path / "c") == contents(tmp_path / "t")


def test_older_readers_raise_unsupported_trace_for_compacted_traces(tmp_path: Path) -> None:
    record_many(tmp_path / "t", 2)
    edit.compact(tmp_path / "t", tmp_path / "c")
    (batch,) = (tmp_path / "c").glob("*.gtb")
    assert batch.read_bytes()[8:16] == bytes([1, 0, 3, 0, wire.ORIGINS, 0, 0, 0])
    with mock.patch.object(wire, "ORIGINS", 0), pytest.raises(UnsupportedTrace, match="features 0x1"):
        open_trace(tmp_path / "c")
    for batch in (tmp_path / "t").glob("*.gtb"):
        assert batch.read_bytes()[8:16] == bytes([1, 0, 3, 0, 0, 0, 0, 0])


def test_damage_in_a_compacted_trace_names_the_writers_of_the_lost_steps(tmp_path: Path) -> None:
    with chunks_of_size(700):
        record_many(tmp_path / "t", 8)
        edit.compact(tmp_path / "t", tmp_path / "c")
    (path,) = (tmp_path / "c").glob("*.gtb")
    chunks = chunks_of(path)
    assert len(chunks) > 3
    old = contents(tmp_path / "t")
    flip(path, chunks[2][1] - 40)
    trace = open_trace(tmp_path / "c")
    with pytest.warns(UserWarning, match="skipped bytes"):
        left = [(episode.writer, episode.episode_id) for episode in trace.scan(on_damage="skip")]
    report = repair_trace(tmp_path / "c", tmp_path / "r")
    (loss,) = report.losses
    lost = {(steps.writer, steps.episode_id) for steps in loss.steps}
    assert loss.exact
    assert lost
    assert lost | set(left) == {(writer, episode) for writer, episode, _ in old}
    assert report.writers == trace.writers
    check_clean(tmp_path / "r")
    kept = contents(tmp_path / "r")
    assert {key[:2] for key in kept} == set(left)
    assert all(old[key] == episode for key, episode in kept.items() if key[:2] not in lost)


def test_repair_of_a_compacted_trace_keeps_origins_apart_across_chunks(tmp_path: Path) -> None:
    for number in range(3):
        record_lengths(tmp_path / "t", [9, 12], flush_after=3, on_exist="append", metadata=number)
    with chunks_of_size(400):
        edit.compact(tmp_path / "t", tmp_path / "c")
    (path,) = (tmp_path / "c").glob("*.gtb")
    for number, (_, end) in list(enumerate(chunks_of(path)))[1:-1]:
        broken, repaired = tmp_path / f"d{number}", tmp_path / f"r{number}"
        shutil.copytree(tmp_path / "c", broken)
        flip(broken / path.name, end - 40)
        repair_trace(broken, repaired)
        assert check_trace(repaired).damages == open_trace(repaired).damage == []
        for episode in open_trace(repaired):
            assert np.diff(episode.observations[:, 0]).tolist() == [1] * len(episode)


def write_with_origins(directory: Path, origins: Any, ids: list[int]) -> None:
    """Write a batch with hostile origins."""
    recorded(directory)
    trace = open_trace(directory)
    schema = {**index_of(trace).readers[0].schema, "writer": "forged", ORIGINS: packed_origins(origins)}
    reader = index_of(trace).readers[0]
    chunk = reader.read_chunk(0)
    fragments = np.repeat(reader.fragments[:1], len(ids))
    fragments["episode"] = ids
    steps = len(ids)
    columns: Any = {
        path: np.repeat(chunk.array(path)[:1], steps * (1 + (path[0] == "observations")), axis=0)
        for path in chunk.columns
        if path[0] in ("observations", "actions", "rewards")
    }
    fragments["steps"] = 1
    fragments["flags"] = wire.HAS_INITIAL | wire.STOPS
    writer = BatchFiles(LocalStorage(directory), {k: v for k, v in schema.items() if k != "batch"}, 1, False)
    writer.write(fragments, columns)
    writer.close({})
    for path in [*directory.glob(f"{reader.writer}.*")]:
        path.unlink()


@pytest.mark.parametrize(
    ("origins", "ids", "problem"),
    [
        ([{"writer": "a"}], [0, 1 << ID_BITS], "does not name"),
        ([{"writer": "a"}, {"writer": "b"}], [1 << ID_BITS, 0], "not in order"),
        ([{"writer": "a"}], [(1 << 64) - 1], "does not name"),
        ([{"writer": "a"}, None], [0, 1 << ID_BITS], "does not name"),
    ],
)
def test_fragments_that_no_origin_claims_are_damage(tmp_path: Path, origins: Any, ids: list[int], problem: str) -> None:
    write_with_origins(tmp_path / "t", origins, ids)
    trace = open_trace(tmp_path / "t")
    assert problem in trace.damage[0].problem
    with pytest.raises(CorruptTrace, match=problem):
        list(trace)
    assert [damage.problem for damage in check_trace(tmp_path / "t").damages] == [trace.damage[0].problem]
    assert repair_trace(tmp_path / "t", tmp_path / "r").writers == []
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "origins",
    [
        [{"writer": "../../etc"}, {"writer": 7}, {}],
        [5, {"writer": "x" * 500, "schema": [1], "without": [{}], "manifest": {}}, {"schema": {"split": 3}}],
        [{"writer": "a"}, {"writer": "a"}, {"writer": "a", "without": ["recorder", "metadata"], "manifest": [None]}],
    ],
)
def test_hostile_origins_are_read_and_get_names_that_files_may_have(tmp_path: Path, origins: Any) -> None:
    write_with_origins(tmp_path / "t", origins, [0, 1 << ID_BITS, 2 << ID_BITS])
    trace = open_trace(tmp_path / "t")
    assert len([episode.observations for episode in trace]) == len(trace) == 3
    assert all(writer.isprintable() and "/" not in writer and len(writer) <= 120 for writer in trace.writers)
    assert check_trace(tmp_path / "t").damages == []
    edit.compact(tmp_path / "t", tmp_path / "c")
    assert open_trace(tmp_path / "c").writers == trace.writers
    describe(trace)


@pytest.mark.parametrize("forged", [b"", b"x", 7, [], packed_origins({}), "====", packed_origins([{}] * 4097)])
def test_origins_that_cannot_be_read_are_damage(tmp_path: Path, forged: Any) -> None:
    with mock.patch(f"{__name__}.packed_origins", return_value=forged):
        write_with_origins(tmp_path / "t", [], [0])
    assert "origins of a schema" in open_trace(tmp_path / "t").damage[0].problem
    assert "origins of a schema" in check_trace(tmp_path / "t").damages[0].problem
    repair_trace(tmp_path / "t", tmp_path / "r")
    with pytest.raises(CorruptTrace, match="origins of a schema"):
        edit.compact(tmp_path / "t", tmp_path / "c")


def test_where_no_batch_says_who_the_origins_are_the_manifest_does(tmp_path: Path) -> None:
    record_many(tmp_path / "t", 3)
    edit.compact(tmp_path / "t", tmp_path / "c")
    (batch,) = (tmp_path / "c").glob("*.gtb")
    flip(batch, wire.HEADER_SIZE + 100)
    assert open_trace(tmp_path / "c").writers == open_trace(tmp_path / "t").writers


def test_a_filter_drops_records_of_writers_without_episodes(tmp_path: Path) -> None:
    record_many(tmp_path / "t", 6)
    edit.compact(tmp_path / "t", tmp_path / "c")
    trace = open_trace(tmp_path / "c")
    edit.filter(trace, tmp_path / "f", np.isin(trace.episodes["writer"], (1, 4)))
    left = open_trace(tmp_path / "f")
    assert left.writers == [trace.writers[1], trace.writers[4]]
    assert [reader.metadata for reader in index_of(left).readers] == [{"worker": 1}, {"worker": 4}]
    expected = contents(tmp_path / "t")
    assert contents(tmp_path / "f") == {key: expected[key] for key in expected if key[0] in left.writers}
    check_clean(tmp_path / "f", 4)
    assert describe(left)["bytes"] == size_of(tmp_path / "f")
    repair_trace(tmp_path / "f", tmp_path / "r")
    assert contents(tmp_path / "r") == contents(tmp_path / "f")
    edit.compact(tmp_path / "f", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "f")


def test_where_origins_are_too_many_for_one_file_there_are_several(tmp_path: Path) -> None:
    record_many(tmp_path / "t", 5)
    for name in ("MOST_ORIGINS", "_MOST_SCHEMA_BYTES"):
        with mock.patch(f"gym_trace.tools.editing.compact.{name}", 2 if name == "MOST_ORIGINS" else 3000):
            edit.compact(tmp_path / "t", tmp_path / name)
        assert len(list((tmp_path / name).glob("*.gtb"))) == (3 if name == "MOST_ORIGINS" else 5)
        assert contents(tmp_path / name) == contents(tmp_path / "t")
        assert open_trace(tmp_path / name).writers == open_trace(tmp_path / "t").writers


def test_views_and_traces_that_are_recorded_are_not_compacted(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(), tmp_path / "t")
    env.reset()
    with pytest.raises(TraceError, match="still recording"):
        edit.compact(tmp_path / "t", tmp_path / "c")
    try_steps(env, 0)
    env.close()
    with pytest.raises(InvalidOption, match="views are not supported"):
        edit.compact(open_trace(tmp_path / "t")[:0], tmp_path / "c")
    with pytest.raises(InvalidOption, match="in_place"):
        edit.compact(tmp_path / "t")
    assert not (tmp_path / "c").exists()


def test_chunks_with_and_without_infos_or_annotations_stay_apart(tmp_path: Path) -> None:
    for infos in (True, False, True, ["t"]):
        env = TraceRecordingWrapper(EchoEnv(length=6), tmp_path / "t", on_exist="append", record_infos=infos)
        for annotated in (False, True, False):
            env.reset()
            for step in range(4):
                if annotated:
                    env.annotate(value=float(step), note="a")
                env.step(0)
            env.flush()
        env.close()
        env = TraceRecordingWrapper(ImageEnv(6), tmp_path / "t", on_exist="append")
        env.reset()
        env.step(0)
        env.close()
    edit.compact(tmp_path / "t", tmp_path / "c")
    assert contents(tmp_path / "c") == contents(tmp_path / "t")
