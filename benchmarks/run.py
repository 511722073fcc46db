"""Measure gym-trace and its peers, and write RESULTS.md, results.json and two charts next to this file.

    python benchmarks/run.py [--quick] [--only cartpole,gym-trace] [--gym-recording PATH]

make bench runs it in a separate environment.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report
import workloads
from contestants import TITLES
from peers import HERE, Unavailable, Worker, interpreter
from schedule import Bench
from stored import machine, rounded

REPEATS = 3  # about 20 minutes on two cores
_PYTHON_OPTIONS = {"envlogger": "envlogger_python", "lerobot": "lerobot_python", "gym-recording": "gym_python"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="number of repetitions")
    parser.add_argument("--steps-scale", type=float, default=1.0, help="factor on all steps and seconds")
    parser.add_argument("--quick", action="store_true", help="smoke test: one short repetition")
    parser.add_argument("--only", default="", help="comma-separated workloads and contestants")
    parser.add_argument("--output", type=Path, default=HERE, help="output directory")
    parser.add_argument("--gym-recording", metavar="PATH", help="checkout of openai/gym-recording")
    parser.add_argument("--gym-python", metavar="PYTHON", help="interpreter with gym 0.9.7; default: create one")
    parser.add_argument("--envlogger-python", metavar="PYTHON", help="interpreter with envlogger; default: create one")
    parser.add_argument("--lerobot-python", metavar="PYTHON", help="interpreter with lerobot; default: create one")
    given = parser.parse_args()
    if given.quick:
        given.repeats, given.steps_scale = 1, 0.03
    given.output.mkdir(parents=True, exist_ok=True)  # fail now, not after an hour
    return given


def started(given: argparse.Namespace, names: list[str], log: Any) -> tuple[dict[str, Worker], dict[str, str]]:
    """Start a worker per contestant; return the workers, and the reasons for missing ones."""
    workers, missing = {}, {}
    for name in names:
        try:
            if name == "gym-recording" and not given.gym_recording:
                raise Unavailable("needs a checkout; pass --gym-recording PATH")
            python = interpreter(name, vars(given).get(_PYTHON_OPTIONS.get(name, "")))
            workers[name] = Worker(name, python, log, given.gym_recording if name == "gym-recording" else None)
        except Unavailable as error:
            missing[name] = str(error)
            print(f"{name}: {error}", flush=True)
    return workers, missing


def main() -> None:
    given = arguments()
    begin = time.monotonic()
    chosen = set(filter(None, given.only.split(",")))
    if unknown := chosen - {*TITLES, *workloads.WORKLOADS}:
        sys.exit(f"--only: unknown workload or contestant: {', '.join(sorted(unknown))}")
    names = [name for name in TITLES if name in chosen] or list(TITLES)
    steps = [w for w in [*workloads.SINGLE, *workloads.VECTOR] if w.name in chosen]
    spent: dict[str, int] = {}
    with tempfile.TemporaryFile() as log:
        workers, missing = started(given, names, log)
        bench = Bench(workers, steps or [*workloads.SINGLE, *workloads.VECTOR], given.repeats, given.steps_scale)
        try:
            sections = [bench.recording_and_reading, bench.kills, bench.opening]
            if "gym-trace" in workers:
                sections += [bench.sizes, bench.growth, bench.startup]
            for section in sections if chosen else [*sections, bench.collect]:
                started_at = time.monotonic()
                section()
                spent[section.__name__.replace("_", " ")] = round(time.monotonic() - started_at)
        finally:
            for worker in workers.values():
                worker.close()
            bench.close()
    paths = ("gym_recording", *_PYTHON_OPTIONS.values())
    results = {
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        # The command line without paths of this machine.
        "command": " ".join(
            ["make bench"] + ["--quick"] * given.quick + ["--only " + given.only] * bool(given.only)
            + [f"--repeats {given.repeats}"] * (not given.quick and given.repeats != REPEATS)
            + [f"--{name.replace('_', '-')} {'PATH' if name == 'gym_recording' else 'PYTHON'}"
               for name in paths if getattr(given, name)]
        ),
        "repeats": given.repeats,
        "scale": given.steps_scale,
        "seconds": round(time.monotonic() - begin),
        "sections": spent,
        "versions": {name: worker.versions for name, worker in workers.items()},
        "notes": {name: worker.note for name, worker in workers.items()},
        "missing": missing,
        **bench.results,
    }  # fmt: skip
    # One line per contestant.
    (given.output / "results.json").write_text(json.dumps(rounded(results)).replace("}], ", "}],\n") + "\n")
    report.write(results, given.output)
    print(f"{results['seconds'] / 60:.1f} minutes; {given.output / 'RESULTS.md'}")


if __name__ == "__main__":
    main()
