"""Comparison of loaded episodes with those of the exported trace."""

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
        observations: N + 1 rows, N if the format lacks the final one: an array, a list of texts, or dicts and tuples
            of these as in the space.
        actions, rewards: N rows.
        terminations, truncations: (N,) bool.
        seed, options, reset_info, outcome: as in Episode; None: to be found in the identity.
        infos: N dicts. annotations: N rows, by name.
        identity: the text of ExportSource.identity().

    Examples:
        >>> loaded = next(gym_trace.testing.loaded_from(gym_trace.open_trace("traces/cartpole")))
        >>> loaded.observations.shape, loaded.outcome
        ((13, 4), 'terminated')
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
        lost: losses that are allowed (see contract.LOSSES).
        only_steps: compare steps alone, without the metadata of episodes.
    """
    count = int(np.count_nonzero(source.episodes["steps"])) if "empty_episode" in lost else len(source.episodes)
    exported = (pair for pair in source.scan() if len(pair[0]) or "empty_episode" not in lost)
    for number, (pair, candidate) in enumerate(zip_longest(exported, loaded)):
        if candidate is None:
            return f"{count} episodes in the trace, but {number} loaded"
        if pair is None:
            return f"{count} episodes in the trace, but more loaded"
        episode, observations = pair
        try:
            _compare_steps(source, episode, observations, candidate, lost)
            if not only_steps:
                _compare_metadata(source, episode, candidate, lost)
        except _Difference as found:
            return f"loaded episode {number}: {found}"
    return ""


def loaded_from(trace: Trace, lost: Collection[str] = ()) -> Iterator[Loaded]:
    """Yield the episodes of an imported trace as a loader would. lost: losses of the format it was imported from.

    Examples:
        >>> trace = gym_trace.open_trace("traces/cartpole")
        >>> len(list(gym_trace.testing.loaded_from(trace)))
        20
    """
    names = [name for name in Loaded._fields if name not in ("observations", "infos", "identity")]
    for episode in trace:
        observations = episode.observations
        if "final_observation" in lost:
            observations = cut(observations, 0, -1)
        fields: dict[str, Any] = {name: getattr(episode, name) for name in names}
        yield Loaded(observations, **fields, infos=infos_of(episode))


# -- steps ------------------------------------------------------------------------------------------------------------


def _compare_steps(
    source: ExportSource, episode: Episode, observations: Any, candidate: Loaded, lost: Collection[str]
) -> None:
    count = len(episode)
    rows = {count + 1, count} if "final_observation" in lost else {count + 1}
    _compare_tree(source, source.layouts.observations, "observations", observations, candidate, lost, rows)
    _compare_tree(source, source.layouts.actions, "actions", episode.actions, candidate, lost, {count})
    form = source.forms[("rewards",)]
    _compare_rows(Leaf(("rewards",), np.dtype(np.float64), ()), form, episode.rewards, candidate.rewards, lost, {count})
    _compare_flags(episode, candidate, lost, bool(source.is_part[episode.index]))


def _compare_tree(
    source: ExportSource, layout: Layout, name: str, tree: Any, candidate: Loaded, lost: Collection[str], rows: set[int]
) -> None:
    """Compare the leaves of observations or actions. rows: allowed numbers of rows."""
    loaded = getattr(candidate, name)
    if "structure" not in lost or isinstance(layout, Leaf):
        pairs = list(_paired(layout, tree, loaded, lost))
    else:
        expected = [(leaf, values) for leaf, values in zip(layout.leaves(), leaves_of(layout, tree, ()).values())]
        expected = [(leaf, values) for leaf, values in expected if leaf.dtype is not None or "text" not in lost]
        loaded_leaves: list[Any] = []
        mapped(loaded_leaves.append, loaded)
        if len(loaded_leaves) == 1 < len(expected):  # a loader may return one vector for all
            flat = [np.asarray(values).reshape(len(values), -1) for _, values in expected]
            vectors = np.concatenate(flat, axis=1)
            form = RowType(vectors.dtype, vectors.shape[1:])
            _compare_rows(Leaf((name,), *form[:2]), form, vectors, loaded_leaves[0], lost, rows)
            return
        if len(loaded_leaves) != len(expected):
            raise _Difference(f"{name}: {len(expected)} leaves, but {len(loaded_leaves)} loaded")
        pairs = [(leaf, values, other) for (leaf, values), other in zip(expected, loaded_leaves)]
    for leaf, values, other in pairs:
        _compare_rows(leaf, source.forms.get(leaf.path), values, other, lost, rows)


def _paired(layout: Layout, tree: Any, loaded: Any, lost: Collection[str]) -> Iterator[tuple[Leaf, Any, Any]]:
    """Yield each leaf with its rows in the trace and its loaded rows."""
    if isinstance(layout, Leaf):
        yield layout, tree, loaded
        return
    kind, size = (tuple, len(layout.children)) if layout.keys is None else (dict, len(layout.children))
    if not isinstance(loaded, kind):
        raise _Difference(f"a {kind.__name__} of {size} in the trace, but {type(loaded).__name__} loaded")
    keys: list[Any] = list(range(size)) if layout.keys is None else layout.keys
    for key, child in zip(keys, layout.children):
        is_loaded = key in loaded if isinstance(loaded, dict) else key < len(loaded)
        if is_loaded:
            yield from _paired(child, tree[key], loaded[key], lost)
        elif "text" not in lost or any(leaf.dtype is not None for leaf in child.leaves()):
            raise _Difference(f"{next(child.leaves()).label} was not loaded")
    if "text" not in lost and len(loaded) != size:
        raise _Difference(f"a {kind.__name__} of {size} in the trace, but {len(loaded)} loaded")


def _compare_rows(
    leaf: Leaf, form: RowType | None, values: Any, loaded_rows: Any, lost: Collection[str], rows: set[int]
) -> None:
    name = leaf.label
    if loaded_rows is None:
        raise _Difference(f"{name} was not loaded")
    if len(loaded_rows) not in rows:
        raise _Difference(f"{name}: {len(loaded_rows)} rows, where there should be {max(rows)}")
    values = values[: len(loaded_rows)]
    if form is None:
        if "text" not in lost:
            _compare_values(name, values, loaded_rows)
        return
    expected, loaded = np.asarray(values).astype(form.dtype), np.asarray(loaded_rows)
    if "structure" in lost and loaded.size == expected.size:
        loaded = loaded.reshape(expected.shape)
    if loaded.shape != expected.shape:
        raise _Difference(f"{name}: shape {loaded.shape}, where it should be {expected.shape}")
    if loaded.dtype.newbyteorder("=") != expected.dtype.newbyteorder("="):
        if "dtype" not in lost:
            raise _Difference(f"{name}: {loaded.dtype}, where it should be {expected.dtype}")
        with np.errstate(all="ignore"):
            expected = expected.astype(loaded.dtype)
    if "pixels" in lost and expected.dtype == np.uint8 and expected.ndim > 2:
        return
    is_equal = _have_same_bits(expected, loaded)
    if not is_equal.all():
        row = int(np.argmin(is_equal))
        raise _Difference(f"{name}, row {row}: {_short(loaded[row])}, where it should be {_short(expected[row])}")


def _have_same_bits(a: Array, b: Array) -> Array:
    """Return (rows,) bool: True for rows that are equal, bit for bit."""
    a, b = (array.astype(array.dtype.newbyteorder("<")) for array in (a, b))
    return np.array([row_a.tobytes() == row_b.tobytes() for row_a, row_b in zip(a, b)], np.bool_)


def _compare_values(name: str, values: Any, loaded_values: Any) -> None:
    for row, (expected, loaded) in enumerate(zip(values, loaded_values)):
        if _text(expected) != _text(loaded):
            raise _Difference(f"{name}, row {row}: {_short(loaded)}, where it should be {_short(expected)}")


def _text(value: Any) -> str:
    """Return the same text for values that libraries do not distinguish: np.str_ and str, np.float64 and float."""
    return json_text(tagged(_plain(value)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _short(value: Any) -> str:
    return f"{value!r:.200}".replace("\n", " ")


def _compare_flags(episode: Episode, candidate: Loaded, lost: Collection[str], is_part: bool) -> None:
    expected = [np.array(episode.terminations), np.array(episode.truncations)]
    loaded = [np.asarray(flags) for flags in (candidate.terminations, candidate.truncations)]
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
    if not expected[0][-1] and (is_part or not expected[1][-1]):  # some loaders end every episode with a flag
        expected[1][-1] = loaded[1][-1]
    for name, flags, loaded_flags in zip(("terminations", "truncations"), expected, loaded):
        if not np.array_equal(flags, loaded_flags):
            step = int(np.argmax(flags != loaded_flags))
            raise _Difference(
                f"{name}, step {step} of {len(flags)}: {loaded_flags[step]}, where it should be {flags[step]}"
            )


# -- metadata of an episode -------------------------------------------------------------------------------------------


def _compare_metadata(source: ExportSource, episode: Episode, candidate: Loaded, lost: Collection[str]) -> None:
    identity = candidate.identity
    if "identity" not in lost and identity is None:
        raise _Difference("no identity, and no loss reported")
    known = {} if identity is None else read_identity(identity)
    if identity is not None and _text(known) != _text(read_identity(source.identity(episode))):
        raise _Difference(f"identity: {identity:.300}, where it should be {source.identity(episode):.300}")
    for name in ("seed", "options", "reset_info"):
        expected, loaded = getattr(episode, name), getattr(candidate, name)
        loaded = known.get(name) if loaded is None else loaded
        if name not in lost and _text(loaded) != _text(expected):
            raise _Difference(f"{name}: {_short(loaded)}, where it should be {_short(expected)}")
    outcome = candidate.outcome or known.get("outcome")
    is_flagged = episode.outcome in ("terminated", "truncated") and not source.is_part[episode.index]
    if not {"outcome", "parts"} & set(lost) and not (outcome is None and is_flagged) and outcome != episode.outcome:
        raise _Difference(f"outcome: {outcome}, where it should be {episode.outcome}")
    infos = infos_of(episode)
    if "infos" not in lost and infos is not None and len(episode):
        if candidate.infos is None or len(candidate.infos) != len(infos):
            count = 0 if candidate.infos is None else len(candidate.infos)
            raise _Difference(f"infos of {count} steps, where there should be {len(infos)}")
        _compare_values("infos", infos, candidate.infos)
    if "annotations" not in lost:
        for name, rows in episode.annotations.items():
            path: Path = ("annotations", name)
            values = (candidate.annotations or {}).get(name)
            form = source.forms[path]
            _compare_rows(Leaf(path, None if form is None else form.dtype, ()), form, rows, values, (), {len(episode)})
