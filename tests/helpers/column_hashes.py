"""Contents of a trace, every column as a hash: the document that tests/node_reader prints, made with gym_trace.

Rows of one dtype and shape are hashed as their bytes. Other columns are hashed as the canonical text of a list of
values (values.mjs has the same): JSON in which numbers are the bits of the float64 of their value.
"""

import hashlib
import json
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from gym_trace import open_trace
from gym_trace.data.values import ABSENT
from gym_trace.playback.episode_index import index_of

_NDARRAY, _SCALAR, _TUPLE, _GRAPH, _COMPLEX, _OBJECTS, _UNSTORED, _ABSENT = 1, 2, 4, 5, 6, 7, 8, 10


def describe_trace(directory: Path) -> list[dict[str, Any]]:
    """A document a writer, by their ids: split, damage (file, start, end) and episodes."""
    trace = open_trace(directory)
    episodes: dict[str, list[dict[str, Any]]] = {writer: [] for writer in trace.writers}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that damage is skipped
        for episode in trace.scan(on_damage="skip"):
            episodes[episode.writer].append(_describe_episode(episode))
    damage = [(Path(found.path).name, found.start, found.end) for found in trace.damage]
    return [
        {
            "writer": stored.writer,
            "split": stored.split,
            "damage": sorted([name, start, end] for name, start, end in damage if name.startswith(stored.writer + ".")),
            "episodes": in_order(episodes[stored.writer]),
        }
        for stored in sorted(index_of(trace).readers, key=lambda stored: stored.writer)
    ]


def in_order(episodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(episodes, key=lambda episode: (episode["episode_id"], episode["first_step"]))


def _describe_episode(episode: Any) -> dict[str, Any]:
    columns = {**_leaves("observations", episode.observations), **_leaves("actions", episode.actions)}
    for name in ("rewards", "terminations", "truncations"):
        columns[name] = getattr(episode, name)
    columns.update({f"annotations/{name}": values for name, values in episode.annotations.items()})
    infos = episode._column("infos")  # None where none were recorded
    if infos is not None:
        columns["infos"] = infos
    return {
        "episode_id": episode.episode_id,
        "lane": episode.lane,
        "first_step": episode.first_step,
        "steps": len(episode),
        "outcome": episode.outcome,
        "seed": _text(episode.seed),
        "reset": _sha256(canonical([episode.options, episode.rng_state, episode.reset_info]).encode()),
        **{
            f"{when}_{clock}": _text(getattr(episode, f"{when}_{clock}"))
            for when in ("start", "end")
            for clock in _CLOCKS
        },
        "columns": {name: _hash_of(values) for name, values in sorted(columns.items())},
    }


_CLOCKS = ("time", "monotonic")


def _text(value: int | None) -> str | None:
    return None if value is None else str(value)


def _leaves(name: str, tree: Any) -> dict[str, Any]:
    if isinstance(tree, dict):
        return {path: leaf for key, child in tree.items() for path, leaf in _leaves(f"{name}/{key}", child).items()}
    if isinstance(tree, tuple):
        return {path: leaf for i, child in enumerate(tree) for path, leaf in _leaves(f"{name}/{i}", child).items()}
    return {name: tree}


def _hash_of(values: Any) -> str:
    if isinstance(values, np.ndarray) and values.dtype != object:
        return f"{values.dtype.str} {'x'.join(map(str, values.shape))} {_sha256(values.tobytes())}"
    return f"values {len(values)} {_sha256(canonical(list(values)).encode())}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def canonical(value: Any) -> str:
    if value is None or isinstance(value, (bool, str)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, np.ndarray) and value.dtype == object:
        return _extension(_OBJECTS, [list(value.shape), value.ravel().tolist()])
    if isinstance(value, np.ndarray):
        return _extension(_NDARRAY, [value.dtype.str, list(value.shape), value.tobytes()])
    if isinstance(value, np.generic):
        return _extension(_SCALAR, [value.dtype.str, value.tobytes()])
    if isinstance(value, (int, float)):
        return _number(value)
    if isinstance(value, complex):
        return _extension(_COMPLEX, struct.pack("<dd", value.real, value.imag))
    if isinstance(value, bytes):
        return f'{{"bytes":"{value.hex()}"}}'
    if isinstance(value, list):
        return f"[{','.join(map(canonical, value))}]"
    if isinstance(value, dict):
        pairs = (f"[{json.dumps(_key(key), ensure_ascii=False)},{canonical(item)}]" for key, item in value.items())
        return f'{{"map":[{",".join(pairs)}]}}'
    return _other(value)


def _other(value: Any) -> str:
    if value is ABSENT:
        return _extension(_ABSENT, None)
    if type(value).__name__ == "GraphInstance":
        return _extension(_GRAPH, list(value))
    if type(value).__name__ == "Unstored":
        return _extension(_UNSTORED, list(value))
    if type(value) is tuple:
        return _extension(_TUPLE, list(value))
    raise TypeError(f"no canonical text for {value!r}")


def _extension(code: int, content: Any) -> str:
    return f'{{"ext":{code},"value":{canonical(content)}}}'


def _key(key: Any) -> str:
    return f"text {key}" if isinstance(key, str) else f"value {canonical(key)}"


def _number(value: int | float) -> str:
    if value != value:
        return '"#nan"'
    try:
        exact = float(value) == value
    except OverflowError:
        exact = False
    return f'"#{struct.pack(">d", value).hex()}"' if exact else f'"#{value}"'
