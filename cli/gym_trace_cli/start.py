"""Entry point: Ctrl-C during imports ends the command without a traceback."""

from __future__ import annotations

import os
import signal
from types import FrameType

from gym_trace_cli.exit_codes import SIGNALLED


def main(prog_name: str | None = None) -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from gym_trace_cli.main import cli

    cli(prog_name=prog_name)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(SIGNALLED + number)  # the command has not begun, or is complete
