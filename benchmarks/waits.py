"""Count how often functions that read a trace wait for its storage, where each read takes a round trip.

    python benchmarks/waits.py

Reads a trace of 21 chunks in memory. The counts depend on no clock: time passes in round trips, and reads that were
begun before the reader waits arrive with what it waits for. Opening is not counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
    from round_trips import CHUNKS, CONSUMERS, record_chunks, waits_of

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        short, long = record_chunks(place / "short", 2 * CHUNKS), record_chunks(place / "long", 1)
        print(f"{CHUNKS} chunks: waits (round trips)")
        print(f"{'':20}{'42 episodes':>14}{'1 episode':>14}")
        for name in CONSUMERS:
            counts = [waits_of(name, files, place) for files in (short, long)]
            print(f"{name:20}" + "".join(f"{f'{waits} ({time})':>14}" for waits, time in counts))


if __name__ == "__main__":
    main()
