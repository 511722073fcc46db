"""Parsing the schema of a writer, which is untrusted."""

from typing import Any

import numpy as np
import pytest

from gym_trace.data.layout import Leaf
from gym_trace.data.schema import WriterSchema
from gym_trace.errors import CorruptTrace

BOX = {"type": "Box", "shape": [4], "dtype": "<f4"}
SPACES = {"observation_space": BOX, "action_space": {"type": "Discrete", "dtype": "<i8"}}
FLAGS = ("filters_episodes", "filters_frames", "has_all_infos", "has_only_statistics", "is_imported", "is_vector")
NESTED: list[Any] = []
for _ in range(10_000):
    NESTED = [NESTED]
STRANGE = [None, 5, -1.5, "text", [], {"a": 1}, np.zeros(3), 10**6000, NESTED, float("nan")]


def test_an_empty_record_is_empty_and_has_no_layouts() -> None:
    schema = WriterSchema.of({})
    assert (schema.created, schema.split, schema.metadata) == (0, "", None)
    assert schema.environment == schema.versions == schema.recorder == schema.origin == {}
    assert not any(getattr(schema, name) for name in FLAGS)
    with pytest.raises(CorruptTrace, match="has no observation_space"):
        _ = schema.layouts


def test_fields_are_read_and_unknown_ones_kept() -> None:
    raw = {
        **SPACES,
        "created": 7,
        "split": "eval",
        "metadata": {"manifest": "m"},
        "recorder": {"record_infos": ["a"], "num_envs": 2, "frame_filter": True, "imported_from": "Monitor"},
        "of a later release": [1],
    }
    schema = WriterSchema.of(raw)
    assert schema.raw is raw
    assert (schema.created, schema.split, schema.origin) == (7, "eval", {"manifest": "m"})
    assert [name for name in FLAGS if getattr(schema, name)] == ["filters_frames", "is_imported", "is_vector"]
    assert schema.layouts is schema.layouts
    assert (schema.layouts.infos, schema.layouts.is_flat) == (True, True)
    assert isinstance(schema.layouts.observations, Leaf)
    assert schema.layouts.observations.shape == (4,)


@pytest.mark.parametrize("value", STRANGE, ids=lambda value: type(value).__name__)
def test_a_malformed_field_raises_only_corrupt_trace(value: Any) -> None:
    names = ("created", "split", "environment", "versions", "recorder", "metadata")
    options = ("record_infos", "num_envs", "frame_filter", "episode_filter", "reward_classes", "imported_from")
    for raw in (dict.fromkeys(names, value), {**SPACES, "recorder": dict.fromkeys(options, value)}):
        schema = WriterSchema.of(raw)
        assert isinstance(schema.created, int)
        assert isinstance(schema.split, str)
        for name in ("environment", "versions", "recorder", "origin"):
            assert isinstance(getattr(schema, name), dict)
        for name in FLAGS:
            assert isinstance(getattr(schema, name), bool)
    assert isinstance(schema.layouts.infos, bool)
    for name in SPACES:
        with pytest.raises(CorruptTrace):
            _ = WriterSchema.of({**SPACES, name: value}).layouts
