"""python -m gym_trace: the command line, where gym-trace itself is not on the PATH."""

from __future__ import annotations

from gym_trace_cli.start import main

if __name__ == "__main__":
    main(prog_name="gym-trace")
