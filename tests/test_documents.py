"""Files named in the developer documents exist, and the layers they draw are the tested ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_layers import LAYERS

ROOT = Path(__file__).parent.parent
ARCHITECTURE = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
DRAWING = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PLACES = re.compile(r"`([\w./-]+(?:/|\.(?:py|txt|toml|md)))`")


def test_every_file_and_folder_that_is_named_is_there() -> None:
    places = {*PLACES.findall(ARCHITECTURE + CONTRIBUTING), *re.findall(r"[\w/]+\.py", DRAWING)}
    assert len(places) > 100
    for place in places:
        assert (ROOT / place).exists() or (ROOT / "gym_trace" / place).exists(), place


@pytest.mark.parametrize(
    ("text", "folder"), [(ARCHITECTURE, "docs"), (CONTRIBUTING, ".")], ids=["architecture", "contributing"]
)
def test_every_link_leads_to_a_file(text: str, folder: str) -> None:
    links = re.findall(r"\]\((?!http)([^)]+)\)", text)
    assert links
    assert all((ROOT / folder / link).exists() for link in links)


def test_every_room_is_described() -> None:
    rooms = {path.parent.name for path in (ROOT / "gym_trace").glob("*/__init__.py")}
    assert rooms <= {place.rstrip("/") for place in re.findall(r"^\| `(\w+/)`", ARCHITECTURE, re.M)}


def test_the_layers_are_those_that_are_tested() -> None:
    (drawn,) = re.findall(r"^```\n(.*?)^```", ARCHITECTURE, re.M | re.S)
    assert [set(line.split()) for line in drawn.splitlines()] == LAYERS[::-1]


def test_every_make_target_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:`|^    )make ([\w-]+)", CONTRIBUTING, re.M)):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_the_hooks_use_the_tools_of_the_checkout_alone() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert "http" not in hooks
    assert "repo: local" in hooks
    assert "entry: make --silent lint" in hooks
