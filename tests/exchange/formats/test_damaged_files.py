"""Old recordings that are damaged, pickled or hostile: one clear line, and nothing left behind."""

import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from legacy_recordings import LEGACY, RECORDINGS, LegacyRecorder, copy_of, import_episodes, rows, write_monitor
from long_tests import LONG
from shell import run

from gym_trace import import_trace, load_results
from gym_trace.errors import InvalidOption, TraceExists, TraceNotFound, UnreadableRecording


def refusal(path: Path, *options: str) -> str:
    """The one line of an import that is refused, after which nothing is left behind."""
    target = path.parent / "refused"
    result = run("import", path, "-o", target, *options)
    assert result.exit_code == 1
    assert not target.exists()
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {path}")
    return str(line)


def test_pickled_recordings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "openaigym.trace.0.7.manifest.pkl").write_bytes(b"cos\nsystem\n(S'exit 3'\ntR.")
    assert "pickled" in refusal(tmp_path / "old")


@pytest.mark.parametrize("dtype", ["object", "O", "|O8"])
def test_arrays_of_objects_are_refused(dtype: str, tmp_path: Path) -> None:
    path = LegacyRecorder(tmp_path / "old").batch(rows(np.zeros((2, 1))))
    path.write_text(path.read_text().replace("float64", dtype))
    assert "pickled" in refusal(tmp_path / "old")


def test_a_pickle_in_a_record_of_np_save_is_refused(tmp_path: Path) -> None:
    LegacyRecorder(tmp_path / "old", "npy").batch(rows(np.array([[1], "a", None], object)))
    assert "pickled" in refusal(tmp_path / "old")


def test_a_directory_without_an_old_recording_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no old recording; gym_recording writes" in refusal(tmp_path / "empty", "--from", "gym")
    assert "unknown format" in refusal(tmp_path / "empty")
    assert "not found" in refusal(tmp_path / "missing")
    assert "no such directory" in refusal(tmp_path / "missing", "--from", "gym")
    import_trace(LEGACY / RECORDINGS[0], tmp_path / "trace")
    assert "already a trace" in refusal(tmp_path / "trace")
    (tmp_path / "file").touch()
    assert "is a file; pass" in refusal(tmp_path / "file", "--from", "gym")


REFERENCE = {"__type": "ndarray", "npyfile": "a.bin", "npyoff": 0, "shape": [2], "dtype": "int64"}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"npyoff": 8}, "truncated"),
        ({"npyoff": -8}, "offset -8"),
        ({"npyoff": 1 << 70}, "offset"),
        ({"npyoff": None}, "offset None"),
        ({"shape": [1 << 40]}, "truncated"),
        ({"shape": [1 << 61, 1 << 61, 0]}, "shape"),
        ({"shape": [-1]}, "shape"),
        ({"shape": [True]}, "shape"),
        ({"shape": None}, "shape"),
        ({"shape": [1] * 40}, "shape"),
        ({"shape": []}, "no rewards"),
        ({"shape": [1]}, "for 1 rewards"),
        ({"dtype": "i4,i4"}, "dtype"),
        ({"dtype": "V8"}, "dtype"),
        ({"dtype": "nonsense"}, "dtype"),
        ({"dtype": ["i8"]}, "dtype"),
        ({"size": 17}, "declares 17"),
        ({"order": "F"}, "order"),
        ({"npyfile": "../a.bin"}, "nothing outside of the directory"),
        ({"npyfile": "/etc/passwd"}, "nothing outside of the directory"),
        ({"npyfile": ""}, "nothing outside of the directory"),
        ({"npyfile": "link.bin"}, "cannot be opened"),
        ({"npyfile": "pipe.bin"}, "not a regular file"),
        ({"npyfile": "missing.bin"}, "missing"),
    ],
    ids=str,
)
def test_references_that_lead_astray_are_refused(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = LegacyRecorder(tmp_path / "old").batch(rows(np.zeros((3, 1))))
    (tmp_path / "a.bin").write_bytes(bytes(16))
    (tmp_path / "old" / "a.bin").write_bytes(bytes(16))
    (tmp_path / "old" / "link.bin").symlink_to(tmp_path / "a.bin")
    if change == {"npyfile": "pipe.bin"}:
        os.mkfifo(tmp_path / "old" / "pipe.bin")
    content = json.loads(path.read_text())
    content["episodes"][0]["rewards"] = {**REFERENCE, **change}
    path.write_text(json.dumps(content))
    assert complaint in refusal(tmp_path / "old")


def test_rows_without_end_are_refused_at_once(tmp_path: Path) -> None:
    path = LegacyRecorder(tmp_path / "old").batch(rows(np.zeros((3, 1))))
    episode = json.loads(path.read_text())["episodes"][0]
    for name, count in (("observations", 1 << 50), ("actions", (1 << 50) - 1), ("rewards", (1 << 50) - 1)):
        episode[name] |= {"shape": [count, 0], "size": 0}
    path.write_text(json.dumps({"episodes": [episode]}))
    assert "rewards without elements" in refusal(tmp_path / "old")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not JSON"),
        ('{"episodes": [', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("\ud800".encode("utf-16-le", "surrogatepass").decode("latin-1"), "not JSON"),
        ("[]", "not a JSON object"),
        ('{"episodes": ' + "[" * 100 + "]" * 100 + "}", "nested more than 64 deep"),
        ("{}", "list of episodes"),
        ('{"episodes": 3}', "list of episodes"),
        ('{"episodes": [[]]}', "episode 0 of the file: not an object"),
        ('{"episodes": [{"observations": []}]}', "has no actions"),
        ('{"episodes": [{"observations": [], "actions": [], "rewards": []}]}', "0 observations"),
        ('{"episodes": []}', "of 0 episodes, but openaigym.trace.0.7.manifest.json declares 1"),
    ],
    ids=lambda text: text[:30],
)
def test_garbled_batches_are_refused(text: str, complaint: str, tmp_path: Path) -> None:
    path = LegacyRecorder(tmp_path / "old").batch(rows(np.zeros((2, 1))), len=1)
    path.write_text(text, encoding="latin-1")
    assert complaint in refusal(tmp_path / "old")


@pytest.mark.parametrize(
    ("manifest", "complaint"),
    [
        ({}, "no batches"),
        ({"batches": [3]}, "not an object"),
        ({"batches": [{"fn": "../x.json"}]}, "nothing outside"),
        ({"batches": [{}]}, "nothing outside"),
        ({"batches": [{"fn": "x.json", "len": "two"}]}, "invalid first episode"),
        ({"batches": [{"fn": "x.json"}]}, "missing"),
    ],
    ids=str,
)
def test_garbled_manifests_are_refused(manifest: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    LegacyRecorder(tmp_path / "old")
    (tmp_path / "old" / "openaigym.trace.0.7.manifest.json").write_text(json.dumps(manifest))
    assert complaint in refusal(tmp_path / "old")


@pytest.mark.parametrize("name", [*RECORDINGS, "monitor-0.9.7/two-processes"])
def test_damage_of_any_kind_ends_in_an_error_of_ours_or_in_a_whole_trace(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    files = sorted(path.name for path in (LEGACY / name).iterdir())
    refused = 0
    attempts = 120 if LONG else 24
    for attempt in range(attempts):
        old = copy_of(name, tmp_path / f"old{attempt}")
        path = old / files[rng.integers(len(files))]
        raw = bytearray(path.read_bytes())
        if attempt % 3:
            for place in rng.integers(len(raw), size=2):
                raw[place] = rng.integers(256)
        else:
            del raw[rng.integers(len(raw)) :]
        path.write_bytes(raw)
        target = tmp_path / f"t{attempt}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import_episodes(old, target)
        except (UnreadableRecording, TraceNotFound):
            refused += 1
            assert not target.exists()
    assert refused > attempts / 6


def test_an_error_late_in_the_import_leaves_an_empty_directory_empty(tmp_path: Path) -> None:
    recorder = LegacyRecorder(tmp_path / "old")
    recorder.batch(rows(np.zeros((2, 1))))
    recorder.batch(rows(np.zeros((2, 1)))).write_text("")
    (tmp_path / "t").mkdir()
    with pytest.raises(UnreadableRecording, match=r"ep000000001\.json: not JSON"):
        import_trace(tmp_path / "old", tmp_path / "t")
    assert list((tmp_path / "t").iterdir()) == []


def test_a_destination_with_something_in_it_is_refused_and_kept(tmp_path: Path) -> None:
    old = copy_of(RECORDINGS[0], tmp_path / "old")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "mine").touch()
    with pytest.raises(TraceExists, match="not empty"):
        import_trace(old, tmp_path / "t")
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["mine"]
    with pytest.raises(InvalidOption, match="lies in the source"):
        import_trace(old, old / "t")
    with pytest.raises(TraceExists, match="is a file"):
        import_trace(old, tmp_path / "t" / "mine")


GOOD: dict[str, Any] = {"timestamps": [2.0], "episode_lengths": [1], "episode_rewards": [1.0]}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"timestamps": [1.0, 2.0]}, "counts must be equal"),
        ({"episode_types": ["t", "t", "t"]}, "counts must be equal"),
        ({"episode_types": ["x"]}, "neither"),
        ({"timestamps": ["now"]}, "instead of a time"),
        ({"timestamps": [math.inf]}, "instead of a time"),
        ({"timestamps": [-1]}, "instead of a time"),
        ({"timestamps": [10**400]}, "instead of a time"),
        ({"episode_lengths": [1.5]}, "instead of a length"),
        ({"episode_lengths": [-1]}, "instead of a length"),
        ({"episode_lengths": [1 << 70]}, "instead of a length"),
        ({"episode_rewards": [None]}, "instead of a number"),
        ({"episode_rewards": None}, "episode_rewards: not a list"),
        ({"initial_reset_timestamp": "x"}, "instead of a time"),
        ({"videos": ["x"]}, "video"),
        ({"videos": [["../x", "y"]]}, "nothing outside"),
    ],
    ids=str,
)
def test_garbled_statistics_are_refused(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    write_monitor(tmp_path / "old", **{**GOOD, **change})
    assert complaint in refusal(tmp_path / "old")
    with pytest.raises(UnreadableRecording, match=complaint):
        load_results(tmp_path / "old")
