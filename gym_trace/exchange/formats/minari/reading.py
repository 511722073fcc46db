"""Read the episodes of a Minari dataset; the files of each data format are StoredEpisodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from gym_trace.data.layout import PlainSpace
from gym_trace.errors import UnreadableRecording
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.imported import NewEpisode, NewSteps
from gym_trace.exchange.formats.infos import ANNOTATIONS, infos_of
from gym_trace.exchange.formats.minari.spaces import is_picture, jpeg_pictures

_DEEPEST = 32
_ROOTS, _FLAGS = ("observations", "actions"), ("terminations", "truncations")
Name = tuple[str, ...]
Spaces = tuple[PlainSpace, PlainSpace]  # of observations and actions
KnownSpaces = tuple[PlainSpace | None, PlainSpace | None]  # None: as wide as the arrays
InfoRows = tuple[list[Any] | None, dict[str, Any]]  # infos, and annotations by name


class StoredEpisode(Protocol):
    """An episode in a file: columns by name, in groups. All methods raise UnreadableRecording.

    steps: their number. attributes: of the episode: KEY, seed, options.
    """

    steps: int
    attributes: dict[str, Any]

    def part_of_tuple(self, index: int) -> str:
        """Return the name of a part of a Tuple."""

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


def spaces_of(episode: StoredEpisode, known: KnownSpaces) -> Spaces:
    """Return the spaces of a dataset. episode: its first one."""
    observations, actions = (
        _widest(episode, (root,)) if space is None else space for root, space in zip(_ROOTS, known)
    )
    return observations, actions


def _widest(episode: StoredEpisode, name: Name) -> PlainSpace:
    if len(name) > _DEEPEST:
        raise episode.fault("nested too deep")
    if (parts := episode.parts(name)) is None:
        return episode.widest(name)
    in_order = [episode.part_of_tuple(index) for index in range(len(parts))]
    if parts and set(parts) == set(in_order):
        return {"type": "Tuple", "spaces": [_widest(episode, (*name, part)) for part in in_order]}
    return {"type": "Dict", "spaces": [[part, _widest(episode, (*name, part))] for part in parts]}


def episode_of(stored: StoredEpisode, spaces: Spaces, has_jpeg: bool) -> NewEpisode:
    """Return an episode. has_jpeg: images are JPEG. Raises UnreadableRecording, also while its parts are read."""
    identity, seed, options = (stored.attributes.get(name) for name in (KEY, "seed", "options"))
    is_ours, prefix = isinstance(identity, str), f"{ANNOTATIONS}/"
    by_name = {"/".join(path): path for path in stored.info_names()}
    annotations = {name.removeprefix(prefix): path for name, path in by_name.items() if name.startswith(prefix)}
    paths, annotations = ([], annotations) if is_ours else ([*by_name.values()], {})

    def infos_in(begin: int, end: int) -> list[dict[str, Any]]:
        return infos_of({path: stored.read(("infos", *path), begin, end) for path in paths}, end - begin)

    def parts() -> Iterator[NewSteps]:
        observations, actions = (_column(stored, space, (root,), has_jpeg) for space, root in zip(spaces, _ROOTS))
        names = [("infos", *path) for path in (*paths, *annotations.values())]
        for begin, end in stored.ranges(observations.row_size + actions.row_size + sum(map(stored.row_size, names))):
            unpacked = stored.packed(begin, end) if is_ours else None
            infos, others = unpacked or (infos_in(begin + 1, end + 1) if paths else None, {})
            terminations, truncations = (np.asarray(stored.read((n,), begin, end)).astype(np.bool_) for n in _FLAGS)
            yield NewSteps(
                observations.read(begin + (begin > 0), end + 1),
                actions.read(begin, end),
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


class _Reader(NamedTuple):
    """Reads the rows of a space. read: takes begin and end. row_size: an estimate, bytes."""

    read: Callable[[int, int], Any]
    row_size: int


def _column(stored: StoredEpisode, space: PlainSpace, name: Name, has_jpeg: bool) -> _Reader:
    if len(name) > _DEEPEST:
        raise stored.fault("nested too deep")
    is_dict = space["type"] == "Dict"
    if is_dict or space["type"] == "Tuple":
        keys, children = zip(*space["spaces"]) if is_dict and space["spaces"] else ((), space["spaces"])
        names = [*map(str, keys)] if is_dict else [*map(stored.part_of_tuple, range(len(children)))]
        readers = [_column(stored, child, (*name, part), has_jpeg) for part, child in zip(names, children)]

        def tree(begin: int, end: int) -> Any:
            rows = tuple(reader.read(begin, end) for reader in readers)
            return dict(zip(keys, rows)) if is_dict else rows

        return _Reader(tree, sum(reader.row_size for reader in readers))
    shape = tuple(space["shape"]) if "shape" in space else None
    if shape is not None and has_jpeg and is_picture(space) and stored.has_files(name):
        return _Reader(
            lambda begin, end: jpeg_pictures(stored.read(name, begin, end), shape, stored.fault), math.prod(shape)
        )
    return _Reader(lambda begin, end: stored.read(name, begin, end, shape), stored.row_size(name))
