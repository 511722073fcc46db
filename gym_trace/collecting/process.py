"""The body of a worker process."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from multiprocessing.connection import Connection

from gym_trace.collecting.worker import Setup, Worker


def work(connection: Connection, setup: Setup) -> None:
    """The body of a worker process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # which reach whole groups of processes; the parent tells us
        signal.signal(number, signal.SIG_IGN)
    if setup.niceness:
        os.nice(setup.niceness)
    if setup.cpu is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {setup.cpu})
    if setup.num_envs is None:
        worker = Worker(connection, setup)
    else:  # vector environments need a newer Gymnasium than the rest
        from gym_trace.collecting.lanes_worker import LanesWorker

        worker = LanesWorker(connection, setup)
    threading.Thread(target=worker.listen, daemon=True).start()
    try:
        worker.run()
    except Exception:  # the parent says it
        worker.say("failed", traceback.format_exc())
