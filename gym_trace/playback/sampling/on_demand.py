"""The first batches of a trace: the rows of their items alone, so that no training waits until all rows are decoded.

Chunks store most columns in blocks, so a few steps take little of them. All rows, or those of a group of a stream, are
decoded once the batches have read a part of their files.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gym_trace.data.values import Array
from gym_trace.playback.sampling.items import Batch, Items
from gym_trace.playback.sampling.rows import DecodedRows, DecodePlan, EpisodeSlices

_MOST_FIRST, _MOST_ALL = 8, 16  # the first batch reads at most 1/_MOST_FIRST of the files, several 1/_MOST_ALL


class OnDemand:
    """Makes batches of items of a plan, each of which reads the rows that it needs.

    Args:
        make: makes items of decoded rows. margins: steps before and after a step that its item needs.
        items: the items of all episodes of the plan, or of some slices, without columns.
        slices: None: all episodes. share: share of all steps that would be decoded otherwise.
    """

    def __init__(
        self,
        plan: DecodePlan,
        make: Callable[[DecodedRows], Items],
        margins: tuple[int, int],
        items: Items,
        slices: EpisodeSlices | None = None,
        share: float = 1,
    ):
        self.items = items
        self._plan, self._make, self._margins = plan, make, margins
        self._episode = None if slices is None else slices.episode
        files = sum(batch.size for reader in plan.readers for batch in reader.batches)
        self._left, self._most = int(files * share) // _MOST_FIRST, int(files * share) // _MOST_ALL

    def batch(self, items: Array, positions: Array) -> Batch | None:
        """Return a batch of items, as Items.of(); None if all rows should be decoded. Raises CorruptTrace."""
        index, step = self.items.located(items, positions)
        index = index if self._episode is None else self._episode[index]
        back, ahead = self._margins
        if (step < 0).any():  # windows that begin before the episode
            return None
        order = np.lexsort((step, index))
        index, step = index[order], step[order]
        offset = np.maximum(step - back, 0)
        end = np.minimum(step + 1 + ahead, self._plan.first[index + 1] - self._plan.first[index])
        slices = EpisodeSlices(index, offset, end - offset, step - offset, step - offset + 1)
        rows, size = self._plan.decode_few(slices, self._left)
        self._left = min(self._left, self._most) - size
        if rows is None:
            return None
        found = self._make(rows)  # one item per slice
        if found.items != len(items):
            return None
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        return found.of(rank, positions)
