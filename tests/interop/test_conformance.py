"""The real environments themselves, through a format that can say all of them."""

from __future__ import annotations

from pathlib import Path

from plain_format import PlainExporter, PlainImporter, load_plain

from gym_trace import open_trace
from gym_trace.exchange.formats.conformance import check_export, check_round_trip


def test_a_real_environment_is_said_whole(real: Path, tmp_path: Path) -> None:
    report = check_export(PlainExporter(), load_plain, real, tmp_path / "out")
    assert report.episodes > 2 or real.name == "continuing"
    assert check_round_trip(PlainExporter(), PlainImporter(), real, tmp_path / "again", tmp_path / "back") == []


def test_a_real_environment_has_unseeded_resets_and_cut_episodes(real: Path) -> None:
    trace = open_trace(real)
    assert len(trace) >= 2
    assert trace[0].seed == 10
    assert {"cut", "closed"} & {episode.outcome for episode in trace}
    if real.name != "continuing":
        assert None in {episode.seed for episode in trace}
        assert {"terminated", "truncated"} & {episode.outcome for episode in trace}
