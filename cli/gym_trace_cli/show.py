"""Format numbers, tables, charts and damage, for all commands."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import click

from gym_trace.printable import printable as printable

if TYPE_CHECKING:
    from gym_trace import Trace
    from gym_trace.results import Return

_FIGURE = re.compile(r"(>= )?[-+~]?[\d.,]+(e[-+]?\d+)?([ %]|$)|-?(nan|inf)|[-–]$")
_BLOCKS = "▁▂▃▄▅▆▇█"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of a braille character, row by row
COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red", "white")  # curves take these in turn
_TABLE_BLOCK = 1000  # rows that are aligned together
_MIN_TEXT, _MIN_HEAD = 8, 7  # widths of the narrowest column of text, and heading of figures
_STDOUT = "gym_trace_cli.stdout"  # key of click's Context.meta
_UNPUBLISHED = "gym_trace_cli.unpublished"  # another key of it
_TIME = re.compile(r"(\d{4}-)?\d\d-\d\d|-?$")  # times are never cut


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


def return_text(value: Return) -> str:
    """A return, or those of several objectives: [12.35, -3]."""
    return f"[{', '.join(map(number, value))}]" if isinstance(value, tuple) else number(value)


def returns(spread: tuple[Return, Return, Return], only_last: bool) -> str:
    """Format mean, min and max of the returns of complete episodes. only_last: of the last 100 of them."""
    mean, least, most = map(return_text, spread)
    return f"return of {'the last 100 ' * only_last}complete episodes: {mean} on average, from {least} to {most}"


def throughput(steps: int, seconds: float) -> str:
    """Format steps, time and throughput: 200 steps in 1.5 s (133 steps/s)."""
    return f"{count(steps, 'step')} in {duration(seconds)} ({count(round(steps / max(seconds, 1e-9)))} steps/s)"


def speeds(rates: Sequence[float]) -> str:
    """Steps per second over 10 s, 1 min and 5 min."""
    ten, minute, five = (count(round(rate)) for rate in rates)
    return f"{ten} over 10 s, {minute} over 1 min, {five} over 5 min"


def damage(path: str, start: int, end: int, problem: str) -> str:
    """Format a damaged range of a file; start and end in bytes, both 0 for the whole file."""
    where = f"bytes {start} to {end}: " if end else ""
    return printable(f"{path}: {where}{problem}")


def warn_of_damage(directory: str, trace: Trace) -> None:
    """Print a warning if damage was found in the trace: episodes may be missing."""
    if trace.damage:
        places = count(len(trace.damage), "damaged place")
        click.echo(f"warning: {printable(directory)}: {places} skipped; see {command('check', directory)}", err=True)


def curve(values: Sequence[float | None], width: int = 60) -> str:
    """A line of blocks, the smallest value low, the largest high; neighbours are averaged to fit the width."""
    groups = [[value for value in group if value is not None] for group in _in_groups(values, width)]
    means = [sum(group) / len(group) if group else None for group in groups]
    present = [mean for mean in means if mean is not None]
    if not present or not math.isfinite(max(present) - min(present)):
        return ""
    scale = (len(_BLOCKS) - 0.01) / ((max(present) - min(present)) or math.inf)
    return "".join(" " if mean is None else _BLOCKS[int((mean - min(present)) * scale)] for mean in means)


def histogram(counts: Sequence[int], width: int = 60) -> str:
    """A line of blocks as high as the counts, gaps for 0; neighbours are added up to fit the width."""
    sums = [sum(group) for group in _in_groups(counts, width)]
    scale = (len(_BLOCKS) - 0.01) / (max(sums, default=0) or 1)
    return "".join(_BLOCKS[int(total * scale)] if total else " " for total in sums)


def chart(curves: Sequence[Sequence[float | None]], width: int, height: int) -> list[str]:
    """Return lines of braille with a colour for each curve, the smallest of all values low, the largest high."""
    present = [value for curve in curves for value in curve if value is not None]
    low, high = min(present, default=0.0), max(present, default=0.0)
    cells: dict[tuple[int, int], tuple[int, str]] = {}
    for number, curve in enumerate(curves):
        before = None
        for x in range(2 * width):
            value = curve[round(x * (len(curve) - 1) / (2 * width - 1))]
            if value is None:
                before = None
                continue
            y = round((high - value) / ((high - low) or 1.0) * (4 * height - 1))
            ends = (y, y if before is None else before)
            for dot in range(min(ends), max(ends) + 1):
                bits = cells.get((dot // 4, x // 2), (0, ""))[0] | _DOTS[dot % 4][x % 2]
                cells[dot // 4, x // 2] = bits, COLOURS[number % len(COLOURS)]
            before = y
    texts = {at: click.style(chr(0x2800 + bits), fg=colour) for at, (bits, colour) in cells.items()}
    return ["".join(texts.get((row, column), " ") for column in range(width)) for row in range(height)]


def _in_groups(values: Sequence[Any], width: int) -> list[Sequence[Any]]:
    groups = min(width, len(values))
    return [values[i * len(values) // groups : (i + 1) * len(values) // groups] for i in range(groups)]


def is_terminal(stream: TextIO) -> bool:
    """Return True if stream is a terminal that can move the cursor."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def can_chart() -> bool:
    """Return True if stdout is a terminal that can show charts."""
    return is_terminal(sys.stdout) and "utf" in (sys.stdout.encoding or "").lower()


def title(text: str) -> None:
    click.secho(f"\n{text}", bold=True)


def fields(rows: Iterable[tuple[str, str]]) -> None:
    """Print labels and values, one per line; long values are folded on a terminal."""
    lines = [(printable(label), printable(value)) for label, value in rows if value]
    indent = max((len(label) for label, _ in lines), default=0) + 2
    for label, value in lines:
        click.echo(click.style(label.ljust(indent), dim=True) + folded(value, indent, sys.stdout))


def line(label: str, text: str) -> None:
    """Print "label: text", folded on a terminal."""
    click.echo(f"{label}: {folded(printable(text), len(label) + 2, sys.stdout)}")


def folded(text: str, indent: int, stream: TextIO) -> str:
    """Fold text after an indent to the width of a terminal; elsewhere return it as it is."""
    if not is_terminal(stream):
        return text
    width = max(20, shutil.get_terminal_size().columns - indent)
    return f"\n{' ' * indent}".join(textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False) or [""])


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], fitted: bool = False, keys: int = 0) -> None:
    """Print rows under headings, figures flush right. Memory does not grow with the rows.

    fitted: shorten text to the width of a terminal, the widest columns first.
    keys: number of first columns that identify a row. With keys, rows become blocks of lines if headings do not fit.
    """
    available = shutil.get_terminal_size().columns if fitted and is_terminal(sys.stdout) else None
    rows = ([printable(cell) for cell in row] for row in rows)
    block = list(islice(rows, _TABLE_BLOCK))
    right = [all(_FIGURE.match(row[i]) for row in block if row[i]) for i in range(len(headings))]
    widths = [len(heading) for heading in headings]
    first = _fitted(_widened(widths, block), block, right, available)
    if keys and available is not None and (_total(first) > available or any(map(int.__lt__, first, widths))):
        for row in chain(block, rows):
            title("  ".join(f"{heading} {cell}" for heading, cell in zip(headings[:keys], row)))
            fields(list(zip(headings, row))[keys:])
        return
    lines = [click.style(_line(headings, first, right), bold=is_terminal(sys.stdout))]
    while block:
        widths = _fitted(_widened(widths, block), block, right, available)
        click.echo("\n".join([*lines, *(_line(row, widths, right) for row in block)]))
        lines, block = [], list(islice(rows, _TABLE_BLOCK))
    if lines:
        click.echo(lines[0])


def _widened(widths: list[int], block: list[Sequence[str]]) -> list[int]:
    return [max(width, *(len(row[i]) for row in block)) if block else width for i, width in enumerate(widths)]


def _total(widths: list[int]) -> int:
    return sum(widths) + 2 * len(widths) - 2


def _fitted(widths: list[int], block: list[Sequence[str]], right: list[bool], available: int | None) -> list[int]:
    """Return widths narrowed to fit, the widest first. Figures are never cut."""
    if available is None:
        return widths
    widths, excess = list(widths), _total(widths) - available
    figures = _widened([0] * len(widths), block)
    least = [
        max(figures[i], min(widths[i], _MIN_HEAD)) if flush or all(_TIME.match(row[i]) for row in block) else _MIN_TEXT
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
    """Shorten text by its middle: beginning and end distinguish names."""
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def reserve_stdout(ctx: click.Context) -> None:
    """Keep the standard output for json_line(): environments, libraries in C and child processes print to stderr."""
    out = ctx.meta[_STDOUT] = sys.stdout
    out.flush()
    with suppress(OSError):  # it is in memory
        own = os.dup(out.fileno())
        os.dup2(sys.stderr.fileno(), out.fileno())
        ctx.meta[_STDOUT] = os.fdopen(own, "w", encoding=out.encoding, errors=out.errors)
    sys.stdout = sys.stderr


def stdout() -> TextIO:
    """Return the standard output, also where it is reserved."""
    return cast(TextIO, click.get_current_context().meta.get(_STDOUT, sys.stdout))


def json_line(value: Any, **options: Any) -> None:
    click.echo(json.dumps(value, **options), stdout())


def command(*words: str) -> str:
    """Return a command to type: 'gym-trace ls traces', or `gym-trace ls 'my traces'`."""
    line = printable(shlex.join(["gym-trace", *words]))
    return f"`{line}`" if "'" in line else f"'{line}'"


def step_commands(directory: Path, episode: int, step: int, environment: Sequence[str] | None) -> None:
    """Print the commands that open a recorded step. environment: options that rebuild it; None: no 'shell' command."""
    step_words = [str(directory), "--episode", str(episode), "--step", str(step)]
    shell = [] if environment is None else [["shell", *step_words, *environment]]
    for words in (*shell, ["view", *step_words]):
        click.echo(f"  {printable(shlex.join(['gym-trace', *words]))}")


def unpublished() -> list[str]:
    """Return the warnings of this command about recordings to URLs that are only on this machine, as one list."""
    found: list[str] = click.get_current_context().meta.setdefault(_UNPUBLISHED, [])
    return found


def next_commands(directory: Path, environment: Sequence[str]) -> None:
    """Print the next commands for a recorded trace. environment: options that rebuild its environment."""
    click.echo("next:")
    # replay takes these options only on a terminal.
    for words in (["stats", str(directory)], ["verify" if environment else "replay", str(directory), *environment]):
        click.echo(f"  {printable(shlex.join(['gym-trace', *words]))}")
