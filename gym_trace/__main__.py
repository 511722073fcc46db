"""python -m gym_trace: the command line where gym-trace is not on the PATH."""

from __future__ import annotations

import os
import sys

# With -m, Python looks for modules in the current directory first, which may be untrusted.
if sys.path[:1] == [os.getcwd()] and not __file__.startswith(os.path.join(os.getcwd(), "gym_trace", "")):
    del sys.path[0]

from gym_trace_cli.start import main

if __name__ == "__main__":
    main(prog_name="gym-trace")
