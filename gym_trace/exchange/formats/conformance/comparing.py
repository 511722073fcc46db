"""Comparison of what a loader gives with its trace."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.episode import Episode, infos_of
from gym_trace.data.json_values import json_text, tagged
from gym_trace.data.layout import Layout, Leaf, Path
from gym_trace.data.trees import cut, mapped
from gym_trace.data.values import Array
from gym_trace.exchange.formats.identity import read_identity
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.playback.ordered_scan import leaves_of
from gym_trace.playback.row_types import RowType
from gym_trace.playback.trace import Trace


class Loaded(NamedTuple):
    """An episode of N steps from the loader of a format. None for anything the format cannot hold.

    Attributes:
        observations: N + 1 rows, N where the format does not keep the final one: an array, or dicts and tuples of
            arrays as the space has them; of text, a list.
        actions, rewards: N rows.
        terminations, truncations: (N,) bool.
        seed, options, reset_info, outcome: as the episode of the trace has them; where None, they are looked up in
            the identity.
        infos: N dicts. annotations: N rows, by name.
        identity: the text that ExportSource.identity() gave.
    """

    observations: Any
    actions: Any
    rewards: Any
    terminations: Any
    truncations: Any
    seed: int | None = None
    options: dict[str, Any] | None = None
    reset_info: dict[str, Any] | None = None
    outcome: str | None = None
    infos: list[Any] | None = None
    annotations: dict[str, Any] | None = None
    identity: str | None = None


class _Difference(Exception):
    """A difference from the trace."""


def difference(source: ExportSource, loaded: Iterable[Loaded], lost: Collection[str], only_steps: bool = False) -> str:
    """Return the first difference from the trace, in words; "" if they are equal.

    Args:
        loaded: the episodes, in their order.
        lost: of what something may be lost (see contract.LOSSES).
        only_steps: compare steps alone, not the facts of episodes.
    """
    count = int(np.count_nonzero(source.episodes["steps"])) if "empty_episode" in lost else len(source.episodes)
    wanted = (pair for pair in source.scan() if len(pair[0]) or "empty_episode" not in lost)
    for number, (pair, one) in enumerate(zip_longest(wanted, loaded)):
        if one is None:
            return f"{count} episodes in the trace, and {number} that were loaded"
        if pair is None:
            return f"{count} episodes in the trace, and more that were loaded"
        episode, observations = pair
        try:
            _compare_steps(source, episode, observations, one, lost)
            if not only_steps:
                _compare_told(source, episode, one, lost)
        except _Difference as found:
            return f"episode {number} of those that were loaded: {found}"
    return ""


def loaded_from(trace: Trace, lost: Collection[str] = ()) -> Iterator[Loaded]:
    """Return the episodes of a trace as a loader would. lost: losses of the previous format."""
    names = [name for name in Loaded._fields if name not in ("observations", "infos", "identity")]
    for episode in trace:
        observations = episode.observations
        if "final_observation" in lost:
            observations = cut(observations, 0, -1)
        facts: dict[str, Any] = {name: getattr(episode, name) for name in names}
        yield Loaded(observations, **facts, infos=infos_of(episode))


# -- steps ------------------------------------------------------------------------------------------------------------


def _compare_steps(
    source: ExportSource, episode: Episode, observations: Any, one: Loaded, lost: Collection[str]
) -> None:
    count = len(episode)
    rows = {count + 1, count} if "final_observation" in lost else {count + 1}
    _compare_tree(source, source.layouts.observations, "observations", observations, one, lost, rows)
    _compare_tree(source, source.layouts.actions, "actions", episode.actions, one, lost, {count})
    form = source.forms[("rewards",)]
    _compare_rows(Leaf(("rewards",), np.dtype(np.float64), ()), form, episode.rewards, one.rewards, lost, {count})
    _compare_flags(episode, one, lost, bool(source.is_part[episode.index]))


def _compare_tree(
    source: ExportSource, layout: Layout, name: str, tree: Any, one: Loaded, lost: Collection[str], rows: set[int]
) -> None:
    said = getattr(one, name)
    if "structure" not in lost or isinstance(layout, Leaf):
        pairs = list(_paired(layout, tree, said, lost))
    else:
        expected = [(leaf, values) for leaf, values in zip(layout.leaves(), leaves_of(layout, tree, ()).values())]
        expected = [(leaf, values) for leaf, values in expected if leaf.dtype is not None or "text" not in lost]
        found: list[Any] = []
        mapped(found.append, said)
        if len(found) == 1 < len(expected):  # a loader may return one vector for all
            flat = [np.asarray(values).reshape(len(values), -1) for _, values in expected]
            together = np.concatenate(flat, axis=1)
            form = RowType(together.dtype, together.shape[1:])
            _compare_rows(Leaf((name,), *form[:2]), form, together, found[0], lost, rows)
            return
        if len(found) != len(expected):
            raise _Difference(f"{name}: {len(expected)} leaves, but {len(found)} loaded")
        pairs = [(leaf, values, other) for (leaf, values), other in zip(expected, found)]
    for leaf, values, other in pairs:
        _compare_rows(leaf, source.forms.get(leaf.path), values, other, lost, rows)


def _paired(layout: Layout, tree: Any, said: Any, lost: Collection[str]) -> Iterator[tuple[Leaf, Any, Any]]:
    """Each leaf, with the rows of the trace and those that were loaded."""
    if isinstance(layout, Leaf):
        yield layout, tree, said
        return
    kind, size = (tuple, len(layout.children)) if layout.keys is None else (dict, len(layout.children))
    if not isinstance(said, kind):
        raise _Difference(f"a {kind.__name__} of {size} in the trace, but {type(said).__name__} loaded")
    keys: list[Any] = list(range(size)) if layout.keys is None else layout.keys
    for key, child in zip(keys, layout.children):
        is_there = key in said if isinstance(said, dict) else key < len(said)
        if is_there:
            yield from _paired(child, tree[key], said[key], lost)
        elif "text" not in lost or any(leaf.dtype is not None for leaf in child.leaves()):
            raise _Difference(f"{next(child.leaves()).label} was not loaded")
    if "text" not in lost and len(said) != size:
        raise _Difference(f"a {kind.__name__} of {size} in the trace, but {len(said)} loaded")


def _compare_rows(
    leaf: Leaf, form: RowType | None, values: Any, found: Any, lost: Collection[str], rows: set[int]
) -> None:
    name = leaf.label
    if found is None:
        raise _Difference(f"{name} was not loaded")
    if len(found) not in rows:
        raise _Difference(f"{name}: {len(found)} rows, where there should be {max(rows)}")
    values = values[: len(found)]
    if form is None:
        if "text" not in lost:
            _compare_values(name, values, found)
        return
    expected, loaded = np.asarray(values).astype(form.dtype), np.asarray(found)
    if "structure" in lost and loaded.size == expected.size:
        loaded = loaded.reshape(expected.shape)
    if loaded.shape != expected.shape:
        raise _Difference(f"{name}: of shape {loaded.shape}, where it should be {expected.shape}")
    if loaded.dtype.newbyteorder("=") != expected.dtype.newbyteorder("="):
        if "dtype" not in lost:
            raise _Difference(f"{name}: {loaded.dtype}, where it should be {expected.dtype}")
        with np.errstate(all="ignore"):
            expected = expected.astype(loaded.dtype)
    if "pixels" in lost and expected.dtype == np.uint8 and expected.ndim > 2:
        return
    same = _same_bits(expected, loaded)
    if not same.all():
        row = int(np.argmin(same))
        raise _Difference(f"{name}, row {row}: {_short(loaded[row])}, where it should be {_short(expected[row])}")


def _same_bits(one: Array, other: Array) -> Array:
    """Return which rows are equal, bit for bit."""
    one, other = (array.astype(array.dtype.newbyteorder("<")) for array in (one, other))
    return np.array([row.tobytes() == same.tobytes() for row, same in zip(one, other)], np.bool_)


def _compare_values(name: str, values: Any, found: Any) -> None:
    for row, (expected, loaded) in enumerate(zip(values, found)):
        if _text(expected) != _text(loaded):
            raise _Difference(f"{name}, row {row}: {_short(loaded)}, where it should be {_short(expected)}")


def _text(value: Any) -> str:
    """Return one text for values that libraries do not distinguish: np.str_ and str, np.float64 and float."""
    return json_text(tagged(_plain(value)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _short(value: Any) -> str:
    return f"{value!r:.200}".replace("\n", " ")


def _compare_flags(episode: Episode, one: Loaded, lost: Collection[str], is_part: bool) -> None:
    expected = [np.array(episode.terminations), np.array(episode.truncations)]
    loaded = [np.asarray(flags) for flags in (one.terminations, one.truncations)]
    for name, flags in zip(("terminations", "truncations"), loaded):
        if flags.shape != (len(episode),) or flags.dtype != np.bool_:
            raise _Difference(
                f"{name}: {flags.dtype} of shape {flags.shape}, where it should be bool ({len(episode)},)"
            )
    if not len(episode):
        return
    if "flags" in lost:
        for flags in expected:
            flags[:-1] = False
        if expected[0][-1]:  # terminated hides truncated
            expected[1][-1] = loaded[1][-1]
    if not expected[0][-1] and (is_part or not expected[1][-1]):  # loaders that end episodes with a flag
        expected[1][-1] = loaded[1][-1]
    for name, flags, found in zip(("terminations", "truncations"), expected, loaded):
        if not np.array_equal(flags, found):
            step = int(np.argmax(flags != found))
            raise _Difference(f"{name}, step {step} of {len(flags)}: {found[step]}, where it should be {flags[step]}")


# -- facts of an episode ----------------------------------------------------------------------------------------------


def _compare_told(source: ExportSource, episode: Episode, one: Loaded, lost: Collection[str]) -> None:
    if "identity" not in lost and one.identity is None:
        raise _Difference("no identity, and no loss reported")
    known = {} if one.identity is None else read_identity(one.identity)
    if one.identity is not None and _text(known) != _text(read_identity(source.identity(episode))):
        raise _Difference(f"identity: {one.identity:.300}, where it should be {source.identity(episode):.300}")
    for name in ("seed", "options", "reset_info"):
        expected = getattr(episode, name)
        said = getattr(one, name) if getattr(one, name) is not None else known.get(name)
        if name not in lost and _text(said) != _text(expected):
            raise _Difference(f"{name}: {_short(said)}, where it should be {_short(expected)}")
    outcome = one.outcome or known.get("outcome")
    is_told = episode.outcome in ("terminated", "truncated") and not source.is_part[episode.index]
    if not {"outcome", "parts"} & set(lost) and not (outcome is None and is_told) and outcome != episode.outcome:
        raise _Difference(f"outcome: {outcome}, where it should be {episode.outcome}")
    infos = infos_of(episode)
    if "infos" not in lost and infos is not None and len(episode):
        if one.infos is None or len(one.infos) != len(infos):
            raise _Difference(f"infos of {0 if one.infos is None else len(one.infos)} steps of {len(infos)}")
        _compare_values("infos", infos, one.infos)
    if "annotations" not in lost:
        for name, rows in episode.annotations.items():
            path: Path = ("annotations", name)
            found = (one.annotations or {}).get(name)
            form = source.forms[path]
            _compare_rows(Leaf(path, None if form is None else form.dtype, ()), form, rows, found, (), {len(episode)})
