"""Forks a recording to a URL for each line of its input, "UID ACKNOWLEDGED", and prints its process id.

    python forked_recordings.py URL

Each recording appends the number of an episode to the file ACKNOWLEDGED once its last step has returned.
"""

from __future__ import annotations

import os
import sys

from scripted_env import CountingEnv

from gym_trace import TraceRecordingWrapper
from gym_trace.format import batch_files
from gym_trace.recording.publishing import spool

LENGTH = 5


def record(url: str, uid: str, acknowledged: str) -> None:
    batch_files.BATCH_FRAGMENTS = 20
    spool._CHECK_SECONDS = 0.02
    fd = os.open(acknowledged, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    env = TraceRecordingWrapper(CountingEnv(length=LENGTH), url, on_exist="append", uid=uid, flush_seconds=0.02)
    for episode in range(10**9):
        env.reset(seed=episode)
        for _ in range(LENGTH):
            env.step(0)
        os.write(fd, f"{episode}\n".encode())


if __name__ == "__main__":
    for line in sys.stdin:
        child = os.fork()
        if not child:
            try:
                record(sys.argv[1], *line.split())
            finally:
                os._exit(1)
        print(child, flush=True)
        os.waitpid(child, 0)
        print("gone", flush=True)
