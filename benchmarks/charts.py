"""Charts: gym-trace beside its peers, and costs over the size of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from contestants import TITLES
from figures import ELSEWHERE, OURS, Figures, Spread

matplotlib.use("svg")
from matplotlib import pyplot

OUR_COLOUR, PEER_COLOUR, SECOND_COLOUR, INK = "#1f6f8b", "#c3c9cf", "#d1495b", "#333333"
SHOWN = {"cartpole": "CartPole-v1", "halfcheetah": "HalfCheetah-v5", "pong": "ALE/Pong-v5"}
SHORT = {
    **TITLES,
    "minari-hdf5": "Minari (HDF5)",
    "minari-arrow": "Minari (Arrow)",
    "minari-default": "Minari (JPEG, lossy)",
    "envlogger": "EnvLogger",
    "npz": "lists + savez_compressed",
    "h5py": "h5py, append per step",
}
pyplot.rcParams.update(
    {"font.size": 9, "svg.hashsalt": "gym-trace", "svg.fonttype": "none", "axes.spines.top": False,
     "axes.spines.right": False, "text.color": INK, "axes.labelcolor": INK, "font.family": "sans-serif",
     "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"]}
)  # fmt: skip


def recording(figures: Figures, path: Path) -> None:
    """Draw µs added per step above, bytes per step below; one column per environment, one bar per contestant."""
    shown = [name for name in SHOWN if name in figures.recorded]
    if not shown:
        return
    figure, axes = pyplot.subplots(2, len(shown), figsize=(3.6 * len(shown) + 1.2, 5.6), squeeze=False)
    for column, workload in enumerate(shown):
        for row, (attribute, label) in enumerate((("added", "µs added per step"), ("bytes", "bytes per step on disk"))):
            _bars(axes[row][column], _medians(figures, workload, attribute), label, names=column == 0)
        axes[0][column].set_title(SHOWN[workload], fontsize=11)
    figure.tight_layout()
    _save(figure, path)


def _medians(figures: Figures, workload: str, attribute: str) -> dict[str, float]:
    found = {}
    for name in TITLES:
        recorded = figures.recorded[workload].get(name)
        spread = getattr(recorded, attribute) if recorded else None
        if spread is not None:
            found[name] = spread.median
        elif name == "gym-recording" and workload == "cartpole" and recorded is None:
            found[name] = ELSEWHERE[attribute]
    return found


def _bars(axis: Any, found: dict[str, float], label: str, names: bool) -> None:
    """Draw one row per contestant in every panel, so that all panels share the names on the left."""
    rows = list(TITLES)
    for name, value in found.items():
        place = len(rows) - rows.index(name)
        axis.barh(place, max(value, 0.05), color=OUR_COLOUR if name == OURS else PEER_COLOUR, height=0.7)
        text = f" {value:,.0f}" if value >= 100 else f" {value:.3g}" if value > 0 else " in the noise"
        axis.text(
            1.04 * max(value, 0.05), place, text, va="center", weight="bold" if name == OURS else "normal", fontsize=8
        )
    for name in rows:
        if name not in found:
            axis.text(0.01, len(rows) - rows.index(name), "–", va="center", transform=axis.get_yaxis_transform())
    axis.set_xscale("log")
    if found:
        least = max(0.05, min(found.values()))
        axis.set_xlim(least / 3, max(found.values()) * 8)
    axis.set_yticks([len(rows) - i for i in range(len(rows))], [SHORT[name] for name in rows] if names else [])
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel(label + " (log)")


def growth(figures: Figures, path: Path) -> None:
    """Draw the cost of recording above, and of playback below."""
    counts = sorted(figures.growth)
    figure, axes = pyplot.subplots(2, 3, figsize=(11, 6))
    recorded = [figures.growth[count][0] for count in counts]
    read = [figures.growth[count][1] for count in counts]

    _line(axes[0][0], counts, [r.added for r in recorded], [1.0] * len(counts), "per step")
    _line(axes[0][0], counts, [r.added for r in recorded], [1.5] * len(counts), "per episode")
    axes[0][0].set(title="recording", ylabel="µs added")
    axes[0][0].legend(frameon=False, loc="lower left")
    rows = figures.seal_times()
    axes[0][1].plot([last for _, last, _ in rows], [1e3 * s for *_, s in rows], "o-", color=OUR_COLOUR)
    axes[0][1].set(title="sealing a batch", ylabel="ms", xlabel="batches in the trace")
    _line(axes[0][2], counts, [r.memory for r in recorded], [1.0] * len(counts))
    axes[0][2].set(title="memory while recording", ylabel="MB")

    _line(axes[1][0], counts, [r.open for r in read], [1e6 / count for count in counts])
    axes[1][0].set(title="opening", ylabel="µs per episode")
    _line(axes[1][1], counts, [r.p50 for r in read], [1e3] * len(counts), "p50")
    _line(axes[1][1], counts, [r.p99 for r in read], [1e3] * len(counts), "p99")
    axes[1][1].set(title="reading a random episode", ylabel="ms")
    axes[1][1].legend(frameon=False, loc="upper left")
    _line(axes[1][2], counts, [r.again for r in read], [1.0] * len(counts))
    axes[1][2].set(title="playing all back", ylabel="million steps/s")

    for axis in axes.flat:
        axis.set_xscale("log")
        axis.set_ylim(0, 1.15 * axis.get_ylim()[1])
        if not axis.get_xlabel():
            axis.set_xlabel("episodes in the trace")
    figure.tight_layout()
    _save(figure, path)


def _line(axis: Any, counts: list[int], spreads: list[Spread | None], units: list[float], label: str = "") -> None:
    """Draw medians, with bars from min to max."""
    points = [(count, s, unit) for count, s, unit in zip(counts, spreads, units) if s is not None]
    axis.errorbar(
        [count for count, *_ in points],
        [s.median * unit for _, s, unit in points],
        yerr=[
            [(s.median - s.least) * unit for _, s, unit in points],
            [(s.most - s.median) * unit for _, s, unit in points],
        ],
        fmt="o-",
        color=SECOND_COLOUR if axis.lines else OUR_COLOUR,
        capsize=3,
        label=label,
    )


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, facecolor="white", metadata={"Date": None})
    pyplot.close(figure)
