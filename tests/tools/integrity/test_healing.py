"""heal_trace puts the recorded bytes back, and check_trace counts what parity restores apart from what it cannot."""

import json
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from long_tests import LONG
from numbered_env import STEPS, all_steps, record, steps_of
from shell import run

from gym_trace import check_trace, edit, heal_trace, open_trace, repair_trace
from gym_trace.data.packing import pack, unpack
from gym_trace.errors import RecordingError
from gym_trace.format import wire
from gym_trace.playback.episode_index import index_of
from gym_trace.storage.local import LocalAppender, LocalStorage


def damage(batch: Path, at: int, length: int = 1) -> bytes:
    """Invert bytes of a batch; return the original file."""
    data = batch.read_bytes()
    batch.write_bytes(data[:at] + bytes(byte ^ 255 for byte in data[at : at + length]) + data[at + length :])
    return data


def parity_offset(data: bytes) -> int:
    footer = wire.unpack_footer(data[-64:], len(data), data[16:32])
    assert footer is not None
    return footer.parity[0]


def test_every_byte_is_put_back(tmp_path: Path) -> None:
    batch = record(tmp_path, parity=True)
    size = batch.stat().st_size
    for at in range(0, size, 1 if LONG else 97):
        data = damage(batch, at)
        report = heal_trace(tmp_path)
        assert batch.read_bytes() == data, at
        assert report.hopeless == []
        assert sum(healed.end - healed.start for healed in report.healed) > 0
        assert any(healed.start <= at < healed.end for healed in report.healed)
    assert heal_trace(tmp_path).healed == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.000000.gtb", "w.manifest.jsonl"]
    assert check_trace(tmp_path).damages == []


@pytest.mark.parametrize("place", ["header", "schema", "chunk", "index", "parity", "footer"])
def test_check_counts_what_parity_restores_apart(tmp_path: Path, place: str) -> None:
    batch = record(tmp_path / "t", parity=True)
    data = batch.read_bytes()
    end = parity_offset(data)
    places = {"header": 20, "schema": 150, "chunk": end // 2, "index": end - 40, "parity": end + 300, "footer": -20}
    damage(batch, places[place] % len(data))
    report = check_trace(tmp_path / "t")
    assert report.steps == STEPS
    if place == "parity":
        assert (len(report.damages), report.healed) == (1, [])
    else:
        assert report.damages == []
        assert [found.start <= places[place] % len(data) < found.end for found in report.healed] == [True]
    repaired = repair_trace(tmp_path / "t", tmp_path / "new")
    assert (repaired.losses, repaired.steps) == ([], STEPS)
    assert steps_of(open_trace(tmp_path / "new")) == all_steps()


def test_damage_beyond_parity_is_left_and_named(tmp_path: Path) -> None:
    batch = record(tmp_path, parity=True)
    end = parity_offset(batch.read_bytes())
    damage(batch, 600, end - 900)
    damaged = batch.read_bytes()
    report = heal_trace(tmp_path)
    assert report.healed == []
    assert report.hopeless
    assert batch.read_bytes() == damaged
    assert check_trace(tmp_path).damages


def test_a_file_that_would_not_match_its_manifest_is_left(tmp_path: Path) -> None:
    batch = record(tmp_path, parity=True)
    manifest = tmp_path / "w.manifest.jsonl"
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    for line in lines:
        line.update({"crc32": 7} if line["type"] == "batch" else {})
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    damage(batch, 700)
    damaged = batch.read_bytes()
    (found,) = heal_trace(tmp_path).hopeless
    assert "manifest" in found.problem
    assert batch.read_bytes() == damaged


def test_a_batch_without_parity_is_named_and_left(tmp_path: Path) -> None:
    batch = record(tmp_path)
    data = damage(batch, 700)
    report = heal_trace(tmp_path)
    assert (report.unprotected, report.healed, report.hopeless) == ([str(batch)], [], [])
    assert batch.read_bytes() != data


def test_a_copy_that_cannot_be_written_raises_and_leaves_the_trace(tmp_path: Path) -> None:
    batch = record(tmp_path, parity=True)
    damage(batch, 700)
    damaged = batch.read_bytes()
    (tmp_path / f"{batch.name}.part").mkdir()
    with pytest.raises(RecordingError, match="cannot be restored"):
        heal_trace(tmp_path)
    assert batch.read_bytes() == damaged


def test_an_edit_copies_the_recorded_bytes_and_not_the_damaged_ones(tmp_path: Path) -> None:
    batch = record(tmp_path / "t", parity=True)
    data = batch.read_bytes()
    damage(batch, parity_offset(data) // 2)
    edit.filter(tmp_path / "t", tmp_path / "all")  # copies whole files, with their parity
    assert heal_trace(tmp_path / "all").hopeless == []
    with pytest.warns(UserWarning, match="by its parity"):
        edit.filter(open_trace(tmp_path / "t")[[0, 2, 3]], tmp_path / "some")
    for name in ("all", "some"):
        report = check_trace(tmp_path / name)
        assert (report.damages, report.healed) == ([], [])
    assert (tmp_path / "all" / batch.name).read_bytes() == data
    assert steps_of(open_trace(tmp_path / "all")) == all_steps()


def test_the_commands_name_the_damage_and_restore_it(tmp_path: Path) -> None:
    batch = record(tmp_path, parity=True)
    data = damage(batch, 700)
    found = run("check", tmp_path)
    assert found.exit_code == 5
    assert ": restored from parity\n" in found.stdout
    assert (
        f"1 damaged place restored from parity; 'gym-trace edit repair {tmp_path} --in-place' writes them back"
        in found.stdout
    )
    assert len(json.loads(run("check", tmp_path, "--json").stdout)["healed"]) == 1
    healed = run("edit", "repair", tmp_path, "--in-place")
    assert (healed.exit_code, "1 damaged place restored" in healed.stdout) == (0, True)
    assert batch.read_bytes() == data
    assert "no damage" in run("check", tmp_path).stdout
    damage(batch, 600, parity_offset(data) - 900)
    assert run("edit", "repair", tmp_path, "--in-place").exit_code == 5
    for wrong in (
        ["edit", "repair", tmp_path],
        ["edit", "repair", tmp_path, "--in-place", "-o", "x"],
        ["edit", "repair", tmp_path, "--in-place", "--salvage"],
    ):
        assert run(*wrong).exit_code == 2
    assert not os.path.exists("x")


def test_an_edit_that_renumbers_a_damaged_batch_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.format.batch_files.BATCH_BYTES", 1500)
    record(tmp_path / "t", parity=True)
    batches = sorted((tmp_path / "t").glob("*.gtb"))
    trace = open_trace(tmp_path / "t")
    for batch, reader in zip(batches, index_of(trace).readers[0].batches):
        damage(batch, int(reader.chunks["offset"][0]) + 6)
    with pytest.warns(UserWarning, match="by its parity"):
        edit.filter(open_trace(tmp_path / "t")[[2, 3, 4]], tmp_path / "new")
    report = check_trace(tmp_path / "new")
    assert (report.damages, report.healed, report.steps) == ([], [], sum((6, 0, 5)))
    for batch in (tmp_path / "new").glob("*.gtb"):
        data = damage(batch, 130)
        heal_trace(tmp_path / "new")
        assert batch.read_bytes() == data


def test_threads_that_meet_damage_at_once_all_read_what_was_recorded(tmp_path: Path) -> None:
    batch = record(tmp_path, parity=True)
    damage(batch, int(index_of(open_trace(tmp_path)).readers[0].batches[0].chunks["offset"][1]) + 200)
    for _ in range(10):
        trace = open_trace(tmp_path)
        with warnings.catch_warnings(), ThreadPoolExecutor(8) as pool:
            warnings.simplefilter("ignore", UserWarning)
            found = list(pool.map(lambda _, trace=trace: steps_of(trace), range(8)))
        assert found == [all_steps()] * 8


def test_a_leftover_of_a_killed_restoration_is_replaced(tmp_path: Path) -> None:
    batch = record(tmp_path, parity=True)
    data = damage(batch, 700)
    batch.chmod(0o600)
    (tmp_path / f"{batch.name}.part").write_bytes(data[:900])
    assert heal_trace(tmp_path).hopeless == []
    assert batch.read_bytes() == data
    assert batch.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.000000.gtb", "w.manifest.jsonl"]


@pytest.mark.skipif(os.name != "posix", reason="needs permissions")
def test_the_permissions_go_to_the_restored_file_and_not_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, secret = record(tmp_path, parity=True), tmp_path / "secret"
    secret.touch()
    secret.chmod(0o600)
    batch.chmod(0o644)
    damage(batch, 700)
    sync = LocalAppender.sync

    def syncing(copy: LocalAppender) -> None:
        sync(copy)
        assert os.fstat(copy.fileno()).st_mode & 0o777 == 0o644
        part = tmp_path / f"{batch.name}.part"
        part.unlink()
        part.symlink_to(secret)

    monkeypatch.setattr(LocalAppender, "sync", syncing)
    heal_trace(tmp_path)
    assert secret.stat().st_mode & 0o777 == 0o600


def test_a_trace_replaced_during_the_restoration_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = record(tmp_path / "t", parity=True)
    other = record(tmp_path / "other", parity=True).read_bytes()
    damage(batch, 700)
    create = LocalStorage.create

    def replacing(self: LocalStorage, name: str, lock: bool = False) -> Any:
        (tmp_path / "new").write_bytes(other)
        (tmp_path / "new").rename(batch)  # as an edit in place does
        return create(self, name, lock)

    monkeypatch.setattr(LocalStorage, "create", replacing)
    assert heal_trace(tmp_path / "t").healed == []
    assert batch.read_bytes() == other


@pytest.mark.parametrize(
    "changes", [{"index": -1}, {"index": 1 << 63}, {"by": "another writer"}, {"block": 1}, None], ids=str
)
def test_parity_records_of_others_harm_nothing(tmp_path: Path, changes: dict[str, Any] | None) -> None:
    batch = record(tmp_path, parity=True)
    (tmp_path / "w.manifest.jsonl").unlink()
    in_a_chunk = int(index_of(open_trace(tmp_path)).readers[0].batches[0].chunks["offset"][1]) + 200
    data = batch.read_bytes()
    start, file_id = parity_offset(data), data[16:32]
    header = wire.unpack_record_header(data[start : start + 64], start, file_id)
    assert header is not None
    metadata = unpack(data[start + 64 : start + 64 + header.metadata_length])
    raw = b"\xc1" if changes is None else pack({**metadata, **changes})
    body = data[header.body_offset : header.end]
    record_ = b"".join(wire.pack_record(wire.PARITY, raw, [[body]], start, header.sequence, file_id, wire.OPTIONAL))
    footer = wire.unpack_footer(data[-64:], len(data), file_id)
    assert footer is not None
    forged = data[:start] + record_
    for tail in (wire.pack_footer(footer.index_offset, len(forged) + 64, file_id, footer.parity), bytes(64)):
        batch.write_bytes(forged + tail)
        damage(batch, in_a_chunk)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            check_trace(tmp_path)
            heal_trace(tmp_path)
            found = steps_of(open_trace(tmp_path).scan(on_damage="skip"))
        assert found <= all_steps()
        assert found == all_steps() or not any(tail)
