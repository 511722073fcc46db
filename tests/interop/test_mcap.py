"""MCAP: what its own reader gives of an export, and that messages are what their schemas and Foxglove's say."""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from mcap.reader import make_reader
from PIL import Image
from planted_defects import check_exporter

from gym_trace.data.json_values import array_from, untagged
from gym_trace.data.layout import Layout
from gym_trace.exchange.formats.conformance import Loaded, check_export
from gym_trace.exchange.formats.rows import first_writer
from gym_trace.exchange.formats.viewing.leaves import name_of
from gym_trace.exchange.formats.viewing.mcap_out import McapExporter

# As https://github.com/foxglove/foxglove-sdk has it in schemas/jsonschema/CompressedImage.json.
COMPRESSED_IMAGE = {"timestamp": "object", "frame_id": "string", "data": "string", "format": "string"}


def load(path: Path) -> Iterator[Loaded]:
    """Messages in the order of their times, those of each episode from where its metadata says it begins."""
    with path.open("rb") as file:
        reader = make_reader(file, validate_crcs=True)
        told = [record.metadata for record in reader.iter_metadata()]
        layouts = first_writer(told[0]["about"])[1]
        rows: dict[tuple[int, str], list[Any]] = defaultdict(list)
        forms: dict[str, dict[str, str]] = {}
        for schema, channel, message in reader.iter_messages():
            said = json.loads(message.data)
            episode = told[1 + said["episode"]]
            assert int(episode["begin"]) <= message.log_time <= int(episode["end"])
            forms[channel.topic[1:]] = channel.metadata
            check_schema(schema, said)
            rows[said["episode"], channel.topic[1:]].append(said["data"] if "data" in said else said["value"])
    for number, episode in enumerate(told[1:]):

        def column(name: str, number: int = number) -> Any:
            return decoded(rows[number, name], forms.get(name, {}))

        def tree(layout: Layout) -> Any:
            return layout.join(column(name_of(leaf.path)) for leaf in layout.leaves())

        notes = [name for name in forms if name.startswith("annotations/")]
        infos = column("info") if "info" in forms else None
        yield Loaded(
            tree(layouts.observations),
            tree(layouts.actions),
            column("reward"),
            np.array(column("terminated"), np.bool_),
            np.array(column("truncated"), np.bool_),
            seed=int(episode["seed"]) if episode["seed"] else None,
            outcome=episode["outcome"],
            infos=infos,
            annotations={name.partition("/")[2]: column(name) for name in notes},
            identity=episode["identity"],
        )


def decoded(rows: list[Any], form: dict[str, str]) -> Any:
    if not form:
        return [untagged(row) for row in rows]
    dtype, shape = np.dtype(form["dtype"]), json.loads(form["shape"])
    if dtype == np.uint8 and rows and isinstance(rows[0], str) and rows[0].startswith("iVBOR"):
        images = [np.asarray(Image.open(BytesIO(base64.b64decode(row)))) for row in rows]
        return np.array(images, dtype).reshape(len(rows), *shape)
    return np.array([array_from(row, dtype.str, shape) for row in rows], dtype).reshape(len(rows), *shape)


def check_schema(schema: Any, said: dict[str, Any]) -> None:
    """As Foxglove reads JSON schemas: an object, of plain types and lists of such."""
    told = json.loads(schema.data)
    assert (schema.encoding, told["type"]) == ("jsonschema", "object")
    properties = told["properties"]
    if schema.name == "foxglove.CompressedImage":
        assert {name: properties[name]["type"] for name in COMPRESSED_IMAGE} == COMPRESSED_IMAGE
        assert properties["data"]["contentEncoding"] == "base64"
        assert said["format"] == "png"
        return
    if "value" in properties:
        kind = properties["value"]["type"]
        kinds = {"number": (int, float, str), "integer": int, "boolean": bool, "string": str, "array": list}
        assert isinstance(said["value"], kinds[kind])
        if kind == "array":
            assert all(isinstance(one, kinds[properties["value"]["items"]["type"]]) for one in said["value"])


def test_right_traces_are_read_as_they_are_and_wrong_ones_are_not(tmp_path: Path) -> None:
    assert not check_exporter(McapExporter(), load, tmp_path, suffix=".mcap")


def test_real_environments(real: Path, tmp_path: Path) -> None:
    assert not check_export(McapExporter(), load, real, tmp_path / "out.mcap").lost
