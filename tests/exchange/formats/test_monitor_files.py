"""Statistics of OpenAI Gym's Monitor: imported, and by load_results, which also reads traces."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
from legacy_recordings import LEGACY, MONITOR, RECORDINGS, copy_of, import_episodes, results, write_monitor
from shell import ok, run

from gym_trace import check_trace, import_trace, load_results, open_trace, summarize
from gym_trace.errors import TraceNotFound, UnreadableRecording
from gym_trace.playback.episode_index import index_of


def test_load_results_returns_the_original_result_for_files_and_traces(tmp_path: Path) -> None:
    expected = json.loads((MONITOR / "two-processes.expected.json").read_text())
    assert results(MONITOR / "two-processes") == expected
    import_trace(MONITOR / "two-processes", tmp_path / "t")
    assert results(tmp_path / "t") == expected


def test_statistics_become_episodes_without_steps(tmp_path: Path) -> None:
    assert import_episodes(MONITOR / "two-processes", tmp_path / "t")[0][:2] == ((), ())
    trace = open_trace(tmp_path / "t")
    assert trace.episodes["steps"].tolist() == [0] * 10
    assert trace.episodes["return"].tolist() == [12, 20, 14, 90, 19, 27, 48, 19, 14, 20]
    assert [episode.split for episode in trace] == ["train"] * 5 + ["eval"] * 5
    episode = trace[1]
    assert (episode.outcome, episode.first_step, len(episode), episode.reset_info) == ("lost", 20, 0, None)
    assert episode.end_time == 1795227283666579008  # the ns that the float was nearest to
    assert index_of(trace).readers[1].schema["metadata"]["open_episode_type"] == "e"
    assert (trace.env_spec["id"], index_of(trace).locate(0)[0].schema["versions"]) == ("CartPole-v0", {"gym": "0.9.7"})


def test_summaries_know_the_lengths_of_episodes_without_steps(tmp_path: Path) -> None:
    import_trace(MONITOR / "two-processes", tmp_path / "t")
    summary = summarize(open_trace(tmp_path / "t"), by="split", columns=True)
    assert (summary["steps"], summary["length"]["max"], summary["return"]["max"]) == (0, 90, 90.0)
    assert summary["groups"]["eval"]["length"]["mean"] == 25.6


def test_several_environments_are_distinguished_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"2 environments .* CartPole-v0 \(0.9.7\), MountainCar-v0 \(0.9.7\)"):
        old = results(MONITOR / "commingled")
    assert [group["env_info"]["env_id"] for group in old["groups"]] == ["CartPole-v0", "MountainCar-v0"]
    assert [sum(group["episode_lengths"]) for group in old["groups"]] == [155, 1000]
    assert old["episode_lengths"] == old["groups"][0]["episode_lengths"]
    report = import_trace(MONITOR / "commingled", tmp_path / "t")
    assert "each process is a writer of its own" in report.warnings[-1]
    with pytest.warns(UserWarning, match="2 environments"):
        new = results(tmp_path / "t")
    without_files = [{key: value for key, value in group.items() if key != "manifests"} for group in old["groups"]]
    assert [{key: value for key, value in g.items() if key != "manifests"} for g in new["groups"]] == without_files


def test_keys_that_some_eras_lack_are_not_needed(tmp_path: Path) -> None:
    write_monitor(tmp_path / "old", timestamps=[3.5, 4.25], episode_lengths=[7, 8], episode_rewards=[1, math.nan])
    import_trace(tmp_path / "old", tmp_path / "t")
    for directory in (tmp_path / "old", tmp_path / "t"):
        found = load_results(directory)
        assert (found["timestamps"], found["episode_lengths"]) == ([3.5, 4.25], [7, 8])
        assert found["episode_rewards"][0] == 1.0
        assert math.isnan(found["episode_rewards"][1])
        assert (found["episode_types"], found["env_info"], found["videos"]) == (None, None, [])
    assert load_results(tmp_path / "old")["initial_reset_timestamp"] == 0


def test_training_and_evaluation_of_one_process_are_two_splits(tmp_path: Path) -> None:
    stats = {"timestamps": [2.0, 3.0, 4.0], "episode_lengths": [1, 2, 3], "episode_rewards": [1.0, 2.0, 3.0]}
    write_monitor(tmp_path / "old", episode_types=["t", "e", "t", "e"], initial_reset_timestamp=1.0, **stats)
    write_monitor(tmp_path / "old", "1.7", timestamps=[], episode_lengths=[], episode_rewards=[])
    import_trace(tmp_path / "old", tmp_path / "t")
    assert results(tmp_path / "t") == results(tmp_path / "old")
    assert results(tmp_path / "t")["episode_types"] == ["t", "e", "t"]
    assert results(tmp_path / "t")["initial_reset_timestamps"] == [1.0]
    episodes = open_trace(tmp_path / "t").episodes
    assert episodes["episode_id"].tolist() == [0, 2, 1]
    assert episodes["duration"].tolist() == [10**9] * 3


def test_videos_are_copied_and_found_again(tmp_path: Path) -> None:
    stats = {"timestamps": [2.0], "episode_lengths": [1], "episode_rewards": [1.0]}
    pairs = [
        ["openaigym.video.0.7.video000000.mp4", "openaigym.video.0.7.video000000.meta.json"],
        ["gone.mp4", "g.json"],
    ]
    write_monitor(tmp_path / "old", videos=pairs, **stats)
    (tmp_path / "old" / pairs[0][0]).write_bytes(b"a film")
    (tmp_path / "old" / pairs[0][1]).write_text("{}")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "old" / "gone.mp4").symlink_to(tmp_path / "secret")
    report = import_trace(tmp_path / "old", tmp_path / "t")
    assert [text for text in report.warnings if "missing" in text] == [
        f"the video {name} is missing; the statistics are imported" for name in pairs[1]
    ]
    assert report.videos == pairs[0]
    assert (tmp_path / "t" / pairs[0][0]).read_bytes() == b"a film"
    assert load_results(tmp_path / "t")["videos"] == [
        (str(tmp_path / "t" / v), str(tmp_path / "t" / m)) for v, m in pairs
    ]
    assert check_trace(tmp_path / "t").damages == []


def test_every_command_works_on_imported_traces(tmp_path: Path) -> None:
    for number, name in enumerate([*RECORDINGS, "monitor-0.9.7/two-processes"]):
        result = ok("import", LEGACY / name, "-o", tmp_path / str(number))
        assert "imported to" in result.stdout
        for command in (["check"], ["info"], ["stats", "--columns"], ["replay"], ["stats", "--json"]):
            ok(command[0], tmp_path / str(number), *command[1:])
        ok("edit", "repair", tmp_path / str(number), "-o", tmp_path / f"{number}-repaired")
    assert results(tmp_path / "3-repaired") == results(tmp_path / "3")


def test_a_directory_of_both_packages_is_imported_whole(tmp_path: Path) -> None:
    copy_of(RECORDINGS[0], tmp_path / "old")
    shutil.copytree(MONITOR / "two-processes", tmp_path / "old", dirs_exist_ok=True)
    result = ok("import", tmp_path / "old", "-o", tmp_path / "t")
    assert "16 episodes, 127 steps of 3 writers" in result.stdout
    assert len(load_results(tmp_path / "old")["timestamps"]) == 10
    whole = open_trace(tmp_path / "t")
    for limit, writers in ((2, 1), (8, 2), (15, 3)):  # the writers have 6, 5 and 5 episodes
        result = ok("import", tmp_path / "old", "-o", tmp_path / str(limit), "--limit", limit)
        assert f"imported to {tmp_path / str(limit)}: {limit} episodes" in result.stdout
        assert len(open_trace(tmp_path / str(limit)).writers) == writers
        returns = whole[:limit].episodes["return"]
        assert open_trace(tmp_path / str(limit)).episodes["return"].tolist() == returns.tolist()


def test_import_asks_for_a_destination() -> None:
    assert run("import", "somewhere").exit_code == 2


def test_load_results_of_a_recorded_trace_counts_the_episodes_that_ended(tmp_path: Path) -> None:
    import gymnasium

    from gym_trace import TraceRecordingWrapper

    for split in ("train", "eval"):
        env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / "t", split=split, on_exist="append")
        env.action_space.seed(0)
        for seed in range(3):
            env.reset(seed=seed)
            over = False
            while not over:
                _, _, terminated, truncated, _ = env.step(env.action_space.sample())
                over = terminated or truncated
        env.reset()
        env.step(env.action_space.sample())
        env.close()
    (manifest, *_) = sorted((tmp_path / "t").glob("*.jsonl"))
    with open(manifest, "a") as file:
        file.write('{"type": "video", "file": "film.mp4"}\n{"type": "video", "file": "../film.mp4"}\n')
    found = load_results(tmp_path / "t")
    assert found["videos"] == [(str(tmp_path / "t" / "film.mp4"), str(manifest))]
    table = open_trace(tmp_path / "t").episodes
    ended = table[table["outcome"] == "terminated"]
    assert len(ended) == 6
    assert found["episode_lengths"] == ended["steps"].tolist()
    assert found["episode_rewards"] == ended["return"].tolist()
    assert found["episode_types"] == ["t"] * 3 + ["e"] * 3
    assert found["data_sources"] == [0] * 3 + [1] * 3
    assert found["timestamps"] == sorted(found["timestamps"])
    assert found["initial_reset_timestamp"] == found["initial_reset_timestamps"][0] < found["timestamps"][0]
    assert found["env_info"] == {"env_id": "CartPole-v1", "gym_version": gymnasium.__version__}
    assert len(found["manifests"]) == 2


def test_load_results_of_what_gym_recording_kept_has_no_times(tmp_path: Path) -> None:
    with pytest.raises(TraceNotFound, match="import recordings of gym_recording first"):
        load_results(LEGACY / RECORDINGS[0])
    import_trace(LEGACY / RECORDINGS[0], tmp_path / "t")
    found = load_results(tmp_path / "t")
    assert found["episode_lengths"] == [15, 18, 21, 22, 18, 33]
    assert all(map(math.isnan, found["timestamps"]))
    assert found["initial_reset_timestamp"] == 0


def test_statistics_that_are_mostly_holes_are_not_read(tmp_path: Path) -> None:
    shutil.copytree(MONITOR / "two-processes", tmp_path / "old")
    os.truncate(next((tmp_path / "old").glob("*.stats.json")), 100 << 20)
    with pytest.raises(UnreadableRecording, match="are on disk"):
        load_results(tmp_path / "old")
