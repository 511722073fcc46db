"""Values without a dtype, such as texts and infos, as strings of RLDS."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from gym_trace.data.json_values import json_text, tagged
from gym_trace.data.values import is_utf8
from gym_trace.exchange.formats.foreign import Values

_JSON = b"\0"  # prefix of JSON where text is also possible


def packed(values: Iterable[Any]) -> Iterator[bytes]:
    """Encode text as UTF-8, other values as a zero byte and JSON (docs/reference/steps.md)."""
    for value in values:
        if type(value) is str and not value.startswith("\0") and is_utf8(value):
            yield value.encode()
        else:
            yield _JSON + json_text(tagged(value)).encode()


def unpacked(texts: Iterable[bytes]) -> Iterator[Any]:
    """Yield the values that packed() was given. Raises UnreadableRecording."""
    values = Values()
    for text in texts:
        if text.startswith(_JSON):
            yield values.of(text[1:]) if text[1:] else None
        else:
            yield text.decode(errors="replace")


def all_from_json(texts: Iterable[bytes]) -> list[Any]:
    """The values of a batch that are JSON; None for no text. Raises UnreadableRecording."""
    values = Values()
    return [values.of(text) if text else None for text in texts]
