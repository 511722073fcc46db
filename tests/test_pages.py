"""The examples of the site run, and print what its pages show."""

from pathlib import Path

import pytest
from snippets import blocks, run_page

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if any(blocks(page.read_text(encoding="utf-8")))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).with_suffix("").as_posix())
def test_the_examples_of_a_page_run_and_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path)


def test_there_are_pages_with_examples() -> None:
    assert len(PAGES) > 30
