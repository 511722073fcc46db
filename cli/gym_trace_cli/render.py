"""gym-trace render"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

import gym_trace
from gym_trace.errors import RenderingError, TraceError
from gym_trace_cli import show
from gym_trace_cli.completion import TraceDirectory
from gym_trace_cli.environments import making_arguments, without_display
from gym_trace_cli.options import recorded_env_options
from gym_trace_cli.selection import Selection, selection_options

if TYPE_CHECKING:
    from gym_trace import Trace


@click.command("render", short_help="Make videos of episodes.")
@click.argument("directory", metavar="DIR", type=TraceDirectory())
@click.option("-o", "--output", required=True, metavar="OUT", type=click.Path(), help="Where to; see above.")
@selection_options
@click.option("--schedule", metavar="S", help="cubic: 0, 1, 8, 27 to 729, then every 1000th; every:N: every Nth.")
@click.option(
    "--format", "form", type=click.Choice(["mp4", "gif", "png", "cast"]), help="Default: as OUT says, or mp4."
)
@click.option(
    "--from",
    "source",
    type=click.Choice(["simulation", "observations"]),
    default="simulation",
    help="Play them again, or show observations that are pictures, without a simulator. Default: simulation.",
)
@click.option("--overlay", is_flag=True, help="Write step, action, reward and return below the pictures.")
@click.option("--fps", type=click.FloatRange(0.01, 1000), metavar="N", help="Default: as the environment says, or 30.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each file.")
@recorded_env_options
def command(
    directory: str,
    output: str,
    selection: Selection,
    schedule: str | None,
    form: str | None,
    env_id: str | None,
    factory: str | None,
    env_args: Sequence[tuple[str, Any]],
    imports: Sequence[str],
    source: str,
    trust: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Make videos of episodes of the trace in DIR: all, or those chosen, such as the best.

    OUT ending in .mp4, .gif (at most 50 frames a second) or .cast (text, for environments that
    render as ansi) is a file of one episode; {} in its name stands for the episode's number and
    makes it a file each. OUT.png is a directory OUT of frames, frame-000000.png and so on. Any
    other OUT is a directory that gets episode-000012.mp4 and so on, in the format of --format; if
    its name has an ending, put a slash behind it.
    """
    from gym_trace.video.render import Destination, render_episodes

    if schedule is not None and (selection.best or selection.worst):
        raise click.UsageError("--schedule, --best and --worst exclude each other")
    if source == "simulation":
        without_display()
    making = making_arguments(env_id, factory, env_args, imports, trust)
    trace = gym_trace.open_trace(directory)
    chosen = _scheduled(selection.some(trace), schedule)
    total = int(trace.episodes["steps"][chosen].sum()) + len(chosen)
    frames, made, begin = 0, 0, time.monotonic()
    with show.ProgressLine() as line:

        def count_frame() -> None:
            nonlocal frames
            frames += 1
            speed = show.count(round(frames / max(time.monotonic() - begin, 1e-9)))
            line.update(f"{show.count(frames)} of {show.count(total, 'frame')}  {speed} frames/s", frames / total)

        for rendered in render_episodes(
            trace,
            Destination(output, form),
            chosen,
            source=source,
            on_frame=count_frame,
            trust=trust,
            **making,
            **options,
        ):
            made += 1
            if as_json:
                told = {"episode": rendered.index, "path": str(rendered.path), "frames": rendered.frames}
                click.echo(json.dumps(told))
            else:
                where = show.printable(rendered.path)
                click.echo(f"episode {rendered.index}: {where}, {show.count(rendered.frames, 'frame')}")
    if not made:
        raise RenderingError("nothing was rendered; episodes whose pictures were recorded need --from observations")


def _scheduled(view: Trace, schedule: str | None) -> list[int]:
    """The places in the whole trace."""
    from gym_trace.video.schedules import schedule_of

    places: list[int] = view.chosen.tolist()
    chosen = places if schedule is None else list(filter(schedule_of(schedule), places))
    if not chosen:
        raise TraceError(f"no episode matches, of {show.count(len(view.whole))}")
    return chosen
