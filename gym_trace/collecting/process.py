"""The body of a worker process."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from multiprocessing.connection import Connection

from gym_trace.collecting.worker import Setup, Worker

# Which reach whole groups of processes.
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


def work(connection: Connection, setup: Setup) -> None:
    """The body of a worker process."""
    for number in STOP_SIGNALS:  # the parent tells us
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # what environments start is not to inherit this
    if setup.niceness:
        os.nice(setup.niceness)
    if setup.cpu is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {setup.cpu})
    if setup.num_envs is None:
        worker = Worker(connection, setup)
    else:  # vector environments need a newer Gymnasium than the rest
        from gym_trace.collecting.vector_worker import LanesWorker

        worker = LanesWorker(connection, setup)
    threading.Thread(target=worker.listen, daemon=True).start()
    try:
        worker.run()
    except Exception:  # the parent says it
        worker.say("failed", traceback.format_exc())
