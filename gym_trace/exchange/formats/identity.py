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
from gym_trace.errors import UnreadableRecording
from gym_trace.format import wire
from gym_trace.format.manifest import json_of
from gym_trace.playback.episode_index import index_of
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
    table, rows, readers = trace.episodes[indices], index_of(trace).rows[indices], index_of(trace).readers
    writers, outcomes = table["writer"].tolist(), table["outcome"].tolist()
    heads = {
        (writer, outcome): json_text({"writer": readers[writer].writer, "outcome": outcome})[:-1]
        for writer, outcome in set(zip(writers, outcomes))
    }
    ends, has_pending = _ends_of(trace, table["writer"], rows), [bool(reader.pending) for reader in readers]
    finals, parts = table["has_final_observation"].tolist(), is_part[indices].tolist()
    numbers = (table[name].astype(np.int64).tolist() for name in _IN_TABLE)
    texts = []
    for index, writer, outcome, part, has_final, ended, start, *values in zip(
        indices.tolist(), writers, outcomes, parts, finals, ends, index_of(trace).starts_of(indices), *numbers
    ):
        if ended is None or (has_pending[writer] and outcome == "lost"):
            texts.append(identity(trace[index], trace.episodes[index], part))
            continue
        number, lane, first_step, seed, begun, over, offset, duration = values
        text = f'{heads[writer, outcome]}, "episode_id": {number}, "lane": {lane}, "first_step": {first_step}'
        text += f', "seed": {seed}' if seed >= 0 else ""
        text += f', "start_time": {begun}' if begun != _NOT_A_TIME else ""
        text += f', "end_time": {over}' if over != _NOT_A_TIME else ""
        text += f', "clock_offset": {offset}' if offset else ""
        text += f', "duration": {duration}' if duration else ""
        if more := _more(seed, start, part, has_final):
            text += f", {json_text(more)[1:-1]}"
        texts.append(text + (_ENDED[tuple(ended)] if ended else "") + "}")
    return texts


_ENDED = {
    (terminated, truncated): f', "ended": {json_text([terminated, truncated])}'
    for terminated in (False, True)
    for truncated in (False, True)
}


def _more(seed: int, start: dict[str, Any], is_part: bool, has_final: bool) -> dict[str, Any]:
    """Return what few episodes have. seed: as in the table. start: the reset record."""
    known: dict[str, Any] = {}
    if seed == wire.SEED_ELSEWHERE and isinstance(large := start.get("seed"), int):
        known["seed"] = tagged(large)
    for name in ("options", "rng_state", "reset_info"):
        if start.get(name) is not None:
            known[name] = tagged(unpack(start[name]) if name == "reset_info" else start[name])
    known |= {"is_part": True} if is_part else {}
    return known if has_final else known | {"has_final_observation": False}


def _ends_of(trace: Trace, writers: Array, rows: Array) -> list[list[bool] | None]:
    """Return [terminated, truncated] of the last step of each episode, as "ended" of identity().

    [] for an episode without steps; None if an earlier step is flagged, too, so that identity() needs "flags".
    """
    ends: list[list[bool] | None] = [None] * len(rows)
    for number in np.unique(writers).tolist():
        mine, reader = np.flatnonzero(writers == number), index_of(trace).readers[number]
        parts, own = reader.parts, rows[mine]
        begin, end = parts.first[own.min()], parts.first[own.max() + 1]
        flags = reader.fragments.flags[parts.fragments[begin:end]]
        flagged = np.concatenate([[0], np.cumsum(flags & (wire.TERMINATED | wire.TRUNCATED) > 0)])
        last = parts.first[1:][own] - 1 - begin
        is_plain = flagged[last] == flagged[parts.first[:-1][own] - begin]
        pairs = np.stack([flags[last] & wire.TERMINATED > 0, flags[last] & wire.TRUNCATED > 0], axis=1).tolist()
        steps = parts.column("steps", own).tolist()
        for index, plain, pair, count in zip(mine.tolist(), is_plain.tolist(), pairs, steps):
            if plain:
                ends[index] = pair if count else []
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
