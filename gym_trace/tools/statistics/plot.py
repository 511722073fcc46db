"""Plots of the episodes of a trace, drawn by matplotlib."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gym_trace.data.values import Array
from gym_trace.data.vocabulary import OUTCOMES
from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.playback.episode_table import outcome_codes
from gym_trace.playback.trace import TraceLike, as_trace
from gym_trace.printable import printable
from gym_trace.storage.staging import replaced_file
from gym_trace.tools.statistics.summary import Facts, facts_of, grouping

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter
except ImportError as missing:
    raise MissingExtra(f"plots need matplotlib ({missing}): pip install 'gym-trace[plot]'") from missing

SUFFIXES = (".svg", ".png")
_DOTS = 1000  # more episodes are joined
_PLACES = 400  # across the picture
_BINS = 40
_ENDLESS = 1e100  # values of this size or more are left out: matplotlib squares some
_MOST_GROUPS, _MOST_OBJECTIVES = 7, 4
_LONGEST = 32  # characters of a name
# Okabe and Ito, "Color Universal Design" (2008): distinct also for the colour-blind.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31")
_REST, _INK, _GRID = "#9aa0a6", "#333333", "#e6e6e6"
_OF_OUTCOMES = dict(zip(OUTCOMES, (_REST, *_COLOURS)))
_STYLE: Any = {
    "font.family": "sans-serif", "font.size": 9, "text.color": _INK, "text.usetex": False, "axes.labelcolor": _INK,
    "axes.edgecolor": _REST, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": _GRID, "axes.axisbelow": True, "xtick.color": _INK, "ytick.color": _INK, "axes.titlesize": 9,
    "svg.fonttype": "none", "svg.hashsalt": "gym-trace",
}  # fmt: skip


def plot_episodes(trace: TraceLike, path: str | os.PathLike[str], *, by: str | None = None) -> None:
    """Draw returns and lengths over the episodes, their histograms, and the outcomes, as SVG or PNG.

    The same trace gives the same bytes with the same matplotlib. An existing file is replaced. Returns and lengths are
    those of complete episodes, as in summarize. Beyond 1,000 episodes, neighbours share one place of the picture, which
    shows their mean, and a band from min to max.

    Args:
        trace: a trace, a view of one, or the directory.
        path: ends in .svg or .png.
        by: "split", "writer" or "outcome": one colour for each group.

    Raises:
        InvalidOption: another ending, or an unknown by.
        TraceNotFound: no trace in the directory.
        OSError: the file cannot be written.
    """
    ending = os.path.splitext(path)[1].lower()
    if ending not in SUFFIXES:
        raise InvalidOption(f"{os.fspath(path)}: unknown ending; choose a name that ends in {' or '.join(SUFFIXES)}")
    trace = as_trace(trace)
    codes = outcome_codes(trace.content)
    names, _, groups = grouping(trace, by, codes)
    facts = facts_of(trace, codes, groups)
    facts = facts.take(np.argsort(facts.start, kind="stable"))
    ids = dict.fromkeys(writer.about_or_empty.environment.get("id") for writer in trace.readers)
    counts = f"{len(facts.steps):,} episodes, {int(facts.steps.sum()):,} steps"
    environments = _cut(", ".join(str(env_id) for env_id in ids if env_id))
    title = "   ·   ".join(filter(None, (_cut(trace.directory.name), environments, counts)))
    with warnings.catch_warnings(), matplotlib.rc_context(_STYLE):
        warnings.filterwarnings("ignore", "Glyph .* missing")  # letters of names
        figure = _figure(facts, names, by, printable(title))
        with replaced_file(path) as staged:
            metadata = {"Date": None} if ending == ".svg" else {}
            figure.savefig(staged, format=ending[1:], dpi=150, facecolor="white", metadata=metadata)


def _figure(facts: Facts, names: Sequence[str], by: str | None, title: str) -> Figure:
    counted = facts.counted(by == "outcome")
    panels = dict(_quantities(facts, counted))
    figure = Figure(figsize=(9, 2.3 * len(panels) + 1.2), layout="constrained")
    figure.suptitle(title, fontsize=10, x=0.01, ha="left", parse_math=False)
    heights = [2.3] * len(panels) + [0.5]
    axes: Any = figure.subplots(
        len(panels) + 1, 2, squeeze=False, gridspec_kw={"width_ratios": (4, 1), "height_ratios": heights}
    )
    places = np.arange(len(facts.steps))
    groups = list(_coloured(facts.group, names, counted))
    episodes = int(np.count_nonzero(counted))
    together = max(1, episodes // 20) if episodes <= _DOTS else None
    for (over, beside), (label, values) in zip(axes, panels.items()):
        good = counted & (np.abs(values) < _ENDLESS)
        over.set_ylabel(label)
        if left_out := np.count_nonzero(counted & ~good):
            over.set_title(f"left out: {left_out:,} with NaN or beyond {_ENDLESS:g}", loc="right")
        for _, mask, colour in groups:
            _draw_over(over, places[good & mask], values[good & mask], len(places), colour, together)
        _draw_histogram(beside, [(values[good & mask], colour) for _, mask, colour in groups])
        _finish(over, beside, len(places), values[good])
    drawn = "   (line: mean, band: min to max)"
    if together is not None:
        drawn = f"   (line: means of {together})" if together > 1 else ""
    kept = (
        "episodes"
        if counted.all()
        else f"{episodes:,} {'episodes with a step' if by == 'outcome' else 'complete episodes'}"
    )
    axes[-2][0].set_xlabel(f"{kept} in the order of their start{drawn}")
    axes[-2][1].set_xlabel("episodes")
    if by is not None:
        _legend(axes[0][0], [(name, colour) for name, _, colour in groups])
    _draw_outcomes(figure, axes[-1], facts.outcome)
    return figure


def _quantities(facts: Facts, counted: Array) -> Iterator[tuple[str, Array]]:
    """Yield label and values of each panel."""
    several = counted & ~np.isnan(facts.objectives).all(axis=1)
    if not several.any() or (counted & ~several).any():
        yield "return", np.where(several, np.nan, facts.returns) if several.any() else facts.returns
    if several.any():
        for i in range(min(_MOST_OBJECTIVES, facts.objectives.shape[1])):
            yield f"return[{i}]", facts.objectives[:, i]
    yield "length", facts.lengths


def _coloured(group: Array, names: Sequence[str], counted: Array) -> Iterator[tuple[str, Array, str]]:
    """Yield name, mask and colour of the largest groups, and of all others together."""
    sizes = np.bincount(group[counted], minlength=len(names))
    largest = sorted(np.argsort(-sizes, kind="stable")[:_MOST_GROUPS].tolist())
    shown = [place for place in largest if sizes[place]]
    for place, colour in zip(shown, _COLOURS):
        yield names[place], group == place, _OF_OUTCOMES[names[place]] if names == list(OUTCOMES) else colour
    rest = counted & ~np.isin(group, shown)
    if rest.any():
        yield f"{len(np.unique(group[rest]))} others", rest, _REST


def _draw_over(axis: Any, places: Array, values: Array, total: int, colour: str, together: int | None) -> None:
    """together: episodes of one mean; None: they are joined where they share a place."""
    if not len(values):
        return
    values = values.astype(np.float64)
    if together is not None:
        size = 4 if len(values) > 100 else 7
        axis.plot(places, values, ".", color=colour, alpha=0.45, markersize=size, markeredgewidth=0)
        begins = np.arange(0, len(values), together)
    else:
        at = places * _PLACES // total
        begins = np.flatnonzero(np.append(True, at[1:] != at[:-1]))
    counts = np.diff(np.append(begins, len(values)))
    middles = np.add.reduceat(places.astype(np.float64), begins) / counts
    means = np.add.reduceat(values, begins) / counts
    if together is None:
        least, most = np.minimum.reduceat(values, begins), np.maximum.reduceat(values, begins)
        axis.fill_between(middles, least, most, color=colour, alpha=0.2, linewidth=0)
    axis.plot(middles, means, color=colour, linewidth=1.4)


def _draw_histogram(axis: Any, groups: list[tuple[Array, str]]) -> None:
    known = [values for values, _ in groups if len(values)]
    if not known:
        return
    least, most = min(values.min() for values in known), max(values.max() for values in known)
    width = (float(most) - float(least)) / _BINS
    if all((values == np.floor(values)).all() for values in known):
        width = max(1.0, np.ceil(width))  # whole numbers: no bin without one
    bins = int((float(most) - float(least)) // (width or 1.0)) + 1
    edges = float(least) + (width or 1.0) * (np.arange(bins + 1) - (0.5 if width == 1.0 else 0.0))
    for values, colour in groups:
        found, _ = np.histogram(values, edges)
        axis.stairs(
            found, edges, orientation="horizontal", fill=True, color=colour, alpha=0.75 / max(1, len(known) - 1)
        )


def _finish(over: Any, beside: Any, total: int, values: Array) -> None:
    beside.sharey(over)
    beside.tick_params(axis="y", labelleft=False, length=0)
    beside.grid(False)
    for axis in (over, beside):
        axis.xaxis.set_major_locator(MaxNLocator(6 if axis is over else 3, integer=True))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    over.set_xlim(-0.01 * max(1, total), 1.01 * max(1, total))
    over.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    if values.dtype.kind in "iu":
        over.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
    if len(values) and values.min() == values.max() and abs(values[0]) < 2**50:
        over.set_ylim(values[0] - 1, values[0] + 1)
    if not len(values):
        over.text(0.5, 0.5, "no values", transform=over.transAxes, ha="center", va="center", color=_REST)
        over.set_yticks([])


def _draw_outcomes(figure: Figure, axes: Any, outcomes: Array) -> None:
    """Draw the share of each outcome as one bar, and the numbers beside it."""
    grid = axes[0].get_gridspec()
    for axis in axes:
        axis.remove()
    axis = figure.add_subplot(grid[-1, :])
    axis.set_axis_off()
    counts = np.bincount(outcomes, minlength=len(OUTCOMES)).tolist()
    at, labels = 0, []
    for name, count in zip(OUTCOMES, counts):
        if count:
            axis.barh(0, count, left=at, color=_OF_OUTCOMES[name], height=0.5)
            labels.append((f"{name} {count:,} ({count / sum(counts):.1%})", _OF_OUTCOMES[name]))
            at += count
    axis.set_xlim(0, max(1, at))
    axis.set_ylim(-1.8, 0.4)
    if labels:
        _legend(axis, labels, loc="lower left", ncols=len(labels))


def _legend(axis: Any, entries: list[tuple[str, str]], **place: Any) -> None:
    handles = [Patch(color=colour, label="name") for _, colour in entries]
    place = place or {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 3}
    legend = axis.legend(handles=handles, frameon=False, borderpad=0, borderaxespad=0, handlelength=1, **place)
    for text, (name, _) in zip(legend.get_texts(), entries):
        text.set_parse_math(False)  # a "$" of a name is a letter
        text.set_text(printable(_cut(name)))


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
