"""What a trace says of itself, without its steps."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from gym_trace.errors import CorruptTrace, TraceError
from gym_trace.format.batch_reader import Damage
from gym_trace.format.facts import read_facts
from gym_trace.model.episode import Episode
from gym_trace.model.packing import pack_lenient
from gym_trace.model.values import Array
from gym_trace.model.vocabulary import OUTCOMES
from gym_trace.printable import printable
from gym_trace.reading.content import Content
from gym_trace.reading.episode_columns import complete_rows
from gym_trace.reading.episode_table import EpisodeTable, outcome_codes
from gym_trace.reading.opened import OnDisk, Opened
from gym_trace.reading.writer_reader import WriterReader
from gym_trace.showing.frames import episodes_frame
from gym_trace.showing.html import image, page, sparkline
from gym_trace.showing.pictures import is_picture, picture_of, pictures_in
from gym_trace.showing.words import count as counted
from gym_trace.showing.words import period, spread, tally

_NAMED = 3  # environments


class Recorded:
    """What is known of a trace, or a view of one, from its indexes and from what its writers said."""

    _opened: Opened
    _content: Content

    def __len__(self) -> int:
        return len(self._content.table)

    def refresh(self) -> int:
        """Takes in what was recorded since; returns how many episodes more there are. A view has nothing to take in.

        Episodes that were running have more steps then, and may have ended. An episode is known by its writer, its
        episode_id and its first_step: its place can be another one than before, where several lanes or writers record.
        """
        before = self._content
        if before.chosen is not None:
            return 0
        writers = list(self._opened.refresh().values())
        if writers != before.writers:
            self._content = Content.whole(writers)
        return len(self) - len(before.table)

    @property
    def directory(self) -> FilePath:
        return FilePath(self._opened.storage.root)

    @property
    def episodes(self) -> Array:
        return self._content.table.view(EpisodeTable)

    @property
    def bytes_on_disk(self) -> int:
        """Bytes that the trace's directory takes, as du counts them: with rings and videos. Of a view, the same."""
        return self._opened.storage.allocated()

    @property
    def writers(self) -> list[str]:
        return [writer.writer for writer in self.readers]

    @property
    def readers(self) -> list[WriterReader]:
        """The writers with what is known of their files; of a view, those that have episodes in it."""
        return self._content.readers

    @property
    def damage(self) -> list[Damage]:
        found = [damage for writer in self.readers for damage in writer.damage]
        return list(dict.fromkeys([*found, *self._opened.skipped]))

    def writer_of(self, index: int) -> WriterReader:
        """Who wrote an episode: .writer (its id), .metadata, .env_spec, .observation_space, .action_space, .schema."""
        return self.place_of(index)[0]

    @property
    def metadata(self) -> Any:
        """What was given as metadata when the trace was recorded. Raises TraceError if writers were given different."""
        return self.writer_agreed_on("metadata").metadata

    @property
    def env_spec(self) -> dict[str, Any]:
        """What is known of the environment: id, spec (JSON), wrappers, class. Raises TraceError as metadata does."""
        return self.writer_agreed_on("environment").env_spec

    @property
    def observation_space(self) -> Any:
        """The recorded gymnasium space. Raises TraceError if writers recorded different ones.

        A custom space in it, which is not plain data, is a StandIn: it has everything in it, and cannot be drawn from.
        """
        return self.writer_agreed_on("observation_space").observation_space

    @property
    def action_space(self) -> Any:
        """The recorded gymnasium space. Raises TraceError if writers recorded different ones.

        A custom space in it, which is not plain data, is a StandIn: it has everything in it, and cannot be drawn from.
        """
        return self.writer_agreed_on("action_space").action_space

    @property
    def facts(self) -> dict[str, Any]:
        """What people say of the whole trace: author, license, description, tags, homepage, citation, reference_scores
        ({"random": …, "expert": …}), or whatever else. Read anew each time; nothing, and a warning, if it is damaged.
        """
        try:
            return read_facts(self._opened.storage)
        except CorruptTrace as error:
            self._report(Damage(str(error.path), 0, 0, error.problem))
            return {}

    def writer_agreed_on(self, name: str) -> WriterReader:
        """A writer whose schema says of name what those of all writers with episodes say."""
        having = [self.readers[number] for number in np.unique(self.episodes["writer"]).tolist()] or self.readers
        said = {pack_lenient(writer.schema.get(name))[0] for writer in having}
        if len(said) > 1:
            raise TraceError(
                f"{self.directory}: the writers of this trace differ in their {name}; trace.writer_of(i) gives the "
                "writer of episode i, with what that one says"
            )
        return having[0]

    def make_env(self, *, trust: bool = False, env_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        """Makes the recorded environment, with its wrappers; kwargs override the recorded ones.

        Args:
            trust: do what only the trace names: import modules, call classes, open files. Without it the error says
                what that would be.
            env_kwargs: further arguments of the environment, such as one that is called "trust".

        Raises:
            EnvironmentUnavailable: says what is missing.
        """
        from gym_trace.envs.make import make_environment

        return make_environment(self.env_spec, trust, {**(env_kwargs or {}), **kwargs})

    @property
    def chosen(self) -> Array:
        """The places that the episodes of a view have in the whole trace, in the order of the view."""
        chosen = self._content.chosen
        return np.arange(len(self)) if chosen is None else chosen

    @property
    def rows(self) -> Array:
        """Where the episodes are stored: the row of each with its writer."""
        content, chosen = self._content, self.chosen
        return chosen - content.bounds[np.searchsorted(content.bounds, chosen, side="right") - 1]

    def place_of(self, index: int) -> tuple[WriterReader, int]:
        """Where an episode is stored: the writer, and its row there."""
        content = self._content
        return content.place(range(len(content.table))[index])

    def _episode(self, content: Content, index: int) -> Episode:
        writer, row = content.place(index)
        record = content.table[index].copy()  # of its own, so that it does not keep the table
        return Episode(record, writer.writer, writer.split, OnDisk(self._opened, writer, row, record))

    def _report(self, damage: Damage) -> None:
        if damage not in self._opened.skipped:
            self._opened.skipped[damage] = None
            where = f"bytes {damage.start} to {damage.end}" if damage.end else "all of it"
            warnings.warn(
                f"{damage.path}: skipped {where}: {damage.problem}",
                UserWarning,
                stacklevel=4,
            )

    # -- how it shows itself ------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return "<" + "\n  ".join([self._title, *filter(None, self._lines())]) + ">"

    def _repr_html_(self) -> str:
        """What notebooks show: the same, the first and the last episodes, the returns, and an observed picture.

        Episodes of a view have the index that they have in the whole trace, as on the command line.
        """
        table = self._content.table.view(EpisodeTable)
        if self._content.chosen is not None:
            table = table.copy()
            table["index"] = self.chosen
        parts = [sparkline(table["return"], "returns"), table._repr_html_() or ""]
        if (picture := self._picture()) is not None:
            parts.append(image(picture))
        return page(self._title, self._lines(), *parts)

    @property
    def _title(self) -> str:
        whole = counted(int(self._content.bounds[-1]), "episode")
        of = whole if self._content.chosen is None else f"{len(self):,} of {whole}"
        return f"Trace of {of} in {printable(self.directory)}"

    def _lines(self) -> list[str]:
        """What it is, in three lines; of those that nothing is known for, nothing."""
        table, readers = self._content.table, self.readers
        about = [writer.about_or_empty.environment for writer in readers]
        ids = dict.fromkeys(printable(env.get("id") or env.get("class") or "unnamed") for env in about)
        named = ", ".join([*ids][:_NAMED]) + (" …" if len(ids) > _NAMED else "")
        what = f"{named}: {counted(int(table['steps'].sum()), 'step')} by {counted(len(readers), 'writer')}"
        codes = outcome_codes(table)
        complete = complete_rows(table, readers) & (not table["first_step"].any())  # parts have parts of returns
        known, outcomes = spread(table["return"][complete]), tally(codes, list(OUTCOMES))
        recorded = period(table["start_time"], table["end_time"])
        when = [f"recorded {recorded}"] if recorded else []
        when += ["recording now"] if any(writer.alive for writer in readers) else []
        when += [f"damaged in {counted(len(self.damage), 'place')}"] if self.damage else []
        returns = [f"return {known}"] if known else []
        return [what, "; ".join(filter(None, [*returns, outcomes])), ", ".join(when)]

    def _picture(self) -> Array | None:
        """One that was observed in the middle of the first episode that has some; None where observations are none."""
        try:
            for index in np.flatnonzero(self._content.table["steps"] > 0)[:1].tolist():
                leaves = self.writer_of(index).layouts.observations.leaves()
                if any(is_picture(leaf.dtype, leaf.shape) for leaf in leaves):
                    middle = int(self._content.table["steps"][index]) // 2
                    found = pictures_in(self._episode(self._content, index)[middle : middle + 1].observations)
                    return picture_of(found[0][-1]) if found else None
        except TraceError:  # damaged
            return None
        return None

    def to_pandas(self) -> Any:
        """The episodes as a pandas.DataFrame, which needs pandas.

        A row an episode, by its index: episode_id, writer (its id), split, lane, first_step, steps, return, outcome,
        seed (integers, or missing), start_time, end_time (UTC), duration (a timedelta), has_final_observation. What is
        not known is missing.

        Raises MissingExtra.
        """
        table, writers = self._content.table, [writer.about_or_empty for writer in self.readers]
        seeds: list[int | None] = [None if seed < 0 else seed for seed in table["seed"].tolist()]
        for index in np.flatnonzero(table["seed"] < -1).tolist():  # too large for the table
            seeds[index] = self._episode(self._content, index).seed
        return episodes_frame(table, self.writers, [writer.split for writer in writers], seeds)
