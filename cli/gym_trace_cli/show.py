"""How numbers, tables, damage and progress look, for all commands."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from gym_trace.printable import printable as printable

if TYPE_CHECKING:
    from rich.live import Live

    from gym_trace.model.returns import Return

_FIGURE = re.compile(r"(>= )?[-+~]?[\d.,]+(e[-+]?\d+)?([ %]|$)|-?(nan|inf)|[-–]$")
_BLOCKS = "▁▂▃▄▅▆▇█"
_TABLE_BLOCK = 1000  # rows that are aligned together
_NARROWEST, _HEADING = 8, 7  # characters that a column of text, and a heading, are cut to at most
_TIME = re.compile(r"(\d{4}-)?\d\d-\d\d|-?$")  # which is not cut
_REDRAW_SECONDS = 0.05  # between changes of the line on a terminal, which cost milliseconds each
_SURE_SECONDS = 1.0  # before it is said how long something may still take
_PLAIN_SECONDS = 5.0  # between lines of progress where there is no terminal


def count(number: int, noun: str | None = None) -> str:
    """1234567 -> 1,234,567; with a noun: 1 episode, 2 episodes."""
    if noun is None:
        return f"{number:,}"
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def size(number: float) -> str:
    """Bytes: 999 B, 12.3 kB, 4.56 GB."""
    if abs(number) < 1000:
        return f"{number:.0f} B"
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        number /= 1000
        if abs(number) < 999.5 or unit == "PB":
            break
    return f"{number:.{2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0}f} {unit}"


def duration(seconds: float | None) -> str:
    """Seconds: 45 ms, 12.3 s, 3 min 20 s, 2 h 5 min, 4 d 3 h."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min" + (f" {rest} s" if rest else "")
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h" + (f" {minutes} min" if minutes else "")
    days, hours = divmod(hours, 24)
    return f"{days} d" + (f" {hours} h" if hours else "")


def number(value: float | None) -> str:
    """A measured value in four significant digits: 0.01235, 12.35, 12,346."""
    if value is None:
        return "-"
    if 1000 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def share(part: float, whole: float) -> str:
    """A percentage: 42.0%."""
    return f"{part / whole:.1%}" if whole else "-"


def returned(value: Return) -> str:
    """A return, or those of several objectives: [12.35, -3]."""
    return f"[{', '.join(map(number, value))}]" if isinstance(value, tuple) else number(value)


def returns(mean: Return, least: Return, most: Return, lately: bool) -> str:
    """The returns of a run's complete episodes. lately: whether there are more of them than these tell of."""
    of = "the last 100 complete episodes" if lately else "complete episodes"
    return f"return of {of}: {returned(mean)} on average, from {returned(least)} to {returned(most)}"


def recorded(episodes: int, steps: int, speed: float, size_: float, mean: Return | None) -> list[str]:
    """What a run that goes on has recorded so far. speed: steps a second; mean: return, None if not known yet.

    What matters least comes last, where a narrow terminal has no room.
    """
    told = [] if mean is None else [f"return {returned(mean)}"]
    return [count(episodes, "episode"), count(steps, "step"), *told, f"{count(round(speed))} steps/s", size(size_)]


def fraction(progress: Any, limits: Mapping[str, float]) -> float:
    """How far something is to the limit that is nearest, each being an attribute of progress."""
    ways: list[float] = [getattr(progress, name) / limit for name, limit in limits.items()]
    return min(1.0, max(ways))


def damage(path: str, start: int, end: int, problem: str) -> str:
    """A damaged place in a line; start and end in bytes, both 0 where it is the whole file."""
    where = f"bytes {start} to {end}: " if end else ""
    return printable(f"{path}: {where}{problem}")


def curve(values: Sequence[float | None], width: int = 60) -> str:
    """A line of blocks, the smallest value low, the largest high; neighbours are averaged to fit the width."""
    groups = [[value for value in group if value is not None] for group in _in_groups(values, width)]
    means = [sum(group) / len(group) if group else None for group in groups]
    known = [mean for mean in means if mean is not None]
    if not known or not math.isfinite(max(known) - min(known)):
        return ""
    scale = (len(_BLOCKS) - 0.01) / ((max(known) - min(known)) or math.inf)
    return "".join(" " if mean is None else _BLOCKS[int((mean - min(known)) * scale)] for mean in means)


def histogram(counts: Sequence[int], width: int = 60) -> str:
    """A line of blocks as high as the counts, gaps where there are none; neighbours are added up to fit the width."""
    sums = [sum(group) for group in _in_groups(counts, width)]
    scale = (len(_BLOCKS) - 0.01) / (max(sums, default=0) or 1)
    return "".join(_BLOCKS[int(total * scale)] if total else " " for total in sums)


def _in_groups(values: Sequence[Any], width: int) -> list[Sequence[Any]]:
    groups = min(width, len(values))
    return [values[i * len(values) // groups : (i + 1) * len(values) // groups] for i in range(groups)]


def is_terminal(stream: TextIO) -> bool:
    """Whether a person is looking at stream, through something that can move the cursor."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def draws() -> bool:
    """Whether charts can be drawn on stdout, and somebody sees them."""
    return is_terminal(sys.stdout) and "utf" in (sys.stdout.encoding or "").lower()


def title(text: str) -> None:
    click.secho(f"\n{text}", bold=True)


def facts(rows: Iterable[tuple[str, str]]) -> None:
    """Prints a label and what is to be said of it, a line each; on a terminal long ones are folded."""
    lines = [(printable(label), printable(value)) for label, value in rows if value]
    indent = max((len(label) for label, _ in lines), default=0) + 2
    for label, value in lines:
        click.echo(click.style(label.ljust(indent), dim=True) + folded(value, indent, sys.stdout))


def line(label: str, text: str) -> None:
    """Prints "label: text"; on a terminal a long one is folded."""
    click.echo(f"{label}: {folded(printable(text), len(label) + 2, sys.stdout)}")


def folded(text: str, indent: int, stream: TextIO) -> str:
    """Text that begins so far to the right, in lines that a terminal has room for; elsewhere as it is."""
    if not is_terminal(stream):
        return text
    room = max(20, shutil.get_terminal_size().columns - indent)
    return f"\n{' ' * indent}".join(textwrap.wrap(text, room, break_on_hyphens=False, break_long_words=False) or [""])


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], fitted: bool = False) -> None:
    """Prints rows of text under headings; columns of figures flush right. Any number of rows, in little memory.

    fitted: what is too wide for a terminal is cut there, the widest columns of text first.
    """
    room = shutil.get_terminal_size().columns if fitted and is_terminal(sys.stdout) else None
    rows = ([printable(cell) for cell in row] for row in rows)
    block = list(islice(rows, _TABLE_BLOCK))
    right = [all(_FIGURE.match(row[i]) for row in block if row[i]) for i in range(len(headings))]
    widths = [len(heading) for heading in headings]
    shown = _fitted(_widened(widths, block), block, right, room)
    lines = [click.style(_line(headings, shown, right), bold=is_terminal(sys.stdout))]
    while block:
        widths = _fitted(_widened(widths, block), block, right, room)
        click.echo("\n".join([*lines, *(_line(row, widths, right) for row in block)]))
        lines, block = [], list(islice(rows, _TABLE_BLOCK))
    if lines:
        click.echo(lines[0])


def _widened(widths: list[int], block: list[Sequence[str]]) -> list[int]:
    return [max(width, *(len(row[i]) for row in block)) if block else width for i, width in enumerate(widths)]


def _fitted(widths: list[int], block: list[Sequence[str]], right: list[bool], room: int | None) -> list[int]:
    """The widths with columns made narrower, the widest first, until a line has room. Figures are never cut."""
    if room is None:
        return widths
    widths, excess = list(widths), sum(widths) + 2 * len(widths) - 2 - room
    figures = _widened([0] * len(widths), block)
    least = [
        max(figures[i], min(widths[i], _HEADING)) if flush or all(_TIME.match(row[i]) for row in block) else _NARROWEST
        for i, flush in enumerate(right)
    ]
    for _ in range(excess):
        widest = max(range(len(widths)), key=lambda i: widths[i] if widths[i] > least[i] else -1)
        widths[widest] -= widths[widest] > least[widest]
    return widths


def _line(cells: Sequence[str], widths: list[int], right: list[bool]) -> str:
    texts = map(cut, cells, widths)
    padded = (text.rjust(width) if flush else text.ljust(width) for text, width, flush in zip(texts, widths, right))
    return "  ".join(padded).rstrip()


def cut(text: str, width: int) -> str:
    """The text, or its beginning and its end, by both of which names are told apart."""
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def next_commands(directory: Path) -> None:
    """Prints what to do with a trace that was recorded."""
    where = printable(shlex.quote(str(directory)))
    click.echo(f"next:\n  gym-trace stats {where}\n  gym-trace replay {where}")


class ProgressLine:
    """One line on stderr that tells how far a command is, and how long it may still take; a context manager.

    On a terminal the line is drawn over and is gone in the end; elsewhere a line is printed every few seconds; with
    quiet there is none.
    """

    def __init__(self, *, quiet: bool = False):
        self._quiet = quiet
        self._live: Live | None = None
        self._redrawn = -math.inf
        self._due = time.monotonic() + _PLAIN_SECONDS
        self._began: tuple[float, float] | None = None  # when, and at which fraction

    def __enter__(self) -> ProgressLine:
        if not self._quiet and is_terminal(sys.stderr):
            from rich.console import Console
            from rich.live import Live

            # What a command or an environment prints meanwhile goes above the line, but a redirected stdout stays so.
            self._live = Live(
                console=Console(stderr=True, highlight=False),
                auto_refresh=False,
                transient=True,
                redirect_stdout=is_terminal(sys.stdout),
            )
            try:
                self._live.start()
            except BaseException:
                self._live.stop()  # which shows the cursor again
                raise
        return self

    def update(
        self, text: str, fraction: float | None = None, table: Callable[[], Any] | None = None, at_once: bool = False
    ) -> None:
        """Shows text, and a bar and the time that is left if it is known which fraction is done.

        table: makes what rich draws below it on a terminal. at_once: whether to print it now where there is none.
        """
        left = [] if fraction is None else self._left(fraction)
        if self._live is not None:
            if time.monotonic() < self._redrawn + _REDRAW_SECONDS:
                return
            self._redrawn = time.monotonic()
            from rich.console import Group

            drawn = _drawn([*left, text], fraction, self._live.console.width)
            self._live.update(drawn if table is None else Group(drawn, table()), refresh=True)
        elif not self._quiet and (at_once or time.monotonic() >= self._due):
            self._due = time.monotonic() + _PLAIN_SECONDS
            click.echo("  ".join([*_percent(fraction), *left, text]), err=True)

    def _left(self, fraction: float) -> list[str]:
        """The time that is left, if it has gone on for long enough to tell."""
        now = time.monotonic()
        if self._began is None or fraction < self._began[1]:
            self._began = now, fraction
        gone, done = now - self._began[0], fraction - self._began[1]
        if gone < _SURE_SECONDS or not 0 < done < 1 or fraction >= 1:
            return []
        seconds = max(1, round(gone * (1 - fraction) / done))
        return [f"{seconds} s left" if seconds < 60 else f"{duration(seconds)} left"]

    def update_bytes(self, done: int, total: int) -> None:
        """Shows how many bytes are done, of how many."""
        self.update(f"{size(done)} of {size(total)}", done / total if total else None)

    def counting(self, noun: str) -> Callable[[int, int], None]:
        """Return an on_progress callback that shows how many of these are done."""
        return lambda done, total: self.update_count(done, total, noun)

    def update_count(self, done: int, total: int, noun: str) -> None:
        """Show "done of total"; total 0 is unknown."""
        if total:
            self.update(f"{count(done)} of {count(total, noun)}", done / total)
        else:
            self.update(f"{count(done)} done")

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _percent(fraction: float | None) -> list[str]:
    """Rounded down, so that it is 100 % in the end and not before."""
    return [] if fraction is None else [f"{math.floor(100 * fraction):3d}%"]


def _drawn(parts: Sequence[str], fraction: float | None, width: int) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    text = "  ".join(parts)
    line = Text(text, no_wrap=True, overflow="ellipsis")
    if fraction is None:
        return line
    grid = Table.grid(padding=(0, 2, 0, 0))
    cells: list[Any] = [Text(*_percent(fraction)), line]
    room = width - len(text) - 10
    if room >= 6:
        cells.insert(0, ProgressBar(total=1.0, completed=fraction, width=min(room, 24)))
    grid.add_row(*cells)
    return grid
