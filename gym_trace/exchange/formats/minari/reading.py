"""Read the episodes of a Minari dataset; the files of each data format are StoredEpisodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from gym_trace.data.layout import PlainSpace, layout_of, leaves_in
from gym_trace.errors import UnreadableRecording
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.imported import NewEpisode, NewSteps
from gym_trace.exchange.formats.infos import ANNOTATIONS, infos_of
from gym_trace.exchange.formats.minari.spaces import Name, is_picture, jpeg_pictures, names_of

_DEEPEST = 32
_ROOTS, _FLAGS = ("observations", "actions"), ("terminations", "truncations")
Spaces = tuple[PlainSpace, PlainSpace]  # the observation space, the action space
KnownSpaces = tuple[PlainSpace | None, PlainSpace | None]  # None: as wide as the arrays
InfoRows = tuple[list[Any] | None, dict[str, Any]]  # infos, and annotations by name


class StoredEpisode(Protocol):
    """An episode in a file: columns by name, in groups. All methods raise UnreadableRecording.

    part_of_tuple: returns the name of a part of a Tuple by its index.
    steps: their number. attributes: of the episode: KEY, seed, options.
    """

    part_of_tuple: Callable[[int], str]
    steps: int
    attributes: dict[str, Any]

    def parts(self, name: Name) -> list[str] | None:
        """Return the names of the parts of a group; None for a column."""

    def widest(self, name: Name) -> PlainSpace:
        """Return the widest space of the values of a column."""

    def info_names(self) -> list[Name]:
        """Return the names of the columns of infos, which have a row for the reset, too."""

    def row_size(self, name: Name) -> int:
        """Estimate the bytes of a row."""

    def has_files(self, name: Name) -> bool:
        """Return True for a column of image files."""

    def ranges(self, row_size: int) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of the steps to read at a time, (0, 0) for an episode without steps."""

    def read(self, name: Name, begin: int, end: int, shape: tuple[int, ...] | None = None) -> Any:
        """Return rows of a column in the range of steps, or one after it. shape: of a row, where it is known."""

    def packed(self, begin: int, end: int) -> InfoRows | None:
        """Return the infos that gym-trace packed for the next steps; None if it packed none."""

    def fault(self, problem: str) -> UnreadableRecording:
        """Return an error about the file."""


def spaces_in(first: StoredEpisode, known: KnownSpaces, has_jpeg: bool) -> tuple[Spaces, list[StoredSpace]]:
    """Return the spaces of a dataset, and how its files have them. first: its first episode."""
    observations, actions = (space or _widest(first, (root,)) for space, root in zip(known, _ROOTS))
    stored = [
        StoredSpace(space, root, first.part_of_tuple, has_jpeg) for space, root in zip((observations, actions), _ROOTS)
    ]
    return (observations, actions), stored


def _widest(episode: StoredEpisode, name: Name) -> PlainSpace:
    if len(name) > _DEEPEST:
        raise episode.fault("nested too deep")
    if (parts := episode.parts(name)) is None:
        return episode.widest(name)
    in_order = [episode.part_of_tuple(index) for index in range(len(parts))]
    if parts and set(parts) == set(in_order):
        return {"type": "Tuple", "spaces": [_widest(episode, (*name, part)) for part in in_order]}
    return {"type": "Dict", "spaces": [[part, _widest(episode, (*name, part))] for part in parts]}


class StoredSpace:
    """Observations or actions in the files of a dataset, one column per leaf. has_jpeg: images are JPEG."""

    def __init__(self, space: PlainSpace, root: str, part_of_tuple: Callable[[int], str], has_jpeg: bool):
        self._layout = layout_of(space, (root,))
        self._names = names_of(self._layout, (root,), part_of_tuple, [])
        leaves = [leaf for _, leaf in leaves_in(space, ())]
        self._shapes = [tuple(leaf["shape"]) if "shape" in leaf else None for leaf in leaves]
        self._may_be_jpeg = [has_jpeg and is_picture(leaf) for leaf in leaves]

    def _columns(self, stored: StoredEpisode) -> Iterator[tuple[Name, tuple[int, ...] | None, bool]]:
        """Yield the name and shape of each leaf, and whether it has image files."""
        for name, shape, may_be_jpeg in zip(self._names, self._shapes, self._may_be_jpeg):
            yield name, shape, may_be_jpeg and stored.has_files(name)

    def row_size(self, stored: StoredEpisode) -> int:
        """Estimate the bytes of a row."""
        return sum(
            math.prod(shape or ()) if is_jpeg else stored.row_size(name)
            for name, shape, is_jpeg in self._columns(stored)
        )

    def read(self, stored: StoredEpisode, begin: int, end: int) -> Any:
        """Return rows: an array, or dicts and tuples of arrays as in the space."""
        columns = []
        for name, shape, is_jpeg in self._columns(stored):
            rows = stored.read(name, begin, end, None if is_jpeg else shape)
            columns.append(jpeg_pictures(rows, shape or (), stored.fault) if is_jpeg else rows)
        return self._layout.join(iter(columns))


def episode_of(stored: StoredEpisode, observations: StoredSpace, actions: StoredSpace) -> NewEpisode:
    """Return an episode. Raises UnreadableRecording, also while its parts are read."""
    identity, seed, options = (stored.attributes.get(name) for name in (KEY, "seed", "options"))
    is_ours, prefix = isinstance(identity, str), f"{ANNOTATIONS}/"
    by_name = {"/".join(path): path for path in stored.info_names()}
    annotations = {name.removeprefix(prefix): path for name, path in by_name.items() if name.startswith(prefix)}
    paths, annotations = ([], annotations) if is_ours else ([*by_name.values()], {})

    def infos_in(begin: int, end: int) -> list[dict[str, Any]]:
        return infos_of({path: stored.read(("infos", *path), begin, end) for path in paths}, end - begin)

    def parts() -> Iterator[NewSteps]:
        row_size = observations.row_size(stored) + actions.row_size(stored)
        row_size += sum(stored.row_size(("infos", *path)) for path in (*paths, *annotations.values()))
        for begin, end in stored.ranges(row_size):
            unpacked = stored.packed(begin, end) if is_ours else None
            infos, others = unpacked or (infos_in(begin + 1, end + 1) if paths else None, {})
            terminations, truncations = (np.asarray(stored.read((n,), begin, end)).astype(np.bool_) for n in _FLAGS)
            yield NewSteps(
                observations.read(stored, begin + (begin > 0), end + 1),
                actions.read(stored, begin, end),
                stored.read(("rewards",), begin, end),
                terminations,
                truncations,
                infos,
                {name: stored.read(("infos", *path), begin + 1, end + 1) for name, path in annotations.items()}
                | others,
            )

    return NewEpisode(
        stored.steps,
        parts(),
        seed=int(seed) if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool) and seed >= 0 else None,
        options=options if isinstance(options, dict) else None,
        reset_info=infos_in(0, 1)[0] if paths else None,
        identity=identity if isinstance(identity, str) else None,
    )
