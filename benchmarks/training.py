"""Compare training with its peers: steps to learn, and throughput with and without recording.

    python benchmarks/training.py learn [--seeds 0,1,2] [--at-once 3]
    python benchmarks/training.py speed [--repeats 3] [--pythons sample-factory=PYTHON] [--epochs 4]
    python benchmarks/training.py long [--only LunarLander-v3,pong]
    python benchmarks/training.py defaults --pythons cleanrl-script=PYTHON --cleanrl CHECKOUT [--seeds 1,2,3]
    python benchmarks/training.py report

learn: steps until the mean return of the last 100 episodes reaches TARGETS, for gym-trace (lag 1, its default) and
CleanRL's ppo.py with the same settings. speed: 64 lanes, batches of 2,048, in turns, each in a separate process; wall
seconds between FEW and MANY steps, and CPU seconds of all processes, which other load affects less. long: one run of
gym-trace per environment. defaults: steps until DEFAULTS are reached, each trainer with its own default settings, for
CleanRL its scripts as they are. Results go to training.json; report makes training.svg and TRAINING.md from it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "training.json"
TARGETS = {"CartPole-v1": (475.0, 500_000), "Acrobot-v1": (-100.0, 500_000)}
DEFAULTS = {"CartPole-v1": 475.0, "Acrobot-v1": -100.0, "LunarLander-v3": 200.0, "Pendulum-v1": -200.0}
DEFAULT_STEPS = 500_000
SPEED = ("CartPole-v1", "burning:CartPole-v1")
_SPEED = {"workers": 2, "lanes": 64, "rollout": 32, "learning_rate": 1e-3, "anneal": False}
LONG: dict[str, tuple[int, float, dict[str, Any]]] = {  # steps, mean return that ends it, settings
    "LunarLander-v3": (1_000_000, 200.0, {
        "workers": 2, "num_envs": 8, "rollout": 128, "minibatches": 8, "learning_rate": 1e-3,
        "learning_rate_schedule": "constant", "gamma": 0.999, "lam": 0.98}),
    "Pendulum-v1": (200_000, -180.0, {
        "workers": 2, "num_envs": 4, "rollout": 512, "epochs": 10, "minibatches": 32, "learning_rate": 1e-3,
        "gamma": 0.9, "target_kl": 0.03, "exploration_coefficient": 0.0}),
    "pong": (3_000_000, 18.0, {
        "workers": 2, "num_envs": 8, "rollout": 64, "minibatches": 8, "learning_rate": 7e-4,
        "learning_rate_schedule": "constant", "hidden": (256,), "activation": "relu"}),
}  # fmt: skip
TRAINERS: dict[str, tuple[str, dict[str, Any]]] = {
    "recorded": ("ours", {}),
    "unrecorded": ("ours", {"records": False}),
    "cleanrl": ("cleanrl", {}),
    "sb3": ("sb3", {}),
    "own": ("ours", {"defaults": True}),
    "sb3-defaults": ("sb3", {"defaults": True}),
    "cleanrl-script": ("cleanrl_script", {}),
    "sample-factory": ("sample_factory_appo", {}),
    "pufferlib": ("pufferlib_ppo", {}),
}
FEW, MANY = 8_192, 49_152
_TIMEOUT = 1800.0


# -- in a separate process --------------------------------------------------------------------------------------------


def one(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Run a job in this process."""
    from trainers import Job, Progress

    module, more = TRAINERS[name]
    more = {**more, **spec.pop("settings", {})}
    trainer, job = import_module(f"trainers.{module}"), Job(**spec)
    progress = Progress(job)
    trainer.train(job, progress, **more)
    return {"reached": progress.reached, "curve": progress.curve, "marks": progress.marks}


def run(name: str, python: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a separate process; return its result, and the seconds it took."""
    with tempfile.TemporaryDirectory(prefix="training-") as place:
        out, run_directory = Path(place, "result.json"), Path(place, "run")
        command = [python, str(Path(__file__)), "one", name, json.dumps({**spec, "directory": str(run_directory)}), out]
        begin = time.monotonic()
        with open(Path(place, "log"), "w+") as log:
            places = os.pathsep.join([str(HERE), str(HERE.parent)])  # without the packages of this environment
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": places}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
            try:
                code = process.wait(None if spec.get("settings") else _TIMEOUT)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            if code or not out.exists():
                log.seek(0)
                raise SystemExit(f"{name}: {log.read()[-2000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
        return {**found, "wall": time.monotonic() - begin}


def measured(name: str, python: str, spec: dict[str, Any]) -> dict[str, float]:
    """Return steps, and their wall and CPU seconds."""
    marks = run(name, python, spec)["marks"]
    begin, end = next(mark for mark in marks if mark[0] >= FEW), marks[-1]
    return {key: after - before for key, before, after in zip(("steps", "wall", "cpu"), begin, end)}


# -- measurements -----------------------------------------------------------------------------------------------------


def learn(given: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    jobs = [
        (name, {"environment": environment, "seed": int(seed), "steps": steps, "until": target})
        for seed in given.seeds.split(",")
        for environment, (target, steps) in TARGETS.items()
        for name in ("recorded", "cleanrl")
        if given.only is None or name in given.only.split(",")
    ]

    def learned(job: tuple[str, dict[str, Any]]) -> None:
        name, spec = job
        found = run(name, sys.executable, spec)
        print(name, spec["environment"], spec["seed"], found["reached"], f"{found['wall']:.0f} s", flush=True)
        curve = found["curve"][:: len(found["curve"]) // 200 + 1]
        keep({"name": name, **spec, "reached": found["reached"], "curve": curve})

    with ThreadPoolExecutor(given.at_once) as pool:
        list(pool.map(learned, jobs))


def defaults(given: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Run each trainer with its own defaults, as `learn` does with common settings."""
    pythons = dict(pair.split("=", 1) for pair in given.pythons.split(",") if pair)
    os.environ["CLEANRL"] = given.cleanrl
    names = given.only.split(",") if given.only else ["own", "sb3-defaults", "cleanrl-script"]
    for environment, target in DEFAULTS.items():
        for seed in map(int, given.seeds.split(",")):
            for name in names:
                spec = {"environment": environment, "seed": seed, "steps": DEFAULT_STEPS, "until": target}
                found = run(name, pythons.get(name, sys.executable), spec)
                print(name, environment, seed, found["reached"], f"{found['wall']:.0f} s", flush=True)
                ended = found["curve"][-1] if found["curve"] else None
                keep({"name": name, **spec, "reached": found["reached"], "ended": ended})


def long(given: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    for environment in given.only.split(",") if given.only else LONG:
        steps, target, settings = LONG[environment]
        spec = {"environment": environment, "steps": steps, "until": target, "settings": settings}
        found = run("recorded", sys.executable, spec)
        curve = found["curve"][:: len(found["curve"]) // 400 + 1]
        keep({"environment": environment, "reached": found["reached"], "curve": curve})


def speed(given: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    pythons = dict(pair.split("=", 1) for pair in given.pythons.split(",") if pair)
    names = [name for name in TRAINERS if name in given.only.split(",")] if given.only else list(TRAINERS)
    names = [name for name in names if name in pythons or name not in ("sample-factory", "pufferlib")]
    for turn in range(given.repeats):
        for environment in SPEED:
            for name in names if turn % 2 == 0 else reversed(names):
                spec = {"environment": environment, "seed": turn, "steps": MANY, "epochs": given.epochs, **_SPEED}
                result = measured(name, pythons.get(name, sys.executable), spec)
                keep({"name": name, "environment": environment, "turn": turn, "epochs": given.epochs, **result})
                frames = (f"{result['steps'] / result[key]:,.0f} frames per {key} second" for key in ("wall", "cpu"))
                print(name, environment, *frames, flush=True)


def main() -> None:
    if sys.argv[1:2] == ["one"]:
        _, _, name, spec, out = sys.argv
        Path(out).write_text(json.dumps(one(name, json.loads(spec))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("learn", "speed", "long", "defaults", "report"))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--at-once", type=int, default=1, help="parallel jobs of learn")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument(
        "--pythons", default="", help="NAME=PYTHON of contestants with their own environment, comma-separated"
    )
    parser.add_argument("--cleanrl", default="", help="a checkout of CleanRL, for its own defaults")
    parser.add_argument("--only", help="comma-separated contestants")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    results = json.loads(given.results.read_text()) if given.results.exists() else {}
    if given.what != "report":
        kept = results.setdefault(given.what, [])

        def keep(result: dict[str, Any]) -> None:
            kept.append(result)
            given.results.write_text(json.dumps(results) + "\n")

        {"learn": learn, "speed": speed, "long": long, "defaults": defaults}[given.what](given, keep)
    from training_report import drawn, training_markdown

    (HERE / "TRAINING.md").write_text(training_markdown(results, TARGETS))
    drawn(results, TARGETS, HERE / "training.svg")


if __name__ == "__main__":
    main()
