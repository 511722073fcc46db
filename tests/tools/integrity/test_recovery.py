"""check_trace finds every kind of damage; repair_trace keeps everything else and says exactly what is lost."""

import errno
import json
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import shell
from damage import flip
from gymnasium import spaces
from long_tests import LONG
from numbered_env import (
    STEPS,
    NumberedEnv,
    all_steps,
    leave_open,
    play_episodes,
    read_undamaged,
    record,
    steps_of,
    strip_parity,
)
from runs import chunks_of, place_of, record_lengths, recorded
from scripted_env import CountingEnv, ImageEnv, Result, ScriptedEnv, bits

from gym_trace import TraceRecordingWrapper, check_trace, edit, open_trace, repair_trace
from gym_trace.data.episode import Episode
from gym_trace.data.packing import pack
from gym_trace.errors import CorruptTrace, InvalidOption, TraceError, TraceExists, TraceNotFound
from gym_trace.format import wire
from gym_trace.format.batch_files import BatchFiles
from gym_trace.playback.episode_index import index_of
from gym_trace.storage.local import LocalStorage


def facts(episode: Episode) -> dict[str, Any]:
    """Return everything known about an episode, bit for bit."""
    arrays = {name: getattr(episode, name) for name in ("observations", "actions", "rewards")}
    plain = {name: (array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()}
    names = ("episode_id", "writer", "lane", "first_step", "outcome", "seed", "split", "start_time", "end_time")
    more = ("start_monotonic", "end_monotonic", "options", "rng_state", "reset_info", "infos")
    plain |= {name: getattr(episode, name) for name in (*names, *more)}
    plain["notes"] = {name: list(notes) for name, notes in episode.annotations.items()}
    plain["flags"] = episode.terminations.tolist(), episode.truncations.tolist()
    return plain


def assert_same_episodes(one: list[Episode], other: list[Episode]) -> None:
    assert [facts(episode) for episode in one] == [facts(episode) for episode in other]


def assert_clean(directory: Path) -> None:
    report = check_trace(directory)
    assert report.damages == []
    assert report.remarks == []


def test_checking_an_intact_trace_counts_it_and_finds_no_damage(tmp_path):
    batch = record(tmp_path / "t")
    seen = []
    report = check_trace(tmp_path / "t", on_progress=lambda done, total: seen.append((done, total)))
    assert report.damages == report.remarks == []
    assert (report.files, report.bytes) == (1, batch.stat().st_size)
    assert (report.episodes, report.steps, report.chunks) == (5, STEPS, len(chunks_of(batch)))
    assert seen == sorted(seen)
    assert seen[-1] == (report.bytes, report.bytes)


def test_repairing_an_intact_trace_gives_the_same_trace(tmp_path):
    record(tmp_path / "t", metadata={"why": [1, "x"], (1, 2): b"odd key"}, split="eval")
    report = repair_trace(tmp_path / "t", tmp_path / "r")
    assert (report.losses, report.orphans, report.steps, report.writers) == ([], [], STEPS, ["w"])
    assert_clean(tmp_path / "r")
    one, other = open_trace(tmp_path / "t"), open_trace(tmp_path / "r")
    assert_same_episodes(list(one), list(other))
    assert (one.episodes == other.episodes).sum() == sum(one.episodes["end_time"] == one.episodes["end_time"])
    assert index_of(one).readers[0].schema.items() == index_of(other).readers[0].schema.items()


@pytest.mark.parametrize("part", ["header", "metadata", "column"])
def test_a_damaged_chunk_loses_only_itself_and_is_reported(tmp_path, part):
    batch = record(tmp_path / "t")
    start, end = chunks_of(batch)[5]
    flip(batch, {"header": start + 30, "metadata": start + 70, "column": end - 9}[part])
    checked = check_trace(tmp_path / "t")
    assert [damage[:3] for damage in checked.damages] == [(str(batch), start, end)]

    report = repair_trace(tmp_path / "t", tmp_path / "r")
    assert_clean(tmp_path / "r")
    kept = steps_of(open_trace(tmp_path / "r"))
    assert kept == steps_of(read_undamaged(tmp_path / "t"))
    assert [loss.damage for loss in report.losses] == checked.damages
    named = [*report.losses[0].steps, *report.orphans]
    lost = {(run.episode_id, run.first_step + s) for run in named for s in range(run.steps)}
    assert report.losses[0].exact
    assert kept | lost == all_steps()
    assert not kept & lost
    assert report.steps == len(kept)


def test_the_return_of_a_part_sums_only_its_own_steps(tmp_path):
    batch = record(tmp_path / "t")
    for start, end in chunks_of(batch)[1::2]:
        flip(batch, (start + end) // 2)
    assert any(np.isnan(episode.total_reward) for episode in read_undamaged(tmp_path / "t"))
    repair_trace(tmp_path / "t", tmp_path / "r")
    for episode in open_trace(tmp_path / "r"):
        assert episode.total_reward == episode.rewards.sum()


def test_without_an_index_a_loss_is_inferred_from_the_steps_around_it(tmp_path):
    batch = record(tmp_path / "t", closed=False)
    flip(batch, chunks_of(batch)[4][0] + 3)
    report = repair_trace(tmp_path / "t", tmp_path / "r")
    assert_clean(tmp_path / "r")
    (loss,) = report.losses
    assert not loss.exact
    kept = steps_of(open_trace(tmp_path / "r"))
    told = {(run.episode_id, run.first_step + s) for run in loss.steps for s in range(run.steps)}
    assert told
    assert told <= all_steps() - kept


@pytest.mark.parametrize("place", ["file header", "schema", "index", "footer", "padding"])
def test_damage_outside_the_chunks_loses_no_step(tmp_path, place):
    batch = record(tmp_path / "t")
    chunks = chunks_of(batch)
    size = batch.stat().st_size
    places = {"file header": 3, "schema": 100, "index": chunks[-1][1] + 100, "footer": size - 20}
    if place == "padding":
        places["padding"] = next(end - 1 for _, end in chunks if batch.read_bytes()[end - 1] == 0)
    flip(batch, places[place])
    assert len(check_trace(tmp_path / "t").damages) == 1
    report = repair_trace(tmp_path / "t", tmp_path / "r")
    assert report.losses == []
    assert len(report.found.damages) == 1
    assert_clean(tmp_path / "r")
    assert steps_of(open_trace(tmp_path / "r")) == all_steps()


def test_a_trace_that_lost_all_its_schemas_takes_that_of_the_manifest(tmp_path):
    batch = record(tmp_path / "t")
    flip(batch, 100)
    assert steps_of(read_undamaged(tmp_path / "t")) == all_steps()
    repair_trace(tmp_path / "t", tmp_path / "r")
    assert steps_of(open_trace(tmp_path / "r")) == all_steps()


def test_without_any_schema_the_writer_is_lost_and_the_others_are_kept(tmp_path):
    batch = record(tmp_path / "t")
    flip(batch, 100)
    (tmp_path / "t" / "w.manifest.jsonl").unlink()
    record(tmp_path / "t", uid="v", on_exist="append")
    report = repair_trace(tmp_path / "t", tmp_path / "r")
    assert report.writers == ["v"]
    assert [Path(loss.damage.path).name for loss in report.losses] == [batch.name]
    assert_clean(tmp_path / "r")
    assert steps_of(open_trace(tmp_path / "r")) == all_steps()


def test_many_files_with_the_same_note_have_one_line(tmp_path):
    for number in range(5):
        TraceRecordingWrapper(NumberedEnv(), tmp_path, uid=f"w{number}", on_exist="append").close()
        with open(tmp_path / f"w{number}.manifest.jsonl", "ab") as manifest:
            manifest.write(b"{")
    assert check_trace(tmp_path).remarks == [
        f"{tmp_path}/w0.manifest.jsonl: its last line is torn; the writer died, or is still recording; "
        "the same of 4 other files"
    ]


def test_the_open_batch_of_a_dead_writer_is_not_damage_and_repair_seals_it(tmp_path):
    env = TraceRecordingWrapper(NumberedEnv(), tmp_path / "t", record_infos=True, uid="w")
    play_episodes(env, 2)
    env.reset(seed=None)
    for step in range(3):
        env.step(14 + step)
    env.flush()
    leave_open(env, tmp_path / "t")
    batch = tmp_path / "t" / "w.000000.gtb.part"
    batch.write_bytes(batch.read_bytes()[:-5])  # it was killed while it wrote
    checked = check_trace(tmp_path / "t")
    assert checked.damages == []
    assert any("whole record" in remark for remark in checked.remarks)

    report = repair_trace(tmp_path / "t", tmp_path / "r")
    assert report.losses == []
    assert_clean(tmp_path / "r")
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["w.000000.gtb", "w.manifest.jsonl"]
    assert_same_episodes(list(open_trace(tmp_path / "t")), list(open_trace(tmp_path / "r")))
    assert open_trace(tmp_path / "r")[-1].outcome == "lost" or len(open_trace(tmp_path / "r")) == 2


def test_an_episode_that_was_open_keeps_the_outcome_lost(tmp_path):
    env = TraceRecordingWrapper(NumberedEnv(), tmp_path / "t", uid="w", record_infos=True)
    env.reset(seed=0)
    env.step(0)
    env.flush()
    leave_open(env, tmp_path / "t")
    repair_trace(tmp_path / "t", tmp_path / "r")
    (episode,) = open_trace(tmp_path / "r")
    assert (episode.outcome, len(episode), episode.end_time) == ("lost", 1, None)
    assert json.loads((tmp_path / "r" / "w.manifest.jsonl").read_text().splitlines()[-1])["type"] == "closed"


def test_a_living_writer_is_checked_but_not_repaired(tmp_path):
    env = TraceRecordingWrapper(NumberedEnv(), tmp_path / "t", uid="w", record_infos=True)
    play_episodes(env, 3)
    report = check_trace(tmp_path / "t")
    assert report.damages == []
    assert any("still recording" in remark for remark in report.remarks)
    with pytest.raises(TraceError, match="still recording"):
        repair_trace(tmp_path / "t", tmp_path / "r")
    assert not (tmp_path / "r").exists()
    env.close()


def test_repair_never_touches_the_original(tmp_path):
    batch = record(tmp_path / "t")
    flip(batch, 3, chunks_of(batch)[2][0] + 70)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "t").iterdir()}
    repair_trace(tmp_path / "t", tmp_path / "r")
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "t").iterdir()}


def test_repair_writes_only_into_a_new_directory_elsewhere(tmp_path):
    record(tmp_path / "t")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    for taken in ("file", "full"):
        with pytest.raises(TraceExists, match=taken):
            repair_trace(tmp_path / "t", tmp_path / taken)
    with pytest.raises(InvalidOption, match="lies in the source"):
        repair_trace(tmp_path / "t", tmp_path / "t" / "inside")
    with pytest.raises(TraceNotFound):
        repair_trace(tmp_path / "nothing", tmp_path / "r")
    assert not (tmp_path / "r").exists()
    assert not (tmp_path / "t" / "inside").exists()


def test_an_interrupted_repair_leaves_nothing(tmp_path):
    record(tmp_path / "t")

    def interrupted(done, total):
        assert not (tmp_path / "r").exists()  # even if killed at this moment
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repair_trace(tmp_path / "t", tmp_path / "r", interrupted)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_missing_batches_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("gym_trace.format.batch_files.BATCH_BYTES", 100)
    record(tmp_path / "t")
    names = sorted(path.name for path in (tmp_path / "t").glob("*.gtb"))
    assert len(names) > 4
    kept = names[:-1]
    for gone in (names[1], names[-1]):
        (tmp_path / "t" / gone).unlink()
    checked = check_trace(tmp_path / "t")
    assert sorted(Path(damage.path).name for damage in checked.damages) == [names[1], names[-1]]
    report = repair_trace(tmp_path / "t", tmp_path / "r")
    assert [loss.exact for loss in report.losses] == [False, False]
    assert_clean(tmp_path / "r")
    assert steps_of(open_trace(tmp_path / "r")) < all_steps()
    (tmp_path / "t" / "w.manifest.jsonl").unlink()  # then only the gap in the numbers reveals it
    assert [Path(damage.path).name for damage in check_trace(tmp_path / "t").damages] == [names[1]]
    assert kept


def test_a_very_large_batch_number_is_one_gap_found_quickly(tmp_path):
    batch = record(tmp_path / "t")
    batch.rename(tmp_path / "t" / "w.999999999.gtb")
    damages = check_trace(tmp_path / "t").damages
    assert damages[0].problem == "this batch is missing, and 999999998 after it"
    assert steps_of(read_undamaged(tmp_path / "t")) == all_steps()


def test_the_index_restores_a_damaged_fragment_table(tmp_path: Path) -> None:
    batch = record(tmp_path / "t")
    flip(batch, place_of(batch, 2, "fragments"))
    report = check_trace(tmp_path / "t")
    assert [damage.problem for damage in report.damages] == ["checksum mismatch in column fragments"]
    assert steps_of(open_trace(tmp_path / "t")) == all_steps()
    repaired = repair_trace(tmp_path / "t", tmp_path / "r")
    assert (report.steps, repaired.steps, repaired.losses) == (STEPS, STEPS, [])
    assert steps_of(open_trace(tmp_path / "r")) == all_steps()
    assert_clean(tmp_path / "r")


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_batch_of_another_recording_of_the_same_id_is_not_read(
    tmp_path: Path, number: int, has_manifest: bool
) -> None:
    with mock.patch("gym_trace.format.batch_files.BATCH_FRAGMENTS", 1):
        for name in "ab":
            record_lengths(tmp_path / name, [4] * 3, uid="w", flush_after=4, record_infos=True)
    shutil.copy(tmp_path / "b" / f"w.{number:06d}.gtb", tmp_path / "a")
    if not has_manifest:
        (tmp_path / "a" / "w.manifest.jsonl").unlink()
    assert [damage.problem for damage in check_trace(tmp_path / "a").damages] == [
        "this batch belongs to another recording"
    ]
    trace = open_trace(tmp_path / "a")
    assert [damage.problem for damage in trace.damage] == ["this batch belongs to another recording"]
    assert {episode.episode_id for episode in read_undamaged(tmp_path / "a")} == {0, 1, 2} - {number}
    with pytest.raises(CorruptTrace, match="another recording"):
        edit.merge([trace], tmp_path / "m")
    assert repair_trace(tmp_path / "a", tmp_path / "r").losses
    assert_clean(tmp_path / "r")


@pytest.mark.parametrize("number", [0, 1, 3])
def test_every_reader_says_that_a_batch_is_missing(tmp_path: Path, number: int) -> None:
    with mock.patch("gym_trace.format.batch_files.BATCH_FRAGMENTS", 1):
        record_lengths(tmp_path / "t", [3] * 4, uid="w", flush_after=1)
    (tmp_path / "t" / f"w.{number:06d}.gtb").unlink()
    trace = open_trace(tmp_path / "t")
    assert [damage.problem for damage in trace.damage] == ["this batch is missing"]
    for read in (lambda: list(trace), lambda: next(trace.windows(1, 2)), lambda: edit.merge([trace], tmp_path / "m")):
        with pytest.raises(CorruptTrace, match="this batch is missing"):
            read()
    with pytest.warns(UserWarning, match="this batch is missing"):
        read = sum(map(len, trace.scan(on_damage="skip")))
    assert read == repair_trace(tmp_path / "t", tmp_path / "r").steps
    for command in ("check", "cat", "verify"):
        assert shell.run(command, tmp_path / "t").exit_code == 5


def test_a_batch_truncated_at_a_chunk_boundary_is_reported(tmp_path):
    batch = record(tmp_path / "t")
    size = batch.stat().st_size
    end = chunks_of(batch)[4][1]
    batch.write_bytes(batch.read_bytes()[:end])
    (footer, rest) = check_trace(tmp_path / "t").damages
    assert footer.path == str(batch)
    assert rest[:3] == (str(batch), end, size)
    report = repair_trace(tmp_path / "t", tmp_path / "r")
    assert report.losses
    assert_clean(tmp_path / "r")


def test_a_missing_or_torn_manifest_is_not_damage(tmp_path):
    record(tmp_path / "t")
    manifest = tmp_path / "t" / "w.manifest.jsonl"
    whole = manifest.read_bytes()
    for cut in range(0, len(whole), 7 if LONG else 37):
        manifest.write_bytes(whole[:cut])
        report = check_trace(tmp_path / "t")
        assert report.damages == []
        assert report.remarks
    manifest.unlink()
    report = check_trace(tmp_path / "t")
    assert (report.damages, len(report.remarks)) == ([], 1)
    assert repair_trace(tmp_path / "t", tmp_path / "r").losses == []
    assert_clean(tmp_path / "r")


def test_every_change_of_a_manifest_is_detected(tmp_path):
    record(tmp_path / "t")
    manifest = tmp_path / "t" / "w.manifest.jsonl"
    whole = manifest.read_bytes()
    first_line = whole.index(b"\n")
    for place in range(0, len(whole) - 1, 1 if LONG else 17):
        manifest.write_bytes(whole[:place] + bytes([whole[place] ^ 2]) + whole[place + 1 :])
        report = check_trace(tmp_path / "t")
        damages = report.damages
        assert damages or report.remarks, whole[max(0, place - 20) : place + 1]
        if place < first_line:
            assert [damage.path for damage in damages] == [str(manifest)]
            assert damages[0].start <= place < damages[0].end


def test_a_batch_replaced_by_another_intact_one_is_detected(tmp_path):
    batch = record(tmp_path / "t")
    other = record(tmp_path / "u")
    shutil.copy(other, batch)
    damages = check_trace(tmp_path / "t").damages
    assert all(damage.path.endswith("manifest.jsonl") for damage in damages)
    assert any("crc32" in damage.problem for damage in damages)


def test_files_of_others_and_links_are_left_alone(tmp_path):
    batch = record(tmp_path / "t")
    (tmp_path / "t" / "notes.txt").write_text("mine")
    (tmp_path / "t" / "w.000007.gtb").symlink_to("/dev/zero")
    (tmp_path / "t" / "x.manifest.jsonl").symlink_to(tmp_path / "t" / "w.manifest.jsonl")
    (tmp_path / "t" / "w.000001.gtb").mkdir()
    assert open_trace(tmp_path / "t").writers == ["w"]
    assert check_trace(tmp_path / "t").bytes == batch.stat().st_size


def test_counts_of_reward_classes_survive_a_repair(tmp_path):
    record(tmp_path / "t", reward_classes=[0.0, 400.0])
    said = json.loads((tmp_path / "t" / "w.manifest.jsonl").read_text().splitlines()[-1])
    repair_trace(tmp_path / "t", tmp_path / "r")
    assert json.loads((tmp_path / "r" / "w.manifest.jsonl").read_text().splitlines()[-1]) == said


@pytest.mark.filterwarnings("ignore:.*but the space has")
def test_values_outside_their_space_survive_a_repair_with_orphans(tmp_path):
    steps = [Result(np.float64([1, 2]) * k, np.float32(k)) if k % 3 else Result(("odd", k), k) for k in range(1, 20)]
    env = ScriptedEnv(spaces.Box(-1, 1, (2,)), spaces.Discrete(9), [(np.zeros(2, np.float32), steps)])
    recorder = TraceRecordingWrapper(env, tmp_path / "t", uid="w")
    recorder.reset()
    for k in range(19):
        recorder.step(np.int8(k) if k % 4 else k)
        recorder.flush()
    recorder.close()
    (whole,) = open_trace(tmp_path / "t")
    actions, rewards, observations = list(whole.actions), list(whole.rewards), list(whole.observations)
    batch = tmp_path / "t" / "w.000000.gtb"
    start, end = chunks_of(batch)[8]
    flip(batch, (start + end) // 2)
    repair_trace(tmp_path / "t", tmp_path / "r")
    assert_clean(tmp_path / "r")
    for part in open_trace(tmp_path / "r"):
        mine = slice(part.first_step, part.first_step + len(part))
        assert list(map(repr, part.actions)) == list(map(repr, actions[mine]))
        assert list(map(repr, part.rewards)) == list(map(repr, rewards[mine]))
        seen = slice(mine.start, mine.stop + 1)
        assert list(map(repr, part.observations)) == list(map(repr, observations[seen]))


def test_the_lanes_of_a_chunk_are_repaired_independently(tmp_path):
    record(tmp_path / "one")
    schema = {**index_of(open_trace(tmp_path / "one")).readers[0].schema, "writer": "lanes"}
    (tmp_path / "t").mkdir()
    writer = BatchFiles(LocalStorage(tmp_path / "t"), schema, level=1, fsync=False)
    for number in range(5):  # two steps of lane 0 and three of lane 1 in each chunk
        table = np.zeros(2, wire.FRAGMENT)
        table["lane"] = table["episode"] = [0, 1]
        table["steps"] = steps = [2, 3]
        table["first_step"] = first = [2 * number, 3 * number]
        table["flags"] = (wire.STARTS | wire.HAS_INITIAL if number == 0 else 0) | (wire.STOPS if number == 4 else 0)
        numbers = np.concatenate([np.arange(f, f + s) for f, s in zip(first, steps)])
        seen = np.concatenate([np.arange(f + (number > 0), f + s + 1) for f, s in zip(first, steps)])
        observations = np.repeat(seen[:, None], 3, axis=1).astype(np.float32)
        columns = {("observations",): observations, ("actions",): numbers, ("rewards",): numbers.astype(float)}
        starts = {("starts",): [pack({})] * 2} if number == 0 else {}
        writer.write(table, {**starts, **columns})
    writer.close({})
    batch = tmp_path / "t" / "lanes.000000.gtb"
    strip_parity(batch)
    flip(batch, chunks_of(batch)[2][0] + 70)
    report = repair_trace(tmp_path / "t", tmp_path / "r")
    assert [run[1:] for run in report.losses[0].steps] == [(0, 4, 2), (1, 6, 3)]
    assert [run[1:] for run in report.orphans] == [(0, 6, 1), (1, 9, 1)]
    assert_clean(tmp_path / "r")
    parts = sorted((part.lane, part.first_step, part.rewards.tolist()) for part in open_trace(tmp_path / "r"))
    assert parts == [(0, 0, [0, 1, 2, 3]), (0, 7, [7, 8, 9]), (1, 0, [0, 1, 2, 3, 4, 5]), (1, 10, [10, 11, 12, 13, 14])]
    for part in open_trace(tmp_path / "r"):
        assert part.observations[:, 0].tolist() == list(range(part.first_step, part.first_step + len(part) + 1))


def test_filtered_runs_survive_a_repair(tmp_path):
    record(tmp_path / "t", frame_filter=lambda step: step % 3 != 1)
    repair_trace(tmp_path / "t", tmp_path / "r")
    assert_same_episodes(list(open_trace(tmp_path / "t")), list(open_trace(tmp_path / "r")))
    batch = next((tmp_path / "t").glob("*.gtb"))
    for number, (start, end) in enumerate(chunks_of(batch)):
        whole = batch.read_bytes()
        flip(batch, end - 9 if whole[end - 9] else start + 70)
        repair_trace(tmp_path / "t", tmp_path / f"r{number}")
        assert_clean(tmp_path / f"r{number}")
        assert steps_of(open_trace(tmp_path / f"r{number}")) == steps_of(read_undamaged(tmp_path / "t"))
        batch.write_bytes(whole)


def test_file_names_override_the_writer_in_the_schema(tmp_path):
    batch = record(tmp_path / "t")
    (tmp_path / "t" / "w.manifest.jsonl").unlink()
    batch.rename(tmp_path / "t" / "other.000000.gtb")
    report = repair_trace(tmp_path / "t", tmp_path / "r")
    assert report.writers == ["other"]
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["other.000000.gtb", "other.manifest.jsonl"]
    assert_clean(tmp_path / "r")


def test_file_systems_without_locks_can_be_recorded_on(tmp_path, monkeypatch):
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("gym_trace.storage.local.fcntl.flock", flock)
    record(tmp_path / "t")
    assert_clean(tmp_path / "t")
    assert steps_of(open_trace(tmp_path / "t")) == all_steps()


@pytest.mark.parametrize("how", ["within", "thread"])
@pytest.mark.parametrize("kind", [CountingEnv, ImageEnv])
def test_a_step_in_progress_at_close_is_the_same_after_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, how: str
) -> None:
    env = TraceRecordingWrapper(kind(100), tmp_path / "t", flush_seconds=1000.0)
    env.reset()
    for _ in range(5):
        env.step(0)
    step = env.env.step

    def under_way(action: Any) -> Any:
        if how == "within":  # as a signal handler may
            env.close()
        else:
            other = threading.Thread(target=env.close)
            other.start()
            other.join()
        return step(action)

    monkeypatch.setattr(env.env, "step", under_way)
    env.step(0)
    (episode,) = open_trace(tmp_path / "t")
    assert (len(episode), episode.outcome) == (5, "closed")
    assert not list((tmp_path / "t").glob("*.ring"))
    repair_trace(tmp_path / "t", tmp_path / "again")
    (again,) = open_trace(tmp_path / "again")
    assert bits(again.observations) == bits(episode.observations)
    assert (len(again), again.outcome) == (len(episode), "closed")


def test_steps_after_the_end_of_their_episode_are_the_same_after_repair(tmp_path: Path) -> None:
    fragments = np.zeros(3, wire.FRAGMENT)  # like those of recorders closed during a step
    fragments["steps"], fragments["first_step"] = (2, 0, 1), (0, 2, 2)
    fragments["flags"] = (wire.STARTS | wire.HAS_INITIAL, wire.STOPS | wire.ENDS, 0)
    fragments["outcome"][1], fragments["seed"] = 4, wire.NO_SEED
    recorded(tmp_path / "t", 1)
    schema = index_of(open_trace(tmp_path / "t")).readers[0].schema
    (tmp_path / "old").mkdir()
    writer = BatchFiles(LocalStorage(tmp_path / "old"), schema, level=1, fsync=False)
    rows = np.arange(8, dtype=np.int64).reshape(4, 2)
    steps = np.arange(3)
    columns = {("observations",): rows, ("actions",): steps, ("rewards",): steps * 1.0, ("starts",): [pack({})]}
    writer.write(fragments, columns)
    writer.close({})
    repair_trace(tmp_path / "old", tmp_path / "again")
    for name in ("old", "again"):
        (episode,) = open_trace(tmp_path / name)
        assert (len(episode), episode.outcome, episode.actions.tolist()) == (3, "closed", [0, 1, 2])
