"""Rerun: what its own reader gives of an export, and that its own tool finds nothing wrong with it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rerun
from PIL import Image
from planted_defects import check_exporter
from rerun.chunk import RrdReader

from gym_trace.data.layout import Layout
from gym_trace.exchange.formats.conformance import Loaded, check_export
from gym_trace.exchange.formats.foreign import all_from_json, unpacked
from gym_trace.exchange.formats.rows import first_writer
from gym_trace.exchange.formats.viewing.leaves import name_of
from gym_trace.exchange.formats.viewing.rerun_out import RerunExporter


def load(path: Path) -> Iterator[Loaded]:
    """The rows of each entity by the number of the episode on the time line of that name."""
    about, forms = "", {}
    rows: dict[tuple[int, str], list[Any]] = defaultdict(list)
    identities: dict[int, str] = {}
    for chunk in RrdReader(path).stream():
        table = chunk.to_record_batch()
        if chunk.entity_path == "/__properties/gym_trace":
            about, forms = table.column("about")[0][0].as_py(), json.loads(table.column("forms")[0][0].as_py())
            entities = {str(rerun.new_entity_path(name.split("/"))).lstrip("/"): name for name in forms}
        elif chunk.entity_path == "/episode":
            episodes = table.column("episode").to_pylist()
            identities |= dict(zip(episodes, (one[0] for one in table.column("identity").to_pylist()), strict=True))
        else:
            name = entities[chunk.entity_path.lstrip("/")]
            for episode, row in zip(table.column("episode").to_pylist(), decoded(table, forms[name]), strict=True):
                rows[episode, name].append(row)
    layouts = first_writer(about)[1]
    for number, identity in sorted(identities.items()):

        def column(name: str, number: int = number) -> Any:
            form = forms[name]
            return rows[number, name] if form is None else np.array(rows[number, name], form[0]).reshape(-1, *form[1])

        def tree(layout: Layout) -> Any:
            return layout.join(column(name_of(leaf.path)) for leaf in layout.leaves())

        yield Loaded(
            tree(layouts.observations),
            tree(layouts.actions),
            column("reward"),
            column("terminated"),
            column("truncated"),
            infos=all_from_json(text.encode() for text in rows[number, "info"]) if "info" in forms else None,
            annotations={name.partition("/")[2]: column(name) for name in forms if name.startswith("annotations/")},
            identity=identity,
        )


def decoded(table: Any, form: Any) -> list[Any]:
    """Each row of a chunk."""
    names = table.schema.names
    if "TextLog:text" in names:
        texts = [one[0] for one in table.column("TextLog:text").to_pylist()]
        return texts if texts and texts[0].startswith("{") else list(unpacked(text.encode() for text in texts))
    dtype, shape = np.dtype(form[0]), form[1]
    if "EncodedImage:blob" in names:
        blobs = (bytes(one[0]) for one in table.column("EncodedImage:blob").to_pylist())
        return [np.asarray(Image.open(BytesIO(blob))).reshape(shape) for blob in blobs]
    if "exact" in names:
        return [np.frombuffer(one[0], dtype).reshape(shape) for one in table.column("exact").to_pylist()]
    return [np.array(one).astype(dtype).reshape(shape) for one in table.column("Scalars:scalars").to_pylist()]


@pytest.fixture
def tool(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """rerun ARGUMENTS, with a home of its own; it fails the test if it fails."""
    found = shutil.which("rerun", path=str(Path(sys.executable).parent))
    assert found, "the command rerun is missing"
    home = tmp_path_factory.mktemp("home")

    def run(*arguments: object) -> str:
        command = [found, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={"HOME": str(home)})
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return run


def test_right_traces_are_read_as_they_are_and_wrong_ones_are_not(tmp_path: Path) -> None:
    assert not check_exporter(RerunExporter(), load, tmp_path, suffix=".rrd")


def test_real_environments(real: Path, tmp_path: Path, tool: Any) -> None:
    assert not check_export(RerunExporter(), load, real, tmp_path / "out.rrd").lost
    assert "verified without error" in tool("rrd", "verify", tmp_path / "out.rrd")
    assert "/reward" in tool("rrd", "print", tmp_path / "out.rrd")
