"""Exporters of the formats of gym-trace cat: JSON lines, CSV, npz."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from gym_trace.data.json_values import json_text
from gym_trace.errors import InvalidOption
from gym_trace.exchange.formats.contract import ExportPlan, Loss, Target, losses
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.exchange.formats.steps.csv_rows import csv_lines
from gym_trace.exchange.formats.steps.jsonl import json_lines
from gym_trace.exchange.formats.steps.npz import columns_in, write_npz
from gym_trace.playback.column_selection import name_of, select_columns
from gym_trace.playback.scan import KEPT

_EPISODES_AT_ONCE = 4096


@dataclass(frozen=True)
class JsonLinesExporter:
    """JSON lines, as docs/reference/steps.md has them: all of a trace, bit for bit"""

    name: ClassVar[str] = "jsonl"
    makes: ClassVar[str] = "file"
    finals: ClassVar[str] = KEPT
    keeps_branch_prefix: ClassVar[bool] = True

    def plan(self, source: ExportSource) -> ExportPlan:
        return ExportPlan((), partial(self._write, source), self._how_to_load)

    def _write(self, source: ExportSource, target: Target) -> None:
        with open(target.staged, "w", encoding="ascii", newline="\n") as file:
            file.write(json_text({"type": "trace", KEY: source.about}) + "\n")
            file.writelines(
                json_lines(source.windows(checked=False), select_columns(source.trace, None), identity=source.identity)
            )

    def _how_to_load(self, path: Path) -> str:
        return (
            "import json\n"
            f"lines = [json.loads(line) for line in open({str(path)!r})]\n"
            'rewards = [line["rewards"] for line in lines if line["type"] == "step"]'
        )


@dataclass(frozen=True)
class CsvExporter:
    """CSV: one line per step, one column per number, all else as JSON in one cell

    spreadsheet: put ' in front of texts that begin with = + - @, which a spreadsheet would run as formulas.
    """

    spreadsheet: bool = False

    name: ClassVar[str] = "csv"
    makes: ClassVar[str] = "file"
    finals: ClassVar[str] = KEPT
    keeps_branch_prefix: ClassVar[bool] = True

    def plan(self, source: ExportSource) -> ExportPlan:
        return ExportPlan(list(self._losses(source)), partial(self._write, source), self._how_to_load)

    def _losses(self, source: ExportSource) -> Iterator[Loss]:
        yield Loss("dtype", "numbers have no dtype, but all digits needed to read the same value")
        if any(form is None for form in source.forms.values()):
            marked = "; text that a spreadsheet would run as a formula gets a leading '" if self.spreadsheet else ""
            yield Loss("text", f"control characters in text are written as escapes{marked}")
        if any(np.isin(source.episodes["outcome"], ("cut", "closed", "lost"))):
            yield Loss("outcome", "cut, closed and lost episodes cannot be distinguished")
        yield from losses(source, "seed", "options", "reset_info", "parts", "facts", "identity")

    def _write(self, source: ExportSource, target: Target) -> None:
        trace = source.trace
        with open(target.staged, "w", encoding="utf-8", newline="") as file:
            file.writelines(
                csv_lines(source.windows(checked=False), trace, select_columns(trace, None), self.spreadsheet)
            )

    def _how_to_load(self, path: Path) -> str:
        return f"import pandas\nsteps = pandas.read_csv({str(path)!r})"


@dataclass(frozen=True)
class NpzExporter:
    """NumPy: one .npz file with one array per column, of all episodes one after the other"""

    name: ClassVar[str] = "npz"
    makes: ClassVar[str] = "file"
    finals: ClassVar[str] = KEPT
    keeps_branch_prefix: ClassVar[bool] = True

    def plan(self, source: ExportSource) -> ExportPlan:
        mixed = [name_of(path) for path, form in source.forms.items() if form is not None and form.mixed]
        if mixed:
            raise InvalidOption(f"{mixed[0]}: has rows of several dtypes, and an npz column has one; export to jsonl")
        return ExportPlan((), partial(self._write, source), self._how_to_load)

    def _write(self, source: ExportSource, target: Target) -> None:
        trace = source.trace
        selection, episodes = select_columns(trace, None), np.arange(len(trace))
        columns, steps_done = [name_of(path) for path in columns_in(trace, episodes, selection)], 0

        def on_progress(column: str, rows_done: int, rows: int) -> None:
            nonlocal steps_done
            equivalent = int(source.steps * (columns.index(column) + rows_done / max(1, rows)) / len(columns))
            source.advance(equivalent - steps_done)
            steps_done = equivalent

        with open(target.staged, "wb") as file:
            texts: dict[str, Iterable[str]] = {f"{KEY}.json": [source.about], f"{KEY}.jsonl": _identities(source)}
            write_npz(trace, episodes, selection, file, on_progress=on_progress, texts=texts)
        source.advance(source.steps - steps_done)

    def _how_to_load(self, path: Path) -> str:
        return (
            "import numpy as np\n"
            f"data = np.load({str(path)!r})\n"
            'rewards = np.split(data["rewards"], np.cumsum(data["episodes"]["steps"])[:-1])'
        )


def _identities(source: ExportSource) -> Iterator[str]:
    for begin in range(0, len(source.trace), _EPISODES_AT_ONCE):
        yield from source.identities(np.arange(begin, min(begin + _EPISODES_AT_ONCE, len(source.trace))))
