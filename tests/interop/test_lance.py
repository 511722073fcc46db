"""Lance tables, as lance itself and stable-worldmodel read them."""

from __future__ import annotations

import base64
import importlib
import importlib.util
import io
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted_defects import check_exporter
from test_parquet import loader, values

import gym_trace
from gym_trace import import_trace, open_trace
from gym_trace.errors import UnreadableRecording
from gym_trace.exchange.formats.conformance import check_export, check_importer, check_round_trip
from gym_trace.exchange.formats.exporting import export

lance = pytest.importorskip("lance")
pa = pytest.importorskip("pyarrow")

from PIL import Image  # noqa: E402 - comes with the extra

from gym_trace.exchange.formats.lance_tables import LanceExporter, LanceImporter  # noqa: E402


def nested_schema(path: Path, table: str = "steps") -> Any:
    text = lance.dataset(path / f"{table}.lance").schema.metadata[b"gym_trace.schema"]
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


def with_lance(path: Path, table: str) -> dict[str, list[Any]]:
    """The columns as Parquet nests them: the flat ones have the order of its leaves."""
    found = lance.dataset(path / f"{table}.lance").to_table()
    flat = iter([found[name].combine_chunks() for name in found.column_names])

    def rows(kind: Any, array: Any = None) -> list[Any]:
        if pa.types.is_struct(kind):
            parts = {field.name: rows(field.type) for field in kind}
            return [{name: part[row] for name, part in parts.items()} for row in range(found.num_rows)]
        array = next(flat)
        if pa.types.is_binary(array.type):
            return [np.array(Image.open(io.BytesIO(data))).ravel() for data in array.to_pylist()]
        return values(array)

    tables = {field.name: rows(field.type) for field in nested_schema(path, table)}
    assert next(flat, None) is None
    return tables


load_lance = loader(with_lance, nested_schema)


def test_traces_of_every_kind_are_what_lance_reads(tmp_path: Path) -> None:
    assert check_exporter(LanceExporter(), load_lance, tmp_path) == {}


def test_traces_of_every_kind_come_back_bit_for_bit(tmp_path: Path) -> None:
    assert check_importer(LanceExporter(), LanceImporter(), tmp_path) == {}


def test_a_real_environment_is_what_lance_reads_and_comes_back(real: Path, tmp_path: Path) -> None:
    check_export(LanceExporter(), load_lance, real, tmp_path / "read")
    assert check_round_trip(LanceExporter(), LanceImporter(), real, tmp_path / "out", tmp_path / "back") == []


@pytest.fixture
def worldmodel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module stable_worldmodel.data.formats.lance, without the simulators that the package imports."""
    spec = importlib.util.find_spec("stable_worldmodel")
    if spec is None:
        pytest.skip("stable-worldmodel is not installed")
    package = types.ModuleType("stable_worldmodel")
    package.__path__ = list(spec.submodule_search_locations or ())
    monkeypatch.setitem(sys.modules, "stable_worldmodel", package)
    return importlib.import_module("stable_worldmodel.data.formats.lance")


@pytest.fixture
def camera(tmp_path: Path) -> Path:
    """A trace of three episodes of an image and a vector."""
    rows = np.random.default_rng(0)
    with gym_trace.TraceWriter(tmp_path / "trace") as writer:
        for steps in (7, 3, 5):
            images, arms = rows.integers(0, 256, (steps + 1, 24, 32, 3), np.uint8), rows.random((steps + 1, 2))
            writer.begin({"camera": images[0], "arm": arms[0]})
            for step in range(1, steps + 1):
                observation = {"camera": images[step], "arm": arms[step]}
                writer.step(rows.random(3, np.float32), observation, float(step), terminated=step == steps)
    return tmp_path / "trace"


def test_windows_of_stable_worldmodel_have_the_recorded_values(worldmodel: Any, camera: Path, tmp_path: Path) -> None:
    export(camera, tmp_path / "out", "lance")
    trace = open_trace(camera)
    dataset = worldmodel.LanceDataset(tmp_path / "out" / "steps.lance", num_steps=2)
    assert dataset.lengths.tolist() == [len(episode) for episode in trace]
    assert len(dataset) == sum(len(episode) - 1 for episode in trace)
    for index, (number, start) in enumerate(dataset.clip_indices):
        window, episode, steps = dataset[index], trace[number], slice(start, start + 2)
        assert np.array_equal(window["pixels"].numpy().transpose(0, 2, 3, 1), episode.observations["camera"][steps])
        assert np.array_equal(window["observation_arm"], episode.observations["arm"][steps])
        assert np.array_equal(window["action"], episode.actions[steps])
        assert np.array_equal(window["reward"], episode.rewards[steps])
        assert np.array_equal(window["terminated"], episode.terminations[steps])


def test_tables_of_stable_worldmodel_are_imported(worldmodel: Any, camera: Path, tmp_path: Path) -> None:
    trace = open_trace(camera)
    with worldmodel.LanceWriter(tmp_path / "theirs.lance") as writer:
        writer.write_episodes(
            {
                "pixels": list(episode.observations["camera"][:-1]),
                "action": list(episode.actions),
                "arm.state": list(episode.observations["arm"][:-1]),
                "reward": list(episode.rewards),
                "terminated": list(episode.terminations),
            }
            for episode in trace
        )
    dataset = worldmodel.LanceDataset(tmp_path / "theirs.lance")
    mapping = {"observations": "pixels"}
    import_trace(tmp_path / "theirs.lance", tmp_path / "back", map=mapping)
    back = open_trace(tmp_path / "back")
    assert [episode.outcome for episode in back] == ["terminated"] * 3
    for number, (episode, was) in enumerate(zip(back, trace)):
        theirs = dataset.load_episode(number)
        assert np.array_equal(episode.observations[:-1].transpose(0, 3, 1, 2), theirs["pixels"])
        assert np.array_equal(episode.actions, was.actions)
        assert np.array_equal(episode.rewards, was.rewards)
        assert np.array_equal(episode.annotations["arm_state"], was.observations["arm"][:-1].astype(np.float32))
        assert not episode.has_final_observation


def test_a_table_that_is_damaged_or_has_files_elsewhere_is_an_error(camera: Path, tmp_path: Path) -> None:
    export(camera, tmp_path / "out", "lance")
    for name in ("steps", "episodes"):
        (data,) = (tmp_path / "out" / f"{name}.lance" / "data").iterdir()
        whole = data.read_bytes()
        data.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(UnreadableRecording, match="cannot be read"):
            import_trace(tmp_path / "out", tmp_path / "back")
        data.write_bytes(whole)
    rows = pa.table({"observation": [1.0], "action": [1], "done": [True]})
    base = lance.DatasetBasePath(str(tmp_path / "other"), "other", True, 1)
    lance.write_dataset(rows, tmp_path / "some.lance", initial_bases=[base], target_bases=["other"])
    with pytest.raises(UnreadableRecording, match="files are outside of it"):
        import_trace(tmp_path / "some.lance", tmp_path / "back")


def test_a_mapping_needs_one_table(camera: Path, tmp_path: Path) -> None:
    export(camera, tmp_path / "out", "lance")
    with pytest.raises(UnreadableRecording, match="has 2 Lance tables"):
        import_trace(tmp_path / "out", tmp_path / "back", "lance", map="obs=pixels")
    report = import_trace(tmp_path / "out" / "steps.lance", tmp_path / "back", map="obs=observation")
    assert (report.episodes, report.steps) == (3, 15)
