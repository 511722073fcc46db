"""heal_trace puts the recorded bytes back, and check_trace counts what parity restores apart from what it cannot."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from longer import LONG
from shell import run
from telltale import STEPS, all_steps, record, steps_of

from gym_trace import check_trace, edit, heal_trace, open_trace, repair_trace
from gym_trace.errors import RecordingError
from gym_trace.format import wire


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
    for at in range(0, size, 1 if LONG else 41):
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
    damage(batch, len(data) // 2)
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
        f"1 damaged place restored from parity; 'gym-trace repair {tmp_path} --in-place' writes them back"
        in found.stdout
    )
    assert len(json.loads(run("check", tmp_path, "--json").stdout)["healed"]) == 1
    healed = run("repair", tmp_path, "--in-place")
    assert (healed.exit_code, "1 place restored" in healed.stdout) == (0, True)
    assert batch.read_bytes() == data
    assert "no damage" in run("check", tmp_path).stdout
    damage(batch, 600, parity_offset(data) - 900)
    assert run("repair", tmp_path, "--in-place").exit_code == 5
    for wrong in (
        ["repair", tmp_path],
        ["repair", tmp_path, "--in-place", "-o", "x"],
        ["repair", tmp_path, "--in-place", "--salvage"],
    ):
        assert run(*wrong).exit_code == 2
    assert not os.path.exists("x")
