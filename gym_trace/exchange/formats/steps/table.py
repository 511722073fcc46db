"""StepTable: selected steps of recorded episodes, as text, arrays or statistics."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace
from gym_trace.exchange.formats.steps.csv_rows import csv_lines
from gym_trace.exchange.formats.steps.jsonl import json_lines
from gym_trace.exchange.formats.steps.npz import write_npz
from gym_trace.exchange.formats.steps.windows import Window, step_windows
from gym_trace.playback.column_selection import name_of, names_in, select_columns
from gym_trace.playback.episode_index import index_of, whole_of
from gym_trace.playback.trace import TraceLike, as_trace
from gym_trace.tools.statistics.columns import StepValues
from gym_trace.tools.statistics.describe import plain


class StepTable:
    """Steps of recorded episodes: the rows that `gym-trace cat` prints, in bounded memory.

    Args:
        trace: a trace, a view, or a directory.
        columns: names of columns, or of their parts, such as "observations/image"; None: all.
        steps: the steps of each episode.
        where: only steps where this condition holds, such as "reward < -5"; excludes steps.
        context: with where, also this many steps before and after each.
        on_damage: called with the error of each damaged part, which is then skipped; None: raise the error.

    Attributes:
        roots: the selected columns of the first level, in their usual order.

    Raises:
        InvalidOption: unknown column, or invalid condition.
        TraceNotFound, CorruptTrace

    Examples:
        >>> table = gym_trace.StepTable("traces/cartpole", ["actions", "rewards"], steps=slice(0, 2))
        >>> print("".join(table.csv_lines()).splitlines()[0])
        episode,step,actions,rewards
    """

    def __init__(
        self,
        trace: TraceLike,
        columns: Sequence[str] | None = None,
        *,
        steps: slice = slice(None),
        where: str | None = None,
        context: int = 0,
        on_damage: Callable[[CorruptTrace], None] | None = None,
    ):
        view = as_trace(trace)
        self._trace, self._episodes = whole_of(view), index_of(view).whole_indices
        self._selection = select_columns(self._trace, columns)
        self._steps, self._context, self._on_damage = steps, context, on_damage
        self._hits = (
            None if where is None else view.find_steps(where, on_damage="raise" if on_damage is None else "skip")
        )

    @property
    def roots(self) -> tuple[str, ...]:
        return self._selection.roots

    @staticmethod
    def columns_of(trace: TraceLike) -> list[str]:
        """Return the names for `columns`: first the columns of every trace, then their parts.

        Examples:
            >>> gym_trace.StepTable.columns_of("traces/cartpole")
            ['observations', 'actions', 'rewards', 'terminations', 'truncations', 'infos', 'annotations']
        """
        return names_in(as_trace(trace))

    @staticmethod
    def text_of(value: Any) -> str:
        """Return a value of a window as JSON, lossy: NaN is null, and large arrays are only described.

        Examples:
            >>> gym_trace.StepTable.text_of(np.array([1.5, np.nan]))
            '[1.5, null]'
        """
        return json.dumps(plain(value), ensure_ascii=False)

    def __len__(self) -> int:
        """Return the number of steps where the condition holds. Raises TypeError without a condition."""
        if self._hits is None:
            raise TypeError("a StepTable without a condition has no length")
        return len(self._hits)

    def windows(self) -> Iterator[Window]:
        """Yield the rows, some consecutive steps of one episode at a time.

        Examples:
            >>> table = gym_trace.StepTable("traces/cartpole", ["rewards"], steps=slice(0, 2))
            >>> window = next(table.windows())
            >>> window.episode.index, window.first_step, window.columns
            (0, 0, {('rewards',): array([1., 1.])})
        """
        on_error, episodes = self._on_damage, self._episodes
        on_damage = None if on_error is None else (lambda damage: on_error(damage.error()))
        steps: slice | list[slice] = self._steps
        if self._hits is not None:
            first, runs = self._trace.episodes["first_step"][episodes], list(_runs(self._hits, self._context))
            # Not below 0: a window that begins with step 0 also has the initial observation.
            steps = [slice(max(0, begin - int(first[i])), end - int(first[i])) for i, begin, end in runs]
            episodes = episodes[[i for i, *_ in runs]] if runs else episodes[:0]
        return step_windows(self._trace, self._selection, episodes, steps, on_damage)

    def json_lines(self) -> Iterator[str]:
        """Yield JSON lines, lossless (docs/reference/steps.md).

        Examples:
            >>> table = gym_trace.StepTable("traces/cartpole", ["actions"], steps=slice(0, 1))
            >>> print(list(table.json_lines())[2], end="")
            {"type": "step", "episode": 0, "step": 0, "actions": 1}
        """
        return json_lines(self.windows(), self._selection, self._on_damage)

    def csv_lines(self) -> Iterator[str]:
        """Yield a heading and lines of CSV, one column per number.

        Examples:
            >>> table = gym_trace.StepTable("traces/cartpole", ["actions"], steps=slice(0, 2))
            >>> print("".join(list(table.csv_lines())[:3]), end="")
            episode,step,actions
            0,0,1
            0,1,1
            1,0,1
            1,1,1
        """
        return csv_lines(self.windows(), self._trace, self._selection)

    def write_npz(self, file: BinaryIO, on_progress: Callable[[str, int, int], None] | None = None) -> None:
        """Write one array per column. on_progress: called with the column, rows done, and rows in total.

        Examples:
            >>> with open("steps.npz", "wb") as file:
            ...     gym_trace.StepTable("traces/cartpole", ["rewards"]).write_npz(file)
            >>> np.load("steps.npz")["rewards"].shape
            (461,)
        """
        write_npz(self._trace, self._episodes, self._selection, file, self._steps, on_progress)

    def statistics(self, on_progress: Callable[[int], None] | None = None) -> list[dict[str, Any]]:
        """Return statistics of each column: min, mean, max, nan and more of numbers, distinct values of others.

        on_progress: called with the number of steps done.

        Examples:
            >>> (column,) = gym_trace.StepTable("traces/cartpole", ["rewards"]).statistics()
            >>> column["column"], column["rows"]
            ('rewards', 461)
        """
        values, done = StepValues(), 0
        for window in self.windows():
            for path, rows in window.columns.items():
                if path[0] == "observations":  # the previous window had the first row, unless this one opens
                    rows = rows[not window.opens : len(rows) - (window.has_placeholder and window.steps > 0)]
                values.add(path, rows)
            done += window.steps
            if on_progress is not None:
                on_progress(done)
        return [
            {"column": name_of(leaf["path"])}
            | {name: value for name, value in leaf.items() if name not in ("path", "space")}
            for leaf in values.result()
        ]


def _runs(hits: Array, context: int) -> Iterator[tuple[int, int, int]]:
    """Yield (episode, first step, step after the last) of the steps around hits; join neighbours and overlaps."""
    run: tuple[int, int, int] | None = None
    for episode, step in hits.tolist():
        begin, end = step - context, step + context + 1
        if run is not None and run[0] == episode and begin <= run[2]:
            run = episode, run[1], end
            continue
        if run is not None:
            yield run
        run = episode, begin, end
    if run is not None:
        yield run
