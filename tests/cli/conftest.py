"""Fixture: each test runs in its own current directory, which has the module clicks.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from shell import in_directory


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from in_directory(tmp_path, monkeypatch)
