"""gym-trace record -j: several worker processes."""

import json
import os
import signal
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from long_tests import LONG
from shell import HEARING, ok, process, run, wait_for
from worker_episodes import children, whole_episodes

from gym_trace import check_trace, open_trace
from gym_trace.playback.episode_index import index_of
from gym_trace.recording.processes.run_log import EVENTS

pytestmark = pytest.mark.usefixtures("forked_workers")


def recording(directory: Path, *args: object, **kwargs: Any) -> subprocess.Popen[str]:
    """Start a practically endless recording with two workers."""
    endless = ("-j", 2, "--episodes", 10**7, "--seed", 1)
    return process("record", "CartPole-v1", "-o", directory, *endless, *args, **kwargs)


def test_several_processes_record_what_one_records(tmp_path: Path) -> None:
    for workers in (1, 2):
        words = ("--episodes", 30, "--seed", 4, "-j", workers)
        printed = ok("record", "CartPole-v1", "-o", tmp_path / str(workers), *words)
        assert "recorded 30 episodes" in printed.output
    assert "30 episodes, identical" in ok("diff", tmp_path / "1", tmp_path / "2").output
    again = ok("record", "CartPole-v1", "-o", tmp_path / "1", "--episodes", 30, "-j", 2, "--resume")
    assert "nothing to do: all 30 episodes are recorded" in again.output


def test_a_run_says_where_it_came_from(tmp_path: Path) -> None:
    words = ("--episodes", 2, "-j", 1, "--infos", "--env-arg", "max_episode_steps=5")
    ok("record", "CartPole-v1", "-o", tmp_path / "t", *words)
    start = json.loads((tmp_path / "t" / EVENTS).read_text().splitlines()[0])
    assert start["settings"]["environment"] == {"id": "CartPole-v1", "kwargs": {"max_episode_steps": 5}}
    assert start["packages"]["gymnasium"]
    assert start["provenance"] == index_of(open_trace(tmp_path / "t")).readers[0].schema["provenance"]
    assert open_trace(tmp_path / "t").metadata["run"] == start["settings"]["run"]
    assert open_trace(tmp_path / "t")[0].infos


def test_failing_workers_are_said_and_exit_with_1(tmp_path: Path) -> None:
    failed = run("record", "CartPole-v1", "-o", tmp_path / "t", "-j", 2, "--env-arg", "x=1")
    assert failed.exit_code == 1
    assert "worker 0 abandoned" in failed.output
    assert "unexpected keyword argument 'x'" in failed.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--resume"], "--resume needs -j"),
        (["--stall-timeout", 5], "--stall-timeout needs -j"),
        (["-j", 2, "--num-envs", 2, "--vectorization-mode", "sync"], "exclude --vectorization-mode"),
        (["-j", 0], "-j"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path: Path, arguments: list[object], said: str) -> None:
    refused = run("record", "CartPole-v1", "-o", tmp_path / "t", *arguments)
    assert refused.exit_code == 2
    assert said in refused.output


@pytest.mark.parametrize("number", [*([signal.SIGINT] if LONG else []), signal.SIGTERM])
def test_a_signal_saves_what_there_is_and_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    running = recording(tmp_path / "t")
    wait_for(lambda: (tmp_path / "t").is_dir() and len(list((tmp_path / "t").glob("*.gtb*"))) == 2)
    workers = children(running.pid)
    running.send_signal(number)
    output, errors = running.communicate(timeout=60)
    assert running.returncode == 128 + number
    assert "resume with the same command and --resume" in errors
    assert "recorded" in output
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    assert not check_trace(tmp_path / "t").damages
    recorded = whole_episodes(tmp_path / "t", 1)
    assert recorded
    assert not list((tmp_path / "t").glob("*.part"))
    ok("record", "CartPole-v1", "-o", tmp_path / "t", "-j", 1, "--episodes", len(recorded) + 5, "--resume")
    assert set(whole_episodes(tmp_path / "t", 1)) >= set(range(len(recorded)))


@pytest.mark.parametrize("number", [signal.SIGINT, *([signal.SIGTERM, signal.SIGHUP] if LONG else [])])
def test_a_signal_to_all_while_workers_start_ends_them_in_order(tmp_path: Path, number: signal.Signals) -> None:
    running = recording(tmp_path / "t", start_new_session=True)
    wait_for(lambda: len(children(running.pid)) >= 2)  # the first worker, and a process of multiprocessing
    os.killpg(running.pid, number)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 128 + number
    assert "Traceback" not in errors
    assert "resume with the same command and --resume" in errors
    events = [json.loads(line) for line in (tmp_path / "t" / EVENTS).read_text().splitlines()]
    assert [event["event"] for event in events if event["event"] not in ("start", "report", "end")] == []


def test_a_second_ctrl_c_ends_everything_at_once(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\n\ndef act(observation):\n    time.sleep(1000)\n    return 0\n")
    running = recording(tmp_path / "t", "--policy", "slow:act", cwd=tmp_path, script=HEARING)
    wait_for(lambda: len(children(running.pid)) >= 2 and len(list((tmp_path / "t").glob("*.ring"))) == 2)
    workers = children(running.pid)
    running.send_signal(signal.SIGINT)
    wait_for((tmp_path / "heard").exists)
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=60)
    assert running.returncode == 130
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


def test_scalars_for_tensorboard_can_be_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    ok("record", "CartPole-v1", "-o", tmp_path / "t", "-j", 1, "--episodes", 20, "--tensorboard", tmp_path / "board")
    (file,) = (tmp_path / "board").iterdir()
    data, found = file.read_bytes(), {}
    while data:
        (length,) = struct.unpack_from("<Q", data)
        event = Event.FromString(data[12 : 12 + length])
        found.update({value.tag: (event.step, value.simple_value) for value in event.summary.value})
        data = data[16 + length :]
    steps = int(open_trace(tmp_path / "t").episodes["steps"].sum())
    assert found["collect/episodes"] == (steps, 20.0)
    assert found["collect/return/mean"][1] == pytest.approx(steps / 20)


def test_an_exported_network_acts(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    # Push against the fall: the second output is larger when the pole falls to the right.
    weights = helper.make_tensor("w", kind, (4, 2), [0, 0, 0, 0, 0, 1, 0, 1])
    inputs, outputs = ([helper.make_tensor_value_info(name, kind, (None, size))] for name, size in (("x", 4), ("y", 2)))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "policy", inputs, outputs, [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, os.fspath(tmp_path / "pole.onnx"))
    for more in ([], ["-j", 2]):
        folder = tmp_path / f"t{len(more)}"
        ok("record", "CartPole-v1", "-o", folder, "--episodes", 6, "--policy", f"onnx:{tmp_path / 'pole.onnx'}", *more)
        assert open_trace(folder).episodes["return"].mean() > 100
    missing = run("record", "CartPole-v1", "-o", tmp_path / "no", "--policy", "onnx:nowhere.onnx")
    assert missing.exit_code == 2
    assert "nowhere.onnx: file not found" in missing.output
    assert not (tmp_path / "no").exists()
