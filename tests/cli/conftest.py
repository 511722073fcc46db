"""A directory of its own as the current one, with the module clicks.py in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from shell import in_directory


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from in_directory(tmp_path, monkeypatch)
