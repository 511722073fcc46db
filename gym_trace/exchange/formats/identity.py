"""Metadata of a trace that other formats lack, as JSON texts which exporters store in the metadata of theirs.

From these texts an import restores writers, episode ids, spaces, seeds, generator states and times. Values are
written as in docs/reference/steps.md.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from gym_trace import __version__
from gym_trace.data.episode import Episode
from gym_trace.data.json_values import json_text, tagged, untagged
from gym_trace.data.origins import ORIGINS
from gym_trace.data.packing import unpack
from gym_trace.data.values import Array
from gym_trace.data.vocabulary import OUTCOMES, Outcome
from gym_trace.errors import UnreadableRecording
from gym_trace.format import wire
from gym_trace.format.manifest import json_of
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.episode_table import OUTCOME_CODE
from gym_trace.playback.trace import Trace
from gym_trace.printable import shown

KEY = "gym_trace"  # names these texts in the metadata of all formats
_VERSION = 1
_NOT_EXPORTED = ("batch", "format", "host", "pid", "type", "writer", ORIGINS)  # keys of a schema: files and machine
_SECRETS = ("argv", "diff", "diff_is_whole")  # keys of the provenance that may hold some
_CLOCKS = ("clock_offset", "duration")  # columns of trace.episodes that are stored if not 0
_ALWAYS = ("episode_id", "lane", "first_step", "seed", "start_time", "end_time")  # columns that are always stored
_IN_TABLE = (*_ALWAYS, *_CLOCKS)
_EPISODE_ATTRIBUTES = ("writer", "outcome", "options", "rng_state", "reset_info", "pending_action", *_ALWAYS)
_NOT_A_TIME = int(np.iinfo(np.int64).min)
_MOST_TEXT = 64 << 20  # characters


def about(trace: Trace) -> str:
    """Return the text of a trace: its facts, and the schemas of its writers. Raises CorruptTrace."""
    writers = {reader.writer: tagged(_schema(reader.schema)) for reader in index_of(trace).readers}
    return json_text({"version": _VERSION, "gym_trace": __version__, "writers": writers, "facts": tagged(trace.facts)})


def _schema(recorded: dict[str, Any]) -> dict[str, Any]:
    exported = _without_files(recorded)
    if isinstance(exported.get("provenance"), dict):
        provenance = exported["provenance"].items()
        exported["provenance"] = {key: value for key, value in provenance if key not in _SECRETS}
    return exported


def _without_files(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in _NOT_EXPORTED}


def identity(episode: Episode, record: Any, is_part: bool) -> str:
    """Return the text of an episode: all but its steps. record: its row of trace.episodes. Raises CorruptTrace."""
    terminations, truncations = episode.terminations, episode.truncations
    is_flagged = terminations | truncations
    attributes = ((name, getattr(episode, name)) for name in _EPISODE_ATTRIBUTES)
    known = {name: tagged(value) for name, value in attributes if value is not None}
    known |= {name: int(record[name]) for name in _CLOCKS if record[name]}
    if is_part:
        known["is_part"] = True
    if not episode.has_final_observation:
        known["has_final_observation"] = False
    if is_flagged[:-1].any():
        known["flags"] = [_bits(terminations), _bits(truncations)]
    elif len(is_flagged):
        known["ended"] = [bool(terminations[-1]), bool(truncations[-1])]
    return json_text(known)


def identities(trace: Trace, indices: Array, is_part: Array) -> list[str]:
    """Return identity() of many episodes, mostly from tables, which is faster. is_part: (all episodes,) bool."""
    content = index_of(trace)
    readers, starts = content.readers, content.starts_of(indices).tolist()
    writers, outcomes = content["writer"][indices].astype(np.int64), content[OUTCOME_CODE][indices]
    numbers = {name: content[name][indices].astype(np.int64) for name in _IN_TABLE}
    is_large = numbers["seed"] == wire.SEED_ELSEWHERE
    more = [_of_start(start, large) if start else "" for start, large in zip(starts, is_large.tolist())]
    present = {name: _is_present(name, column) for name, column in numbers.items()}
    traits = {
        "writer": writers,
        "outcome": outcomes,
        "ended": _ends_of(trace, writers, content.rows[indices]),
        "has_final": content["has_final_observation"][indices],
        "is_part": is_part[indices],
        "has_more": np.array([bool(text) for text in more], np.bool_),
        **present,
    }
    has_pending = np.array([bool(reader.pending) for reader in readers], np.bool_)[writers]
    alone = (traits["ended"] == _SEVERAL) | (has_pending & (outcomes == Outcome.LOST))
    texts = np.full(len(indices), None)
    for mine in _alike(traits):  # their texts differ in numbers alone
        one = {name: int(column[mine[0]]) for name, column in traits.items()}
        head = json_text({"writer": readers[one["writer"]].writer, "outcome": OUTCOMES[one["outcome"]]})[:-1]
        names = [name for name in _IN_TABLE if one[name]]
        tail: dict[str, Any] = {"is_part": True} if one["is_part"] else {}
        tail |= {} if one["has_final"] else {"has_final_observation": False}
        if one["ended"] != _NONE:
            tail["ended"] = [bool(one["ended"] & 1), bool(one["ended"] & 2)]
        template = head.replace("%", "%%") + "".join(f', "{name}": %d' for name in names) + "%s"
        template += f", {json_text(tail)[1:]}" if tail else "}"
        rows = zip(*(numbers[name][mine].tolist() for name in names), [more[i] for i in mine.tolist()])
        texts[mine] = list(map(template.__mod__, rows))
    for i in np.flatnonzero(alone).tolist():
        index = int(indices[i])
        texts[i] = identity(trace[index], trace.episodes[index], bool(is_part[index]))
    found: list[str] = texts.tolist()
    return found


def _is_present(name: str, column: Array) -> Array:
    """Return True where a number of the table of episodes is stored."""
    least = 0 if name == "seed" else _NOT_A_TIME + name.endswith("_time")
    present: Array = (column >= least) & ((column != 0) | (name not in _CLOCKS))
    return present


def _alike(traits: dict[str, Array]) -> list[Array]:
    """Return the positions of the episodes with the same traits, for each combination. Traits are small numbers."""
    key = np.zeros(len(traits["writer"]), np.int64)
    for column in traits.values():
        key = key * (int(column.max(initial=0)) + 1) + column
    order = np.argsort(key, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(key[order])) + 1) if len(order) else []


def _of_start(start: dict[str, Any], is_large: bool) -> str:
    """Return the text of what few reset records have. is_large: the table of episodes cannot hold the seed."""
    known: dict[str, Any] = {}
    if is_large and isinstance(large := start.get("seed"), int):
        known["seed"] = tagged(large)
    for name in ("options", "rng_state", "reset_info"):
        if start.get(name) is not None:
            known[name] = tagged(unpack(start[name]) if name == "reset_info" else start[name])
    return f", {json_text(known)[1:-1]}" if known else ""


# Ends of episodes: 1 if terminated, plus 2 if truncated; _NONE without steps; _SEVERAL if other steps are flagged.
_NONE, _SEVERAL = 4, 5


def _ends_of(trace: Trace, writers: Array, rows: Array) -> Array:
    """Return how each episode ended: flags of its last step, _NONE, or _SEVERAL, so that identity() needs "flags"."""
    ends = np.full(len(rows), _SEVERAL)
    for number in np.unique(writers).tolist():
        mine, reader = np.flatnonzero(writers == number), index_of(trace).readers[number]
        parts, own = reader.parts, rows[mine]
        begin, end = parts.first[own.min()], parts.first[own.max() + 1]
        flags = reader.fragments.flags[parts.fragments[begin:end]]
        flagged = np.concatenate([[0], np.cumsum(flags & (wire.TERMINATED | wire.TRUNCATED) > 0)])
        last = parts.first[1:][own] - 1 - begin
        is_plain = flagged[last] == flagged[parts.first[:-1][own] - begin]
        pairs = (flags[last] & wire.TERMINATED > 0) + 2 * (flags[last] & wire.TRUNCATED > 0)
        pairs[parts.column("steps", own) == 0] = _NONE
        ends[mine] = np.where(is_plain, pairs, _SEVERAL)
    return ends


def _bits(flags: Array) -> str:
    return base64.b64encode(np.packbits(flags).tobytes()).decode()


def read_about(text: str) -> dict[str, Any]:
    """Read the text of about(); check only that its parts are maps. Raises UnreadableRecording."""
    plain = _read(text)
    writers, facts = plain.get("writers"), plain.get("facts")
    if plain.get("version") != _VERSION:
        raise UnreadableRecording(f"exported by a newer gym-trace: version {shown(plain.get('version'))}")
    if not (isinstance(writers, dict) and isinstance(facts, dict)):
        raise malformed("the trace")
    schemas = {writer: untagged(schema) for writer, schema in writers.items()}
    if not all(isinstance(schema, dict) for schema in schemas.values()):
        raise malformed("a writer")
    schemas = {writer: _without_files(schema) for writer, schema in schemas.items()}
    return {"writers": schemas, "facts": untagged(facts)}


def read_identity(text: str) -> dict[str, Any]:
    """Read the text of identity(), and check the types of its values. Raises UnreadableRecording."""
    known = {key: untagged(value) for key, value in _read(text).items()}
    for kind, keys in _KINDS.items():
        if any(
            not isinstance(known[key], kind) or isinstance(known[key], bool) is not (kind is bool)
            for key in keys
            if key in known
        ):
            raise malformed("an episode")
    for key, kind in (("ended", bool), ("flags", str)):
        pair = known.get(key, [])
        if not isinstance(pair, list) or len(pair) not in (0, 2) or not all(isinstance(item, kind) for item in pair):
            raise malformed("an episode")
    return known


_KINDS: dict[type, tuple[str, ...]] = {
    str: ("writer", "outcome"),
    int: ("episode_id", "lane", "first_step", "start_time", "end_time", "clock_offset", "duration"),
    dict: ("options", "rng_state", "reset_info"),
    bool: ("is_part", "has_final_observation"),
}


def flags_of(known: dict[str, Any], steps: int) -> Array | None:
    """Return the terminations and truncations in an identity, (2, steps) bool; None if it has none."""
    if "flags" in known:
        return np.stack([_unpacked(text, steps) for text in known["flags"]])
    if "ended" not in known:
        return None
    pair = np.zeros((2, steps), np.bool_)
    pair[:, -1:] = np.array(known["ended"])[:, None]
    return pair


def _unpacked(text: str, steps: int) -> Array:
    try:
        raw = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    except ValueError as error:
        raise malformed("an episode") from error
    if len(raw) != (steps + 7) // 8:
        raise malformed("an episode")
    return np.unpackbits(raw, count=steps).astype(np.bool_)


def _read(text: str) -> dict[str, Any]:
    try:
        plain = json_of(text) if len(text) <= _MOST_TEXT else None
    except (ValueError, RecursionError):
        plain = None
    if not isinstance(plain, dict):
        raise malformed("the trace, or an episode,")
    return plain


def malformed(what: str) -> UnreadableRecording:
    return UnreadableRecording(f"malformed metadata of gym-trace for {what}")
