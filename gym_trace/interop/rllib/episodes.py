"""Episodes: each is MessagePack of SingleAgentEpisode.get_state(), as RLlib writes and reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gym_trace.errors import InvalidOption
from gym_trace.interop.contract import Loss
from gym_trace.interop.identity import KEY
from gym_trace.interop.losses import losses
from gym_trace.interop.rllib.encoding import as_plain, is_plain, packed
from gym_trace.interop.rllib.names import Names
from gym_trace.interop.rllib.shards import ShardWriter
from gym_trace.interop.rllib.spaces import space_as_told
from gym_trace.interop.source import Source
from gym_trace.interop.steps.choice import name_of
from gym_trace.model.episode import Episode, infos_of
from gym_trace.model.layout import Branch, Layout, Leaf
from gym_trace.model.packing import pack_lenient
from gym_trace.model.values import Array
from gym_trace.printable import printable

EXACT_INFOS, EXACT_NOTES = f"{KEY}.infos", f"{KEY}.annotations"  # in custom_data: what RLlib reads as something else
_UNKNOWN = frozenset(("Graph", "OneOf", "Sequence"))
_GROUP_BYTES = 16 << 20
_MOST_BYTES = (1 << 31) - (1 << 24)  # of an episode, which is one value of Parquet
_STEP_BYTES = 16  # of a step besides its observation and action
_OF_RLLIB = {  # columns of its batches, whose names annotations must not have
    *("obs", "new_obs", "actions", "rewards", "terminateds", "truncateds", "infos", "eps_id", "agent_id", "module_id"),
    *("t", "seq_lens", "loss_mask", "state_in", "state_out", "advantages", "value_targets", "weights"),
}


class EpisodeKind:
    """Episodes of a trace as rows of one value."""

    def __init__(self, source: Source):
        """Raises InvalidOption if RLlib has no words for the values, or an episode is too long for one value."""
        self._source = source
        self._spaces = [space_as_told(space) for space in (source.observation_space, source.action_space)]
        size = _STEP_BYTES
        for layout in (source.layouts.observations, source.layouts.actions):
            for leaf in layout.leaves():
                form = source.forms[leaf.path]
                if leaf.dtype is not None if form is None else form.dtype.kind not in "biufc":
                    raise InvalidOption(
                        f"RLlib: the {_told(leaf)} are of several dtypes or shapes, which it cannot hold"
                    )
                size += leaf.row_size if form is None else form.dtype.itemsize * int(np.prod(form.shape))
        if unknown := [kind for plain in source.plain_spaces for kind in _kinds(plain) if kind in _UNKNOWN]:
            raise InvalidOption(f"RLlib has no words for values of a {unknown[0]} space")
        if source.forms[("rewards",)] is None:
            raise InvalidOption("RLlib: the rewards are of several dtypes or shapes, which it cannot hold")
        longest = int(source.episodes["steps"].max())
        if longest * size > _MOST_BYTES:
            raise InvalidOption(
                f"RLlib: an episode of {longest:,} steps takes some {longest * size >> 20:,} MiB, more than a value "
                "of Parquet can have; kind=rows holds episodes of any length"
            )

    def lost(self) -> Iterator[Loss]:
        """What episodes cannot say."""
        if _has_tuples(self._source.layouts.observations) or _has_tuples(self._source.layouts.actions):
            yield Loss("structure", "a Tuple is read as a list")
        yield from losses(self._source, "flags")

    def write(self, target: Path) -> None:
        """Episodes are gathered until they make a row group of some size."""
        source, names = self._source, Names(self._source)
        with ShardWriter(target, pa.schema({"item": pa.binary()}), source.about) as writer:
            items: list[bytes] = []
            size = 0
            for episode, observations in source.scan():
                items.append(packed(self._state(episode, observations, names.next(episode))))
                size += len(items[-1])
                if size > _GROUP_BYTES:
                    writer.write([_binary(items)])
                    items, size = [], 0
                source.advance(len(episode))
            if items:
                writer.write([_binary(items)])

    def _state(self, episode: Episode, observations: Any, name: str) -> dict[str, Any]:
        layouts, count = self._source.layouts, len(episode)
        infos, custom = self._infos(episode)
        outputs: dict[str, Any] = {}
        for note, rows in episode.annotations.items():
            if rows.dtype.kind in "biufc" and note not in _OF_RLLIB:
                outputs[note] = _buffer(rows)
            else:
                kept = custom.setdefault(EXACT_NOTES, {})
                kept[note] = rows if rows.dtype.kind in "biufc" else [pack_lenient(row)[0] for row in rows]
        terminated = bool(count and episode.terminations[-1])
        truncated = bool(count and episode.truncations[-1])
        told_observations, told_actions = self._spaces
        return {
            "id_": name,
            "agent_id": None,
            "module_id": None,
            "multi_agent_episode_id": None,
            "observations": _buffer(_tree(layouts.observations, observations), told_observations),
            "actions": _buffer(_tree(layouts.actions, episode.actions), told_actions),
            "rewards": _buffer(episode.rewards),
            "infos": {**_buffer(infos), "finalized": False},
            "extra_model_outputs": outputs or None,
            "is_terminated": terminated,
            "is_truncated": truncated or not terminated,
            "t_started": 0,
            "t": count,
            "_observation_space": told_observations,
            "_action_space": told_actions,
            "_start_time": None,
            "_last_step_time": None,
            "custom_data": {KEY: self._source.identity(episode), **custom},
        }

    def _infos(self, episode: Episode) -> tuple[list[Any], dict[str, Any]]:
        """One info more than there are steps, as RLlib can read them, and what they are where that is not the same."""
        infos = infos_of(episode)
        if infos is None:
            return [{}] * (len(episode) + 1), {EXACT_INFOS: None}
        told = [episode.reset_info or {}, *infos]
        if is_plain(told):
            return told, {}
        return as_plain(told), {EXACT_INFOS: [pack_lenient(info)[0] for info in infos]}


def _buffer(data: Any, space: Any = None) -> dict[str, Any]:
    """The state of an InfiniteLookbackBuffer."""
    return {"data": data, "lookback": 0, "finalized": True, "space": space}


def _tree(layout: Layout, tree: Any) -> Any:
    if isinstance(layout, Branch):
        keys = range(len(layout.children)) if layout.keys is None else layout.keys
        parts = [_tree(child, tree[key]) for key, child in zip(keys, layout.children)]
        return parts if layout.keys is None else dict(zip(keys, parts))
    return tree if tree.dtype != object else _texts(layout, tree)


def _texts(leaf: Leaf, rows: Array) -> Array:
    """Texts as an array, which is how RLlib has them in episodes that are complete."""
    texts = rows.tolist()
    if not all(type(text) is str for text in texts):
        raise InvalidOption(f"RLlib: {_told(leaf)} has values that are no text, which it cannot hold")
    if len(texts) * max(map(len, texts), default=0) * 4 > _MOST_BYTES:
        raise InvalidOption(f"RLlib: {_told(leaf)} has texts that are too long to be in one array")
    array = np.array(texts, np.str_)
    if array.tolist() != texts:
        raise InvalidOption(f"RLlib: {_told(leaf)} has texts that end with a zero byte, which NumPy leaves out")
    return array


def _binary(items: list[bytes]) -> Any:
    ends = np.cumsum([0, *map(len, items)], dtype=np.int32)
    data = items[0] if len(items) == 1 else b"".join(items)
    return pa.Array.from_buffers(pa.binary(), len(items), [None, pa.py_buffer(ends), pa.py_buffer(data)])


def _kinds(plain: dict[str, Any]) -> Iterator[str]:
    """The types of the spaces that a space, as plain data, is made of."""
    yield plain["type"]
    if plain["type"] in ("Dict", "Tuple"):
        for member in plain["spaces"]:
            yield from _kinds(member[1] if plain["type"] == "Dict" else member)


def _has_tuples(layout: Layout) -> bool:
    return isinstance(layout, Branch) and (layout.keys is None or any(map(_has_tuples, layout.children)))


def _told(leaf: Leaf) -> str:
    return printable(name_of(leaf.path))
