"""Facts about a whole trace, such as author, licence and description, in one file (docs/FORMAT.md, Facts)."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.format.manifest import is_bomb
from gym_trace.printable import shown
from gym_trace.storage.local import alone
from gym_trace.storage.protocol import ReadStorage, Storage
from gym_trace.storage.staging import staged_file

NAME = "facts.json"
_PART = re.compile(re.escape(NAME) + r"\.[0-9a-f]{8}\.part")
MOST_BYTES = 1 << 20
Facts = dict[str, Any]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_tags(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_scores(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_score, value.values()))


def _is_score(value: Any) -> bool:
    if isinstance(value, list):  # one number per objective
        return bool(value) and all(_is_score(one) and not isinstance(one, list) for one in value)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def _is_names(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_tags, value.values()))


FLAGS = ("good", "bad", "look")  # "look": look at it again


def _is_flags(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_flags_of_writer, value.values()))


def _is_flags_of_writer(value: Any) -> bool:
    if not (isinstance(value, dict) and value.keys() <= set(FLAGS)):
        return False
    return all(isinstance(ids, list) and all(type(one) is int and one >= 0 for one in ids) for ids in value.values())


SPELT = {"licence": "license"}  # accepted spelling -> stored key
# Keys whose values must have a form: its description, and a function that checks it.
KNOWN: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "author": ("text", _is_text),
    "license": ("text, such as MIT or cc-by-4.0", _is_text),
    "description": ("text", _is_text),
    "tags": ("a list of texts", _is_tags),
    "homepage": ("text, an address", _is_text),
    "citation": ("text", _is_text),
    "reference_scores": ('a map of numbers, such as {"random": 22.0, "expert": 500.0}', _is_scores),
    "names": ('a map of columns to lists of texts, such as {"observations": ["x", "speed"]}', _is_names),
    "flags": ('a map of writers to flags and episode ids, such as {"WRITER": {"bad": [3, 17]}}', _is_flags),
}


def read_facts(storage: ReadStorage) -> Facts:
    """Return the facts of a trace; an empty dict if it has none. They are untrusted: see known().

    Raises CorruptTrace if the file is too large or not a JSON object, and OSError.
    """
    path = storage.path(NAME)
    try:
        with storage.open(NAME) as file:
            raw = file.read(0, MOST_BYTES + 1)
    except FileNotFoundError:
        return {}
    if len(raw) > MOST_BYTES or is_bomb(raw):
        raise CorruptTrace(f"facts of a trace larger than {MOST_BYTES} bytes", path)
    try:
        found = json.loads(raw, parse_constant=_refuse)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CorruptTrace("the facts of this trace are not a JSON object", path)
    return found


def write_facts(storage: Storage, facts: Mapping[str, Any]) -> None:
    """Replace the facts of a trace atomically.

    Pass facts from a user through checked() first. Raises InvalidOption for values that JSON cannot hold, and OSError.
    """
    content = _packed(facts)
    with staged_file(storage, NAME, f"{NAME}.{os.urandom(4).hex()}.part") as file:  # others may be writing facts, too
        file.write(content)


@contextlib.contextmanager
def changed_facts(storage: Storage) -> Iterator[Facts]:
    """Yield the facts of a trace for editing, and write them when the block ends. A lock keeps other writers out.

    Raises TraceError if another process keeps the lock, and the errors of read_facts and write_facts.
    """
    with alone(storage.root, is_needed=True) as is_alone:
        for name in storage.names() if is_alone else ():
            if _PART.fullmatch(name):  # left by a killed process
                storage.remove(name)
        facts = read_facts(storage)
        yield facts
        write_facts(storage, facts)


def add_facts(storage: Storage, facts: Mapping[str, Any]) -> None:
    """Add facts to a trace; existing keys are replaced. Raises the errors of read_facts and write_facts."""
    if facts:
        with changed_facts(storage) as existing:
            existing |= facts


def checked(facts: Mapping[str, Any]) -> Facts:
    """Validate facts from a user and return them with the keys of SPELT.

    Raises InvalidOption for a value of another form than in KNOWN.
    """
    facts = {SPELT.get(key, key) if isinstance(key, str) else key: value for key, value in facts.items()}
    for key, value in facts.items():
        if not isinstance(key, str) or not key:
            raise InvalidOption(f"{key!r}: invalid key of a fact; pass a non-empty string")
        if key in KNOWN and not KNOWN[key][1](value):
            raise InvalidOption(f"{key}={shown(value)}: invalid; pass {KNOWN[key][0]}")
    _packed(facts)
    return dict(facts)


def _packed(facts: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(dict(facts), indent=2, ensure_ascii=False, allow_nan=False)
        content = text.encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which JSON can store as an escape
        content = json.dumps(dict(facts), indent=2, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidOption(f"facts: not storable as JSON: {error}") from error
    if len(content) > MOST_BYTES or is_bomb(content):
        raise InvalidOption(f"facts: {len(content)} bytes; the limit is {MOST_BYTES}")
    return content


def fact_from_text(key: str, text: str) -> tuple[str, Any]:
    """Return a fact given on a command line: text is parsed as JSON if the result is valid for the key.

    Examples:
        >>> gym_trace.edit.fact_from_text("tags", '["robot", "sim"]')
        ('tags', ['robot', 'sim'])
    """
    key = SPELT.get(key, key)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return key, text
    fits = KNOWN[key][1] if key in KNOWN else lambda _: True
    return key, text if not fits(found) and fits(text) else found


def known(facts: Mapping[str, Any]) -> Facts:
    """Return the non-empty facts with keys and forms of KNOWN, in its order."""
    return {key: facts[key] for key, (_, fits) in KNOWN.items() if facts.get(key) and fits(facts[key])}


def agreed(several: Iterable[Mapping[str, Any]]) -> Facts:
    """Return the facts of a merged trace: those that all of its sources share, and the flags of every source."""
    first, *others = several
    shared = {key: value for key, value in first.items() if all(key in one and one[key] == value for one in others)}
    flags: dict[str, Any] = {}
    for one in (first, *others):
        flags |= known(one).get("flags", {})
    return {**shared, "flags": flags} if flags else shared


def flags_of(facts: Mapping[str, Any]) -> dict[str, dict[int, str]]:
    """Return the flag of each flagged episode, by writer and episode id. Malformed flags count as none."""
    flags = known(facts).get("flags", {})
    return {writer: {one: flag for flag, ids in by_flag.items() for one in ids} for writer, by_flag in flags.items()}


def with_flag(facts: Mapping[str, Any], writer: str, episode: int, flag: str | None) -> Facts:
    """Return the facts with another flag for the episode with this writer and id; None removes its flag.

    Raises InvalidOption.
    """
    if flag is not None and flag not in FLAGS:
        raise InvalidOption(f"flag={flag!r:.100}: invalid; pass {', '.join(FLAGS)} or None")
    flags = flags_of(facts)
    of_writer = flags.setdefault(writer, {})
    of_writer.pop(episode, None)
    if flag is not None:
        of_writer[episode] = flag
    packed = {
        name: {one: sorted(ids) for one in FLAGS if (ids := [key for key, given in by_flag.items() if given == one])}
        for name, by_flag in flags.items()
        if by_flag
    }
    others = {key: value for key, value in facts.items() if key != "flags"}
    return {**others, "flags": packed} if packed else others


def remove_facts(storage: Storage) -> None:
    """Remove the facts of a trace; keep a file that does not hold valid facts."""
    with contextlib.suppress(CorruptTrace, FileNotFoundError):
        if read_facts(storage):
            storage.remove(NAME)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
