"""Public names change on purpose only, and documents, examples and the command line import nothing else."""

import ast
import difflib
import re
from collections.abc import Iterator
from pathlib import Path

import public_api
import pytest

GOLDEN = Path(__file__).parent / "public_api.txt"
HINT = "if this is meant, add a fragment to changes/ and run: python tests/helpers/public_api.py > tests/public_api.txt"


def lines_of(text: str) -> list[str]:
    """Without the sections of names whose packages are not installed, or whose Gymnasium is too old."""
    lines = []
    for section in text.split("\n\n"):
        found = re.match(r"(?:class|def) (gym_trace(?:\.\w+)*)\.(\w+)\(", section)
        if found and not public_api.is_here(found[1], found[2]):
            continue
        lines += ["", *section.splitlines()]
    return lines


def test_the_public_api_is_the_one_that_was_promised() -> None:
    promised, found = lines_of(GOLDEN.read_text(encoding="utf-8")), lines_of(public_api.text())
    difference = "\n".join(difflib.unified_diff(promised, found, "promised", "found", lineterm="", n=1))
    if difference:
        pytest.fail(f"{difference}\n\n{HINT}", pytrace=False)


ROOT = Path(__file__).parent.parent
COMMANDS = sorted((ROOT / "cli").rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
# ARCHITECTURE, CONTRIBUTING and FORMAT are about the inside.
PAGES = [
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.stem not in ("ARCHITECTURE", "FORMAT")),
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "sample_traces/README.md")),
]
# Names in files, which are not those of Python.
KEYS = {"gym_trace.episode", "gym_trace.json", "gym_trace.jsonl", "gym_trace.states"}
ENTRY_POINTS = {"gym_trace.exporters", "gym_trace.importers", "gym_trace.lint_rules", "gym_trace.policies"}


def imports_of(source: str) -> Iterator[str]:
    """The names of gym_trace that Python imports, in functions, too."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name for name in names if name.partition(".")[0] == "gym_trace")


@pytest.mark.parametrize("source", [*COMMANDS, *EXAMPLES], ids=lambda path: path.stem)
def test_the_command_line_and_examples_import_public_names(source: Path) -> None:
    private = [name for name in imports_of(source.read_text(encoding="utf-8")) if not public_api.is_public(name)]
    assert not private, f"{source.name} imports {private}: add a public name, or a function of the library"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documents_name_and_import_public_names(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {name for name in re.findall(r"\bgym_trace(?:\.[A-Za-z_]\w*)+", text) if name not in ENTRY_POINTS | KEYS}
    imported = re.findall(r"^\s*from (gym_trace[\w.]*) import ([\w, ]+)$", text, re.M)
    named |= {f"{module}.{name.strip()}" for module, names in imported for name in names.split(",")}
    private = sorted(name for name in named if not public_api.is_public(name))
    assert not private, f"{page.name} names {private}"


def test_classes_that_public_functions_return_are_public() -> None:
    opaque = {"gym_trace.format.ring.segment.Segment"}  # in formats.Imported, which importers only hand on
    assert not public_api.unnamed_results() - opaque


def test_the_python_reference_has_every_public_name() -> None:
    """Names of modules that are listed whole are those of their __all__."""
    text = (ROOT / "docs" / "api_names.txt").read_text(encoding="utf-8")
    listed: set[str] = set()
    for path, members in re.findall(r"^::: ([\w.]+)$(?:\n    options:\n      members: \[([\w, ]+)\])?", text, re.M):
        whole = path in (*public_api.MODULES, *public_api.EXCHANGE) and not members
        names = public_api.names_of(path) if whole else [name.strip() for name in members.split(",") if name]
        listed |= {path, path.rpartition(".")[0], *(f"{path}.{name}" for name in names)}
    missing = {
        f"{module}.{name}"
        for module in (*public_api.MODULES, *public_api.EXCHANGE)
        for name in public_api.names_of(module)
    } - listed
    known = {name.rpartition(".")[2] for name in listed}
    assert not {name for name in missing if name.rpartition(".")[2] not in known}
