"""The contract tests for exporters and importers: what is right passes, and what is wrong is found out."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from long_tests import TRACES
from plain_format import (
    Forgetful,
    Leftover,
    Narrow,
    OneFlag,
    PlainExporter,
    PlainImporter,
    Silent,
    Sorting,
    load_plain,
    read_plain,
)
from planted_defects import DEFECTS, check_exporter, plant

from gym_trace.exchange.formats.conformance import (
    Loaded,
    check_importer,
    difference,
    loaded_from,
    make_zoo,
)
from gym_trace.exchange.formats.contract import LOSSES, Target
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.playback.trace import open_trace


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_zoo(tmp_path_factory.mktemp("zoo"), ["dict", "infos"])


def test_a_format_that_says_all_passes(tmp_path: Path) -> None:
    assert check_exporter(PlainExporter(), load_plain, tmp_path, only=TRACES) == {}


def test_an_importer_that_makes_it_all_again_passes(tmp_path: Path) -> None:
    assert check_importer(PlainExporter(), PlainImporter(), tmp_path, only=TRACES) == {}


def test_each_defect_shows_in_a_trace_that_exporters_are_given(zoo: dict[str, Path], tmp_path: Path) -> None:
    source = ExportSource(open_trace(zoo["dict"]))
    for number, what in enumerate(DEFECTS):
        assert plant(what, zoo["dict"], tmp_path / str(number)), what
        loaded = loaded_from(open_trace(tmp_path / str(number)))
        assert difference(source, loaded, (), only_steps=True), what
        assert DEFECTS[what].hidden_by <= LOSSES


@pytest.mark.parametrize(
    ("exporter", "trace", "problem"),
    [
        (Narrow(), "vectors", "rewards: float32, where it should be float64"),
        (Forgetful(), "vectors", "observations: 9 rows, where there should be 10"),
        (OneFlag(), "vectors", "terminations, step 11 of 12: True, where it should be False"),
        (Leftover(), "vectors", "an interrupted export leaves"),
        (Silent(), "vectors", "progress ends with"),
        (Sorting(), "vectors", "loaded episode 0"),
    ],
    ids=lambda value: getattr(type(value), "__name__", ""),
)
def test_an_exporter_that_is_wrong_is_found_out(
    tmp_path: Path, exporter: PlainExporter, trace: str, problem: str
) -> None:
    with pytest.raises(AssertionError, match=problem):
        check_exporter(exporter, load_plain, tmp_path, only=[trace], run_how_to_load=False)


@pytest.mark.parametrize("missing", ["infos", "annotations", "identity"])
def test_missing_content_must_be_reported_as_lost(zoo: dict[str, Path], tmp_path: Path, missing: str) -> None:
    source = ExportSource(open_trace(zoo["infos"]))
    PlainExporter().plan(source).write(Target(tmp_path, tmp_path))
    loaded = [Loaded(**{**said, missing: None}) for said in read_plain(tmp_path)]
    assert missing in difference(source, loaded, ())
    if missing != "identity":
        assert not difference(source, loaded, {missing})


def test_a_loader_that_cannot_see_a_defect_is_found_out(zoo: dict[str, Path], tmp_path: Path) -> None:
    right: dict[str, Any] = {}

    def blind(path: Path) -> Iterable[Loaded]:
        """Return the rewards of the correct trace for each defect."""
        for number, one in enumerate(load_plain(path)):
            if path == tmp_path / "vectors":
                right[str(number)] = one.rewards
            is_defect = path.parent.name == "vectors-defects"
            yield one._replace(rewards=right.get(str(number), one.rewards)) if is_defect else one

    with pytest.raises(AssertionError, match="rewards shifted, not noticed"):
        check_exporter(PlainExporter(), blind, tmp_path, only=["vectors"], run_how_to_load=False)
