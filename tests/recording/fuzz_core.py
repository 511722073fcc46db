"""Fuzz the C core with odd objects for some time, and compare it with pure Python.

python tests/recording/fuzz_core.py SECONDS [SEED]. It prints a seed that fails, which odd_run(),
odd_frames() of test_core take, odd_tree_run() and odd_large_run() of test_core_trees, and odd_lane_run() and
odd_slab_run() of test_core_lanes.
"""

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from test_core import odd_frames, odd_run
from test_core_lanes import odd_lane_run, odd_slab_run
from test_core_trees import odd_large_run, odd_tree_run


def fuzz(seconds: float, seed: int) -> int:
    """Return the number of runs."""
    until, runs = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        try:
            odd_run(seed + runs)
            odd_tree_run(seed + runs)
            odd_large_run(seed + runs)
            odd_frames(seed + runs)
            odd_lane_run(seed + runs)
            odd_slab_run(seed + runs)
        except BaseException:
            print(f"seed {seed + runs}", file=sys.stderr)
            raise
        runs += 1
    return runs


if __name__ == "__main__":
    start = int(sys.argv[2]) if len(sys.argv) > 2 else int(np.random.SeedSequence().entropy) % (1 << 62)
    print(f"{fuzz(float(sys.argv[1]), start)} runs of odd objects, from seed {start}")
