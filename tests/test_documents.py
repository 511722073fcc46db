"""Links and named files of all documents exist, and the layers that they draw are the tested ones."""

import re
import runpy
import unicodedata
from functools import cache
from pathlib import Path

import public_api
import pytest
from snippets import blocks
from test_layers import PACKAGES

import gym_trace

ROOT = Path(__file__).parent.parent
ARCHITECTURE = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
DRAWING = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTS = [
    *PAGES,
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    ROOT / "sample_traces" / "README.md",
]
PLACES = re.compile(r"`([\w./-]+(?:/|\.(?:py|txt|toml|md)))`")


def test_every_file_and_folder_that_is_named_is_there() -> None:
    places = {*PLACES.findall(ARCHITECTURE + CONTRIBUTING), *re.findall(r"[\w/]+\.py", DRAWING)}
    assert len(places) > 100
    for place in places:
        assert (ROOT / place).exists() or (ROOT / "gym_trace" / place).exists(), place


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)", prose(page)):
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name}: {target}#{anchor}"


def prose(page: Path) -> str:
    """Return a Markdown page without its code."""
    return re.sub(r"^ *```.*?^ *```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_reads_well_on_a_forge(page: Path) -> None:
    """The site's own syntax is text there: macros, tabs, admonitions, attributes."""
    assert re.findall(r"\{\{|^(?:===|!!!|\?\?\?) |\{ ?[:.#]", prose(page), re.M) == []


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as the site has them."""
    page_prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    plain = (unicodedata.normalize("NFKD", heading) for heading in re.findall(r"^#+ (.*)$", page_prose, re.M))
    words = (re.sub(r"[^\w\s-]", "", heading.encode("ascii", "ignore").decode()) for heading in plain)
    return {re.sub(r"[-\s]+", "-", text.strip().lower()) for text in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_every_page_has_a_runnable_example_before_its_second_heading(page: Path) -> None:
    if page.stem in ("ARCHITECTURE", "FORMAT", "quickstart"):  # the quickstart begins with the installation
        return
    text = page.read_text(encoding="utf-8")
    first = next(block for block in blocks(text) if block.language in ("bash", "python") and block.title is None)
    headings = [number for number, line in enumerate(text.splitlines(), 1) if line.startswith("## ")]
    assert first.needs is not None
    assert first.line < headings[0] if headings else True


def test_the_navigation_of_the_site_has_every_page_once() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r": (\S+\.md)$", site, re.M)
    assert len(named) == len(set(named))
    generated = {name for name in named if name.startswith(("notebooks/", "project/"))} | {"reference/cli.md"}
    assert set(named) - generated == {page.relative_to(DOCS).as_posix() for page in PAGES}


@pytest.mark.parametrize(
    "answer",
    [
        "guides/record.md#make-it-cheaper",
        "how-it-works.md#the-ring",  # may I delete it?
        "concepts.md#lane",
        "reference/benchmarks.md#size",
        "guides/cluster.md",
        "reference/troubleshooting.md",
        "FORMAT.md",  # read it in Julia or C++
        "FORMAT.md#10-history",
        "cookbook/another-machine.md",
        "guides/crash.md#when-the-power-fails",
        "../CONTRIBUTING.md#add-an-exporter-or-an-importer",
    ],
)
def test_the_home_page_links_to_the_answer(answer: str) -> None:
    assert f"]({answer})" in (DOCS / "index.md").read_text(encoding="utf-8")


def test_the_error_messages_that_a_page_explains_are_those_of_the_code() -> None:
    """A reader searches the site for the words of a message."""
    source = "".join(
        path.read_text(encoding="utf-8") for part in ("gym_trace", "cli") for path in (ROOT / part).rglob("*.py")
    )
    joined = re.sub(r"[\"']\s*\n\s*f?[\"']", "", source)  # a message on several lines
    page = (DOCS / "reference" / "troubleshooting.md").read_text(encoding="utf-8")
    titles = re.findall(r"^### ([^`\n]+)$", page, re.M)
    messages = [message for title in titles for message in title.split(", ")]
    foreign = {"Namespace ALE not found", "Environment … doesn't exist", "No space left on device"}
    assert len(messages) > 15
    assert [message for message in messages if message.rstrip("…]'") not in joined and message not in foreign] == []


def test_there_are_few_examples_and_each_is_run_by_a_test() -> None:
    names = [path.stem for path in (ROOT / "examples").glob("*.py")]
    tests = ROOT / "tests"
    files = [*tests.glob("interop/test_*.py"), *tests.glob("strangers/test_*.py")]
    code = "".join(path.read_text(encoding="utf-8") for path in files)
    assert 0 < len(names) <= 14
    for name in names:
        assert name in code or f'"{name.removeprefix("train_")}"' in code, name


def test_every_public_name_is_imported_for_type_checkers_and_the_reference() -> None:
    source = (ROOT / "gym_trace" / "__init__.py").read_text(encoding="utf-8")
    imported = ", ".join(re.findall(r"^    from [\w.]+ import ([\w, ]+)$", source, re.M)).split(", ")
    names = [name.rpartition(" as ")[2] for name in imported]
    assert sorted(names) == sorted({*gym_trace.__all__, *gym_trace._MODULES, "train"} - {"errors"})


def test_the_drawings_are_those_of_their_program() -> None:
    drawn = runpy.run_path(str(DOCS / "drawings.py"))["DRAWINGS"]
    found = {path.stem: path.read_text(encoding="utf-8") for path in (DOCS / "drawings").glob("*.svg")}
    assert found == {name: draw().svg() for name, draw in drawn.items()}, "run make drawings"


def test_every_room_is_described() -> None:
    rooms = {path.parent.name for path in (ROOT / "gym_trace").glob("*/__init__.py")}
    assert rooms <= {place.rstrip("/") for place in re.findall(r"^\| `(\w+/)`", ARCHITECTURE, re.M)}


def test_the_layers_are_those_that_are_tested() -> None:
    (drawn,) = re.findall(r"^```\n(.*?)^```", ARCHITECTURE, re.M | re.S)
    assert [set(line.split()) for line in drawn.splitlines()] == PACKAGES[::-1]


def test_names_in_the_glossary_exist() -> None:
    words = CONTRIBUTING.partition("## Words")[2].partition("## What a change")[0]
    names = [name for row in re.findall(r"^\| (.*?) \|", words, re.M) for name in re.findall(r"`(\w+)`", row)]
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "gym_trace").rglob("*.py"))
    assert len(names) > 30
    assert [name for name in names if not re.search(rf"\b{name}\b", source)] == []


def test_every_make_target_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:`|^    )make ([\w-]+)", CONTRIBUTING, re.M)):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_the_hooks_use_the_tools_of_the_checkout_alone() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert "http" not in hooks
    assert "repo: local" in hooks
    assert "entry: make --silent lint" in hooks


def test_no_two_pages_write_the_same_file_or_directory() -> None:
    """A reader opens several pages, in any order and in one directory."""
    pages: dict[str, set[str]] = {}
    for page in (ROOT / "README.md", *PAGES):
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.language in ("bash", "python") and block.needs is not None:
                written = re.findall(r"\b(?<!/)(?:traces|runs)/[\w-]+", block.code)
                written += re.findall(r" -o (\S+)", block.code) if block.language == "bash" else []
                for name in [*written, *([block.title] if block.title else [])]:
                    pages.setdefault(name, set()).add(page.name)
    assert len(pages) > 100
    assert {name: shared for name, shared in pages.items() if len(shared) > 1} == {}


def test_the_python_page_lists_the_public_import_paths() -> None:
    page = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`(gym_trace[\w.]*)`", page.partition("## Import paths")[2]))
    assert paths == {*public_api.MODULES, *public_api.EXCHANGE}
