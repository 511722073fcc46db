"""Traces forged by an attacker, with valid checksums: their contents must not harm a reader.

Each forgery is a function that changes a valid trace in a directory. Its name describes the change.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import msgpack
import numpy as np
import zstandard
from batch_forgery import Forgery, Record, taken_apart
from long_tests import LONG
from numbered_env import record

from gym_trace import TraceRecordingWrapper
from gym_trace.data.packing import pack
from gym_trace.format import wire
from gym_trace.format.encodings import CONSTANT, ZSTD

REWARDS, INFOS, STARTS = ("rewards",), ("infos",), ("starts",)
MB = 1 << 20
THOUSANDS = 1500 if LONG else 200  # repetitions in slow cases
LESS = 1 if LONG else 4  # divisor of sizes in slow cases
BATCH, MANIFEST = "w.000000.gtb", "w.manifest.jsonl"
LONG_NUMBER = 10**5000  # more digits than Python converts to text

Forge = Callable[["Place"], Any]
FORGERIES: dict[str, Forge] = {}


class Place(NamedTuple):
    """Directories of a forgery: the trace, and files outside of it that must not change."""

    trace: Path
    outside: Path

    @property
    def batch(self) -> Path:
        return self.trace / BATCH

    @property
    def manifest(self) -> Path:
        return self.trace / MANIFEST

    def forge(self, change: Callable[[Forgery], Any], sealed: bool = True) -> None:
        forgery = taken_apart(self.batch)
        change(forgery)
        if not sealed:
            forgery.without_index()
            self.batch.unlink()
        path = self.batch if sealed else self.batch.with_name(f"{BATCH}.part")
        path.write_bytes(forgery.data())

    def schema(self, **changes: Any) -> None:
        self.forge(lambda forgery: forgery.records[0].metadata.update(changes))

    def environment(self, **spec: Any) -> None:
        """Change the recorded environment."""
        known = {"id": "CartPole-v1", "entry_point": None, "kwargs": {}, "additional_wrappers": [], **spec}
        self.schema(environment={"id": known["id"], "spec": json.dumps(known), "wrappers": [], "class": "x.Y"})

    def lines(self, *lines: Any) -> None:
        """Append to the manifest."""
        with open(self.manifest, "ab") as file:
            for line in lines:
                file.write((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n")


def forgery(forge: Forge) -> Forge:
    FORGERIES[forge.__name__] = forge
    return forge


def sound_trace(directory: Path) -> None:
    record(directory, record_infos=True)


def first(forged: Forgery) -> Record:
    """Return the first chunk with steps."""
    return next(chunk for chunk in forged.chunks if REWARDS in chunk.columns)


def rows_of(chunk: Record, path: tuple[str, ...]) -> int:
    return int(chunk.metadata["columns"][chunk.columns[path]][3])


def put_values(chunk: Record, path: tuple[str, ...], values: list[bytes], encoding: int = ZSTD) -> None:
    """Replace a column by these MessagePack values."""
    raw = np.array(list(map(len, values)), "<u4").tobytes() + b"".join(values)
    blob = zstandard.compress(raw) if encoding & ZSTD else raw
    if path not in chunk.columns:
        chunk.metadata["columns"].append([list(path), "msgpack", [], len(values), 0, 0, 0, 0])
        chunk.blobs.append(b"")
    chunk.store(path, blob, dtype="msgpack", shape=[], rows=len(values), raw=len(raw), encoding=encoding)


def infos(value: bytes, encoding: int = ZSTD) -> Callable[[Forgery], None]:
    """Replace the first info of the trace."""

    def change(forged: Forgery) -> None:
        chunk = first(forged)
        put_values(chunk, INFOS, [value] + [b"\x80"] * (rows_of(chunk, INFOS) - 1), encoding)

    return change


def repeated(forged: Forgery, times: int) -> list[Record]:
    """Repeat the first chunk."""
    chunk = first(forged)
    at = forged.records.index(chunk)
    copies = [
        Record(chunk.kind, {"columns": [list(d) for d in chunk.metadata["columns"]]}, list(chunk.blobs), chunk.flags)
        for _ in range(times)
    ]
    for number, copy in enumerate(copies):
        copy.change_fragments(lambda table, number=number: _set(table[:1], episode=1000 + number))
    for copy in copies:  # keep the rows of one fragment
        copy.metadata["columns"] = copy.metadata["columns"][:1]
        copy.blobs = copy.blobs[:1]
        copy.change_fragments(lambda table: _set(table, steps=0, flags=wire.STARTS | wire.HAS_INITIAL | wire.ENDS))
    forged.records[at:at] = copies
    return copies


def _set(table: Any, **values: Any) -> Any:
    table = table.copy()
    for name, value in values.items():
        table[name] = value
    return table


def constant(chunk: Record, path: list[Any], dtype: str, shape: list[int], rows: int, row: bytes) -> None:
    """Add a constant column: one stored row for many rows."""
    chunk.metadata["columns"].append([path, dtype, shape, rows, CONSTANT, 0, len(row), 0])
    chunk.blobs.append(b"")
    chunk.store(tuple(path), row)


# -- numbers ----------------------------------------------------------------------------------------------------------


@forgery
def an_index_whose_totals_are_infinite(place):
    place.forge(lambda forged: forged.index.metadata.update(totals=[[["rewards"], float("inf"), float("inf")]]))


@forgery
def an_index_whose_totals_have_five_thousand_digits(place):
    place.forge(lambda forged: forged.index.metadata.update(totals=[[["rewards"], LONG_NUMBER, LONG_NUMBER]]))


@forgery
def an_index_whose_totals_are_below_zero(place):
    place.forge(lambda forged: forged.index.metadata.update(totals=[[["rewards"], -5, -(1 << 62)]]))


@forgery
def a_column_named_by_a_number_of_five_thousand_digits(place):
    place.forge(lambda forged: first(forged).describe(REWARDS, path=["annotations", LONG_NUMBER]))


@forgery
def metadata_with_a_number_of_five_thousand_digits(place):
    place.schema(metadata={"number": LONG_NUMBER, LONG_NUMBER: 1}, created=LONG_NUMBER, pid=LONG_NUMBER)


@forgery
def an_info_with_a_number_of_five_thousand_digits(place):
    place.forge(infos(pack({"t": LONG_NUMBER, LONG_NUMBER: [LONG_NUMBER]})))


@forgery
def rewards_of_five_thousand_digits(place):
    def change(forged):
        chunk = first(forged)
        put_values(chunk, REWARDS, [pack(LONG_NUMBER)] * rows_of(chunk, REWARDS))

    place.forge(change)


@forgery
def a_seed_and_options_of_five_thousand_digits(place):
    def change(forged):
        for chunk in forged.chunks:
            if STARTS in chunk.columns:
                values = [pack({"seed": LONG_NUMBER, "options": {"x": LONG_NUMBER}})] * rows_of(chunk, STARTS)
                put_values(chunk, STARTS, values)
                chunk.change_fragments(lambda table: _set(table, seed=wire.SEED_ELSEWHERE))

    place.forge(change)


@forgery
def reset_infos_that_are_no_messagepack(place):
    def change(forged):
        for chunk in forged.chunks:
            if STARTS in chunk.columns:
                values = [pack({"seed": "x", "options": 7, "rng_state": [], "reset_info": 5})] * rows_of(chunk, STARTS)
                put_values(chunk, STARTS, values)

    place.forge(change)


@forgery
def returns_and_times_at_the_ends_of_their_ranges(place):
    edges = {"reward_sum": np.inf, "duration": (1 << 63) - 1, "clock_drift": (1 << 63) - 1, "start_time": 1 - (1 << 63)}

    def change(forged):
        for chunk in forged.chunks:
            chunk.change_fragments(lambda table: _set(table, **edges))

    place.forge(change)


@forgery
def a_space_of_five_hundred_megabytes_in_sixty_bytes(place):
    bound = {"dtype": "<f8", "shape": [], "data": "AAAAAAAAAAA="}
    box = {"type": "Box", "dtype": "<f8", "shape": [1 << 26], "low": bound, "high": bound}
    place.schema(observation_space={"type": "Tuple", "spaces": [box] * 50})


@forgery
def spaces_of_absurd_numbers(place):
    numbers = {"n": LONG_NUMBER, "start": -LONG_NUMBER}
    place.schema(
        observation_space={"type": "Discrete", "dtype": "<i8", **numbers},
        action_space={"type": "MultiBinary", "dtype": "|i1", "shape": [1 << 30]},
    )


# -- small files that grow in memory ----------------------------------------------------------------------------------


@forgery
def an_info_of_tens_of_thousands_of_empty_lists(place):
    place.forge(infos(b"\xdd" + (MB // 16).to_bytes(4, "big") + b"\x90" * (MB // 16), encoding=0))


@forgery
def an_info_of_twelve_million_empty_maps_in_little(place):
    place.forge(infos(b"\xdd" + (12 * MB).to_bytes(4, "big") + b"\x80" * (12 * MB)))


@forgery
def an_info_of_many_lists_of_many_lists(place):
    inner = b"\xdc" + (4096).to_bytes(2, "big") + b"\x90" * 4096
    place.forge(infos(b"\xdc" + (3_000).to_bytes(2, "big") + inner * 3_000))


@forgery
def infos_that_are_one_large_value_for_every_row(place):
    def change(forged):
        chunk, rows = first(forged), 600
        value = pack({"a": [[]] * 20_000})
        chunk.store(INFOS, value, dtype="msgpack", shape=[], rows=rows, encoding=CONSTANT, raw=len(value))
        chunk.change_fragments(lambda table: _set(table[:1], flags=wire.HAS_INITIAL, steps=rows))
        keep = [0, chunk.columns[INFOS]]
        chunk.metadata["columns"] = [chunk.metadata["columns"][i] for i in keep]
        chunk.blobs = [chunk.blobs[i] for i in keep]
        for path, dtype, shape, size in (("observations", "<f4", [3], 12), ("actions", "<i8", [], 8)):
            constant(chunk, [path], dtype, shape, rows + (path == "observations"), bytes(size))
        constant(chunk, ["rewards"], "<f8", [], rows, bytes(8))

    place.forge(change)


@forgery
def a_schema_of_millions_of_empty_lists(place):
    many = msgpack.ExtType(4, b"\xdd" + (MB // LESS).to_bytes(4, "big") + b"\x90" * (MB // LESS))
    place.schema(metadata=many)


@forgery
def a_manifest_line_of_millions_of_empty_lists(place):
    place.lines(b'{"type":"x","a":[' + b"[]," * MB + b"[]]}")


@forgery
def a_column_descriptor_of_a_million_dimensions(place):
    place.forge(lambda forged: first(forged).describe(REWARDS, shape=[1 << 31] * 300_000))


@forgery
def a_hundred_columns_of_a_gigabyte_in_a_row_each(place):
    def change(forged):
        chunk = first(forged)
        steps = wire.MAX_ROWS
        chunk.change_fragments(lambda table: _set(table[:1], flags=wire.HAS_INITIAL, steps=steps - 1))
        del chunk.metadata["columns"][1:], chunk.blobs[1:]
        constant(chunk, ["observations"], "<f4", [3], steps, bytes(12))
        constant(chunk, ["actions"], "<i8", [], steps - 1, bytes(8))
        constant(chunk, ["rewards"], "<f8", [], steps - 1, bytes(8))
        for i in range(100):
            constant(chunk, ["annotations", f"n{i}"], "<f8", [8], steps - 1, bytes(64))

    place.forge(change)


@forgery
def a_hundred_fragment_tables_that_grow_to_a_million_rows(place):
    def change(forged):
        row = forged.chunks[0].table("fragments", wire.FRAGMENT)[:1].copy()
        row["steps"], row["flags"] = 0, wire.HAS_INITIAL
        for number, copy in enumerate(repeated(forged, 100)):
            row["episode"] = number
            copy.store(("fragments",), row.tobytes(), rows=wire.MAX_TABLE, encoding=CONSTANT, raw=80)
            copy.fragments = row

    place.forge(change, sealed=False)


@forgery
def batches_whose_indexes_grow_to_millions_of_rows(place):
    forged = taken_apart(place.batch)
    row = forged.chunks[0].table("fragments", wire.FRAGMENT)[:1].copy()
    row["flags"] = wire.HAS_INITIAL | wire.STARTS | wire.ENDS
    index = forged.index
    index.put_table("chunks", np.array([(200, 8, wire.MAX_TABLE // 4, 0)], wire.CHUNK_ENTRY))
    index.store(("fragments",), row.tobytes(), rows=wire.MAX_TABLE // 4, encoding=CONSTANT, raw=80)
    for number in range(10):
        (place.trace / f"w.{number:06d}.gtb").write_bytes(forged.data(reindexed=False))


@forgery
def batches_whose_shuffled_indexes_grow_to_millions_of_rows(place):
    forged = taken_apart(place.batch)
    rows = np.repeat(forged.chunks[0].table("fragments", wire.FRAGMENT)[:1], wire.MAX_TABLE // 4)
    rows["flags"], rows["episode"] = wire.HAS_INITIAL | wire.STARTS | wire.ENDS, np.arange(len(rows)) << 38
    forged.index.put_table("chunks", np.array([(200, 8, len(rows), 0)], wire.CHUNK_ENTRY))
    forged.index.put_table("fragments", rows)
    for number in range(10):
        (place.trace / f"w.{number:06d}.gtb").write_bytes(forged.data(reindexed=False))


# -- false sizes ------------------------------------------------------------------------------------------------------


@forgery
def a_batch_of_a_terabyte_of_holes(place):
    os.truncate(place.batch, 1 << 40)


@forgery
def an_open_batch_of_a_terabyte_of_holes(place):
    place.batch.rename(place.trace / f"{BATCH}.part")
    os.truncate(place.trace / f"{BATCH}.part", 1 << 40)


@forgery
def a_terabyte_of_holes_with_a_footer_that_checks(place):
    forged = taken_apart(place.batch)
    data = place.batch.read_bytes()
    footer = wire.unpack_footer(data[-64:], len(data), forged.file_id)
    assert footer is not None
    os.truncate(place.batch, (1 << 40) - 64)
    with open(place.batch, "ab") as file:
        file.write(wire.pack_footer(footer.index_offset, 1 << 40, forged.file_id))


@forgery
def a_record_whose_columns_are_holes(place):
    """Fill them with zeros, with valid checksums."""
    forged = taken_apart(place.batch)
    chunk = first(forged)
    rows = 1 << 23
    size, crc = 64 * rows, 0
    for _ in range(size // MB):
        crc = crc32(bytes(MB), crc)
    chunk.metadata["columns"].append([["annotations", "n"], "<f8", [8], rows, 0, size, size, crc])
    forged.without_index()
    del forged.records[forged.records.index(chunk) + 1 :]
    place.batch.unlink()
    chunk.claims = {"body_length": size + sum(wire.aligned(len(blob)) for blob in chunk.blobs)}
    data = forged.data()
    path = place.trace / f"{BATCH}.part"
    path.write_bytes(data)
    os.truncate(path, len(data) + size)


@forgery
def a_manifest_of_a_hundred_gigabytes_of_holes(place):
    os.truncate(place.manifest, 100 << 30)


@forgery
def a_manifest_with_a_line_a_hole_apart(place):
    with open(place.manifest, "r+b") as file:
        for number in range(1, 200):
            file.seek(number << 30)
            file.write(b"\n{}\n")


@forgery
def a_wide_hole_before_the_records(place):
    data = place.batch.read_bytes()
    with open(place.batch, "wb") as file:
        file.write(data[:64])
        file.seek(200 << 30)
        file.write(data[64:])


def _with_parity(place: Place, *numbers: int) -> None:
    """Claim parity of this shape in the footer, and damage a chunk, so that readers look for it."""
    data = bytearray(place.batch.read_bytes())
    file_id = bytes(data[16:32])
    footer = wire.unpack_footer(data[-64:], len(data), file_id)
    assert footer is not None
    data[-64:] = wire.pack_footer(footer.index_offset, len(data), file_id, numbers)  # type: ignore[arg-type]
    data[footer.parity[0] // 2] ^= 1
    place.batch.write_bytes(data)


@forgery
def parity_of_absurd_numbers_of_groups(place):
    _with_parity(place, 64, 64, (1 << 32) - 1)


@forgery
def parity_of_blocks_of_gigabytes_behind_the_end(place):
    _with_parity(place, (1 << 64) - 1, (1 << 32) - 1, 1)


@forgery
def parity_of_the_index_alone_that_is_the_index_itself(place):
    _with_parity(place, len(place.batch.read_bytes()) // 2 & ~7, 64, 1)


# -- quadratic costs --------------------------------------------------------------------------------------------------


@forgery
def eight_megabytes_of_sync_marks(place):
    place.batch.write_bytes(place.batch.read_bytes()[:64] + wire.SYNC * MB)


@forgery
def two_megabytes_of_headers_of_records_that_are_not_whole(place):
    forged = taken_apart(place.batch)
    data = bytearray(forged.without_index().data())
    while len(data) < 2 * MB:
        data += b"".join(wire.pack_record(wire.CHUNK, b"", [], len(data), 9, forged.file_id))[:64]
        header = bytearray(data[-64:])
        header[16:24] = (1 << 40).to_bytes(8, "little")
        data[-64:] = header[:60] + _crc(header[:60])
    place.batch.write_bytes(data)


@forgery
def thousands_of_chunks_that_are_damaged(place):
    def change(forged):
        for copy in repeated(forged, THOUSANDS):
            copy.metadata["columns"][0][7] ^= 1

    place.forge(change, sealed=False)


@forgery
def thousands_of_damaged_chunks_that_the_index_knows(place):
    forged = taken_apart(place.batch)
    copies = repeated(forged, THOUSANDS)
    data = bytearray(forged.data())
    at = 0
    for _ in copies:
        at = data.index(wire.SYNC, at + 8)
        if at > 3000:
            data[at + 70] ^= 1
    place.batch.write_bytes(data)


@forgery
def thousands_of_episodes_that_have_lost_their_beginning(place):
    def change(forged):
        for number, copy in enumerate(repeated(forged, THOUSANDS)):
            row = {"steps": 1, "flags": 0, "first_step": 5, "episode": number // 2}
            copy.change_fragments(lambda table, row=row: _set(table, **row))
            for path, dtype, shape, size in (("observations", "<f4", [3], 12), ("actions", "<i8", [], 8)):
                constant(copy, [path], dtype, shape, 1, bytes(size))
            constant(copy, ["rewards"], "<f8", [], 1, bytes(8))
            if number % 4 == 0:
                copy.metadata["columns"][1][7] ^= 1

    place.forge(change, sealed=False)


@forgery
def padding_that_is_not_zero_behind_every_chunk(place):
    def change(forged):
        repeated(forged, THOUSANDS)

    place.forge(change, sealed=False)
    path = place.trace / f"{BATCH}.part"
    data = bytearray(path.read_bytes())
    at = 0
    while (at := data.find(wire.SYNC, at + 8)) >= 0:
        if at > 4096:
            length = int.from_bytes(data[at + 12 : at + 16], "little")
            if length % 8:
                data[at + 64 + length] = 1
    path.write_bytes(data)


def _crc(data: bytes) -> bytes:
    return crc32(bytes(data)).to_bytes(4, "little")


def outside_of(place: Place) -> None:
    """Create a foreign file that must not change."""
    with TraceRecordingWrapper(_env(), place.outside / "victim", uid="w") as env:
        env.reset(seed=0)
        env.step(0)
    (place.outside / "a file").write_text("not yours\n")


def _env() -> Any:
    from numbered_env import NumberedEnv

    return NumberedEnv()


def copy_of(sound: Path, place: Place) -> None:
    shutil.copytree(sound, place.trace)
