"""Origins: the writers that first recorded the episodes in another writer's files (docs/FORMAT.md, Origins)."""

from __future__ import annotations

import base64
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import zstandard

from gym_trace.data.packing import pack_lenient, unpack
from gym_trace.data.schema import as_map
from gym_trace.errors import CorruptTrace

ORIGINS = "origins"  # the key of the schema record
ID_BITS = (
    40  # an id in the fragment table: the low bits are the episode's own id, the high bits the number of its origin
)
OWN_ID = (1 << ID_BITS) - 1
MOST_ORIGINS = 1 << 12
_FORMAT = [1, 3]
_LEVEL = 9
_MOST_BYTES, _MOST_GROWTH = 16 << 20, 1 << 10  # limits on unpacked origins: size, and ratio to packed size


class Origin(NamedTuple):
    """A writer whose episodes are in another writer's files.

    Attributes:
        writer: id of the writer.
        schema: schema record of the writer.
        entries: lines of the writer's manifest, except schema and batch lines.
    """

    writer: str
    schema: dict[str, Any]
    entries: list[dict[str, Any]]


def origins_of(schema: dict[str, Any], file: str) -> list[Origin | None]:
    """Return the origins in an untrusted schema record; an empty list if the writer recorded its episodes itself.

    A deleted origin leaves None, so that the numbers of the others stay valid.

    file: id of the writer that holds the files; an origin without an id is named after it.

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
        removed = [key for key in without if isinstance(key, str)] if isinstance(without, list) else []
        now = {key: value for key, value in now.items() if key not in removed} if removed else dict(now)
        now |= as_map(one.get("schema"))
        writer = one.get("writer")
        writer = writer if isinstance(writer, str) else f"{file}.{number}"
        entries = one.get("manifest")
        lines = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
        found.append(Origin(writer, {**now, "writer": writer}, lines))
    return found


def with_origins(origins: Iterable[Origin | None], writer: str) -> dict[str, Any]:
    """Return the schema record for files with these origins: the first schema, and how later ones differ."""
    described: list[dict[str, Any] | None] = []
    schema: dict[str, Any] = {}
    before: dict[str, Any] = {}
    packed: dict[str, bytes] = {}
    for origin in origins:
        if origin is None:
            described.append(None)
            continue
        schema_fields = {key: value for key, value in origin.schema.items() if key not in ("batch", ORIGINS)}
        own = {key: value for key, value in schema_fields.items() if key != "writer"}
        if not schema:
            schema = {**schema_fields, "format": _FORMAT, "writer": writer}
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


def changed_schema(
    schema: dict[str, Any],
    change: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    numbers: Container[int] | None = None,
) -> dict[str, Any]:
    """Return a schema record with the schema of each of its writers changed.

    change: returns the new schema of a writer; called for each origin, or for the only writer.
    numbers: origins to keep; None: all. Raises CorruptTrace.
    """
    if ORIGINS not in schema:
        return change(schema)
    origins = origins_of(schema, str(schema["writer"]))
    changed = [
        origin._replace(schema=change(origin.schema)) if origin and (numbers is None or number in numbers) else None
        for number, origin in enumerate(origins)
    ]
    return schema if changed == origins else with_origins(changed, str(schema["writer"]))


def packed_origins(described: list[Any]) -> bytes:
    """Compress origins for a schema record: they are very similar."""
    return zstandard.ZstdCompressor(level=_LEVEL).compress(pack_lenient(described)[0])


def unpacked_origins(packed: Any) -> list[Any]:
    """Decompress origins. packed: bytes (from a batch) or base64 text (from a manifest). Raises CorruptTrace."""
    try:
        frame = base64.b64decode(packed, validate=True) if isinstance(packed, str) else packed
        size = zstandard.frame_content_size(frame) if isinstance(frame, bytes) else -1
        if not 0 <= size <= min(_MOST_BYTES, _MOST_GROWTH * len(frame)):
            raise CorruptTrace("the origins of a schema are malformed, or too large")
        described = unpack(zstandard.ZstdDecompressor().decompress(frame))
    except (ValueError, zstandard.ZstdError) as error:
        raise CorruptTrace("the origins of a schema are malformed") from error
    if not isinstance(described, list) or len(described) > MOST_ORIGINS:
        raise CorruptTrace(f"the origins of a schema are not an array of at most {MOST_ORIGINS}")
    return described


def split_id(episode: int) -> tuple[int, int]:
    """Split an id of the fragment table into the number of the origin and the episode's own id."""
    return episode >> ID_BITS, episode & OWN_ID
