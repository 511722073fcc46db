"""How what a trace holds looks in messages and tables: it may be hostile to a terminal, or endless."""

from __future__ import annotations

import math
from typing import Any

_LONGEST = 4000  # digits of an integer that are shown; Python refuses to make text of more than 4300


def printable(text: object) -> str:
    """Text on one line, with escapes for what could steer a terminal or cannot be encoded."""
    line = str(text)
    return line if line.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in line)


def printable_lines(text: str) -> str:
    """The same of text that may have several lines."""
    return "\n".join(map(printable, text.split("\n")))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def integer(number: int) -> str:
    """An integer as text, those of very many digits by their size."""
    digits = int(number.bit_length() * math.log10(2)) + 1
    return str(number) if digits <= _LONGEST else f"{'-' * (number < 0)}(an integer of about {digits} digits)"


def shown(value: Any, most: int = 200) -> str:
    """repr(value), up to so many characters, whatever is in it."""
    try:
        text = repr(value)
    except Exception:  # an integer of too many digits somewhere in it, or other people's code
        text = integer(value) if isinstance(value, int) else f"<{type(value).__name__} that cannot be shown>"
    return text[:most]


def key_text(key: object) -> str:
    """A key of a recorded map as text."""
    return integer(key) if isinstance(key, int) else str(key)
