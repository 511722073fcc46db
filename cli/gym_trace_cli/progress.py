"""Progress of commands: one line on stderr, a table below it, scalars for TensorBoard."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gym_trace_cli.show import count, duration, is_terminal, printable, size
from gym_trace_cli.stopping import StopSignals

if TYPE_CHECKING:
    from rich.live import Live

_REDRAW_SECONDS = 0.05  # drawing costs milliseconds
_ESTIMATE_AFTER_SECONDS = 1.0
_PLAIN_SECONDS = 5.0  # between lines, without a terminal
_SCALAR_SECONDS = 5.0


class ProgressLine:
    """Context manager: one line on stderr with progress and the time left, hidden if quiet.

    A terminal redraws the line, and removes it at the end and before other output. Elsewhere, a line is printed every
    few seconds.
    """

    def __init__(self, *, quiet: bool = False):
        self._quiet = quiet
        self._live: Live | None = None
        self._replaced: dict[str, Any] = {}
        self._redrawn = -math.inf
        self._due = time.monotonic() + _PLAIN_SECONDS
        self._began: tuple[float, float] | None = None  # time and fraction

    def __enter__(self) -> ProgressLine:
        if not self._quiet and is_terminal(sys.stderr):
            from rich.console import Console
            from rich.live import Live

            console = Console(file=sys.stderr, highlight=False)
            self._live = Live(
                console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            for name in ("stdout", "stderr"):
                if is_terminal(stream := getattr(sys, name)):
                    self._replaced[name] = stream
                    setattr(sys, name, _AboveLine(stream, self._live))
        return self

    def update(
        self, text: str, fraction: float | None = None, table: Callable[[], Any] | None = None, at_once: bool = False
    ) -> None:
        """Show text, and with a fraction a bar and the time left.

        table: returns what rich draws below the line. at_once: print now, also without a terminal.
        """
        time_left = [] if fraction is None else self._time_left(fraction)
        if self._live is not None:
            if time.monotonic() < self._redrawn + _REDRAW_SECONDS:
                return
            self._redrawn = time.monotonic()
            from rich.console import Group

            drawn = _drawn([*time_left, text], fraction, self._live.console.width)
            self._live.start()
            self._live.update(drawn if table is None else Group(drawn, table()), refresh=True)
        elif not self._quiet and (at_once or time.monotonic() >= self._due):
            self._due = time.monotonic() + _PLAIN_SECONDS
            click.echo("  ".join([*_percent(fraction), *time_left, text]), err=True)

    def _time_left(self, fraction: float) -> list[str]:
        """Return the time left, once it can be estimated."""
        now = time.monotonic()
        if self._began is None or fraction < self._began[1]:
            self._began = now, fraction
        elapsed, done = now - self._began[0], fraction - self._began[1]
        if elapsed < _ESTIMATE_AFTER_SECONDS or not 0 < done < 1 or fraction >= 1:
            return []
        seconds = max(1, round(elapsed * (1 - fraction) / done))
        return [f"{seconds} s left" if seconds < 60 else f"{duration(seconds)} left"]

    def update_bytes(self, done: int, total: int) -> None:
        """Show "done of total" in bytes."""
        self.update(f"{size(done)} of {size(total)}", done / total if total else None)

    def counting(self, noun: str | None = None) -> Callable[[int, int], None]:
        """Return an on_progress callback that calls update_count()."""
        return lambda done, total: self.update_count(done, total, noun)

    def update_count(self, done: int, total: int, noun: str | None = None) -> None:
        """Show "done of total"; total 0 is unknown."""
        if total:
            self.update(f"{count(done)} of {count(total, noun)}", done / total)
        else:
            self.update(f"{count(done)} done")

    def __exit__(self, *_: object) -> None:
        for name, stream in self._replaced.items():
            setattr(sys, name, stream)
        if self._live is not None:
            self._live.stop()  # also shows the cursor again
            self._live = None


class _AboveLine:
    """A terminal stream that removes the progress line before it writes."""

    def __init__(self, stream: Any, live: Live):
        self._stream, self._live = stream, live

    def write(self, text: str) -> int:
        self._live.stop()
        written: int = self._stream.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _percent(fraction: float | None) -> list[str]:
    """Round down, so that 100 % is the end."""
    return [] if fraction is None else [f"{math.floor(100 * fraction):3d}%"]


def _drawn(parts: Sequence[str], fraction: float | None, width: int) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    text = "  ".join(parts)
    # 6 cells are for the percentage; ")" ends the reason of a restart, which stays.
    while len(text) > width - 6 and "  " in text and not text.endswith(")"):
        text = text.rpartition("  ")[0]
    line = Text(text, no_wrap=True, overflow="ellipsis")
    if fraction is None:
        return line
    grid = Table.grid(padding=(0, 2, 0, 0))
    cells: list[Any] = [Text(*_percent(fraction)), line]
    bar_width = width - len(text) - 10
    if bar_width >= 6:
        cells.insert(0, ProgressBar(total=1.0, completed=fraction, width=min(bar_width, 24)))
    grid.add_row(*cells)
    return grid


@dataclass
class Report:
    """Progress of record or train, to be shown and plotted.

    Attributes:
        parts: texts of the line, the most important first; a narrow terminal omits the last.
        details: returns what rich draws below the line.
        scalars: steps, returns and values for TensorBoard, one tuple per policy.
    """

    parts: list[str]
    fraction: float | None = None
    details: Callable[[], Any] | None = None
    restarts: int = 0
    trouble: str = ""
    scalars: list[tuple[int, Any, dict[str, float]]] = field(default_factory=list)


class Watch:
    """Context manager and on_progress callback that shows and plots a run, and defers signals.

    Args:
        describe: returns a Report of the library's progress.
        tensorboard: directories, one per policy.
        saving: whether the run has something to save from the start, not only from the first report on.
    """

    def __init__(
        self,
        describe: Callable[[Any], Report],
        *,
        quiet: bool,
        tensorboard: Sequence[Path] = (),
        group: str = "collect",
        saving: bool = True,
    ):
        self.stop, self.line = StopSignals(defers=saving), ProgressLine(quiet=quiet)
        self._describe, self._directories, self._group = describe, tensorboard, group
        self._stack = ExitStack()
        self._scalars: list[Any] = []
        self._restarts, self._next_scalars = 0, 0.0

    def __enter__(self) -> Watch:
        with ExitStack() as stack:
            stack.enter_context(self.stop)
            if self._directories:
                from gym_trace_cli.tensorboard import Scalars

                self._scalars = [stack.enter_context(closing(Scalars(path, self._group))) for path in self._directories]
            stack.enter_context(self.line)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def __call__(self, progress: Any) -> int:
        """Return the number of the signal that asks to stop, or 0."""
        self.stop.defers = True
        report = self._describe(progress)
        restarted, self._restarts = report.restarts > self._restarts, report.restarts
        parts = report.parts + ([count(report.restarts, "restart")] if report.restarts else [])
        text = "  ".join([*parts, f"({report.trouble})"] if restarted else parts)
        self.line.update(printable(text), report.fraction, report.details, restarted)
        if time.monotonic() >= self._next_scalars:
            self._plot(report)
        return self.stop.received

    def finish(self, done: Any) -> None:
        """Plot the result."""
        self._plot(self._describe(done))

    def _plot(self, report: Report) -> None:
        self._next_scalars = time.monotonic() + _SCALAR_SECONDS
        for scalars, (steps, returns, values) in zip(self._scalars, report.scalars):
            scalars.add(steps, returns, **values)


def fraction(progress: Any, limits: Mapping[str, float]) -> float:
    """Return how close progress is to the nearest limit; limits are attributes of progress."""
    fractions: list[float] = [getattr(progress, name) / limit for name, limit in limits.items()]
    return min(1.0, max(fractions))
