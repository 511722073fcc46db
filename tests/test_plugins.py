"""Entry points of other packages are found again only when what is installed changed."""

import importlib.metadata
from pathlib import Path

import pytest

from gym_trace import plugins


def installed(place: Path, name: str, group: str) -> None:
    (place / f"{name}-1.0.dist-info").mkdir(parents=True)
    (place / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (place / f"{name}-1.0.dist-info" / "entry_points.txt").write_text(f"[{group}]\n{name} = json:loads\n")


def test_packages_are_read_again_once_another_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path / "site", "first", "gym_trace.exporters")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert "first" in [point.name for point in plugins.entry_points("gym_trace.exporters")]
    reads: list[str] = []
    real = importlib.metadata.entry_points
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: reads.append(group) or real(group=group))
    plugins.entry_points("gym_trace.exporters")
    assert not reads
    installed(tmp_path / "site", "second", "gym_trace.exporters")
    assert {"first", "second"} <= {point.name for point in plugins.entry_points("gym_trace.exporters")}
    assert reads == ["gym_trace.exporters"]
