"""Check the number of times that readers wait for a storage where each read takes a round trip."""

from pathlib import Path

import pytest
from round_trips import CONSUMERS, record_chunks, waits_of


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return record_chunks(tmp_path_factory.mktemp("short"), episodes=42)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return record_chunks(tmp_path_factory.mktemp("long"), episodes=1)


@pytest.mark.parametrize("name", CONSUMERS)
def test_a_reader_of_21_chunks_waits_at_most_twice(
    name: str,
    short: dict[str, bytes],
    long: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GYM_TRACE_CACHE", str(tmp_path / "cache"))
    if name in ("to_arrow", "export parquet"):
        pytest.importorskip("pyarrow")
    assert waits_of(name, short, tmp_path)[0] <= 2
    assert waits_of(name, long, tmp_path)[0] <= 2
