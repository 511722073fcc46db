"""Seeded runs write the same bytes: recordings against tests/written_bytes.txt."""

from pathlib import Path

import pytest
import written_bytes

FIRST, *GOLDEN = (Path(__file__).parent / "written_bytes.txt").read_text(encoding="utf-8").splitlines()
SAME_ZSTD = FIRST.startswith(f"# zstd {written_bytes.ZSTD};")
HINT = (
    "if intended, add a fragment to changes/ and run: python tests/helpers/written_bytes.py > tests/written_bytes.txt"
)


def compared(line: str) -> str:
    """Return the line without its zstd hash, unless this zstd version made the golden file."""
    return line if SAME_ZSTD else line.partition(" zstd ")[0]


@pytest.mark.parametrize("name", written_bytes.names())
def test_a_seeded_recording_writes_the_golden_bytes(name: str, tmp_path: Path) -> None:
    if name in written_bytes.VECTORS and not written_bytes.HAS_VECTORS:
        pytest.skip("vector environments need gymnasium 1.1")
    golden = [line.removeprefix(f"{name}: ") for line in GOLDEN if line.startswith(f"{name}: ")]
    lines = written_bytes.recorded(name, tmp_path / "trace")
    if lines[0].startswith("said ") and lines[0] != golden[0]:
        pytest.skip("the environment itself behaves differently on this machine")
    different = [(old, new) for old, new in zip(golden, lines) if compared(old) != compared(new)]
    assert len(lines) == len(golden), HINT
    assert not different, HINT


def test_the_golden_file_lists_exactly_the_recordings() -> None:
    assert list(dict.fromkeys(line.partition(": ")[0] for line in GOLDEN)) == written_bytes.names()
