"""A signal ends any command: it cleans up, prints at most one line, and its exit code names the signal."""

import os
import pty
import signal
import socket
import subprocess
import sys
from pathlib import Path

import forked_python
import pytest
from long_tests import LONG
from runs import recorded
from shell import process, wait_for
from terminals import written

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
# A command that hangs when its output is complete, but not renamed into place yet.
HANGING = """
import pathlib, signal, sys, time
from gym_trace.tools.editing import in_place
from gym_trace.storage import staging
from gym_trace_cli.main import cli

def hang(*_):
    pathlib.Path("hangs").touch()
    time.sleep(60)

{patched} = hang
cli()
"""
SYNC = "staging.sync_files"
COMMANDS = {
    "repair": (SYNC, ["edit", "repair", "t", "-o", "new"]),
    "merge": (SYNC, ["edit", "merge", "t", "-o", "new"]),
    "in place": ("in_place.sync_files", ["edit", "compact", "t", "--in-place"]),
    "export": ("staging._sync_file", ["export", "t", "--to", "jsonl", "-o", "new"]),
}
CASES = [("repair", signal.SIGTERM), ("in place", signal.SIGHUP), ("export", signal.SIGTERM)]


@pytest.mark.parametrize(
    ("command", "number"), [(command, number) for command in COMMANDS for number in WORDS] if LONG else CASES
)
def test_a_signal_ends_a_command_and_nothing_is_left(tmp_path: Path, command: str, number: signal.Signals) -> None:
    recorded(tmp_path / "t", episodes=2)
    patched, words = COMMANDS[command]
    script = HANGING.replace("{patched}", patched)
    running = forked_python.Popen(
        [sys.executable, "-c", script, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for(lambda: (tmp_path / "hangs").exists() or running.poll() is not None)
    assert len(list(tmp_path.iterdir())) > 2
    running.send_signal(number)
    _, errors = running.communicate(timeout=60)
    assert (running.returncode, errors.decode()) == (128 + number, f"{WORDS[number]}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hangs", "t"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_while_an_object_store_does_not_answer(number: signal.Signals) -> None:
    pytest.importorskip("obstore")
    with socket.create_server(("127.0.0.1", 0)) as server:
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        running = process("info", "s3://bucket/trace", env={**os.environ, **keys, "AWS_ENDPOINT_URL": endpoint})
        connection, _ = server.accept()
        with connection:
            running.send_signal(number)
            _, errors = running.communicate(timeout=55)  # the request ends after 60 seconds
    assert (running.returncode, errors) == (128 + number, f"{WORDS[number]}\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT] if LONG else [signal.SIGTERM])
def test_a_signal_leaves_a_cursor_to_be_seen(tmp_path: Path, number: signal.Signals) -> None:
    recorded(tmp_path / "t", episodes=2)
    ours, theirs = pty.openpty()
    script = HANGING.replace("{patched}", SYNC)
    command = [sys.executable, "-c", script, "edit", "repair", "t", "-o", "new"]
    running = forked_python.Popen(
        command, cwd=tmp_path, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    wait_for(lambda: (tmp_path / "hangs").exists() or running.poll() is not None)
    running.send_signal(number)
    assert running.wait(60) == 128 + number
    drawn = written(ours)
    assert drawn.rfind(b"\x1b[?25h") > drawn.rfind(b"\x1b[?25l") > -1


EARLY = """
import sys, time

class Slow:  # what is imported takes its time
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            print("ready", flush=True)
            time.sleep(60)

sys.meta_path.insert(0, Slow())
from gym_trace_cli.start import main
main()
"""


@pytest.mark.parametrize("name", ["gym_trace_cli.main", "gym_trace_cli.check"])
def test_ctrl_c_during_start_prints_no_traceback(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-c", EARLY.format(name=name), "check", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert errors in (b"", b"interrupted\n")


FORKING = """
import os, signal, sys, time
from gym_trace_cli.stopping import ended_by_signals

with ended_by_signals():
    read, write = os.pipe()
    child = os.fork()
    if not child:
        while True:  # deaf to exceptions
            try:
                os.write(write, b".")
                time.sleep(60)
            except BaseException:
                pass
    os.read(read, 1)
    os.kill(child, signal.SIGTERM)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -signal.SIGTERM)
"""


def test_processes_forked_by_an_environment_end_by_sigterm() -> None:
    assert forked_python.run([sys.executable, "-c", FORKING], timeout=60).returncode == 0
