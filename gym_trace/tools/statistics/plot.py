"""Plots of the episodes of a trace, and of the learning curves of runs, drawn by matplotlib."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from gym_trace.data.values import Array
from gym_trace.data.vocabulary import OUTCOMES
from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.episode_table import outcome_codes
from gym_trace.playback.trace import TraceLike, as_trace
from gym_trace.printable import printable
from gym_trace.storage.staging import replaced_file
from gym_trace.tools.statistics.comparison import RunComparison
from gym_trace.tools.statistics.summary import EpisodeArrays, episode_arrays, grouping

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter
except ImportError as missing:
    raise MissingExtra(f"plots need matplotlib ({missing}): pip install 'gym-trace[plot]'") from missing

SUFFIXES = (".svg", ".png")
_MOST_DOTS = 1000  # with more episodes, means are drawn instead of dots
_MEANS = 400  # across the plot
_BINS = 40
_HUGE = 1e100  # values of this size or more are left out: matplotlib squares some
_MOST_GROUPS, _MOST_OBJECTIVES = 7, 4
_MOST_CHARACTERS = 32  # limit of a name
# Okabe and Ito, "Color Universal Design" (2008): distinct also for the colour-blind.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31")
_GREY, _INK, _GRID = "#9aa0a6", "#333333", "#e6e6e6"
_OUTCOME_COLOURS = dict(zip(OUTCOMES, (_GREY, *_COLOURS)))
_DASHES = ("-", "--", ":")
_AXIS_LABELS = {"steps": "environment steps", "episodes": "episodes", "time": "seconds since the start"}
_STYLE: Any = {
    "font.family": "sans-serif", "font.size": 9, "text.color": _INK, "text.usetex": False, "axes.labelcolor": _INK,
    "axes.edgecolor": _GREY, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": _GRID, "axes.axisbelow": True, "xtick.color": _INK, "ytick.color": _INK, "axes.titlesize": 9,
    "svg.fonttype": "none", "svg.hashsalt": "gym-trace",
}  # fmt: skip


def plot_episodes(trace: TraceLike, path: str | os.PathLike[str], *, by: str | None = None) -> None:
    """Draw returns and lengths over the episodes, their histograms, and the outcomes, as SVG or PNG.

    The same trace gives the same bytes with the same matplotlib. An existing file is replaced. Only complete episodes
    have a return and a length, as in summarize. Beyond 1,000 episodes, neighbours are drawn as one mean, with a band
    from min to max.

    Args:
        trace: a trace, a view, or a directory.
        path: the file to write; ends in .svg or .png.
        by: "split", "writer" or "outcome": one colour for each group.

    Raises:
        InvalidOption: another ending of path, or an unknown by.
        TraceNotFound: no trace in the directory.
        OSError: the file cannot be written.

    Examples:
        >>> gym_trace.plot_episodes("traces/cartpole", "returns.svg")
    """
    ending = _ending(path)
    trace = as_trace(trace)
    codes = outcome_codes(index_of(trace))
    names, _, groups = grouping(trace, by, codes)
    episodes = episode_arrays(trace, codes, groups)
    episodes = episodes.take(np.argsort(episodes.start, kind="stable"))
    ids = dict.fromkeys(writer.about_or_empty.environment.get("id") for writer in index_of(trace).readers)
    counts = f"{len(episodes.steps):,} episodes, {int(episodes.steps.sum()):,} steps"
    environments = _cut(", ".join(str(env_id) for env_id in ids if env_id))
    title = "   ·   ".join(filter(None, (_cut(trace.directory.name), environments, counts)))
    _save(path, ending, lambda: _figure(episodes, names, by, printable(title)))


def plot_runs(comparison: RunComparison, path: str | os.PathLike[str]) -> None:
    """Draw the learning curves of compared runs, as SVG or PNG: one colour for each name.

    A name of several runs has a thick line, the mean of its runs, with a band, the 95 % interval of the mean; and a
    thin line for each run. The same comparison gives the same bytes with the same matplotlib. An existing file is
    replaced.

    Args:
        comparison: what compare() returned.
        path: the file to write; ends in .svg or .png.

    Raises:
        InvalidOption: another ending of path.
        OSError: the file cannot be written.

    Examples:
        >>> gym_trace.plot_runs(gym_trace.compare({"random": ["traces/cartpole"]}), "runs.svg")
    """
    _save(path, _ending(path), lambda: _runs_figure(comparison))


def _ending(path: str | os.PathLike[str]) -> str:
    ending = os.path.splitext(path)[1].lower()
    if ending not in SUFFIXES:
        raise InvalidOption(f"{os.fspath(path)}: unknown ending; choose a name that ends in {' or '.join(SUFFIXES)}")
    return ending


def _save(path: str | os.PathLike[str], ending: str, make_figure: Callable[[], Figure]) -> None:
    with warnings.catch_warnings(), matplotlib.rc_context(_STYLE):
        warnings.filterwarnings("ignore", "Glyph .* missing")  # names may have letters that the font lacks
        figure = make_figure()
        with replaced_file(path) as staged:
            metadata = {"Date": None} if ending == ".svg" else {}
            figure.savefig(staged, format=ending[1:], dpi=150, facecolor="white", metadata=metadata)


def _figure(episodes: EpisodeArrays, names: Sequence[str], by: str | None, title: str) -> Figure:
    counted = episodes.counted(by == "outcome")
    panels = dict(_quantities(episodes, counted))
    figure = Figure(figsize=(9, 2.3 * len(panels) + 1.2), layout="constrained")
    figure.suptitle(title, fontsize=10, x=0.01, ha="left", parse_math=False)
    heights = [2.3] * len(panels) + [0.5]
    axes: Any = figure.subplots(
        len(panels) + 1, 2, squeeze=False, gridspec_kw={"width_ratios": (4, 1), "height_ratios": heights}
    )
    positions = np.arange(len(episodes.steps))
    groups = list(_coloured(episodes.group, names, counted))
    count = int(np.count_nonzero(counted))
    per_mean = max(1, count // 20) if count <= _MOST_DOTS else None
    for (line_axis, histogram_axis), (label, values) in zip(axes, panels.items()):
        good = counted & (np.abs(values) < _HUGE)
        line_axis.set_ylabel(label)
        if left_out := np.count_nonzero(counted & ~good):
            line_axis.set_title(f"left out: {left_out:,} with NaN or beyond {_HUGE:g}", loc="right")
        for _, mask, colour in groups:
            _draw_line(line_axis, positions[good & mask], values[good & mask], len(positions), colour, per_mean)
        _draw_histogram(histogram_axis, [(values[good & mask], colour) for _, mask, colour in groups])
        _format_axes(line_axis, histogram_axis, len(positions), values[good])
    explanation = "   (line: mean, band: min to max)"
    if per_mean is not None:
        explanation = f"   (line: means of {per_mean})" if per_mean > 1 else ""
    which = (
        "episodes"
        if counted.all()
        else f"{count:,} {'episodes with a step' if by == 'outcome' else 'complete episodes'}"
    )
    axes[-2][0].set_xlabel(f"{which} in the order of their start{explanation}")
    axes[-2][1].set_xlabel("episodes")
    if by is not None:
        _legend(axes[0][0], [(name, colour) for name, _, colour in groups])
    _draw_outcomes(figure, axes[-1], episodes.outcome)
    return figure


def _runs_figure(comparison: RunComparison) -> Figure:
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axis: Any = figure.subplots()
    environments = dict.fromkeys(one for group in comparison.groups for one in group.environments if one)
    figure.suptitle(printable(_cut(", ".join(environments))), fontsize=10, x=0.01, ha="left", parse_math=False)
    entries, has_band = [], False
    for number, group in enumerate(comparison.groups):
        colour, dashes = _COLOURS[number % len(_COLOURS)], _DASHES[number // len(_COLOURS) % len(_DASHES)]
        lines = np.array([*group.curves, group.low, group.high, group.curve])
        *runs, low, high, curve = np.where(np.abs(lines) < _HUGE, lines, np.nan)
        name = _cut(group.name)
        if len(runs) > 1:
            name, has_band = f"{name} ({len(runs)} runs)", True
            for run in runs:
                axis.plot(comparison.grid, run, color=colour, linestyle=dashes, linewidth=0.6, alpha=0.5)
            axis.fill_between(comparison.grid, low, high, color=colour, alpha=0.2, linewidth=0)
        axis.plot(comparison.grid, curve, color=colour, linestyle=dashes, linewidth=1.8)
        entries.append((name, colour))
    if not any(np.isfinite(line.get_ydata()).any() for line in axis.lines):
        _say_empty(axis)
    if comparison.threshold is not None and abs(comparison.threshold) < _HUGE:
        axis.axhline(comparison.threshold, color=_GREY, linewidth=1, linestyle="--")
    axis.set_xlabel(_AXIS_LABELS[comparison.x] + "   (line: mean, band: its 95 % interval)" * has_band)
    axis.set_ylabel("return" if comparison.window == 1 else f"return, mean of {comparison.window} episodes")
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_xlim(0, 1.01 * (comparison.grid[-1] or 1))
    _legend(axis, entries)
    return figure


def _quantities(episodes: EpisodeArrays, counted: Array) -> Iterator[tuple[str, Array]]:
    """Yield label and values of each panel."""
    has_objectives = counted & ~np.isnan(episodes.objectives).all(axis=1)
    if not has_objectives.any() or (counted & ~has_objectives).any():
        yield "return", np.where(has_objectives, np.nan, episodes.returns) if has_objectives.any() else episodes.returns
    if has_objectives.any():
        for i in range(min(_MOST_OBJECTIVES, episodes.objectives.shape[1])):
            yield f"return[{i}]", episodes.objectives[:, i]
    yield "length", episodes.lengths


def _coloured(group: Array, names: Sequence[str], counted: Array) -> Iterator[tuple[str, Array, str]]:
    """Yield name, mask and colour of the largest groups, and of all others together."""
    sizes = np.bincount(group[counted], minlength=len(names))
    largest = sorted(np.argsort(-sizes, kind="stable")[:_MOST_GROUPS].tolist())
    shown = [number for number in largest if sizes[number]]
    for number, colour in zip(shown, _COLOURS):
        yield names[number], group == number, _OUTCOME_COLOURS[names[number]] if names == list(OUTCOMES) else colour
    rest = counted & ~np.isin(group, shown)
    if rest.any():
        yield f"{len(np.unique(group[rest]))} others", rest, _GREY


def _draw_line(axis: Any, positions: Array, values: Array, total: int, colour: str, per_mean: int | None) -> None:
    """Draw the values of a group. per_mean: draw dots, and means of this many; None: _MEANS means and a band."""
    if not len(values):
        return
    values = values.astype(np.float64)
    if per_mean is not None:
        size = 4 if len(values) > 100 else 7
        axis.plot(positions, values, ".", color=colour, alpha=0.45, markersize=size, markeredgewidth=0)
        begins = np.arange(0, len(values), per_mean)
    else:
        bins = positions * _MEANS // total
        begins = np.flatnonzero(np.append(True, bins[1:] != bins[:-1]))
    counts = np.diff(np.append(begins, len(values)))
    middles = np.add.reduceat(positions.astype(np.float64), begins) / counts
    means = np.add.reduceat(values, begins) / counts
    if per_mean is None:
        mins, maxs = np.minimum.reduceat(values, begins), np.maximum.reduceat(values, begins)
        axis.fill_between(middles, mins, maxs, color=colour, alpha=0.2, linewidth=0)
    axis.plot(middles, means, color=colour, linewidth=1.4)


def _draw_histogram(axis: Any, groups: list[tuple[Array, str]]) -> None:
    arrays = [values for values, _ in groups if len(values)]
    if not arrays:
        return
    low, high = float(min(values.min() for values in arrays)), float(max(values.max() for values in arrays))
    width = (high - low) / _BINS
    if all((values == np.floor(values)).all() for values in arrays):
        width = max(1.0, np.ceil(width))  # otherwise some bins would contain no whole number
    bins = int((high - low) // (width or 1.0)) + 1
    edges = low + (width or 1.0) * (np.arange(bins + 1) - (0.5 if width == 1.0 else 0.0))
    alpha = 0.75 / max(1, len(arrays) - 1)
    for values, colour in groups:
        counts, _ = np.histogram(values, edges)
        axis.stairs(counts, edges, orientation="horizontal", fill=True, color=colour, alpha=alpha)


def _format_axes(line_axis: Any, histogram_axis: Any, total: int, values: Array) -> None:
    histogram_axis.sharey(line_axis)
    histogram_axis.tick_params(axis="y", labelleft=False, length=0)
    histogram_axis.grid(False)
    for axis in (line_axis, histogram_axis):
        axis.xaxis.set_major_locator(MaxNLocator(6 if axis is line_axis else 3, integer=True))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    line_axis.set_xlim(-0.01 * max(1, total), 1.01 * max(1, total))
    line_axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    if values.dtype.kind in "iu":
        line_axis.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
    if len(values) and values.min() == values.max() and abs(values[0]) < 2**50:
        line_axis.set_ylim(values[0] - 1, values[0] + 1)
    if not len(values):
        _say_empty(line_axis)


def _say_empty(axis: Any) -> None:
    axis.text(0.5, 0.5, "no values", transform=axis.transAxes, ha="center", va="center", color=_GREY)
    axis.set_yticks([])


def _draw_outcomes(figure: Figure, axes: Any, outcomes: Array) -> None:
    """Draw the share of each outcome as a part of one bar, with a legend."""
    grid = axes[0].get_gridspec()
    for axis in axes:
        axis.remove()
    axis = figure.add_subplot(grid[-1, :])
    axis.set_axis_off()
    counts = np.bincount(outcomes, minlength=len(OUTCOMES)).tolist()
    left, labels = 0, []
    for name, count in zip(OUTCOMES, counts):
        if count:
            axis.barh(0, count, left=left, color=_OUTCOME_COLOURS[name], height=0.5)
            labels.append((f"{name} {count:,} ({count / sum(counts):.1%})", _OUTCOME_COLOURS[name]))
            left += count
    axis.set_xlim(0, max(1, left))
    axis.set_ylim(-1.8, 0.4)
    if labels:
        _legend(axis, labels, loc="lower left", ncols=len(labels))


def _legend(axis: Any, entries: list[tuple[str, str]], **layout: Any) -> None:
    handles = [Patch(color=colour, label="name") for _, colour in entries]
    layout = layout or {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 3}
    legend = axis.legend(handles=handles, frameon=False, borderpad=0, borderaxespad=0, handlelength=1, **layout)
    for text, (name, _) in zip(legend.get_texts(), entries):
        text.set_parse_math(False)  # a "$" in a name begins no formula
        text.set_text(printable(_cut(name)))


def _cut(name: str) -> str:
    return name if len(name) <= _MOST_CHARACTERS else f"{name[: _MOST_CHARACTERS - 1]}…"
