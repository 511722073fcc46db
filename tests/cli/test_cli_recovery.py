"""gym-trace check and repair: output and exit codes."""

import json

from numbered_env import STEPS, record
from runs import batch_reader
from shell import run


def break_chunk(batch, number):
    offset, length, *_ = batch_reader(batch).chunks[number].tolist()
    data = bytearray(batch.read_bytes())
    data[offset + length - 9] ^= 1
    batch.write_bytes(data)
    return offset, offset + length


def test_check_names_damage_by_file_and_byte_and_exits_with_5(tmp_path):
    batch = record(tmp_path / "t")
    result = run("check", tmp_path / "t")
    assert result.exit_code == 0
    assert f"5 episodes, {STEPS} steps can be read" in result.output
    assert "no damage" in result.output
    assert run("check", tmp_path / "t", "--quiet").output == ""
    start, end = break_chunk(batch, 3)
    for options in ([], ["--quiet"]):
        result = run("check", tmp_path / "t", *options)
        assert result.exit_code == 5
        assert f"{batch}: bytes {start} to {end}: " in result.output
        assert "gym-trace edit repair" in result.output


def test_repair_tells_what_is_kept_and_what_is_lost(tmp_path):
    batch = record(tmp_path / "t")
    start, end = break_chunk(batch, 1)
    result = run("edit", "repair", tmp_path / "t", "-o", tmp_path / "r")
    assert result.exit_code == 0
    assert f"{batch}: bytes {start} to {end}: " in result.output
    assert "lost: episode 0 of w, steps 2 to 3" in result.output
    assert f"kept in {tmp_path / 'r'}: 5 episodes, {STEPS - 2} steps of 1 writer" in result.output
    assert run("check", tmp_path / "r").exit_code == 0


def test_repair_of_a_killed_recording_says_that_nothing_is_lost(tmp_path):
    record(tmp_path / "t", closed=False)
    assert run("check", tmp_path / "t").exit_code == 0
    assert "0 files" not in run("check", tmp_path / "t").output
    result = run("edit", "repair", tmp_path / "t", "-o", tmp_path / "r")
    assert result.exit_code == 0
    assert "nothing is lost" in result.output
    assert "no damage" in run("check", tmp_path / "r").output


def test_repair_that_can_keep_no_episode_exits_with_1_and_leaves_nothing(tmp_path):
    batch = record(tmp_path / "t")
    for number in range(len(batch_reader(batch).chunks)):
        break_chunk(batch, number)
    result = run("edit", "repair", tmp_path / "t", "-o", tmp_path / "r")
    assert result.exit_code == 1
    assert f"no readable episode; {tmp_path / 'r'} not written" in result.output
    assert "lost: episode 0 of w" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
    told = json.loads(run("edit", "repair", tmp_path / "t", "-o", tmp_path / "r", "--json").output)
    assert (told["episodes"], told["writers"]) == (0, [])


def test_mistakes_are_one_clear_line_and_no_traceback(tmp_path):
    record(tmp_path / "t")
    for words, code, said in [
        (("check", tmp_path / "nothing"), 1, "no such directory"),
        (("edit", "repair", tmp_path / "t", "-o", tmp_path / "t"), 2, "lies in the source"),
        (("edit", "repair", tmp_path / "nothing", "-o", tmp_path / "r"), 1, "no such directory"),
    ]:
        result = run(*words)
        assert result.exit_code == code
        assert said in result.output
        assert len(result.output.splitlines()) == 1
    assert run("edit", "repair", tmp_path / "t").exit_code == 2  # without -o
