"""Edits of traces: what they keep of every episode, what they copy, and what they refuse."""

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from damage import flip
from hypothesis import given, settings
from hypothesis import strategies as st
from rings import Run, killed
from runs import chunks_of, manifest_entries, record_lengths, record_nested, recorded
from scripted_env import CountingEnv, ImageEnv
from trace_contents import SAMPLES, check_clean, contents, record_anything

from gym_trace import TraceRecordingWrapper, check_trace, diff_traces, edit, open_trace
from gym_trace.errors import CorruptTrace, InvalidOption, RecordingError, TraceError, TraceExists, TraceNotFound
from gym_trace.format import wire
from gym_trace.format.directory import video_name
from gym_trace.playback.episode_index import index_of


def pieces_of(trace: Path, where: Path, random: np.random.Generator, count: int, killed: bool = False) -> list[Path]:
    """Traces that have the episodes of a trace between them, each at random."""
    opened = open_trace(trace)
    part = random.integers(0, count, len(opened))
    made = []
    for number in range(count):
        if (part == number).any():
            made.append(where / f"piece-{number}")
            edit.filter(opened, made[-1], part == number)
            check_clean(made[-1], int((part == number).sum()), killed)
    return made


@settings(max_examples=settings().max_examples // 4)
@given(st.integers(0, 1 << 30))
def test_random_pieces_of_random_traces_are_the_same_trace_again(seed: int) -> None:
    random = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as name, mock.patch("gym_trace.format.batch_files.BATCH_FRAGMENTS", 6):
        where = Path(name)
        record_anything(where / "t", random)
        expected = contents(where / "t")
        if not expected:
            return
        source = where / "t"
        if random.random() < 0.4:
            source = where / "compacted"
            edit.compact(where / "t", source)
        pieces = pieces_of(source, where, random, int(random.integers(1, 4)))
        found: dict[Any, Any] = {}
        for piece in pieces:
            found |= contents(piece)
        assert found == expected
        again = [pieces[i] for i in random.permutation(len(pieces))]
        if random.random() < 0.3:
            edit.compact(again[0], where / "smaller")
            again.append(where / "smaller")
        edit.merge([*again, *again[:1]], where / "back")
        check_clean(where / "back", len(expected))
        assert contents(where / "back") == expected
        assert [one.difference for one in diff_traces(where / "t", where / "back")] == [None] * len(expected)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_every_sample_trace_is_split_and_merged_without_a_change(sample: Path, tmp_path: Path) -> None:
    if sample.name == "damaged":
        edit.merge([sample], tmp_path / "copy")
        found = [check_trace(place).damages for place in (sample, tmp_path / "copy")]
        assert [damage[1:] for damage in found[1]] == [damage[1:] for damage in found[0]] != []
        return
    expected, killed = contents(sample), bool(check_trace(sample).remarks)
    report = edit.merge([sample], tmp_path / "copy")
    assert report.writers == [reader.writer for reader in index_of(open_trace(sample)).readers]
    check_clean(tmp_path / "copy", len(expected), killed)
    assert contents(tmp_path / "copy") == expected
    if not expected:
        with pytest.raises(InvalidOption, match="no episode"):
            edit.filter(sample, tmp_path / "none", [])
        return
    pieces = pieces_of(sample, tmp_path, np.random.default_rng(3), 3, killed)
    edit.merge(pieces, tmp_path / "back")
    check_clean(tmp_path / "back", len(expected), killed)
    assert contents(tmp_path / "back") == expected


def values_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_batches_that_stay_as_they_are_are_the_same_files(tmp_path: Path) -> None:
    with mock.patch("gym_trace.format.batch_files.BATCH_FRAGMENTS", 3):
        record_lengths(tmp_path / "a", [5] * 12, env=CountingEnv(5), flush_after=5, uid="w")
    report = edit.merge([tmp_path / "a"], tmp_path / "b")
    assert (report.files, report.chunks, report.encoded) == (4, 0, 0)
    assert values_of(tmp_path / "a") == values_of(tmp_path / "b")
    report = edit.filter(tmp_path / "a", tmp_path / "c", slice(3, None))
    assert (report.files, report.chunks, report.encoded) == (3, 0, 0)
    names = ["w.000000.gtb", "w.000001.gtb", "w.000002.gtb"]
    for name, was in zip(names, [*names[1:], "w.000003.gtb"]):
        old, new = ((tmp_path / place).read_bytes() for place in (f"a/{was}", f"c/{name}"))
        assert len(new) == len(old)
        schema = wire.unpack_record_header(old[64:128], 64, old[16:32])
        footer = wire.unpack_footer(old[-64:], len(old), old[16:32])
        assert schema is not None
        assert footer is not None
        records = slice(schema.end, footer.parity[0])  # before and behind them are the number of the batch, and parity
        assert records.start < records.stop
        assert old[records] == new[records]
        assert old[-64:] == new[-64:]
    check_clean(tmp_path / "c", 9)


def test_a_batch_whose_number_takes_more_bytes_is_copied_chunk_by_chunk(tmp_path: Path) -> None:
    with mock.patch("gym_trace.format.batch_files.BATCH_FRAGMENTS", 1):
        record_lengths(tmp_path / "a", [1] * 131, env=CountingEnv(1), flush_after=1, uid="w")
    expected = contents(tmp_path / "a")
    kept = [key for key in expected if key[1] != 2]
    report = edit.filter(tmp_path / "a", tmp_path / "b", [index for index in range(131) if index != 2])
    assert report.files + report.chunks == 130
    assert not report.encoded
    check_clean(tmp_path / "b", 130)
    assert contents(tmp_path / "b") == {key: expected[key] for key in kept}


def test_chunks_of_which_a_part_is_kept_are_joined_to_full_ones(tmp_path: Path) -> None:
    record_lengths(tmp_path / "a", [1] * 200, env=CountingEnv(1), flush_after=4)
    report = edit.filter(tmp_path / "a", tmp_path / "b", slice(None, None, 4))
    assert report.encoded == 50
    assert index_of(open_trace(tmp_path / "b")).readers[0].chunk_count == 1
    assert report.episodes == len(open_trace(tmp_path / "b")) == 50


def test_a_killed_writer_keeps_its_open_episode_and_pending_action(tmp_path: Path) -> None:
    run = Run().play(5, 100, 7, open_end=True)
    assert len(run.slabs) > 1
    run.slab.ask(3)
    killed(tmp_path / "t", run, written=1)
    expected = contents(tmp_path / "t")
    assert [episode.pending_action for episode in open_trace(tmp_path / "t")] == [None, None, 3]
    edit.merge([tmp_path / "t"], tmp_path / "copy")
    check_clean(tmp_path / "copy", len(expected), killed=True)
    assert contents(tmp_path / "copy") == expected
    assert not list((tmp_path / "copy").glob("*.ring"))
    assert "closed" not in [entry["type"] for entry in manifest_entries(tmp_path / "copy")]
    edit.filter(tmp_path / "t", tmp_path / "others", slice(2))
    edit.filter(tmp_path / "copy", tmp_path / "last", [2])
    edit.merge([tmp_path / "last", tmp_path / "others"], tmp_path / "back")
    check_clean(tmp_path / "back", len(expected), killed=True)
    assert contents(tmp_path / "back") == expected
    assert [episode.pending_action for episode in open_trace(tmp_path / "others")] == [None, None]


def test_running_episodes_are_skipped(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(4), tmp_path / "t")
    for seed in range(3):
        env.reset(seed=seed)
        for _ in range(4 if seed < 2 else 2):
            env.step(1)
    report = edit.merge([tmp_path / "t"], tmp_path / "now")
    assert (report.episodes, report.running) == (2, 1)
    with pytest.raises(InvalidOption, match="no episode"):
        edit.filter(tmp_path / "t", tmp_path / "none", [2])
    assert not (tmp_path / "none").exists()
    env.close()
    check_clean(tmp_path / "now", 2)
    report = edit.merge([tmp_path / "now", tmp_path / "t"], tmp_path / "all")
    assert (report.episodes, report.duplicates) == (3, 2)
    assert contents(tmp_path / "all") == contents(tmp_path / "t")


def test_an_episode_that_differs_in_two_traces_is_named(tmp_path: Path) -> None:
    recorded(tmp_path / "a", 3, uid="w", metadata=1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    created = index_of(open_trace(tmp_path / "a")).readers[0].schema["created"]
    shutil.rmtree(tmp_path / "b")
    with mock.patch("time.time_ns", return_value=created):
        recorded(tmp_path / "b", 2, uid="w", metadata=1)
    one, other = (index_of(open_trace(tmp_path / name)).readers[0].schema for name in "ab")
    words = (
        "episode 0 of w is in .*/a and in .*/b, with different start_time"
        if one == other
        else "with different metadata"
    )
    with pytest.raises(TraceError, match=words):
        edit.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_copies_of_chunks_in_another_trace_are_read_but_not_decoded(tmp_path: Path) -> None:
    record_lengths(tmp_path / "a", [3] * 40, flush_after=7, uid="w")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with mock.patch("gym_trace.tools.editing.sources._compare", side_effect=AssertionError):
        report = edit.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    assert (report.episodes, report.duplicates) == (40, 40)
    assert contents(tmp_path / "c") == contents(tmp_path / "a")
    path = tmp_path / "a" / "w.000000.gtb"
    flip(path, chunks_of(path)[3][1] - 100)
    with pytest.raises(CorruptTrace, match=r"a/w\.000000\.gtb"):
        edit.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "d")


def test_writers_of_one_name_that_recorded_different_things_are_not_merged(tmp_path: Path) -> None:
    record_lengths(tmp_path / "a", [2], uid="w")
    record_lengths(tmp_path / "b", [2], uid="w", env=ImageEnv(10**6))
    with pytest.raises(TraceError, match=r"writer w is in .*/a and in .*/b, with different metadata"):
        edit.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_runs_of_one_episode_in_two_pieces_keep_its_seed_and_outcome(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(30), tmp_path / "t", frame_filter=lambda step: step % 10 < 4)
    env.reset(seed=7, options={"a": 1})
    for _ in range(30):
        env.step(0)
    env.close()
    expected = contents(tmp_path / "t")
    assert [key[2] for key in sorted(expected)] == [0, 10, 20]
    for index, name in enumerate("abc"):
        edit.filter(tmp_path / "t", tmp_path / name, [index])
        ((_, episode),) = contents(tmp_path / name).items()
        assert (episode["seed"], episode["outcome"]) == ("7", "terminated")
    edit.merge([tmp_path / name for name in "cab"], tmp_path / "back")
    check_clean(tmp_path / "back", 3)
    assert contents(tmp_path / "back") == expected


def test_videos_of_the_episodes_that_are_kept_come_along(tmp_path: Path) -> None:
    recorded(tmp_path / "t", 3, uid="w")
    lines = []
    for episode in (0, 2):
        name = video_name("w", episode)
        (tmp_path / "t" / name).write_bytes(b"\0\0\0\x18ftyp" + bytes(episode))
        size = (tmp_path / "t" / name).stat().st_size
        lines.append({"type": "video", "file": name, "bytes": size, "episode": episode, "frames": 1})
    lines.append({**lines[0], "file": "../outside.mp4"})
    with open(tmp_path / "t" / "w.manifest.jsonl", "a") as manifest:
        manifest.writelines(json.dumps(line) + "\n" for line in lines)
    edit.filter(tmp_path / "t", tmp_path / "kept", [1, 2])
    assert [path.name for path in (tmp_path / "kept").glob("*.mp4")] == [video_name("w", 2)]
    assert [line for line in manifest_entries(tmp_path / "kept") if line["type"] == "video"] == [lines[1]]


def test_metadata_of_several_traces_is_kept_where_they_agree(tmp_path: Path) -> None:
    for name, author in (("a", "Ann"), ("b", "Bob")):
        recorded(tmp_path / name, 2)
        (tmp_path / name / "facts.json").write_text(json.dumps({"author": author, "license": "MIT"}))
    edit.filter(tmp_path / "a", tmp_path / "some", slice(1))
    assert open_trace(tmp_path / "some").facts == {"author": "Ann", "license": "MIT"}
    edit.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    assert open_trace(tmp_path / "both").facts == {"license": "MIT"}


@pytest.mark.parametrize("by", ["split", "writer", "outcome"])
def test_a_trace_is_split_by_what_its_episodes_have(by: str, tmp_path: Path) -> None:
    for number, split in enumerate(("train", "../evil", ".. evil", "")):
        record_lengths(tmp_path / "t", [3] * 3, env=CountingEnv(2 + number), on_exist="append", split=split)
    reports = edit.split(tmp_path / "t", tmp_path / "parts", by)
    trace = open_trace(tmp_path / "t")
    expected = {
        "split": {"train", "_evil", "_evil-2", "none"},
        "writer": set(trace.writers),
        "outcome": {str(outcome) for outcome in trace.episodes["outcome"]},
    }
    assert set(reports) == {path.name for path in (tmp_path / "parts").iterdir()} == expected[by]
    found: dict[Any, Any] = {}
    for name, report in reports.items():
        check_clean(tmp_path / "parts" / name, report.episodes)
        found |= contents(tmp_path / "parts" / name)
    assert found == contents(tmp_path / "t")


def test_a_hash_of_the_seed_decides_the_part_of_an_episode(tmp_path: Path) -> None:
    record_lengths(tmp_path / "a", [1] * 100)
    record_lengths(tmp_path / "b", [1] * 300)
    seeds = {}
    for name in "ab":
        reports = edit.split(tmp_path / name, tmp_path / f"{name}-parts", fractions={"train": 0.7, "test": 0.3}, seed=5)
        seeds[name] = [set(open_trace(report.destination).episodes["seed"].tolist()) for report in reports.values()]
    assert not seeds["b"][0] & seeds["b"][1]
    assert seeds["b"][0] >= seeds["a"][0]
    assert seeds["b"][1] >= seeds["a"][1]
    assert 180 < len(seeds["b"][0]) < 240


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"by": "colour"}, "by='colour'"),
        ({"by": "seed-hash"}, "fractions"),
        ({"by": "writer", "fractions": {"a": 1.0}}, "fractions"),
        ({"fractions": {"a": 0.5, "b": 0.4}}, r"add up to 0\.9"),
        ({"fractions": {"a": 1.5, "b": -0.5}}, "up to 1"),
        ({"fractions": {"..": 0.5, "b": 0.5}}, "directory"),
        ({"fractions": {"a": 0.5, "A": 0.5}}, "differ only in case"),
        ({"fractions": {"a": 1 - 1e-9, "b": 1e-9}}, "part 'b' would get no episode"),
    ],
)
def test_a_split_that_makes_no_sense_is_refused_and_leaves_nothing(
    arguments: dict[str, Any], words: str, tmp_path: Path
) -> None:
    recorded(tmp_path / "t", 2)
    with pytest.raises(InvalidOption, match=words):
        edit.split(tmp_path / "t", tmp_path / "parts", **arguments)
    assert os.listdir(tmp_path) == ["t"]


def test_a_directory_that_holds_something_or_lies_in_the_trace_is_refused(tmp_path: Path) -> None:
    recorded(tmp_path / "t", 2)
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("x")
    for target, error in (("t", TraceExists), ("full", TraceExists), ("file", TraceExists), ("t/new", InvalidOption)):
        with pytest.raises((error, InvalidOption)):
            edit.merge([tmp_path / "t"], tmp_path / target)
    with pytest.raises(TraceNotFound):
        edit.merge([tmp_path / "t", tmp_path / "none"], tmp_path / "new")
    with pytest.raises(InvalidOption):
        edit.merge([], tmp_path / "new")
    (tmp_path / "empty").mkdir()
    edit.merge([tmp_path / "t"], tmp_path / "empty")
    check_clean(tmp_path / "empty", 2)


def test_a_lost_batch_is_not_covered_up(tmp_path: Path) -> None:
    with mock.patch("gym_trace.format.batch_files.BATCH_FRAGMENTS", 1):
        record_lengths(tmp_path / "t", [2] * 3, flush_after=2, uid="w")
    (tmp_path / "t" / "w.000001.gtb").unlink()
    with pytest.raises(CorruptTrace, match=r"w\.000001\.gtb: this batch is missing"):
        edit.merge([tmp_path / "t"], tmp_path / "new")


def test_damage_in_a_chunk_is_copied_as_it_is_or_ends_the_edit(tmp_path: Path) -> None:
    record_lengths(tmp_path / "t", [50, 50], flush_after=100, uid="w")
    path = tmp_path / "t" / "w.000000.gtb"
    flip(path, chunks_of(path)[0][1] - 100)
    edit.merge([tmp_path / "t"], tmp_path / "copy")
    assert (tmp_path / "copy" / path.name).read_bytes() == path.read_bytes()
    with pytest.raises(CorruptTrace, match=r"w\.000000\.gtb"):
        edit.filter(tmp_path / "t", tmp_path / "some", [0])
    assert not (tmp_path / "some").exists()


def test_a_full_disk_leaves_nothing_half(tmp_path: Path) -> None:
    recorded(tmp_path / "t", 3)
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch("gym_trace.storage.local.LocalAppender.copy", side_effect=full),
        pytest.raises(RecordingError, match=r"new: the new trace could not be written: .*No space left"),
    ):
        edit.merge([tmp_path / "t"], tmp_path / "new")
    assert os.listdir(tmp_path) == ["t"]


def test_annotations_and_infos_that_some_chunks_lack_are_not_mixed_up(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(3), tmp_path / "t")
    for number in range(12):
        env.reset()
        for step in range(3):
            if number % 3 == 0:
                env.annotate(value=number * 10.0 + step)
            env.step(0)
        env.flush()
    env.close()
    record_nested(tmp_path / "u")
    for name in "tu":
        expected = contents(tmp_path / name)
        pieces = pieces_of(tmp_path / name, tmp_path / f"of-{name}", np.random.default_rng(1), 2)
        assert {key: value for piece in pieces for key, value in contents(piece).items()} == expected


@given(st.binary(max_size=80), st.binary(max_size=80), st.integers(0, 1 << 20), st.data())
def test_checksums_of_files_are_known_from_those_of_their_parts(a: bytes, b: bytes, zeros: int, data: Any) -> None:
    from zlib import crc32

    rest = b + bytes(zeros)
    assert wire.joined_crc(crc32(a), crc32(rest), len(rest)) == crc32(a + rest)
    other = data.draw(st.binary(min_size=len(a), max_size=len(a)))
    assert wire.replaced_crc(crc32(a + rest), a, other, len(rest)) == crc32(other + rest)


def test_merging_one_trace_instead_of_a_list_raises(tmp_path: Path) -> None:
    for one in ("traces", tmp_path):
        with pytest.raises(InvalidOption, match="a list of one or more"):
            edit.merge(one, tmp_path / "new")
