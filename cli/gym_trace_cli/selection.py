"""Select episodes: --episodes, --where, --sort and --limit, the same for all commands."""

from __future__ import annotations

from dataclasses import dataclass

import click

import gym_trace
from gym_trace.errors import InvalidOption, TraceError
from gym_trace_cli import show
from gym_trace_cli.completion import episode_columns
from gym_trace_cli.help import bundle, option, section
from gym_trace_cli.options import POSITIVE, episode_slice


@dataclass(frozen=True)
class Selection:
    """Selected episodes. Order of the steps: episodes, where, sort, limit."""

    episodes: slice | list[int] | None = None
    where: str | None = None
    sort: str | None = None
    limit: int | None = None

    @property
    def is_all(self) -> bool:
        """Return True for every episode, in the order of the trace."""
        return self == Selection()

    def view(self, trace: gym_trace.Trace) -> gym_trace.Trace:
        """Return a view of these episodes, or the trace itself if all are selected.

        Without --sort the order is that of the trace, or of --episodes. Raises click.BadParameter.
        """
        view = trace if self.episodes is None else trace[_valid_positions(len(trace), self.episodes)]
        if Selection(self.episodes) == self:
            return view
        try:
            return view.select(**{name: value for name, value in vars(self).items() if name != "episodes"})
        except InvalidOption as error:
            names = (name for name in ("where", "sort") if getattr(self, name) is not None)
            raise click.BadParameter(str(error), param_hint=" / ".join(f"'--{name}'" for name in names)) from error

    def view_or_error(self, trace: gym_trace.Trace) -> gym_trace.Trace:
        """Return view(). Raises TraceError if a selection has no episodes."""
        view = self.view(trace)
        if not len(view) and not self.is_all:
            raise TraceError(self.empty_message(trace))
        return view

    def view_or_note(self, trace: gym_trace.Trace) -> gym_trace.Trace:
        """Return view(). Print a note if it has no episodes."""
        view = self.view(trace)
        if not len(view):
            click.echo(self.empty_message(trace), err=True)
        return view

    def empty_message(self, trace: gym_trace.Trace) -> str:
        """Return the message for an empty selection."""
        if not len(trace):
            return f"{show.printable(trace.directory)}: has no episodes"
        return f"none of {show.count(len(trace), 'episode')} matches"

    def view_of_one(self, trace: gym_trace.Trace) -> gym_trace.Trace:
        """Return a view of these episodes in one of several traces.

        It is empty for a trace without the episodes, or the keys of infos, that the selection names.
        """
        from gym_trace.playback import NoSuchKey

        try:
            return self.view(trace)
        except click.BadParameter as error:
            if isinstance(error.__cause__, (NoSuchKey, IndexError)):
                return trace[:0]
            raise


def _where(value: str) -> str:
    """Check --where at once; the trace checks the columns."""
    from gym_trace.playback import check_condition

    check_condition(value)
    return value


def _order(value: str) -> str:
    """Check --sort at once; the trace checks the columns."""
    from gym_trace.playback import check_order

    check_order(value)
    return value


selection_options = section(
    "Selection",
    bundle(
        "selection",
        Selection,
        option("--episodes SLICE", "By position: 5, 2:10, -3:, ::10 or 1,4,7.", episode_slice),
        option("--where EXPR", "By condition: 'return > 100 and steps < 50'.", _where, shell_complete=episode_columns),
        option("--sort KEY", "Sort: -return (descending), random[:SEED].", _order, shell_complete=episode_columns),
        option("--limit N", "Keep the first N.", POSITIVE),
    ),
    topic="select",
)


def episode_index(trace: gym_trace.Trace, episode: int) -> int:
    """Return the index of --episode, where -1 is the last. Raises click.BadParameter."""
    if not -len(trace) <= episode < len(trace):
        problem = f"{episode}: the trace has {show.count(len(trace), 'episode')}"
        raise click.BadParameter(problem, param_hint="'--episode'")
    return range(len(trace))[episode]


def _valid_positions(length: int, episodes: slice | list[int]) -> slice | list[int]:
    """Return valid positions, each once. Raises click.BadParameter."""
    if isinstance(episodes, slice):
        return episodes
    for index in episodes:
        if not -length <= index < length:
            problem = f"no episode {index}; the trace has {show.count(length, 'episode')}"
            raise click.BadParameter(problem, param_hint="'--episodes'") from IndexError(problem)
    return list(dict.fromkeys(index % length for index in episodes))
