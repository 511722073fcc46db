"""Mutate rings as a bad disk would, or as an attacker would, with valid checksums and marks."""

import contextlib
import random
import struct
from zlib import crc32

import msgpack

HEADER = struct.Struct("<8sHHI16s16sIIQQII44x")
ENTRY = struct.Struct("<IIHHI4qQ")
ODD_NUMBERS = (
    0,
    1,
    2,
    7,
    8,
    63,
    64,
    255,
    4096,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 62,
    (1 << 63) - 1,
    -1,
)
ODD_THINGS = (
    *ODD_NUMBERS,
    1 << 63,
    None,
    True,
    1.5,
    float("nan"),
    "",
    "O",
    "<f8",
    "|V80",
    "<U9999",
    "<M8[s]",
    b"\xff",
    [],
    {},
    [[]],
)
ODD_PATHS = (
    ["fragments"],
    ["starts"],
    ["rewards"],
    ["infos"],
    ["annotations"],
    ["annotations", 1],
    [],
    ["x"],
    [[]],
    [1],
)


def mutated_ring(chance: random.Random, data: bytes) -> bytes:
    """Return a ring with one or a few mutations."""
    ring = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        kind = chance.randrange(10)
        if kind == 0:
            _change_header(chance, ring)
        elif kind <= 2:
            _change_layout(chance, ring)
        elif kind <= 6:
            _change_log(chance, ring)
        elif kind == 7:
            _change_rows(chance, ring)
        elif kind == 8:
            at = chance.randrange(len(ring))
            length = min(chance.choice((1, 8, 64, 500)), len(ring) - at)
            ring[at : at + length] = chance.choice((chance.randbytes(length), bytes(length), b"\xff" * length))
        else:
            del ring[chance.randrange(len(ring)) :]
        if len(ring) < 256:
            break
    return bytes(ring)


def _change_header(chance: random.Random, ring: bytearray) -> None:
    fields = list(HEADER.unpack_from(ring))
    which = chance.choice((1, 2, 3, 6, 7, 8, 9, 10))
    fields[which] = (
        chance.choice(ODD_NUMBERS) if chance.random() < 0.5 else fields[which] + chance.choice((-8, -1, 1, 8))
    )
    bits = {1: 16, 2: 16, 8: 64, 9: 64}.get(which, 32)
    fields[which] %= 1 << bits
    ring[:124] = HEADER.pack(*fields)
    ring[124:128] = struct.pack("<I", crc32(ring[:124]))


def _change_layout(chance: random.Random, ring: bytearray) -> None:
    fields = list(HEADER.unpack_from(ring))
    try:
        layout = msgpack.unpackb(ring[128 : 128 + fields[10]], strict_map_key=False)
    except (ValueError, msgpack.UnpackException):
        return
    if not isinstance(layout, dict) or not layout:
        return
    columns = layout.get("columns")
    if isinstance(columns, list) and columns and chance.random() < 0.6:
        column = chance.choice(columns)
        if isinstance(column, list) and column:
            at = chance.randrange(len(column))
            column[at] = chance.choice(ODD_PATHS if at == 0 else ([3, 3], [1 << 20] * 3, *ODD_THINGS))
        if chance.random() < 0.2:
            columns.append(column)
    else:
        key = chance.choice(list(layout))
        layout[key] = chance.choice(ODD_THINGS)
    packed = msgpack.packb(layout)
    if 128 + len(packed) > fields[9]:
        return
    ring[128 : 128 + len(packed)] = packed
    fields[10:12] = len(packed), crc32(packed)
    ring[:124] = HEADER.pack(*fields)
    ring[124:128] = struct.pack("<I", crc32(ring[:124]))


def _slab(chance: random.Random, ring: bytearray) -> tuple[int, int, int]:
    """Return offset, size and number of a used slab."""
    *_, slabs, size, first, _, _ = HEADER.unpack_from(ring)
    places = [first + i * size for i in range(min(slabs, 16)) if first + (i + 1) * size <= len(ring)]
    begun = [place for place in places if any(ring[place : place + 8])]
    if not begun or size < 256:
        return 0, 0, 0
    place = chance.choice(begun)
    return place, size, struct.unpack_from("<Q", ring, place)[0]


def _change_log(chance: random.Random, ring: bytearray) -> None:
    """Replace an entry and keep its mark."""
    place, size, sequence = _slab(chance, ring)
    if not size:
        return
    places, at = [], _log_of(ring)
    while at + ENTRY.size <= size and len(places) < 10_000:
        length, mark = (
            struct.unpack_from("<I", ring, place + at + 4)[0],
            struct.unpack_from("<Q", ring, place + at + 48)[0],
        )
        if mark != (sequence << 32 | len(places) + 1) % (1 << 64):
            break
        places.append(at)
        at += ENTRY.size + (length + 7 & ~7)
    if not places:
        return
    at = place + chance.choice(places)
    fields = list(ENTRY.unpack_from(ring, at))
    which = chance.choice((0, 0, 1, 2, 2, 3, 4, 5, 6, 7, 8))
    odd = chance.choice((0, 1, 2, fields[0], fields[0] + 1, *ODD_NUMBERS)) if which != 2 else chance.randrange(30)
    bits = (32, 32, 16, 16, 32)[which] if which < 5 else 64
    fields[which] = odd % (1 << bits) if which < 5 else (odd + (1 << 63)) % (1 << 64) - (1 << 63)
    ring[at : at + ENTRY.size] = ENTRY.pack(*fields)
    length = fields[1]
    if chance.random() < 0.4 and 0 < length < size and at + ENTRY.size + length <= len(ring):
        spot = at + ENTRY.size + chance.randrange(length)
        ring[spot] = chance.randrange(256)


def _log_of(ring: bytearray) -> int:
    """Return the offset of the log in a slab: after the header for rows, from the layout for lanes."""
    with contextlib.suppress(ValueError, msgpack.UnpackException):
        layout = msgpack.unpackb(ring[128 : 128 + HEADER.unpack_from(ring)[10]], strict_map_key=False)
        if isinstance(layout, dict) and type(layout.get("log")) is int and 0 <= layout["log"] < len(ring):
            return int(layout["log"])
    return 64


def _change_rows(chance: random.Random, ring: bytearray) -> None:
    """Change the marks of rows."""
    place, size, sequence = _slab(chance, ring)
    if not size:
        return
    number = chance.choice((1, 2, 3, 10, 1 << 20, (1 << 32) - 1))
    at = place + size - 8 * chance.randrange(1, min(100, size // 8))
    struct.pack_into("<Q", ring, at, (sequence << 32 | number) % (1 << 64) if chance.random() < 0.7 else 0)
