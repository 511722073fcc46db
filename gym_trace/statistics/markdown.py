"""Text from files as Markdown and YAML that say it and do nothing: no HTML, no pictures, no hidden links."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gym_trace.printable import printable

_ACTING = re.compile(r"([\\`*_{}\[\]<>&~|$#])")
_BEGINNING = re.compile(r"^(?:([-+=:])|(\d+)([.)]))")  # of a list, an underlined heading, a table
_LINK = re.compile(r"https?://[A-Za-z0-9.-]+(:\d+)?(/[\w.~!$'*+,;=:@%/?#&-]*)?", re.ASCII)


def front_matter(values: Mapping[str, Any]) -> str:
    """YAML between two lines of dashes; of JSON, which YAML contains."""
    lines = (f"{key}: {json.dumps(_printable(value), ensure_ascii=False)}" for key, value in values.items())
    return "\n".join(["---", *lines, "---"])


def _printable(value: Any) -> Any:
    """As text without what YAML has no place for: what is printable for Python is for YAML."""
    if isinstance(value, str):
        return printable(value)
    return list(map(_printable, value)) if isinstance(value, list) else value


def prose(text: str, most: int = 300) -> str:
    """Text in one line."""
    return _escaped(cut(printable(" ".join(text.split())), most))


def paragraphs(text: str, most: int = 20_000) -> str:
    """Text with its lines."""
    return "\n".join(_escaped(printable(line.strip())) for line in cut(text, most).strip().splitlines())


def code(text: str, most: int = 600) -> str:
    """Text as it is, in one line of code; not for tables."""
    line = cut(printable(" ".join(text.split())), most) or " "
    fence = "`" * (1 + _longest_run(line))
    space = " " if line[0] in "` " or line[-1] in "` " else ""
    return f"{fence}{space}{line}{space}{fence}"


def block(text: str, most: int = 20_000) -> str:
    """Text with its lines, as a block of code."""
    lines = [printable(line) for line in cut(text, most).strip().splitlines()]
    fence = "`" * max(3, 1 + max(map(_longest_run, lines), default=0))
    return "\n".join([fence, *lines, fence])


def link(address: str) -> str:
    """An address that can be followed, if it is one of the web and says what it is."""
    return f"<{address}>" if len(address) < 500 and _LINK.fullmatch(address) else prose(address)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are Markdown already."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cut(text: str, most: int) -> str:
    """The beginning of a long text."""
    return text if len(text) <= most else f"{text[:most]}…"


def _escaped(line: str) -> str:
    return _BEGINNING.sub(lambda found: f"{found[2] or ''}\\{found[1] or found[3]}", _ACTING.sub(r"\\\1", line))


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
