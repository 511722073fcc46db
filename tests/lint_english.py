"""Find stiff English in docstrings, comments, messages and Markdown.

    python tests/lint_english.py [PATHS]

Without paths, checks the Python and Markdown files of the repository. Prints "file:line: text -> rule" for each hit,
and exits with 1 if there is one. A line that needs the phrase, such as a quotation, ends in "# english: quoted".
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
ALLOWED = "english: quoted"
SKIPPED = {Path(__file__).name, "test_lint_english.py"}

# Units of "one X per Y"; without a list of nouns, "a" and "an" pairs have too many false alarms.
_UNITS = (
    r"(?:batch|block|bytes?|chunk|column|dimension|element|episode|event|file|frame|lane|leaf|line|process|row|step)"
)

# Rules for any text: pattern, and what to write instead.
PHRASES = [
    (r"\b(?:whoever|whomever|whosoever)\b", "name the role: user, caller, process"),
    (r"\b(?:somebody|nobody)\b", "name the role: user, caller, no process"),
    (r"(?<!make )(?<!\")\bstrangers?\b(?![\"/])", "untrusted, third-party"),
    (r"\b(?:whereof|wherein|whereby|lest)\b", "use plain words"),
    (r"\b(?:anew|meanwhile)\b", "again, from scratch, since then"),
    (r"[,;] besides\b|\bbesides[.:;)]|\bbesides$", "also"),
    (r"\b(?:is|are|was|be) told\b|\btold (?:of|apart)\b|\btells? of\b", "reported, stored, described; distinguish"),
    (r"\bsays? of (?:it|them)sel(?:f|ves)\b|\bsaid of\b", "describes; metadata"),
    (r"\bthere (?:is|are) none\b|\b(?:that|which) (?:is|are) none\b", "missing, invalid"),
    (r"(?<!there )\b(?:is|are) no (?!longer\b|more\b|different\b|less\b)[a-z]+", "is not a ..., invalid"),
    (r"\b(?:that|as) there (?:can be|cannot be|are not)\b", "invalid, possible"),
    (r"\bso many\b(?! that\b)", "N, the number of"),
    (r"\bat most so (?:long|much|many)\b", "timeout, limit"),
    (r"\bsuch as (?:is|are|has|have)\b", "name the property"),
    (r"\b(?:is|are) to (?:be|say|have|hold|add|go|reach|show)\b", "must, will, or the plain verb"),
    (r"\b(?:put|puts) down\b", "record, store"),
    (r"\b(?:let|lets|letting) go of\b", "close, release"),
    (r"\b(?:comes?|came) out (?:the same|as recorded|otherwise|differently)\b", "matches, differs"),
    (r"\bother people's code\b", "user code, foreign code"),
    (rf"\b(?:a|an|one) (?!of\b|for\b|in\b)[a-z]+ an? {_UNITS}\b", "one ... per ..."),
]  # fmt: skip
# Openings of a docstring.
OPENINGS = r"(?:Of|What|Whether|How|That|Whose|Who|Such|Those|Where|When|The same|Has)\b(?! to\b)"
OPENING_RULE = "open with a verb (Return ...) or a noun"

# Openings of a docstring or a comment that make a phrase without a subject ...
NO_SUBJECT = re.compile(r"(?:of|that|those|whether|what|with|by|such|one)\b", re.IGNORECASE)
NO_SUBJECT_RULE = "give the sentence a subject, and name the thing"
_NOUN = r"(?!(?:what|that|which|those|any|of|for|before|after|is|by)\b)"
# ... unless they count a noun (one row per step), come before a main clause (With -m, Python looks ...), name the
# keys of a mapping (by lane: last episode), or go on from the name that is assigned to (LEVEL = 3  # of zstd).
_WITH_SUBJECT = re.compile(
    rf"one (?!more\b){_NOUN}[\w-]+"
    rf"|(?:with|by|of) {_NOUN}[^,:;]{{1,60}}, \w+ \w+"
    rf"|(?:with|by) {_NOUN}(?:(?!that\b)\w+ ?){{1,6}}[:;] ",
    re.IGNORECASE,
)
_GOES_ON = re.compile(rf"(?:of|by|with) {_NOUN}(?:[^\s,:;]+ ?){{1,6}}$", re.IGNORECASE)
_ASSIGNS = re.compile(r"(?<![=!<>])=(?!=)|^\s*[\w.]+: |^\s*\)\s*$")

_PHRASES = [(re.compile(pattern, re.IGNORECASE), rule) for pattern, rule in PHRASES]
_OPENING = re.compile(OPENINGS)
_TEST_NAME = re.compile(
    r"_(?:is|are)_(?:none|told)(?=_|$)|_told_|_whatever_|_whoever_|_(?:is|are)_no_(?!longer_|more_)|_cannot_be_(?:is|are)_"
    r"|(?:_said_so|_besides|_anew|_put_down)(?=_|$)|test_(?:of|what|who|whom|whose|whether|that|those)_"
)


MOST_LETTERS = 70  # of the name of a test


class Hit(NamedTuple):
    """A stiff phrase. line: from 1."""

    path: Path
    line: int
    text: str
    rule: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text} -> {self.rule}"


def hits_in(path: Path, text: str) -> list[Hit]:
    """Return the hits in a Python or Markdown file, in order."""
    lines = text.split("\n")
    found = _python_hits(text) if path.suffix == ".py" else _text_hits(_prose(lines))
    hits = (Hit(path, min(line, len(lines)), hit, rule) for line, hit, rule in sorted(set(found)))
    return [hit for hit in hits if ALLOWED not in lines[hit.line - 1]]


def _python_hits(text: str) -> Iterator[tuple[int, str, str]]:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _text_hits(enumerate(node.value.split("\n"), node.lineno))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
            if _TEST_NAME.search(node.name):
                yield node.lineno, node.name, "say what the test expects, and of what"
            if len(node.name) > MOST_LETTERS:
                yield node.lineno, node.name, f"say it in at most {MOST_LETTERS} letters"
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node, clean=False)
            if docstring is not None and (opening := _OPENING.match(docstring.strip())):
                yield node.body[0].lineno, opening[0], OPENING_RULE
            elif docstring is not None and _lacks_subject(docstring.strip()):
                yield node.body[0].lineno, docstring.strip().split("\n")[0], NO_SUBJECT_RULE
    last_line = 0  # of the comment above, if it has a line of its own
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from _text_hits([(token.start[0], token.string)])
            code, comment = token.line[: token.start[1]], token.string.lstrip("#: ")
            goes_on = (
                _ASSIGNS.search(code) and _GOES_ON.match(comment) if code.strip() else last_line == token.start[0] - 1
            )
            if not goes_on and _lacks_subject(comment):
                yield token.start[0], comment, NO_SUBJECT_RULE
            last_line = 0 if code.strip() else token.start[0]


def _lacks_subject(sentence: str) -> bool:
    return bool(NO_SUBJECT.match(sentence)) and not _WITH_SUBJECT.match(sentence)


def _prose(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield numbered lines outside of code blocks, without inline code."""
    is_code = False
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, re.sub(r"`[^`]*`", "", line)


def _text_hits(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str, str]]:
    for number, line in lines:
        for pattern, rule in _PHRASES:
            for found in pattern.finditer(line):
                yield number, found[0].strip(), rule


def repository_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(name) for name in listed.stdout.splitlines()]


def main(paths: list[str]) -> int:
    found: list[Hit] = []
    given = [Path(path) for path in paths]
    files = [path for one in given for path in (sorted(one.rglob("*.[pm][yd]")) if one.is_dir() else [one])]
    for path in files or repository_files():
        if path.name not in SKIPPED:
            found += hits_in(path, (path if files else ROOT / path).read_text(encoding="utf-8"))
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
