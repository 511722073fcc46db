"""What RLlib calls the episodes of a trace."""

from __future__ import annotations

import numpy as np

from gym_trace.interop.source import Source
from gym_trace.model.episode import Episode


class Names:
    """A name for each episode, never the same for two: RLlib takes those of one name for one episode."""

    def __init__(self, source: Source):
        table = source.episodes
        keys = np.stack([table["writer"].astype(np.int64), table["episode_id"], table["first_step"]], axis=1)
        _, firsts = np.unique(keys, axis=0, return_index=True)
        self._is_again = np.ones(len(table), np.bool_)  # of views that have an episode twice
        self._is_again[firsts] = False
        self._place = -1

    def next(self, episode: Episode) -> str:
        """Of the episodes, which are asked for in their order."""
        self._place += 1
        parts = [episode.writer, episode.episode_id]
        parts += [episode.first_step] if episode.first_step else []
        parts += [f"again{self._place}"] if self._is_again[self._place] else []
        return "-".join(map(str, parts))
