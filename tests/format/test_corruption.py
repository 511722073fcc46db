"""Reading damaged or malicious files gives correct values or a TraceError: no wrong value, no hang, no memory bomb.

With GYM_TRACE_LONG=1 the tests try every byte; otherwise a sample, and the bytes around chunk boundaries.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked_python
import fuzz_reader
import msgpack
import numpy as np
import pytest
import zstandard
from batch_forgery import Forgery, taken_apart
from forked_python import HELPERS
from hostile_forgeries import first, put_values, rows_of
from long_tests import LONG
from numbered_env import all_steps, read_undamaged, record, steps_of
from runs import batch_reader

from gym_trace import check_trace, open_trace
from gym_trace.errors import TraceError
from gym_trace.format import wire

STRIDE = 1 if LONG else 257  # coprime to the alignment of 8


@pytest.fixture(params=["sealed", "open"])
def batch(request, tmp_path) -> Path:
    """The batch file of a small trace: closed, or of a dead writer."""
    return record(tmp_path / "t", closed=request.param == "sealed")


def chunk_steps(batch: Path) -> list[tuple[int, int, set[tuple[int, int]]]]:
    """Return (begin, end, steps) of each chunk, in bytes."""
    reader, first, found = batch_reader(batch), 0, []
    for offset, length, count, _ in reader.chunks.tolist():
        rows = reader.fragments[first : first + count][["episode", "first_step", "steps"]].tolist()
        first += count
        found.append((offset, offset + length, {(e, f + s) for e, f, steps in rows for s in range(steps)}))
    return found


def places(size: int, chunks: list[tuple[int, int, set[tuple[int, int]]]]) -> list[int]:
    """Return offsets to try: every STRIDE bytes, and around chunk boundaries."""
    edges = {end + near for _, end, _ in chunks[:: 1 if LONG else 3] for near in (-1, 0, 1)}
    return sorted({*range(0, size, STRIDE), *(edge for edge in edges if edge < size)})


def read_strictly(directory: Path) -> set[tuple[int, int]] | None:
    """Return the steps read, or None if reading raises a TraceError."""
    try:
        trace = open_trace(directory)
        found = steps_of(trace)
        assert steps_of(trace[i] for i in range(len(trace))) == found
    except TraceError:
        return None
    return found


@pytest.mark.parametrize("mask", [1, 128, 255] if LONG else [4])
def test_a_flipped_byte_loses_at_most_one_chunk_and_check_locates_it(batch, mask):
    whole = batch.read_bytes()
    chunks = chunk_steps(batch)
    for place in places(len(whole), chunks):
        batch.write_bytes(whole[:place] + bytes([whole[place] ^ mask]) + whole[place + 1 :])
        context = f"byte {place} of {len(whole)}"

        assert read_strictly(batch.parent) in (None, all_steps()), context

        left = steps_of(read_undamaged(batch.parent), damaged=True)
        lost = next((steps for start, end, steps in chunks if start <= place < end), set())
        # The step after a lost one is lost, too: its first observation is missing.
        assert all_steps() - left <= lost | {(e, s + 1) for e, s in lost}, context

        damages = check_trace(batch.parent).damages
        assert any(damage.start <= place < damage.end for damage in damages), context


def test_a_truncated_batch_keeps_exactly_its_complete_chunks(batch):
    whole = batch.read_bytes()
    chunks = chunk_steps(batch)
    for length in places(len(whole), chunks):
        batch.write_bytes(whole[:length])
        context = f"{length} of {len(whole)} bytes"
        complete = set().union(*(steps for _, end, steps in chunks if end <= length))
        assert steps_of(read_undamaged(batch.parent)) == complete, context
        report = check_trace(batch.parent)
        assert report.steps == len(complete), context
        if batch.suffix == ".part":  # as after a killed writer
            assert read_strictly(batch.parent) == complete, context
            assert report.damages == [], context
        else:
            assert read_strictly(batch.parent) is None, context
            assert report.damages, context


def test_bytes_at_the_end_of_a_sealed_batch_are_damage(tmp_path):
    batch = record(tmp_path / "t")
    batch.write_bytes(batch.read_bytes() + b"\0" * 64)
    assert check_trace(tmp_path / "t").damages
    assert read_strictly(tmp_path / "t") is None
    assert steps_of(read_undamaged(tmp_path / "t")) == all_steps()


def test_zeros_at_the_end_of_an_open_batch_are_not_damage(tmp_path):
    batch = record(tmp_path / "t", closed=False)
    batch.write_bytes(batch.read_bytes() + bytes(5000))
    assert read_strictly(tmp_path / "t") == all_steps()
    assert check_trace(tmp_path / "t").damages == []


# -- malicious files --------------------------------------------------------------------------------------------------

FRAGMENTS, REWARDS, INFOS, OBSERVATIONS = ((name,) for name in ("fragments", "rewards", "infos", "observations"))
_frame = zstandard.ZstdCompressor(level=3).compress
_bomb = functools.cache(lambda: _frame(bytes(1 << 30)))
_frame_without_size = zstandard.ZstdCompressor(write_content_size=False).compress
_frame_of_a_huge_window = zstandard.ZstdCompressor(
    compression_params=zstandard.ZstdCompressionParameters.from_level(3, window_log=30)
).compress


def _extension(code: int, *content: Any) -> bytes:
    return msgpack.packb(msgpack.ExtType(code, b"".join(content)))


def _nested(times: int, inner: Any, around: Callable[[Any], Any]) -> Any:
    return functools.reduce(lambda value, _: around(value), range(times), inner)


# Columns of the first chunk, and what their descriptors say.
DESCRIBED = {
    "constant_rows_that_fill_the_memory": (REWARDS, {"rows": 1 << 28, "encoding": 8, "raw": 8}),
    "a_column_of_objects": (REWARDS, {"dtype": "O"}),
    "a_column_of_structures": (REWARDS, {"dtype": "<i4,<f4"}),
    "a_column_of_a_wrong_shape": (OBSERVATIONS, {"shape": [4]}),
    "a_column_of_negative_shape": (OBSERVATIONS, {"shape": [-1, -3]}),
    "negative_rows": (REWARDS, {"rows": -1}),
    "a_column_that_reaches_out_of_its_record": (REWARDS, {"stored": 1 << 30}),
}
# Compressed rewards of a number of rows, and what their descriptor says.
REWARDS_STORED: dict[str, tuple[Callable[[int], bytes], dict[str, Any]]] = {
    "a_zstd_bomb": (lambda rows: _bomb(), {}),
    "a_zstd_bomb_that_is_declared": (lambda rows: _bomb(), {"raw": 1 << 30, "rows": 1 << 27}),
    "a_zstd_frame_without_its_size": (lambda rows: _frame_without_size(bytes(1 << 20)), {}),
    "a_truncated_zstd_frame": (lambda rows: _frame(np.random.default_rng(0).bytes(8 * rows))[:-3], {}),
    "two_zstd_frames": (lambda rows: _frame(bytes(8 * rows)) * 2, {}),
    "a_zstd_frame_of_a_huge_window": (lambda rows: _frame_of_a_huge_window(bytes(100)), {}),
}
# Infos.
PACKED = {
    "a_msgpack_bomb": b"\xdd" + (1 << 15).to_bytes(4, "big") + b"\x90" * (1 << 15),
    "a_larger_msgpack_bomb_than_any_limit": b"\xdd" + (1 << 26).to_bytes(4, "big"),  # and as many values
    "a_msgpack_value_that_claims_more_than_there_is": b"\xdd\xff\xff\xff\xff",
    "msgpack_values_nested_deep": b"\x91" * 100_000 + b"\xc0",
    "extension_types_nested_deep": _nested(3000, b"\xc0", lambda value: _extension(4, b"\x91", value)),
    "an_array_of_a_shape_that_is_too_large": _extension(1, msgpack.packb(["<f8", [1 << 40], b""])),
    "an_array_of_negative_shape": _extension(1, msgpack.packb(["<f8", [-1, -1], bytes(8)])),
    "an_object_array": _extension(1, msgpack.packb(["|O", [1], bytes(8)])),
}
# Fields of all fragments.
FIELDS = {
    "fragments_of_four_billion_steps": {"steps": 0xFFFFFFFF},
    "fragments_that_overflow_their_counters": {"first_step": (1 << 64) - 1, "episode": (1 << 64) - 1},
    "outcomes_and_flags_that_there_are_not": {
        "flags": 0xFFFFFFFF,
        "outcome": 0xFFFFFFFF,
        "start_time": -(1 << 63),
    },
}
# Fields of the observation space.
SPACE = {
    "a_schema_of_a_huge_space": {"shape": [1 << 31, 1 << 31]},
    "a_schema_of_a_space_of_negative_shape": {"shape": [-3]},
    "a_schema_of_a_space_of_too_many_dimensions": {"shape": [1] * 100},
    "a_schema_of_a_space_nested_deep": _nested(200, {"type": "Discrete"}, lambda s: {"type": "Tuple", "spaces": [s]}),
}
# Fields in the header of the first chunk.
CLAIMS = {
    "a_record_that_claims_to_be_huge": {"body_length": 1 << 62},
    "a_record_with_metadata_beyond_the_file": {"metadata_length": 0xFFFFFFFF},
    "a_record_of_an_unknown_required_type": {"type": 77},
}


def rows_beyond_any_limit(forgery):
    for path in first(forgery).columns:
        first(forgery).describe(path, rows=1 << 40)


def a_constant_chunk_that_fits_its_absurd_fragments(forgery):
    chunk, steps = first(forgery), wire.MAX_ROWS // 8
    chunk.change_fragments(lambda table: _set(table[:1], flags=wire.HAS_INITIAL, steps=steps))
    del chunk.metadata["columns"][1:], chunk.blobs[1:]
    for path, dtype, shape, raw in [
        (["observations"], "<f4", [3], 12),
        (["actions"], "<i8", [], 8),
        (["rewards"], "<f8", [], 8),
    ]:
        chunk.metadata["columns"].append([path, dtype, shape, steps + (path[0] == "observations"), 8, 0, raw, 0])
        chunk.blobs.append(b"")
        chunk.store(tuple(path), bytes(raw))


def the_same_column_twice(forgery):
    chunk = first(forgery)
    chunk.metadata["columns"].append(chunk.metadata["columns"][-1])
    chunk.blobs.append(chunk.blobs[-1])


def a_chunk_without_rewards(forgery):
    chunk = first(forgery)
    place = chunk.columns[REWARDS]
    del chunk.metadata["columns"][place], chunk.blobs[place]


def columns_that_are_no_list(forgery):
    first(forgery).metadata = {"columns": {"rewards": 1}}
    next(chunk for chunk in forgery.chunks if "columns" in chunk.metadata).blobs.clear()


def a_million_fragments_in_a_constant_column(forgery):
    chunk = first(forgery)
    row = chunk.table("fragments", wire.FRAGMENT)[:1].copy()
    row["steps"], row["flags"] = 0, wire.HAS_INITIAL
    chunk.store(FRAGMENTS, row.tobytes(), rows=1 << 24, encoding=8, raw=80)


def a_schema_of_nothing(forgery):
    forgery.records[0].metadata = {}


def a_schema_that_names_another_directory(forgery):
    forgery.records[0].metadata["writer"] = "../../escaped"


CHANGES: list[Callable[[Forgery], Any]] = [
    rows_beyond_any_limit,
    a_constant_chunk_that_fits_its_absurd_fragments,
    the_same_column_twice,
    a_chunk_without_rewards,
    columns_that_are_no_list,
    a_million_fragments_in_a_constant_column,
    a_schema_of_nothing,
    a_schema_that_names_another_directory,
]


def _forgeries(batch: Path) -> Iterator[tuple[str, Forgery]]:
    """Yield malicious batches, each made from a sound one."""
    for change in CHANGES:
        change(forgery := taken_apart(batch))
        yield change.__name__, forgery
    for name, (path, fields) in DESCRIBED.items():
        first(forgery := taken_apart(batch)).describe(path, **fields)
        yield name, forgery
    for name, (blob, fields) in REWARDS_STORED.items():
        chunk = first(forgery := taken_apart(batch))
        chunk.store(REWARDS, blob(rows_of(chunk, REWARDS)), encoding=1, **fields)
        yield name, forgery
    for name, value in PACKED.items():
        chunk = first(forgery := taken_apart(batch))
        value += b"\x90" * (1 << 26) if name == "a_larger_msgpack_bomb_than_any_limit" else b""
        put_values(chunk, INFOS, [value] * rows_of(chunk, INFOS))
        yield name, forgery
    for name, fields in FIELDS.items():
        forgery = taken_apart(batch)
        for chunk in forgery.chunks:
            chunk.change_fragments(lambda table, fields=fields: _set(table, **fields))
        yield name, forgery
    for name, fields in SPACE.items():
        forgery = taken_apart(batch)
        forgery.records[0].metadata["observation_space"].update(fields)
        yield name, forgery
    for name, fields in CLAIMS.items():
        first(forgery := taken_apart(batch)).claims = fields
        yield name, forgery


def _set(table: Any, **values: Any) -> Any:
    table = table.copy()
    for name, value in values.items():
        table[name] = value
    return table


def _index_cases(forgery: Forgery) -> Iterator[tuple[str, bytes]]:
    """Yield batches whose index contradicts the chunks."""
    chunks = forgery.index.table("chunks", wire.CHUNK_ENTRY)
    fragments = forgery.index.table("fragments", wire.FRAGMENT)
    for name, change in [
        ("index_of_chunks_elsewhere", {"offset": chunks["offset"] + 8}),
        ("index_of_chunks_behind_the_file", {"offset": chunks["offset"] + (1 << 63)}),
        ("index_of_chunks_in_another_order", {"offset": chunks["offset"][::-1]}),
        ("index_of_more_fragments", {"fragments": chunks["fragments"] + 1}),
        ("index_of_fragments_that_overflow", {"fragments": np.uint64((1 << 64) - 1)}),
    ]:
        forgery.index.put_table("chunks", _set(chunks, **change))
        yield name, forgery.data(reindexed=False)
    forgery.index.put_table("chunks", chunks)
    for name, change in [
        ("index_of_other_steps", {"steps": 0xFFFFFFFF}),
        ("index_of_other_episodes", {"episode": fragments["episode"] + 1}),
    ]:
        forgery.index.put_table("fragments", _set(fragments, **change))
        yield name, forgery.data(reindexed=False)
    forgery.index.put_table("fragments", np.repeat(fragments, 3))
    forgery.index.put_table("chunks", np.repeat(chunks, 3))
    yield "index_that_lists_all_three_times", forgery.data(reindexed=False)


def _manifests(head: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    batch = {"type": "batch", "bytes": 1, "crc32": 2, "episodes": 3, "steps": 4}
    for name, file in [
        ("manifest_that_names_a_file_elsewhere", "../../../../etc/passwd"),
        ("manifest_that_names_an_absolute_file", "/etc/passwd"),
        ("manifest_that_names_no_text", ["x"]),
        ("manifest_with_a_nul", "w.000001.gtb\0"),
    ]:
        yield name, (json.dumps(head) + "\n" + json.dumps({**batch, "file": file}) + "\n").encode()
    yield "manifest_nested_deep", b"[" * 100_000 + b"\n"
    yield "manifest_of_nothing", b"\n\n\n{}\n[]\nnull\n"
    yield "manifest_of_absurd_numbers", (json.dumps({**head, "created": 10**400}) + "\n").encode()
    yield "manifest_that_is_no_text", bytes(range(256)) + b"\n"


@pytest.fixture(scope="module")
def hostile_traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One directory per malicious trace, by name."""
    root = tmp_path_factory.mktemp("above") / "hostile"
    batch = record(root / "sound", record_infos=True)
    manifest = (root / "sound" / "w.manifest.jsonl").read_bytes()
    cases = []
    for (name, sealed), (_, unsealed) in zip(_forgeries(batch), _forgeries(batch)):
        unsealed.without_index()
        cases.append((f"{name}-sealed", "w.000000.gtb", sealed.data(), manifest))
        cases.append((f"{name}-open", "w.000000.gtb.part", unsealed.data(), manifest))
    cases += [(name, "w.000000.gtb", data, manifest) for name, data in _index_cases(taken_apart(batch))]
    head = json.loads(manifest.splitlines()[0])
    cases += [(name, "w.000000.gtb", batch.read_bytes(), lines) for name, lines in _manifests(head)]
    for name, file, data, lines in cases:
        (root / name).mkdir()
        (root / name / file).write_bytes(data)
        (root / name / "w.manifest.jsonl").write_bytes(lines)
    return {name: root / name for name, *_ in cases}


_READER = """
import json, resource, sys
from pathlib import Path
import fuzz_reader, gymnasium
base = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = base + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for name in json.loads(sys.argv[3]):
    directory = Path(sys.argv[1], name)
    try:
        said = dict(fuzz_reader.read_everything(directory, Path(sys.argv[1], "repaired")))
    except BaseException as error:
        said = {"failed": repr(error)}
    print(json.dumps([name, said]), flush=True)
print(json.dumps(["peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - base]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the memory of a process")
def test_malicious_files_raise_only_trace_errors_in_bounded_memory(hostile_traces):
    names = list(hostile_traces)
    root = hostile_traces[names[0]].parent
    if not LONG:  # every second case, as sealed or as open in turn
        names = [
            name for number, name in enumerate(names) if not name.endswith(("-sealed", "-open")) or number % 8 in (0, 5)
        ]
    room = 2 << 30
    process = forked_python.run(
        [sys.executable, "-W", "error", "-c", _READER, str(root), str(room), json.dumps(names)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": HELPERS},
        check=False,
    )
    said = dict(json.loads(line) for line in process.stdout.splitlines())
    assert process.returncode == 0, (process.stderr, list(said)[-1:])
    said.pop("peak")
    assert {name: outcome for name, outcome in said.items() if "failed" in outcome} == {}
    assert list(said) == names
    assert not list(root.parent.glob("escaped*"))


def test_check_reports_malicious_files(hostile_traces):
    harmless = ("a_schema_that_names_another_directory", "outcomes_and_flags", "fragments_that_overflow")
    harmless += ("a_constant_chunk", "a_schema_of", "a_msgpack_bomb", "a_record_of_an_unknown")
    for name, directory in hostile_traces.items():
        if not name.startswith(harmless) and not name.endswith("-open"):
            assert check_trace(directory).damages, name


def test_a_short_run_of_the_fuzzer_finds_nothing(tmp_path):
    inputs = 1000 if LONG else 80
    outcomes = fuzz_reader.fuzz(inputs, 7, tmp_path)
    assert outcomes["open: fine"] > 0.6 * inputs
    assert outcomes["skip: fine"] > 0.6 * inputs
    assert outcomes["scan: CorruptTrace"] > 0.02 * inputs
