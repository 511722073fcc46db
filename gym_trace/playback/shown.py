"""Describe a trace for a REPL and for a notebook."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gym_trace.data.episode import Episode
from gym_trace.data.showing.html import image, page, sparkline
from gym_trace.data.showing.pictures import is_picture, picture_of, pictures_in
from gym_trace.data.showing.text import count as counted
from gym_trace.data.showing.text import period, spread, tally
from gym_trace.data.values import Array
from gym_trace.data.vocabulary import OUTCOMES
from gym_trace.errors import TraceError
from gym_trace.playback.episode_columns import complete_rows
from gym_trace.playback.episode_index import EpisodeIndex
from gym_trace.playback.episode_table import EpisodeTable, outcome_codes
from gym_trace.printable import printable

_NAMED = 3  # environments that the description names


class Shown(NamedTuple):
    """Describes a trace, or a view of one.

    damages: number of damaged places.
    """

    directory: Path
    content: EpisodeIndex
    damages: int

    def text(self) -> str:
        return "<" + "\n  ".join([self._title(), *filter(None, self._lines())]) + ">"

    def html(self, episode: Callable[[int], Episode], viewer: str = "") -> str:
        """Return HTML with the text, the returns, first and last episodes, an observed image, if any, and the viewer.

        Episodes of a view have their index in the whole trace, as on the command line. episode: returns the episode at
        an index.
        """
        content = self.content
        table = content.table.view(EpisodeTable)
        if content.chosen is not None:
            table = table.copy()
            table["index"] = content.chosen
        parts = [sparkline(table["return"], "returns"), table._repr_html_() or ""]
        if (picture := self._picture(episode)) is not None:
            parts.append(image(picture))
        return page(self._title(), self._lines(), *parts, viewer)

    def _title(self) -> str:
        content = self.content
        whole = counted(int(content.bounds[-1]), "episode")
        of = whole if content.chosen is None else f"{len(content):,} of {whole}"
        return f"Trace of {of} in {printable(self.directory)}"

    def _lines(self) -> list[str]:
        """Return three lines; a line without content is empty."""
        table, readers = self.content, self.content.readers
        about = [writer.about_or_empty.environment for writer in readers]
        ids = dict.fromkeys(printable(env.get("id") or env.get("class") or "unnamed") for env in about)
        named = ", ".join([*ids][:_NAMED]) + (" …" if len(ids) > _NAMED else "")
        what = f"{named}: {counted(int(table['steps'].sum()), 'step')} by {counted(len(readers), 'writer')}"
        codes = outcome_codes(table)
        complete = complete_rows(table, readers) & (not table["first_step"].any())  # parts do not have the whole return
        known, outcomes = spread(table["return"][complete]), tally(codes, list(OUTCOMES))
        recorded = period(table["start_time"], table["end_time"])
        when = [f"recorded {recorded}"] if recorded else []
        when += ["recording now"] if any(writer.alive for writer in readers) else []
        when += [f"damaged in {counted(self.damages, 'place')}"] if self.damages else []
        returns = [f"return {known}"] if known else []
        return [what, "; ".join(filter(None, [*returns, outcomes])), ", ".join(when)]

    def _picture(self, episode: Callable[[int], Episode]) -> Array | None:
        """Return an observation from the middle of the first episode with steps; None if it is not an image."""
        steps = self.content["steps"]
        try:
            for index in np.flatnonzero(steps > 0)[:1].tolist():
                leaves = self.content.locate(index)[0].layouts.observations.leaves()
                if any(is_picture(leaf.dtype, leaf.shape) for leaf in leaves):
                    middle = int(steps[index]) // 2
                    found = pictures_in(episode(index)[middle : middle + 1].observations)
                    return picture_of(found[0][-1]) if found else None
        except TraceError:  # damaged
            return None
        return None
