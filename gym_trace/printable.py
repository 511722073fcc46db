"""Text from untrusted files for messages and tables: escaped and limited in length."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["error_text", "integer", "key_text", "printable", "shown"]

_MAX_DIGITS = 4000  # Python converts integers of up to 4300 digits to text


def printable(text: object) -> str:
    """Return text on one line; escape characters that could control a terminal or cannot be encoded.

    Examples:
        >>> gym_trace.printable.printable("red: \\x1b[31m")
        'red: \\\\x1b[31m'
    """
    line = str(text)
    return line if line.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in line)


def printable_lines(text: str) -> str:
    """Return text with each of its lines escaped."""
    return "\n".join(map(printable, text.split("\n")))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def integer(number: int) -> str:
    """Return an integer as text; for one with too many digits, a phrase with its number of digits.

    Examples:
        >>> gym_trace.printable.integer(42)
        '42'
    """
    digits = int(number.bit_length() * math.log10(2)) + 1
    return str(number) if digits <= _MAX_DIGITS else f"{'-' * (number < 0)}(an integer of about {digits} digits)"


def shown(value: Any, most: int = 200) -> str:
    """Return up to `most` characters of repr(value); never raises.

    Examples:
        >>> gym_trace.printable.shown(list(range(1000)), 20)
        '[0, 1, 2, 3, 4, 5, 6'
    """
    try:
        text = repr(value)
    except Exception:  # a nested integer with too many digits, or an error in foreign code
        text = integer(value) if isinstance(value, int) else f"<{type(value).__name__}: repr failed>"
    return text[:most]


def error_text(error: BaseException) -> str:
    """Return a foreign error on one line with its type, such as "pygame.error: No available video device".

    Examples:
        >>> gym_trace.printable.error_text(ValueError("too large"))
        'ValueError: too large'
    """
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return " ".join(f"{name}: {error}".split())


def key_text(key: object) -> str:
    """Return a key of a recorded map as text.

    Examples:
        >>> gym_trace.printable.key_text("position"), gym_trace.printable.key_text(3)
        ('position', '3')
    """
    return integer(key) if isinstance(key, int) else str(key)
