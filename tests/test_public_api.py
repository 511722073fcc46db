"""Names, signatures, commands and options change on purpose only: what there is, against tests/public_api.txt."""

import difflib
import importlib.util
from pathlib import Path

import gymnasium
import public_api
import pytest

GOLDEN = Path(__file__).parent / "public_api.txt"
HINT = "if this is meant, say so in CHANGELOG.md and run: python tests/helpers/public_api.py > tests/public_api.txt"


def lines_of(text: str) -> list[str]:
    """Without the vector wrapper where gymnasium has no such environments, and training where there is no PyTorch."""
    sections = text.split("\n\n")
    if not hasattr(gymnasium.vector, "AutoresetMode"):
        sections = [section for section in sections if not section.startswith(f"class {public_api.NEEDS_VECTORS}")]
    if importlib.util.find_spec("torch") is None:
        needing = tuple(f"{kind} {name}(" for name in public_api.NEED_TORCH for kind in ("class", "def"))
        sections = [section for section in sections if not section.startswith(needing)]
    if importlib.util.find_spec("pettingzoo") is None:
        needing = ("class RecordedAEC(", "class RecordedParallel(", "def record(", "def replay(")
        sections = [section for section in sections if not section.startswith(needing)]
    lines = "\n\n".join(sections).splitlines()
    return [line for line in lines if not line.startswith("gym_trace.pettingzoo.")]


def test_the_public_api_is_the_one_that_was_promised() -> None:
    promised, found = lines_of(GOLDEN.read_text(encoding="utf-8")), lines_of(public_api.text())
    difference = "\n".join(difflib.unified_diff(promised, found, "promised", "found", lineterm="", n=1))
    if difference:
        pytest.fail(f"{difference}\n\n{HINT}", pytrace=False)
