"""Untrusted text as inert Markdown and YAML: no HTML, no images, no hidden links."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gym_trace.printable import printable

_MARKUP = re.compile(r"([\\`*_{}\[\]<>&~|$#])")
_BEGINNING = re.compile(r"^(?:([-+=:])|(\d+)([.)]))")  # start of a list item, a heading underline or a table
_LINK = re.compile(r"https?://[A-Za-z0-9.-]+(:\d+)?(/[\w.~!$'*+,;=:@%/?#&-]*)?", re.ASCII)


def front_matter(values: Mapping[str, Any]) -> str:
    """Return a YAML header between two lines of dashes. Values are JSON, which is valid YAML."""
    lines = (f"{key}: {json.dumps(_printable(value), ensure_ascii=False)}" for key, value in values.items())
    return "\n".join(["---", *lines, "---"])


def _printable(value: Any) -> Any:
    """Escape unprintable characters in text: YAML does not allow them."""
    if isinstance(value, str):
        return printable(value)
    return list(map(_printable, value)) if isinstance(value, list) else value


def prose(text: str, most: int = 300) -> str:
    """Return text on one line, escaped."""
    return _escaped(cut(printable(" ".join(text.split())), most))


def paragraphs(text: str, most: int = 20_000) -> str:
    """Return text escaped, with its line breaks."""
    return "\n".join(_escaped(printable(line.strip())) for line in cut(text, most).strip().splitlines())


def code(text: str, most: int = 600) -> str:
    """Return text as inline code on one line; not for tables."""
    line = cut(printable(" ".join(text.split())), most) or " "
    fence = "`" * (1 + _longest_run(line))
    space = " " if line[0] in "` " or line[-1] in "` " else ""
    return f"{fence}{space}{line}{space}{fence}"


def block(text: str, most: int = 20_000) -> str:
    """Return text as a code block."""
    lines = [printable(line) for line in cut(text, most).strip().splitlines()]
    fence = "`" * max(3, 1 + max(map(_longest_run, lines), default=0))
    return "\n".join([fence, *lines, fence])


def link(address: str) -> str:
    """Return a link if the address is a plain web address; otherwise the escaped text."""
    return f"<{address}>" if len(address) < 500 and _LINK.fullmatch(address) else prose(address)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Cells must be Markdown."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cut(text: str, most: int) -> str:
    """Return text, shortened to `most` characters."""
    return text if len(text) <= most else f"{text[:most]}…"


def _escaped(line: str) -> str:
    return _BEGINNING.sub(lambda found: f"{found[2] or ''}\\{found[1] or found[3]}", _MARKUP.sub(r"\\\1", line))


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
