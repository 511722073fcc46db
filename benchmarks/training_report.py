"""Tables and curves of the results of training.py."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import charts
from matplotlib import pyplot

TITLES = {
    "recorded": "gym-trace, recording",
    "unrecorded": "gym-trace, not recording",
    "cleanrl": "CleanRL's ppo.py",
    "sb3": "Stable-Baselines3",
    "sample-factory": "Sample Factory",
}
_ABOUT = """Measured with `python benchmarks/training.py` on two processor cores. Throughput is of all processes, in
turns, on an otherwise idle machine: CleanRL and Stable-Baselines3 have one process, the others two workers and a
learner. Steps to learn are with CleanRL's settings (4 lanes, rollouts of 128, learning rate annealed from 2.5e-4),
where the heading does not say "by default"."""
_BY_DEFAULT = """Each trainer with its own default settings, three seeds, at most 500,000 steps:
`gym_trace.train(make_env, directory)`, `PPO("MlpPolicy", env)` of Stable-Baselines3, and CleanRL's `ppo.py` (for
Pendulum `ppo_continuous_action.py`, which plans for 1,000,000 steps) as it is, with Gymnasium 0.29 and LunarLander-v2.
Stable-Baselines3 and CleanRL publish better settings for single environments, which are not used here."""
DEFAULT_NAMES = {"own": "gym-trace", "sb3-defaults": "Stable-Baselines3", "cleanrl-script": "CleanRL"}
NAMES = {"burning:CartPole-v1": "CartPole-v1, 50 µs added per step", "pong": "ALE/Pong-v5, 42 x 42, 4 frames"}


def training_markdown(results: dict[str, Any], targets: dict[str, tuple[float, int]]) -> str:
    parts = ["# Training", _ABOUT, "![mean returns over steps](training.svg)"]
    for environment, (target, _) in targets.items():
        rows = [_learnt(results, environment, name) for name in ("recorded", "cleanrl")]
        parts.append(f"## {environment}: steps to a mean return of {target:g} over 100 episodes")
        parts.append(_table(("", "median", "each seed"), [row for row in rows if row]))
    if "defaults" in results:
        parts += ["## Steps to learn by default", _BY_DEFAULT, _by_default(results["defaults"])]
    for environment in dict.fromkeys(turn["environment"] for turn in results.get("speed", [])):
        parts.append(f"## {NAMES.get(environment, environment)}: 64 lanes, batches of 2,048, four epochs")
        parts.append(
            _table(
                (
                    "",
                    "frames per second",
                    "ratio to Sample Factory",
                    "frames per CPU second",
                    "ratio to Sample Factory",
                ),
                _speeds(results, environment),
            )
        )
    for found in results.get("long", []):
        steps, mean = found["curve"][-1]
        name = NAMES.get(found["environment"], found["environment"])
        parts.append(f"{name}, one run: a mean return of {mean:.1f} over the last 100 episodes after {steps:,} steps.")
    return "\n\n".join(parts) + "\n"


def _learnt(results: dict[str, Any], environment: str, name: str) -> tuple[str, ...] | None:
    runs = [run for run in results.get("learn", []) if (run["name"], run["environment"]) == (name, environment)]
    if not runs:
        return None
    reached = [run["reached"] for run in runs]
    middle = statistics.median(steps or float("inf") for steps in reached)
    return TITLES[name], f"{middle:,.0f}", ", ".join(f"{steps:,}" if steps else "never" for steps in reached)


def _by_default(runs: list[dict[str, Any]]) -> str:
    rows = []
    for environment, until in dict.fromkeys((run["environment"], run["until"]) for run in runs):
        cells = [f"{environment}, {until:g}"]
        for name in DEFAULT_NAMES:
            reached = [run["reached"] for run in runs if (run["name"], run["environment"]) == (name, environment)]
            cells.append(", ".join(f"{steps:,}" if steps else "never" for steps in reached))
        rows.append(tuple(cells))
    return _table(("environment, mean return of 100 episodes", *DEFAULT_NAMES.values()), rows)


def _speeds(results: dict[str, Any], environment: str) -> list[tuple[str, ...]]:
    turns = [turn for turn in results["speed"] if turn["environment"] == environment]
    rows = []
    for name, title in TITLES.items():
        own = {turn["turn"]: turn for turn in turns if turn["name"] == name}
        if own:
            cells = []
            for key in ("wall", "cpu"):
                middle = statistics.median(turn["steps"] / turn[key] for turn in own.values())
                cells += [f"{middle:,.0f}", _ratios(turns, own, "sample-factory", key)]
            rows.append((title, *cells))
    return rows


def _ratios(turns: list[dict[str, Any]], own: dict[int, dict[str, Any]], peer: str, key: str) -> str:
    """Format ratios of frames per second to a peer: the median, and each turn. key: "wall" or "cpu"."""
    peers = {turn["turn"]: turn for turn in turns if turn["name"] == peer}
    both = [(mine, peers[turn]) for turn, mine in own.items() if turn in peers]
    found = sorted(mine["steps"] / mine[key] / (other["steps"] / other[key]) for mine, other in both)
    return f"{statistics.median(found):.2f} (turns: {', '.join(f'{ratio:.2f}' for ratio in found)})" if found else "-"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---", *["---:"] * (len(head) - 1)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def drawn(results: dict[str, Any], targets: dict[str, tuple[float, int]], path: Path) -> None:
    """Draw mean returns over steps: gym-trace and CleanRL, and long runs of gym-trace."""
    panels = [*targets, *(found["environment"] for found in results.get("long", []))]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(3.2 * len(panels), 2.8), squeeze=False)
    for axis, environment in zip(axes[0], panels):
        axis.set_title(NAMES.get(environment, environment), fontsize=10)
        axis.set_xlabel("1,000 steps")
        for run in [*results.get("learn", []), *results.get("long", [])]:
            if run["environment"] == environment:
                ours = run.get("name", "recorded") == "recorded"
                label = TITLES["recorded" if ours else "cleanrl"] if run.get("seed", 0) == 0 else None
                steps, means = zip(*run["curve"])
                colour = charts.OUR_COLOUR if ours else charts.SECOND_COLOUR
                axis.plot([s / 1000 for s in steps], means, color=colour, label=label, linewidth=1)
    axes[0][0].set_ylabel("mean return, 100 episodes")
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
