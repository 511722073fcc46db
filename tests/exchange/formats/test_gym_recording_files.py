"""Import of recordings of gym_recording: the arrays are those that the old reader gave."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from legacy_recordings import LEGACY, RECORDINGS, LegacyRecorder, import_episodes, rows

from gym_trace import import_trace, open_trace
from gym_trace.envs.spaces import restore
from gym_trace.errors import UnreadableRecording
from gym_trace.playback.episode_index import index_of


@pytest.mark.parametrize("name", RECORDINGS)
def test_imported_arrays_are_those_that_the_old_reader_gave(name: str, tmp_path: Path) -> None:
    episodes = import_episodes(LEGACY / name, tmp_path / "t")
    with np.load(LEGACY / f"{name}.expected.npz") as expected:
        assert len(expected.files) == 3 * len(episodes) > 0
        for i, arrays in enumerate(episodes):
            for column, array in zip(("observations", "actions", "rewards"), arrays):
                wanted = expected[f"{column}_{i}"]
                assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape)
                assert array.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("era", ["bare", "npy", "neither order nor size"])
@pytest.mark.parametrize(
    "array",
    [
        np.array([[0.0, -0.0], [np.nan, np.inf]], "<f4"),
        np.array([[[1, 2]], [[3, 4]]], ">i2"),
        np.array([True, False]),
        np.asfortranarray(np.arange(6, dtype=np.float16).reshape(2, 3)),
        np.zeros((2, 0), np.int8),
    ],
    ids=lambda array: array.dtype.str,
)
def test_arrays_of_every_dtype_keep_their_bits(array: Any, era: str, tmp_path: Path) -> None:
    LegacyRecorder(tmp_path / "old", era).batch(rows(array))
    ((observations, _, _),) = import_episodes(tmp_path / "old", tmp_path / "t")
    assert (observations.dtype, observations.shape) == (array.dtype, array.shape)
    assert observations.tobytes() == array.tobytes()


@pytest.mark.parametrize("array", [np.array([1 + 2j, 0j], "<c8"), np.array(["a", "bc"]), np.array([3, 4], "<M8[ns]")])
def test_arrays_that_no_space_has_come_back_value_by_value(array: Any, tmp_path: Path) -> None:
    LegacyRecorder(tmp_path / "old", "npy").batch(rows(array))
    ((observations, _, _),) = import_episodes(tmp_path / "old", tmp_path / "t")
    assert [(value.dtype, value) for value in observations] == [(value.dtype, value) for value in array]


def test_lists_become_what_their_spaces_would_be(tmp_path: Path) -> None:
    image = np.arange(4, dtype=np.uint8).reshape(2, 2)
    observations = [{"image": image + i, "pair": [i, [0.5, True]]} for i in range(3)]
    episode = {"observations": observations, "actions": [["key", 1], ["point", 2, 3]], "rewards": [0, 1.5]}
    LegacyRecorder(tmp_path / "old").batch(episode)
    ((seen, done, rewards),) = import_episodes(tmp_path / "old", tmp_path / "t")
    assert seen["image"].dtype == np.uint8
    assert seen["image"].tolist() == [(image + i).tolist() for i in range(3)]
    number, (half, yes) = seen["pair"]
    assert (number.dtype, half.dtype, yes.dtype) == (np.int64, np.float64, np.bool_)
    assert (number.tolist(), half.tolist(), yes.tolist()) == ([0, 1, 2], [0.5] * 3, [True] * 3)
    assert done.tolist() == [["key", 1], ["point", 2, 3]]
    assert rewards.tolist() == [0.0, 1.5]
    space = open_trace(tmp_path / "t").observation_space
    assert space["image"].shape == (2, 2)
    assert [space["pair"][0].dtype, *(member.dtype for member in space["pair"][1])] == [np.int64, np.float64, np.bool_]


def test_an_episode_of_another_kind_than_the_first_is_recorded_as_it_is(tmp_path: Path) -> None:
    others: list[Any] = [np.zeros((3, 2)), np.zeros((2, 4), np.float32), [np.zeros(1), np.zeros(2)], [{"a": 1}, None]]
    LegacyRecorder(tmp_path / "old").batch(*map(rows, others))
    got = [observations for observations, _, _ in import_episodes(tmp_path / "old", tmp_path / "t")]
    assert [array.dtype for array in got] == [np.float64, np.float32, object, object]
    assert got[1].shape == (2, 4)
    assert [len(value) for value in got[2]] == [1, 2]
    assert got[3].tolist() == [{"a": 1}, None]


def test_long_episodes_and_large_rows_are_written_in_pieces(tmp_path: Path) -> None:
    frames = np.arange(70 * 300 * 300, dtype=np.uint32).reshape(70, 300, 300)  # 25 MB, several pieces, two chunks
    many = np.arange(40_000, dtype=np.float64).reshape(20_000, 2)
    for name, array in (("frames", frames), ("many", many)):
        LegacyRecorder(tmp_path / name).batch(rows(array[:3]), rows(array), rows(list(array[:3])))
        _, (observations, actions, _), (listed, _, _) = import_episodes(tmp_path / name, tmp_path / f"{name}-t")
        assert np.array_equal(observations, array)
        assert np.array_equal(actions, np.arange(len(array) - 1))
        assert np.array_equal(listed, array[:3])


def test_episodes_without_a_step_are_kept_and_do_not_decide_the_spaces(tmp_path: Path) -> None:
    nothing = np.zeros((1, 0))
    empty = {"observations": np.ones((1, 3)), "actions": nothing, "rewards": nothing}
    LegacyRecorder(tmp_path / "old").batch(empty, rows(np.ones((2, 3))))
    first, second = import_episodes(tmp_path / "old", tmp_path / "t")
    assert first[0].tolist() == [[1.0, 1.0, 1.0]]
    assert [len(array) for array in first[1:]] == [0, 0]
    assert second[1].dtype == open_trace(tmp_path / "t").action_space.dtype == np.int64


def test_a_recording_of_nothing_but_resets_is_a_trace(tmp_path: Path) -> None:
    LegacyRecorder(tmp_path / "old").batch({"observations": [1], "actions": [], "rewards": []})
    ((observations, actions, rewards),) = import_episodes(tmp_path / "old", tmp_path / "t")
    assert (observations.tolist(), len(actions), len(rewards)) == ([1], 0, 0)


def test_imports_of_old_recordings_invent_nothing(tmp_path: Path) -> None:
    import_trace(LEGACY / RECORDINGS[0], tmp_path / "t")
    trace = open_trace(tmp_path / "t")
    episode = trace[0]
    assert (episode.outcome, episode.seed, episode.start_time, episode.end_time) == ("cut", None, None, None)
    assert not episode.terminations.any()
    assert not episode.truncations.any()
    assert "imported from gym_recording" in trace.env_spec["note"]
    assert trace.metadata["manifest"] == "openaigym.trace.0.15564.manifest.json"
    assert restore(index_of(trace).readers[0].schema["observation_space"]).shape == (4,)


def test_several_recorders_and_batches_keep_their_order_and_ids(tmp_path: Path) -> None:
    recorder = LegacyRecorder(tmp_path / "old")
    recorder.batch(rows(np.zeros((2, 1))), rows(np.ones((2, 1))), first=0, len=2)
    recorder.batch(rows(np.full((2, 1), 2.0)), first=5, len=1)
    text = (tmp_path / "old" / "openaigym.trace.0.7.manifest.json").read_text()
    for number in (10, 9):
        (tmp_path / "old" / f"openaigym.trace.{number}.7.manifest.json").write_text(text)
    episodes = import_episodes(tmp_path / "old", tmp_path / "t")
    assert [observations[0, 0] for observations, _, _ in episodes] == [0.0, 1.0, 2.0] * 3
    trace = open_trace(tmp_path / "t")
    assert trace.episodes["episode_id"].tolist() == [0, 1, 5] * 3
    assert trace.writers == [f"openaigym.trace.{number}.7" for number in (0, 9, 10)]


def named_again(path: Path, times: int) -> Path:
    """A recording whose episodes have one array, which the file has once."""
    recorder = LegacyRecorder(path, "npy")
    file = recorder.batch(rows(np.zeros((100, 50))))
    said = json.loads(file.read_text())
    said["episodes"] *= times
    file.write_text(json.dumps(said))
    (manifest,) = path.glob("*.manifest.json")
    known = json.loads(manifest.read_text())
    known["batches"][0]["len"] = len(said["episodes"])
    manifest.write_text(json.dumps(known))
    return path


def test_an_array_that_is_named_very_often_is_refused(tmp_path: Path) -> None:
    assert import_trace(named_again(tmp_path / "once", 1), tmp_path / "t").episodes == 1
    with pytest.raises(UnreadableRecording, match="or its arrays are named so often"):
        import_trace(named_again(tmp_path / "often", 50), tmp_path / "other")


def test_a_file_of_episodes_that_is_named_very_often_is_refused(tmp_path: Path) -> None:
    path = named_again(tmp_path / "old", 1)
    (manifest,) = path.glob("*.manifest.json")
    known = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({"batches": known["batches"] * 50}))
    with pytest.raises(UnreadableRecording, match="or its arrays are named so often"):
        import_trace(path, tmp_path / "t")
