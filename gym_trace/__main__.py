"""python -m gym_trace: the command line, where gym-trace itself is not on the PATH."""

from __future__ import annotations

from gym_trace_cli.main import cli

if __name__ == "__main__":
    cli(prog_name="gym-trace")
