"""Sample traces, golden files of every released format version, are read without changes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from column_hashes import describe_trace

from gym_trace import check_trace, heal_trace, open_trace
from gym_trace.data.vocabulary import OUTCOMES, SCANNED
from gym_trace.errors import CorruptTrace
from gym_trace.format import columns, encodings
from gym_trace.format.columns import ColumnDescriptor
from gym_trace.playback.episode_index import index_of

SAMPLES = Path(__file__).parent.parent / "sample_traces"
EXPECTED = json.loads((SAMPLES / "expected.json").read_text(encoding="utf-8"))
PARITY = "format-1.1/parity"
FOLDERS = sorted(str(path.relative_to(SAMPLES)) for path in SAMPLES.glob("format-*/*"))


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_column_of_a_sample_has_its_golden_hash(name: str) -> None:
    assert describe_trace(SAMPLES / name) == EXPECTED[name]


def test_samples_and_golden_hashes_match_one_to_one() -> None:
    assert sorted(EXPECTED) == FOLDERS


def test_samples_are_small() -> None:
    sizes = {name: sum(path.stat().st_size for path in (SAMPLES / name).iterdir()) for name in FOLDERS}
    assert max(sizes.values()) < 200_000
    assert sum(sizes.values()) < 1_000_000


def test_samples_show_every_outcome() -> None:
    assert {episode["outcome"] for writers in EXPECTED.values() for w in writers for episode in w["episodes"]} == {
        *OUTCOMES[:-1]  # no file says "running"
    }


def test_samples_show_every_encoding() -> None:
    seen = {(column.dtype == columns.MSGPACK, column.encoding) for column in columns_of_samples()}
    zstd, constant, in_blocks = encodings.ZSTD, encodings.CONSTANT, encodings.BLOCKS | encodings.ZSTD
    typed = {0, constant, zstd | constant, *(zstd | encoding.bits for encoding in encodings.ENCODINGS)}
    typed.add(in_blocks | encodings.SHUFFLE.bits)
    of_values = (0, zstd, constant, zstd | constant)
    assert seen >= {(False, encoding) for encoding in typed} | {(True, encoding) for encoding in of_values}


def columns_of_samples() -> Iterator[ColumnDescriptor]:
    for name in FOLDERS:
        for writer in index_of(open_trace(SAMPLES / name)).readers:
            for batch in writer.batches:
                for i in range(len(batch.chunks)):
                    try:
                        yield from batch.read_chunk(i, lambda path: True).columns.values()
                    except CorruptTrace:
                        assert name.endswith("damaged")


def test_the_sample_with_parity_is_intact() -> None:
    report = check_trace(SAMPLES / PARITY)
    assert (report.files, report.damages, report.healed, report.remarks) == (4, [], [], [])


@pytest.mark.filterwarnings("ignore:.*damaged, but read as recorded")
def test_the_sample_with_parity_is_readable_and_healed_after_a_flip(tmp_path: Path) -> None:
    for start in (0, 1500, 3000, 4500):
        trace = shutil.copytree(SAMPLES / PARITY, tmp_path / str(start))
        batches = {path: path.read_bytes() for path in trace.glob("*.gtb")}
        for path, data in batches.items():
            begin = min(start, len(data) - 100)
            path.write_bytes(
                data[:begin] + bytes(byte ^ 0x5A for byte in data[begin : begin + 100]) + data[begin + 100 :]
            )
        assert describe_trace(trace) == EXPECTED[PARITY]
        report = heal_trace(trace)
        assert {damage.path for damage in report.healed} == set(map(str, batches))
        assert report.hopeless == []
        assert {path: path.read_bytes() for path in batches} == batches
        assert check_trace(trace).healed == []


def test_samples_hold_no_data_about_their_machine() -> None:
    schemas = [writer.schema for name in FOLDERS for writer in index_of(open_trace(SAMPLES / name)).readers]
    assert {(schema["host"], schema["pid"], schema["platform"]) for schema in schemas} == {("example", 4711, "Linux")}


def test_a_strict_scan_reports_file_and_byte_of_the_damaged_sample() -> None:
    name = "format-1.0/damaged"
    ((file, start, _),) = EXPECTED[name][0]["damage"]
    with pytest.raises(CorruptTrace, match=f"{file}.*byte {start}"):
        list(open_trace(SAMPLES / name).scan(columns=SCANNED))


def test_making_samples_keeps_existing_ones() -> None:
    path = SAMPLES / "format-1.3" / "empty" / "sample.manifest.jsonl"
    before = path.read_bytes(), path.stat().st_mtime_ns
    command = [sys.executable, str(SAMPLES / "make_samples.py"), "empty"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "format-1.3/empty: already exists, kept\n"), done.stderr
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
