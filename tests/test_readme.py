"""The README shows what happens, and is short."""

import re
from pathlib import Path

import pytest
from snippets import blocks, run_page

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


def test_its_examples_run_in_order_and_print_what_it_shows(tmp_path: Path) -> None:
    shown = [block for block in blocks(TEXT) if block.language in ("bash", "python")]
    assert len(shown) >= 8
    assert run_page(README, tmp_path) == sum(block.is_runnable for block in shown)


def test_it_has_at_most_150_lines() -> None:
    assert len(TEXT.splitlines()) <= 150


@pytest.mark.parametrize("target", re.findall(r"(?:^|`)make (\w+)", TEXT, re.M))
def test_every_make_target_it_names_is_there(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
