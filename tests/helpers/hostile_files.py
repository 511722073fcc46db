"""More malicious traces: links and pipes, manifests, code to execute, terminal escapes, old recordings."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from hostile_forgeries import (
    BATCH,
    INFOS,
    LESS,
    LONG_NUMBER,
    MANIFEST,
    MB,
    THOUSANDS,
    Place,
    first,
    forgery,
    infos,
    put_values,
    rows_of,
)

from gym_trace.data.packing import pack

ESCAPES = "\x1b]0;owned\x07\x1b[2J\r\n\u202eevil\x9b31m"


def moved_out(place: Place, name: str) -> Path:
    """Move a file of the trace out of its directory."""
    return Path(shutil.move(place.trace / name, place.outside / name))


# -- links, pipes and other non-regular files -------------------------------------------------------------------------


@forgery
def a_batch_that_is_a_link_out_of_the_directory(place):
    place.batch.symlink_to(moved_out(place, BATCH))


@forgery
def a_manifest_that_is_a_link_out_of_the_directory(place):
    place.manifest.symlink_to(moved_out(place, MANIFEST))


@forgery
def an_open_batch_that_is_a_pipe(place):
    place.batch.unlink()
    os.mkfifo(f"{place.batch}.part")


@forgery
def a_batch_that_is_a_pipe_beside_a_sound_one(place):
    os.mkfifo(place.trace / "w.000001.gtb")


@forgery
def a_manifest_that_is_a_pipe(place):
    place.manifest.unlink()
    os.mkfifo(place.manifest)


@forgery
def a_batch_that_is_a_directory(place):
    place.batch.unlink()
    place.batch.mkdir()


@forgery
def a_manifest_that_is_a_directory(place):
    place.manifest.unlink()
    place.manifest.mkdir()


@forgery
def a_batch_that_is_an_endless_device(place):
    (place.trace / "w.000001.gtb").symlink_to("/dev/zero")
    (place.trace / "w.000002.gtb.part").symlink_to("/dev/tty")


@forgery
def a_link_that_leads_to_itself(place):
    (place.trace / "w.000001.gtb").symlink_to(place.trace / "w.000001.gtb")


@forgery
def a_manifest_that_nobody_else_wrote_for_another_writer(place):
    os.link(place.manifest, place.trace / "v.manifest.jsonl")


# -- manifests --------------------------------------------------------------------------------------------------------


@forgery
def a_manifest_of_many_lines(place):
    with open(place.manifest, "ab") as file:
        file.write(b"{}\n" * (40 * THOUSANDS))


@forgery
def a_manifest_of_many_lines_that_are_none(place):
    with open(place.manifest, "ab") as file:
        file.write(b"[\n" * (40 * THOUSANDS))


@forgery
def a_manifest_that_names_ten_thousand_batches(place):
    line = {"type": "batch", "bytes": 1, "crc32": 2, "episodes": 3, "steps": 4}
    place.lines(*({**line, "file": f"w.{number:06d}.gtb"} for number in range(10_000)))


@forgery
def a_manifest_that_names_the_same_batch_ten_thousand_times(place):
    line = place.manifest.read_bytes().splitlines()[1]
    place.lines(*[line.replace(b'"steps"', b'"bytes":1,"steps"')] * 10_000)


@forgery
def a_manifest_that_closes_ten_thousand_times(place):
    place.lines(*[{"type": "closed", "episodes": 1e999, "steps": -1}] * 10_000)


@forgery
def a_manifest_of_videos_elsewhere(place):
    video = {"type": "video", "bytes": 1, "episode": 0, "frames": 1}
    names = ("../outside/a file", "/etc/passwd", "w.video.000000.mp4", ESCAPES, "..", "\0")
    place.lines(
        *({**video, "file": name} for name in names), {**video, "file": ["x"], "episode": LONG_NUMBER % 10**4000}
    )
    (place.trace / "w.video.000000.mp4").symlink_to(place.outside / "a file")


@forgery
def a_manifest_nested_deep_and_numbers_that_are_none(place):
    place.lines(b"[" * MB, b'{"type":"closed","episodes":1e999,"steps":NaN}', b'{"type":"batch","file":' + b"9" * 6000)


@forgery
def a_manifest_of_one_line_without_an_end(place):
    place.manifest.write_bytes(b'{"type":"writer","a":"' + b"x" * (40 * MB // LESS))


@forgery
def a_thousand_writers_of_an_empty_batch(place):
    for number in range(THOUSANDS):
        (place.trace / f"v{number}.000000.gtb").touch()


@forgery
def batches_numbered_far_apart(place):
    data = place.batch.read_bytes()
    for number in (5, 999_999, 123_456_789, 999_999_999):
        (place.trace / f"w.{number:06d}.gtb").write_bytes(data)


# -- terminal escapes -------------------------------------------------------------------------------------------------


@forgery
def strings_that_steer_a_terminal(place):
    place.schema(
        split=ESCAPES,
        host=ESCAPES,
        platform=ESCAPES,
        versions={ESCAPES: ESCAPES},
        metadata={ESCAPES: ESCAPES},
        environment={"id": ESCAPES, "spec": ESCAPES, "class": ESCAPES, "wrappers": [ESCAPES], "note": ESCAPES},
        recorder={ESCAPES: ESCAPES},
    )


@forgery
def a_schema_whose_spaces_steer_a_terminal(place):
    space = {"type": "custom", "class": ESCAPES, "repr": ESCAPES}
    place.schema(observation_space={"type": "Dict", "spaces": [[ESCAPES, space]]}, action_space=space)


@forgery
def an_environment_id_that_steers_a_terminal(place):
    place.environment(id=ESCAPES, kwargs={ESCAPES: ESCAPES}, entry_point=ESCAPES)


@forgery
def columns_and_infos_that_steer_a_terminal(place):
    def change(forged):
        infos(pack({ESCAPES: ESCAPES}))(forged)
        chunk = next(chunk for chunk in forged.chunks if ("annotations", "note") in chunk.columns)
        chunk.describe(("annotations", "note"), path=["annotations", ESCAPES])

    place.forge(change)


@forgery
def a_damaged_column_whose_name_steers_a_terminal(place):
    def change(forged):
        chunk = next(chunk for chunk in forged.chunks if ("annotations", "note") in chunk.columns)
        chunk.describe(("annotations", "note"), crc=1, path=["annotations", ESCAPES])

    place.forge(change, sealed=False)


# -- deep nesting -----------------------------------------------------------------------------------------------------


@forgery
def metadata_nested_as_deep_as_messagepack_goes(place):
    value: Any = "deep"
    for _ in range(400):
        value = [{"x": value}]
    place.schema(metadata=value, environment={"id": value, "wrappers": value}, versions=value, recorder=value)


@forgery
def infos_and_rewards_nested_deep(place):
    def change(forged):
        value: Any = 1
        for _ in range(400):
            value = [value]
        for path in (INFOS, ("rewards",)):
            put_values(
                first(forged), path, [pack({"a": value} if path == INFOS else value)] * rows_of(first(forged), path)
            )

    place.forge(change)


@forgery
def a_spec_that_is_json_nested_deep(place):
    place.schema(environment={"id": "CartPole-v1", "spec": "[" * 100_000 + "]" * 100_000, "wrappers": 5})


@forgery
def a_spec_of_numbers_without_end(place):
    place.schema(environment={"id": "CartPole-v1", "spec": '{"id":' + "9" * 6000 + "}", "wrappers": [LONG_NUMBER]})


# -- environments that would execute code -----------------------------------------------------------------------------


def wrapper(entry_point: str, **kwargs: Any) -> dict[str, Any]:
    return {"name": entry_point.rpartition(":")[2], "entry_point": entry_point, "kwargs": kwargs}


@forgery
def a_wrapper_that_is_a_recorder_told_to_replace(place):
    recorder = wrapper("gym_trace:TraceRecordingWrapper", directory=str(place.outside / "victim"), on_exist="replace")
    place.environment(additional_wrappers=[recorder])


@forgery
def a_wrapper_that_records_videos_elsewhere(place):
    video = wrapper("gymnasium.wrappers:RecordVideo", video_folder=str(place.outside / "victim"))
    place.environment(additional_wrappers=[video], kwargs={"render_mode": "rgb_array"})


@forgery
def an_environment_that_opens_another_trace(place):
    place.environment(id="Replay-v0", kwargs={"directory": str(place.outside / "victim")})


@forgery
def an_environment_id_that_imports_a_module(place):
    (place.trace / "evil_module.py").write_text("open('acted', 'w').close()\n")
    place.environment(id="evil_module:Evil-v0")


@forgery
def an_entry_point_that_runs_a_command(place):
    place.environment(id="Unknown-v0", entry_point="os:system", kwargs={"command": "touch acted"})


@forgery
def an_argument_that_allows_itself_everything(place):
    kwargs = {"trust": True, "allow_import": True, "make_env": "os:system", "imports": ["evil_module"]}
    place.environment(id="evil_module:Evil-v0", kwargs=kwargs)


@forgery
def a_wrapper_that_calls_what_it_is_given(place):
    place.environment(additional_wrappers=[wrapper("gymnasium.wrappers:TransformReward", func="os:abort")])


@forgery
def a_wrapper_that_runs_a_command(place):
    place.environment(additional_wrappers=[wrapper("os:system", command="touch acted")])


@forgery
def steps_of_an_episode_limit_that_never_ends(place):
    place.environment(
        additional_wrappers=[wrapper("gymnasium.wrappers:TimeLimit", max_episode_steps=LONG_NUMBER % 10**4000)]
    )


# -- a resumed run ----------------------------------------------------------------------------------------------------


@forgery
def events_of_a_run_that_are_a_link_elsewhere(place):
    (place.trace / "events.jsonl").symlink_to(place.outside / "a file")


@forgery
def events_of_a_run_that_are_a_pipe(place):
    os.mkfifo(place.trace / "events.jsonl")


# -- old recordings in the directory ----------------------------------------------------------------------------------


def monitor(place: Place, **stats: Any) -> None:
    """Turn the trace into a directory of OpenAI Gym's Monitor."""
    shutil.rmtree(place.trace)
    place.trace.mkdir()
    content = {
        "timestamps": [1.0],
        "episode_lengths": [1],
        "episode_rewards": [1.0],
        "initial_reset_timestamp": 0.5,
        **stats,
    }
    manifest = {"stats": "openaigym.episode_batch.0.1.stats.json", "videos": [], "env_info": {"env_id": ESCAPES}}
    (place.trace / "openaigym.manifest.0.1.manifest.json").write_text(json.dumps(manifest))
    (place.trace / "openaigym.episode_batch.0.1.stats.json").write_text(json.dumps(content))


@forgery
def an_old_recording_of_absurd_numbers(place):
    huge = 10**4000
    monitor(place, timestamps=[huge], episode_lengths=[huge], episode_rewards=[float("inf")])


@forgery
def an_old_recording_whose_statistics_are_a_link(place):
    monitor(place)
    stats = "openaigym.episode_batch.0.1.stats.json"
    (place.trace / stats).symlink_to(moved_out(place, stats))


@forgery
def an_old_recording_of_millions_of_empty_lists(place):
    monitor(place)
    name = "openaigym.episode_batch.0.1.stats.json"
    (place.trace / name).write_bytes(b'{"timestamps":[' + b"[]," * (12 * MB) + b"[]]}")


@forgery
def an_old_recording_nested_deep(place):
    monitor(place)
    name = "openaigym.episode_batch.0.1.stats.json"
    (place.trace / name).write_bytes(b'{"timestamps":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


@forgery
def an_old_recording_of_arrays_that_are_not_there(place):
    shutil.rmtree(place.trace)
    place.trace.mkdir()
    array = {"__type": "ndarray", "npyfile": "a.npy", "npyoff": 0, "dtype": "<f8", "shape": [1 << 40], "order": "C"}
    array["size"] = 8 << 40
    episode = {"actions": array, "observations": array, "rewards": array}
    batch = {"episodes": [episode]}
    (place.trace / "openaigym.trace.0.1.manifest.json").write_text(json.dumps({"batches": ["b.json"]}))
    (place.trace / "b.json").write_text(json.dumps(batch))
    (place.trace / "a.npy").write_bytes(np.zeros(8).tobytes())
    os.truncate(place.trace / "a.npy", 8 << 40)
