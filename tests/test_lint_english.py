"""tests/lint_english.py finds stiff English, and accepts plain English."""

from pathlib import Path

import lint_english
import pytest

STIFF = [
    ('"""Whether it fits."""', "Whether"),
    ('def f() -> None:\n    """Of so many rows."""', "so many"),
    ("x = 1  # whoever reads it", "whoever"),
    ('raise ValueError(f"{x} is no trace")', "is no trace"),
    ('x = "a row a step"', "a row a step"),
    ("def test_a_rate_that_is_none_is_refused(): ...", "test_a_rate_that_is_none_is_refused"),
    ("try: x\nexcept: y  # of any kind: told like one of writing", "of any kind: told like one of writing"),
    ("self.next = None  # that to begin the next one with", "that to begin the next one with"),
    ('"""With an id that is one: files are called by it."""', "With an id that is one: files are called by it."),
    (f"def test_{'x' * 66}(): ...", f"test_{'x' * 66}"),
]


@pytest.mark.parametrize(("text", "phrase"), STIFF)
def test_a_stiff_phrase_is_reported_with_its_line(text: str, phrase: str) -> None:
    hits = lint_english.hits_in(Path("x.py"), f"import os\n{text}\n" if '"""' not in text else text)
    assert phrase in [hit.text for hit in hits]
    assert all(str(hit).startswith(f"x.py:{hit.line}: {hit.text} -> ") for hit in hits)


@pytest.mark.parametrize(
    "text",
    [
        '"""Return the number of rows, one per step."""',
        "x = 1  # no longer needed; there is no space left",
        "LEVEL = 3  # of zstd",
        "last = {}  # by lane: the last episode",
        "# With -m, Python looks in the current directory.\n# that is untrusted",
        '"""One row per step."""',
        'x = "whoever"  # english: quoted',
        'x = "\\n\\n\\n"',
    ],
)
def test_plain_or_quoted_text_has_no_hits(text: str) -> None:
    assert lint_english.hits_in(Path("x.py"), text) == []


def test_code_in_markdown_is_skipped() -> None:
    text = "A row a step.\n\n```\nA row a step.\n```\nRun `a row a step`.\n"
    assert [(hit.line, hit.text) for hit in lint_english.hits_in(Path("x.md"), text)] == [(1, "A row a step")]


def test_the_exit_code_is_1_if_there_is_a_hit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.py").write_text('"""Good."""\n')
    assert lint_english.main([str(tmp_path)]) == 0
    (tmp_path / "bad.md").write_text("Lest it fails.\n")
    assert lint_english.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{tmp_path / 'bad.md'}:1: Lest -> use plain words\n"
