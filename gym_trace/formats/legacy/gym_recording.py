"""Directories of OpenAI's gym_recording: JSON that names batches, JSON of episodes, and arrays in binary files."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from gym_trace.errors import UnreadableRecording
from gym_trace.format import wire
from gym_trace.formats.legacy.arrays import StoredArray, stored_array
from gym_trace.formats.legacy.columns import Content, NewWriter, columns_of, rewards_of, row_size, space_of
from gym_trace.formats.legacy.old_files import OldDirectory, malformed, plain_name
from gym_trace.model.schema import Layouts, WriterSchema
from gym_trace.model.vocabulary import Outcome
from gym_trace.ring.segment import Segment, size_of

_MANIFESTS, _PICKLES = "openaigym.trace.*.manifest.json", "openaigym.trace.*.pkl"
_SUFFIX = ".manifest.json"
_PIECE_BYTES, _PIECE_ROWS = 4 << 20, 8192  # of an episode are read at a time
_MOST_NAMED = 1000  # files that the metadata lists

NOTE = (
    "imported from gym_recording, which kept neither environment nor spaces nor how episodes ended: the spaces are the "
    "widest that the arrays can be of, and each episode is what lay between two resets"
)


class Batch(NamedTuple):
    """A file of episodes: its name, and the id of the first and how many there are, or None where it is not said."""

    name: str
    first: int | None
    episodes: int | None


class Episode(NamedTuple):
    """The rows of an episode: one more of observations than of actions and rewards."""

    observations: Content
    actions: Content
    rewards: Content
    steps: int


def find_recordings(directory: OldDirectory) -> list[GymRecording]:
    """Find the recordings of gym_recording in a directory. Raises UnreadableRecording if some of it is pickled."""
    pickled = fnmatch.filter(directory.names, _PICKLES)
    if pickled:
        raise UnreadableRecording(
            f"{directory.path / pickled[0]}: a pickled recording; unpickling runs whatever is in a file, so it is "
            "never done here. Where you trust it, load it with the program that wrote it and replay it into a "
            "recorder; to import what else is in the directory, move its .pkl files away"
        )
    return [GymRecording(directory, name) for name in fnmatch.filter(directory.names, _MANIFESTS)]


def is_recording(name: str) -> bool:
    """Return True if gym_recording has files of this name."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in (_MANIFESTS, _PICKLES))


class GymRecording:
    """The files of one recorder of gym_recording.

    Attributes:
        name: that of its files, which has the number of the recorder and of its process.
        batches: its files of episodes, in order.
    """

    kind = "gym_recording"

    def __init__(self, directory: OldDirectory, manifest: str):
        self.name = manifest.removesuffix(_SUFFIX)
        self._directory = directory
        self._manifest = manifest
        path = directory.path / manifest
        content = directory.json(manifest)
        entries = content.get("batches")
        if not isinstance(entries, list):
            raise malformed(path, "a manifest that lists no batches")
        self.batches: list[Batch] = []
        for entry in entries:
            if not isinstance(entry, dict):
                raise malformed(path, "a batch that is not described by an object")
            first, count = entry.get("first"), entry.get("len")
            if not all(number is None or (type(number) is int and 0 <= number < 1 << 62) for number in (first, count)):
                raise malformed(path, "a batch with an invalid first episode or number of episodes")
            self.batches.append(Batch(plain_name(entry.get("fn"), path), first, count))

    @property
    def files(self) -> int:
        """Number of episode files."""
        return len(self.batches)

    def writers(self, on_file: Callable[[], None]) -> Iterator[NewWriter]:
        """The writer of a trace that it becomes. on_file: called when a file of episodes is done."""
        observations, actions = self._spaces()
        schema = {
            "split": "",
            "observation_space": observations,
            "action_space": actions,
            "environment": {"id": None, "note": NOTE},
            "versions": {},
            "recorder": {},
            "metadata": {
                "imported_from": self.kind,
                "manifest": self._manifest,
                "files": [batch.name for batch in self.batches[:_MOST_NAMED]],
            },
        }
        yield NewWriter(self.name, schema, self._segments(WriterSchema.of(schema).layouts, on_file))

    def _spaces(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the rows of the first episode with a step."""
        observations: Content = []
        for batch in self.batches:
            for episode in self._episodes(batch):
                if episode.steps:
                    return space_of(episode.observations), space_of(episode.actions)
                observations = observations or episode.observations
        return space_of(observations), space_of([])

    def _segments(self, layouts: Layouts, on_file: Callable[[], None]) -> Iterator[Segment]:
        next_id = 0
        for batch in self.batches:
            next_id = max(next_id, batch.first or 0)  # filters of some versions left episodes out
            for episode in self._episodes(batch):
                yield from _pieces(next_id, episode, layouts)
                next_id += 1
            on_file()

    def _episodes(self, batch: Batch) -> Iterator[Episode]:
        path = self._directory.path / batch.name

        def decode(read: dict[str, Any]) -> Any:
            return stored_array(self._directory, read, path) if read.get("__type") == "ndarray" else read

        content = self._directory.json(batch.name, decode)
        episodes = content.get("episodes")
        if not isinstance(episodes, list):
            raise malformed(path, "a batch without a list of episodes")
        if batch.episodes is not None and batch.episodes != len(episodes):
            raise malformed(
                path, f"a batch of {len(episodes)} episodes, of which {self._manifest} says {batch.episodes}"
            )
        for number, episode in enumerate(episodes):
            try:
                yield _checked(episode)
            except ValueError as error:
                raise malformed(path, f"episode {number} of the file: {error}") from error


def _checked(episode: Any) -> Episode:
    """Raises ValueError if it is none."""
    if not isinstance(episode, dict):
        raise ValueError("not an object")
    contents = []
    for name in ("observations", "actions", "rewards"):
        content = episode.get(name)
        if not isinstance(content, list) and not (isinstance(content, StoredArray) and content.shape):
            raise ValueError(f"has no {name}")
        contents.append(content)
    observations, actions, rewards = contents
    steps = 0 if _is_nothing(rewards) else len(rewards)
    counts = len(observations), 0 if not steps and _is_nothing(actions) else len(actions)
    if counts != (steps + 1, steps):
        raise ValueError(
            f"{counts[0]} observations and {counts[1]} actions for {steps} rewards; there should be one observation "
            "more, and as many actions"
        )
    if steps and isinstance(rewards, StoredArray) and not rewards.row_size:
        raise ValueError("rewards without elements")
    return Episode(observations, actions, rewards, steps)


def _is_nothing(content: Content) -> bool:
    """Return True for the rows of no steps, which gym_recording stored as an array of shape (1, 0)."""
    return not len(content) or (isinstance(content, StoredArray) and content.shape == (1, 0))


def _pieces(number: int, episode: Episode, layouts: Layouts) -> Iterator[Segment]:
    """The segments of an episode, none of them large."""
    size = row_size(episode.observations) + row_size(episode.actions)
    rows = max(1, min(_PIECE_ROWS, _PIECE_BYTES // max(1, size)))
    for begin in range(0, max(1, episode.steps), rows):
        end = min(begin + rows, episode.steps)
        table = np.zeros(1, wire.FRAGMENT)
        table["episode"], table["first_step"], table["steps"] = number, begin, end - begin
        lead = 1 if begin else 0
        columns = columns_of(layouts.observations, episode.observations, begin + lead, end + 1)
        if end > begin:
            columns |= columns_of(layouts.actions, episode.actions, begin, end)
            columns |= rewards_of(episode.rewards, begin, end)
        if begin == 0:
            table["flags"] |= wire.LEADS
        if end == episode.steps:
            table["flags"] |= wire.STOPS | wire.ENDS
            table["outcome"] = Outcome.CUT
        yield Segment(table, columns, table.nbytes + sum(map(size_of, columns.values())))
