"""Writers whose files hold what others have recorded: who these were (docs/FORMAT.md, Origins)."""

from __future__ import annotations

import base64
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

import zstandard

from gym_trace.errors import CorruptTrace
from gym_trace.model.packing import pack_lenient, unpack
from gym_trace.model.schema import as_map

ORIGINS = "origins"  # the key of the schema record
ID_BITS = 40  # of an episode id in the fragment table that are the episode's own; those above are the origin's number
OWN_ID = (1 << ID_BITS) - 1
MOST_ORIGINS = 1 << 12
_FORMAT = [1, 2]
_LEVEL = 9
_MOST_BYTES, _MOST_GROWTH = 16 << 20, 1 << 10  # of the description of origins, and how many times the bytes it takes


class Origin(NamedTuple):
    """A writer whose episodes are in the files of another one.

    Attributes:
        writer: its id.
        schema: its schema record.
        entries: the lines of its manifest, but for those that tell of the schema and of batches.
    """

    writer: str
    schema: dict[str, Any]
    entries: list[dict[str, Any]]


def origins_of(schema: dict[str, Any], file: str) -> list[Origin | None]:
    """The origins that a schema record tells of, of which nothing is trusted; none of a writer's own recording.

    None stands for one of which nothing is left, as its number goes on to be that of nobody.

    file: the id of the writer in whose files they are, by which one is called that does not say its id.

    Raises CorruptTrace.
    """
    found: list[Origin | None] = []
    now = {key: value for key, value in schema.items() if key not in (ORIGINS, "batch")}
    for number, one in enumerate(unpacked_origins(schema[ORIGINS]) if ORIGINS in schema else ()):
        if one is None:
            found.append(None)
            continue
        one = as_map(one)
        without = one.get("without")
        gone = [key for key in without if isinstance(key, str)] if isinstance(without, list) else []
        now = {key: value for key, value in now.items() if key not in gone} if gone else dict(now)
        now |= as_map(one.get("schema"))
        writer = one.get("writer")
        writer = writer if isinstance(writer, str) else f"{file}.{number}"
        entries = one.get("manifest")
        lines = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
        found.append(Origin(writer, {**now, "writer": writer}, lines))
    return found


def with_origins(origins: Iterable[Origin | None], writer: str) -> dict[str, Any]:
    """The schema record of a writer whose files hold what these have recorded: the first one's, and what differs."""
    described: list[dict[str, Any] | None] = []
    schema: dict[str, Any] = {}
    before: dict[str, Any] = {}
    packed: dict[str, bytes] = {}
    for origin in origins:
        if origin is None:
            described.append(None)
            continue
        said = {key: value for key, value in origin.schema.items() if key not in ("batch", ORIGINS)}
        own = {key: value for key, value in said.items() if key != "writer"}
        if not schema:
            schema = {**said, "format": _FORMAT, "writer": writer}
            before, packed = schema, {key: pack_lenient(value)[0] for key, value in schema.items()}
        now = {key: pack_lenient(value)[0] for key, value in own.items()}
        differs = {key: value for key, value in own.items() if packed.get(key) != now[key]}
        without = [key for key in before if key not in own and key != "writer"]
        one: dict[str, Any] = {"writer": origin.writer}
        one |= {"schema": differs} if differs else {}
        one |= {"without": without} if without else {}
        one |= {"manifest": origin.entries} if origin.entries else {}
        described.append(one)
        before, packed = own, now
    return {**schema, ORIGINS: packed_origins(described)}


def of_origins(schema: dict[str, Any], numbers: Container[int]) -> dict[str, Any]:
    """The schema record of files that hold something of these of its origins alone: nothing is said of the others."""
    origins = origins_of(schema, str(schema["writer"]))
    kept = [origin if number in numbers else None for number, origin in enumerate(origins)]
    return schema if kept == origins else with_origins(kept, str(schema["writer"]))


def packed_origins(described: list[Any]) -> bytes:
    """As a schema record has them: they are much alike."""
    return zstandard.ZstdCompressor(level=_LEVEL).compress(pack_lenient(described)[0])


def unpacked_origins(packed: Any) -> list[Any]:
    """What a schema record has, as maps. packed: as it is in a batch, or in a manifest. Raises CorruptTrace."""
    try:
        frame = base64.b64decode(packed, validate=True) if isinstance(packed, str) else packed
        size = zstandard.frame_content_size(frame) if isinstance(frame, bytes) else -1
        if not 0 <= size <= min(_MOST_BYTES, _MOST_GROWTH * len(frame)):
            raise CorruptTrace("the origins of a schema are malformed, or too large")
        described = unpack(zstandard.ZstdDecompressor().decompress(frame))
    except (ValueError, zstandard.ZstdError) as error:
        raise CorruptTrace("the origins of a schema are malformed") from error
    if not isinstance(described, list) or len(described) > MOST_ORIGINS:
        raise CorruptTrace(f"the origins of a schema are no array of at most {MOST_ORIGINS}")
    return described


def split_id(episode: int) -> tuple[int, int]:
    """The number of the origin of an episode, and its own id, by its id in the fragment table."""
    return episode >> ID_BITS, episode & OWN_ID
