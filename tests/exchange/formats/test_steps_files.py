"""JSON lines, CSV and npz as their usual readers have them: json, csv and numpy."""

import base64
import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from long_tests import TRACES
from planted_defects import check_exporter
from shell import ok

from gym_trace import open_trace
from gym_trace.data.json_values import untagged
from gym_trace.errors import UnreadableRecording
from gym_trace.exchange.formats.conformance import Loaded, check_importer, make_zoo
from gym_trace.exchange.formats.exporting import export
from gym_trace.exchange.formats.importing import import_trace
from gym_trace.exchange.formats.steps.exporters import CsvExporter, JsonLinesExporter, NpzExporter
from gym_trace.exchange.formats.steps.jsonl import json_lines
from gym_trace.exchange.formats.steps.jsonl_importer import JsonLinesImporter
from gym_trace.exchange.formats.steps.windows import step_windows
from gym_trace.playback.column_selection import select_columns

SOME = ("vectors", "float64", "pixels", "dict", "tuple", "text", "integers", "ends", "parts", "seeds", "infos")


def rows_of(form: Any, rows: list[Any]) -> Any:
    """As docs/reference/steps.md says."""
    if "dict" in form:
        return {key: rows_of(part, [row[key] for row in rows]) for key, part in form["dict"].items()}
    if "tuple" in form:
        return tuple(rows_of(part, [row[i] for row in rows]) for i, part in enumerate(form["tuple"]))
    if form["dtype"] is None:
        return list(map(untagged, rows))
    if form.get("base64"):
        rows = [np.frombuffer(base64.b64decode(row), form["dtype"]) for row in rows]
    return np.array(rows, form["dtype"]).reshape(len(rows), *form["shape"])


def load_jsonl(path: Path) -> Iterator[Loaded]:
    forms: dict[str, Any] = {}
    episode: dict[str, Any] = {}
    start: dict[str, Any] = {}
    steps: list[dict[str, Any]] = []

    def loaded() -> Loaded:
        observations = [start["observations"], *(step["observations"] for step in steps)]
        columns = {
            name: [step[name] for step in steps] for name in ("actions", "rewards", "terminations", "truncations")
        }
        notes = forms.get("annotations", {}) if steps else {}
        return Loaded(
            rows_of(forms["observations"], observations),
            *(rows_of(forms[name], rows) for name, rows in columns.items()),
            seed=untagged(episode["seed"]),
            options=untagged(episode["options"]),
            outcome=episode["outcome"],
            infos=[untagged(step["infos"]) for step in steps] if "infos" in forms else None,
            annotations=rows_of({"dict": notes}, [step["annotations"] for step in steps]) if notes else {},
            identity=episode["gym_trace"],
        )

    for line in map(json.loads, path.read_text("ascii").splitlines()):
        if line["type"] == "columns":
            forms |= line
        elif line["type"] == "episode":
            if episode:
                yield loaded()
            episode, steps = line, []
        elif line["type"] == "start":
            start = line
        elif line["type"] == "step":
            steps.append(line)
    yield loaded()


def load_npz(path: Path) -> Iterator[Loaded]:
    data = np.load(path)
    table, identities = data["episodes"], data["gym_trace.jsonl"].decode().splitlines()
    columns: dict[str, Any] = {}
    for name in data.files:
        if name.endswith(".jsonl") and name != "gym_trace.jsonl":
            values = [untagged(json.loads(line)) for line in data[name].decode().splitlines()]
            columns[name.removesuffix(".jsonl")] = values
        elif not name.startswith(("gym_trace", "episodes")):
            columns[name] = data[name]
    for row, end in enumerate(np.cumsum(table["steps"])):
        begin = end - table["steps"][row]

        def cut(name: str, rows: slice) -> Any:
            mine = (key for key in columns if key.split("/")[0] == name)
            return tree({key[len(name) + 1 :]: columns[key][rows] for key in mine})

        yield Loaded(
            cut("observations", slice(begin + row, end + row + 1)),
            *(cut(name, slice(begin, end)) for name in ("actions", "rewards", "terminations", "truncations")),
            infos=columns["infos"][begin:end] if "infos" in columns else None,
            annotations=cut("annotations", slice(begin, end)) if "annotations/value" in columns else None,
            outcome=str(table["outcome"][row]),
            identity=identities[row],
        )


def tree(parts: dict[str, Any]) -> Any:
    """{"a/0": x, "a/1": y} as {"a": (x, y)}."""
    if set(parts) == {""}:
        return parts[""]
    keys = list(dict.fromkeys(name.partition("/")[0] for name in parts))
    below = {}
    for key in keys:
        mine = {name: value for name, value in parts.items() if name.partition("/")[0] == key}
        below[key] = tree({name.partition("/")[2]: value for name, value in mine.items()})
    return tuple(below.values()) if all(key.isdigit() for key in keys) else below


def load_csv(path: Path) -> Iterator[Loaded]:
    csv.field_size_limit(sys.maxsize)
    with open(path, encoding="utf-8", newline="") as file:
        heading, *lines = csv.reader(file)
    leaves: dict[str, list[int]] = {}
    for place, name in enumerate(heading[2:], 2):
        leaves.setdefault(re.sub(r"\[[\d,]+\]$", "", name), []).append(place)
    begins = [i for i, line in enumerate(lines) if i == 0 or line[0] != lines[i - 1][0]]
    for begin, end in zip(begins, [*begins[1:], len(lines)]):
        columns: dict[str, dict[str, Any]] = {}
        for name, places in leaves.items():
            root, _, rest = name.partition("/")
            rows = lines[begin:end] if root == "observations" else lines[begin + 1 : end]
            cells = [[row[place] for place in places] for row in rows]
            columns.setdefault(root, {})[rest] = (
                read(cells) if rows else np.zeros((0, *[len(places)] * (len(places) > 1)))
            )
        trees = {root: tree(parts) for root, parts in columns.items()}
        yield Loaded(
            *(trees[name] for name in ("observations", "actions", "rewards")),
            *(np.array(trees[name], np.bool_) for name in ("terminations", "truncations")),
            infos=[untagged(info) for info in trees["infos"]] if "infos" in trees else None,
            annotations=trees.get("annotations"),
        )


def read(rows: list[list[str]]) -> Any:
    """The values of a leaf: cells that are JSON, or the numbers that make up a row."""
    if len(rows[0]) > 1:
        return np.array([[number(cell) for cell in row] for row in rows])
    try:
        values = [json.loads(row[0]) if row[0][:1] in "[{tf" else number(row[0]) for row in rows]
    except ValueError:
        return [row[0] for row in rows]
    return values if any(isinstance(value, dict) for value in values) else np.array(values)


def number(cell: str) -> Any:
    return int(cell) if re.fullmatch(r"-?\d+", cell) else float(cell)


def test_json_lines_have_all_of_every_trace(tmp_path: Path) -> None:
    assert check_exporter(JsonLinesExporter(), load_jsonl, tmp_path, suffix=".jsonl", only=SOME) == {}


def test_json_lines_come_back_bit_for_bit(tmp_path: Path) -> None:
    assert check_importer(JsonLinesExporter(), JsonLinesImporter(), tmp_path, suffix=".jsonl", only=TRACES) == {}


def test_npz_has_all_of_every_trace(tmp_path: Path) -> None:
    assert check_exporter(NpzExporter(), load_npz, tmp_path, suffix=".npz", only=SOME) == {}


def test_csv_has_the_numbers_of_every_trace(tmp_path: Path) -> None:
    only = [name for name in SOME if name not in ("dict", "infos")]
    assert check_exporter(CsvExporter(), load_csv, tmp_path, suffix=".csv", only=only, run_how_to_load=False) == {}


def test_the_output_of_cat_can_be_imported(tmp_path: Path) -> None:
    trace = open_trace(make_zoo(tmp_path, ["dict"])["dict"])
    selection = select_columns(trace, None)
    (tmp_path / "printed").write_text("".join(json_lines(step_windows(trace, selection), selection)))
    report = import_trace(tmp_path / "printed", tmp_path / "back")
    assert "printed, not exported" in report.warnings[0]
    for ours, theirs in zip(trace, open_trace(tmp_path / "back"), strict=True):
        assert ours.observations["camera"].tobytes() == theirs.observations["camera"].tobytes()
        assert ours.rewards.tobytes() == theirs.rewards.tobytes()
        assert (ours.seed, ours.outcome) == (theirs.seed, theirs.outcome)


GARBAGE = {
    "no JSON": '{"type": "columns"',
    "a number": "7",
    "nested deep": "[" * 100_000,
    "a step of no episode": '{"type": "step"}',
    "an episode of nothing": '{"type": "episode"}',
    "an episode too long": '{"type": "episode", "steps": 1000000000000, "seed": null, "options": null}',
    "an episode without its beginning": '{"type": "episode", "steps": 0, "seed": null, "options": null}',
    "no declaration": '{"type": "episode", "steps": 0}\n{"type": "start", "observations": 0}',
    "a declaration of nothing": '{"type": "columns", "observations": 4}\n{"type": "episode", "steps": 0}\n'
    '{"type": "start", "observations": 0}',
    "too large a shape": '{"type": "columns", "observations": {"dtype": "<f4", "shape": [99999999999]}}\n'
    '{"type": "episode", "steps": 0}\n{"type": "start", "observations": []}',
    "a trace of nothing": '{"type": "trace", "gym_trace": "{}"}',
}


@pytest.mark.parametrize("name", GARBAGE)
def test_lines_that_are_malformed_are_refused_in_a_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text(GARBAGE[name] + "\n")
    with pytest.raises(UnreadableRecording) as raised:
        import_trace(tmp_path / "lines", tmp_path / "back", "jsonl")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "back").exists()


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    export(make_zoo(tmp_path, ["vectors"])["vectors"], tmp_path / "whole", "jsonl")
    whole = (tmp_path / "whole").read_bytes()
    for end in np.random.default_rng(0).integers(len(whole) - 2, size=40).tolist():
        (tmp_path / "cut").write_bytes(whole[:end])
        try:
            import_trace(tmp_path / "cut", tmp_path / f"back{end}", "jsonl")
        except UnreadableRecording:
            continue
        assert whole[:end].endswith(b"}\n") or whole[end : end + 1] == b"\n"


@pytest.mark.parametrize("form", ["csv", "table"])
def test_cat_shows_only_the_chosen_leaves(tmp_path: Path, form: str) -> None:
    trace = make_zoo(tmp_path, ["text"])["text"]
    shown = ok("cat", trace, "--columns", "observations/direction", "--format", form, "--limit", "1").stdout
    assert "observations/direction" in shown
    assert "mission" not in shown
    assert "image" not in shown
