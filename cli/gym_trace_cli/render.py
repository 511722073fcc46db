"""gym-trace render"""

from __future__ import annotations

import time
from typing import Any

import click

import gym_trace
from gym_trace.errors import RenderingError
from gym_trace_cli import show
from gym_trace_cli.environments import RecordedEnvironment, recorded_environment_options, without_display
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.options import PATH, comparison_options, source_option, trace_argument
from gym_trace_cli.progress import ProgressLine
from gym_trace_cli.selection import Selection, selection_options


@headed("render")
@trace_argument
@section(
    "Output",
    option("-o, --output OUT", "File or directory.", PATH, required=True),
    option(
        "--format FORMAT", "mp4, gif, png, cast. Default: by OUT, else mp4.", ["mp4", "gif", "png", "cast"], name="form"
    ),
    option("--json", "Print JSON lines, one per file.", name="as_json"),
)
@selection_options
@section(
    "Video",
    source_option(default="auto"),
    option("--overlay", "Write step, action, reward and return below."),
    option("--fps N", "Frames per second. Default: from the environment, else 30.", click.FloatRange(0.01, 1000)),
)
@recorded_environment_options
@comparison_options
def command(
    directory: str,
    output: str,
    selection: Selection,
    form: str | None,
    recorded: RecordedEnvironment,
    comparison: dict[str, Any],
    source: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Make videos of episodes.

    OUT is a file for one episode (.mp4, .gif, .cast), a file per episode if its
    name has {}, a directory of frames (.png), or else a directory of files.

    \b
    gym-trace render traces/cartpole --sort -return --limit 1 -o best.mp4
    gym-trace render traces/cartpole --episodes ::10 -o 'videos/{}.gif'
    """
    if source != "observations":
        without_display()
    making: dict[str, Any] = {**recorded.arguments(), **comparison}
    making |= {"source": source} if source == "observations" else {"start": source}
    trace = gym_trace.open_trace(directory)
    chosen = selection.view_or_error(trace).indices.tolist()
    total = int(trace.episodes["steps"][chosen].sum()) + len(chosen)
    frames, videos, begin = 0, 0, time.monotonic()
    with ProgressLine() as line:

        def count_frame() -> None:
            nonlocal frames
            frames += 1
            speed = show.count(round(frames / max(time.monotonic() - begin, 1e-9)))
            line.update(f"{show.count(frames)} of {show.count(total, 'frame')}  {speed} frames/s", frames / total)

        for rendered in gym_trace.render(trace, output, chosen, form=form, on_frame=count_frame, **making, **options):
            videos += 1
            if as_json:
                show.json_line({"episode": rendered.index, "path": str(rendered.path), "frames": rendered.frames})
            else:
                where = show.printable(rendered.path)
                click.echo(f"episode {rendered.index}: {where}, {show.count(rendered.frames, 'frame')}")
    if not videos:
        raise RenderingError("nothing rendered; recorded images need --from observations")
