"""What people say of a whole trace: author, licence, description …, in one file beside it (docs/FORMAT.md, Facts)."""

from __future__ import annotations

import contextlib
import json
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.format.manifest import is_bomb
from gym_trace.printable import shown
from gym_trace.storage.local import alone
from gym_trace.storage.protocol import Storage

NAME = "facts.json"
MOST_BYTES = 1 << 20
Facts = dict[str, Any]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_tags(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_scores(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_score, value.values()))


def _is_score(value: Any) -> bool:
    if isinstance(value, list):  # a number for each objective
        return bool(value) and all(_is_score(one) and not isinstance(one, list) for one in value)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


SPELT = {"licence": "license"}  # and what it is kept as
# The keys whose values have a form, and which.
KNOWN: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "author": ("text", _is_text),
    "license": ("text, such as MIT or cc-by-4.0", _is_text),
    "description": ("text", _is_text),
    "tags": ("a list of texts", _is_tags),
    "homepage": ("text, an address", _is_text),
    "citation": ("text", _is_text),
    "reference_scores": ('a map of numbers, such as {"random": 22.0, "expert": 500.0}', _is_scores),
}


def read_facts(storage: Storage) -> Facts:
    """What is said of a trace; nothing where nothing is. Anybody may have written it: see known().

    Raises CorruptTrace if it is no JSON object, or too large to be one of ours, and OSError.
    """
    path = storage.path(NAME)
    try:
        with storage.open(NAME) as file:
            raw = file.read(0, MOST_BYTES + 1)
    except FileNotFoundError:
        return {}
    if len(raw) > MOST_BYTES or is_bomb(raw):
        raise CorruptTrace(f"larger than the {MOST_BYTES} bytes that facts of a trace may take", path)
    try:
        found = json.loads(raw, parse_constant=_refuse)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CorruptTrace("the facts of this trace are not a JSON object", path)
    return found


def write_facts(storage: Storage, facts: Mapping[str, Any]) -> None:
    """Has a trace say this of itself, and no more what it said before. A kill leaves the one or the other.

    What somebody gave goes through checked() first. Raises InvalidOption for what JSON cannot hold, and OSError.
    """
    content = _packed(facts)
    fresh = f"{NAME}.{secrets.token_hex(4)}.part"  # of this call alone: others may be at it, too
    file = storage.create(fresh)
    try:
        try:
            file.write(content)
            file.sync()
        finally:
            file.close()
        storage.rename(fresh, NAME)
    except BaseException:
        with contextlib.suppress(OSError):
            storage.remove(fresh)
        raise
    storage.sync()


@contextlib.contextmanager
def changed_facts(storage: Storage) -> Iterator[Facts]:
    """What is said of a trace, to be changed: it says that when the block ends, and nobody else changes it meanwhile.

    Raises as read_facts and write_facts do.
    """
    with alone(storage.root):
        said = read_facts(storage)
        yield said
        write_facts(storage, said)


def add_facts(storage: Storage, facts: Mapping[str, Any]) -> None:
    """Has a trace say this, too, or instead of what it said by that name. Raises as read_facts and write_facts do."""
    if facts:
        with changed_facts(storage) as said:
            said |= facts


def checked(facts: Mapping[str, Any]) -> Facts:
    """Facts that somebody gave, under the names of SPELT. Raises InvalidOption where one has not the form of KNOWN."""
    facts = {SPELT.get(key, key) if isinstance(key, str) else key: value for key, value in facts.items()}
    for key, value in facts.items():
        if not isinstance(key, str) or not key:
            raise InvalidOption(f"a fact of a trace has a name, which {key!r} is not")
        if key in KNOWN and not KNOWN[key][1](value):
            raise InvalidOption(f"{key}={shown(value)}: pass {KNOWN[key][0]}")
    _packed(facts)
    return dict(facts)


def _packed(facts: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(dict(facts), indent=2, ensure_ascii=False, allow_nan=False)
        content = text.encode() + b"\n"
    except UnicodeEncodeError:  # half a character, which JSON can tell of by its number
        content = json.dumps(dict(facts), indent=2, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidOption(f"the facts of a trace are kept as JSON, which cannot hold these: {error}") from error
    if len(content) > MOST_BYTES or is_bomb(content):
        raise InvalidOption(f"the facts of a trace may take {MOST_BYTES} bytes, these take {len(content)}")
    return content


def known(facts: Mapping[str, Any]) -> Facts:
    """Those of KNOWN that have the form which they should have, in its order, and that say something."""
    return {key: facts[key] for key, (_, fits) in KNOWN.items() if facts.get(key) and fits(facts[key])}


def agreed(several: Iterable[Mapping[str, Any]]) -> Facts:
    """What all of several traces say alike, which can be said of a trace that is made of them."""
    first, *others = several
    return {key: value for key, value in first.items() if all(key in one and one[key] == value for one in others)}


def remove_facts(storage: Storage) -> None:
    """Removes what was said of a trace; what is no such thing is left alone."""
    with contextlib.suppress(CorruptTrace, FileNotFoundError):
        if read_facts(storage):
            storage.remove(NAME)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
