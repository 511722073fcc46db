"""Entry point: Ctrl-C during imports ends the command without a traceback, and short commands start quickly."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from types import FrameType

from gym_trace_cli.exit_codes import SIGNALLED

_SHORT = ("ls", "info", "stats", "cat", "sql", "check")  # commands that run no code of users


def main(prog_name: str | None = None) -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    if sys.argv[1:2] and sys.argv[1] in _SHORT:
        _save_time(sys.argv[1])
    from gym_trace_cli.main import cli

    cli(prog_name=prog_name)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(SIGNALLED + number)  # the command has not begun, or is complete


def _save_time(command: str) -> None:
    """Save a third of the CPU time of a command that has little to do."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's threads spin for 30 ms each, and have no work
    gc.set_threshold(50_000)  # imports make many objects, and little garbage
    atexit.register(gc.freeze)  # Python would look for garbage once more
    if command == "sql":
        sys.meta_path.insert(0, _WithoutPandas())


class _WithoutPandas:
    """Hide pandas, which DuckDB and pyarrow import where it is installed: that takes as long as a query."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
