"""gym-trace view"""

from __future__ import annotations

import errno
import html
import tempfile
import threading
import webbrowser
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

import gym_trace
from gym_trace.errors import TraceError
from gym_trace_cli import show
from gym_trace_cli.compare import named_traces
from gym_trace_cli.completion import TraceDirectory
from gym_trace_cli.environments import RecordedEnvironment, recorded_environment_options, without_display
from gym_trace_cli.exit_codes import FINE
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.options import NOT_NEGATIVE, PATH, byte_count, comparison_options, start_option
from gym_trace_cli.progress import ProgressLine
from gym_trace_cli.record import named_policy, policy_name
from gym_trace_cli.selection import Selection, episode_index, selection_options

_PORT = click.IntRange(0, 65535)
_LOOPBACK = "127.0.0.1"
_SAMPLED = 3  # episodes from which the size of the page is estimated
_ADDRESS_ERRORS = (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL)
_OPENER = """<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer"><title>gym-trace</title>
<meta http-equiv="refresh" content="0; url={0}"><a href="{0}">Open gym-trace</a>
"""


@headed("view")
@click.argument("given", metavar="[NAME=]DIR...", nargs=-1, required=True, type=TraceDirectory())
@section(
    "Server",
    option("--port N", "Port. Default: a free one.", _PORT, default=0),
    option("--host ADDRESS", "Address to listen on. Default: this machine only.", default=_LOOPBACK),
    option("--no-browser", "Print the address, open no browser."),
)
@section(
    "Start",
    option("--episode N", "Open the page at this episode, by its index.", click.INT),
    option("--step N", "Open that episode at this step. Default: 0.", NOT_NEGATIVE),
)
@section(
    "Renderings and branches",
    start_option,
    option("--policy P", "Policy to branch with, as of 'branch' (repeatable).", policy_name, name="policies"),
    option("--branches DIR", "Keep branches there. Default: until it ends.", PATH, hidden=True),
)
@section(
    "Output",
    option("-o, --output OUT", "Write a page (.html) or a directory for a web host; no server.", PATH),
    option("--max-bytes SIZE", "Limit of the page, such as 5MB. Default: 25MB.", byte_count, hidden=True),
)
@selection_options
@recorded_environment_options
@comparison_options
def command(
    given: tuple[str, ...],
    port: int,
    host: str,
    no_browser: bool,
    episode: int | None,
    step: int | None,
    start: str,
    policies: tuple[str, ...],
    branches: str | None,
    output: str | None,
    max_bytes: int | None,
    selection: Selection,
    recorded: RecordedEnvironment,
    comparison: dict[str, Any],
) -> int:
    """See traces in a browser: episodes, images, plots and steps, also live.

    Serves a page on this machine until Ctrl-C. Keys flag episodes ('flag' is then a
    column of --where); environments render them, or branch off. NAME and the traces
    of a DIR are as in 'compare'. Needs [view], except for -o.

    \b
    gym-trace view traces/cartpole
    gym-trace view ppo='runs/ppo-*' dqn='runs/dqn-*' --no-browser --port 8000
    gym-trace view traces/cartpole --sort -return --limit 3 -o best.html
    gym-trace view traces/cartpole -o public
    """
    is_page = output is not None and output.lower().endswith((".html", ".htm"))
    if max_bytes is not None and not is_page:
        raise click.UsageError("--max-bytes: needs -o FILE.html; pass both")
    if output is not None and (port or host != _LOOPBACK or no_browser or policies or branches):
        raise click.UsageError("-o excludes --port, --host, --no-browser, --policy and --branches")
    named = named_traces(given)
    traces = [gym_trace.open_trace(directory) for found in named.values() for directory in found]
    is_plain = set(named) == set(given) and len(traces) == len(named)  # one trace in each DIR, and no NAME
    settings = None if is_plain else [name for name, found in named.items() for _ in found]
    fragment = _fragment(traces[0], episode, step)
    traces = traces if selection.is_all else [selection.view_or_error(trace) for trace in traces]
    if fragment and (output is not None or not selection.is_all):
        raise click.UsageError("--episode and --step exclude -o and the selection of episodes")
    if output is None:
        known = {policy: named_policy(policy) for policy in policies}
        more = {"start": start, "policies": known, "branches": branches, "settings": settings}
        return _serve(traces, host, port, no_browser, recorded, {**comparison, **more}, fragment)
    if is_page:
        _save(traces, output, max_bytes)
    else:
        _save_site(traces, settings, output)
    return FINE


def _fragment(trace: gym_trace.Trace, episode: int | None, step: int | None) -> str:
    """Return the URL fragment that opens the page at a step; "" without --episode."""
    if episode is None:
        if step is not None:
            raise click.UsageError("--step: needs --episode; pass both")
        return ""
    index = episode_index(trace, episode)
    steps = len(trace[index])
    if step is not None and step > steps:
        raise click.BadParameter(f"{step}: episode {index} has {show.count(steps, 'step')}", param_hint="--step")
    return f"#trace=0&episode={index}&step={step or 0}"


def _serve(
    traces: list[gym_trace.Trace],
    host: str,
    port: int,
    no_browser: bool,
    recorded: RecordedEnvironment,
    settings: dict[str, Any],
    fragment: str,
) -> int:
    from gym_trace.viewer import serve

    without_display()
    making = {**recorded.arguments(), **settings}
    opened = ExitStack()

    def on_start(address: str) -> None:
        address += fragment
        click.echo(f"{address}\nserving {show.count(len(traces), 'trace')}; Ctrl-C stops")
        if not no_browser:
            # Every user of this machine can read the command line of a browser, which must not hold the token.
            folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="gym-trace-", ignore_cleanup_errors=True))
            opener = Path(folder, "open.html")
            opener.write_text(_OPENER.format(html.escape(address)), encoding="utf-8")
            # webbrowser.open() does not return for a browser in the terminal.
            threading.Thread(target=webbrowser.open, args=(opener.as_uri(),), daemon=True).start()

    try:
        serve(*traces, host=host, port=port, imports=recorded.imports, on_start=on_start, **making)
    except KeyboardInterrupt:
        click.echo("\nstopped", err=True)
    except OSError as error:
        number = error.errno or 0
        if number not in _ADDRESS_ERRORS and number >= 0:  # negative: unknown host name
            raise
        problem = f"{show.printable(host)} port {port}: {str(error.strerror).partition(' (while')[0]}"
        raise TraceError(f"{problem}; choose another one") from error
    finally:
        opened.close()
    return FINE


def _save(traces: list[gym_trace.Trace], save: str, max_bytes: int | None) -> None:
    from gym_trace.viewer import MOST_BYTES, save_page

    limit = MOST_BYTES if max_bytes is None else max_bytes
    with ProgressLine() as line:

        def on_progress(done: int, total: int, size: int) -> None:
            if done == _SAMPLED < total:
                expected = size // done * total
                cut = f"; --max-bytes {show.size(limit)} cuts it" if expected > limit else ""
                click.echo(f"about {show.size(expected)} for {show.count(total, 'episode')}{cut}")
            line.update(f"{show.count(done)} of {show.count(total, 'episode')}, {show.size(size)}", done / total)

        saved = save_page(*traces, target=save, max_bytes=limit, on_progress=on_progress)
    skipped = f"; {show.count(saved.left_out, 'episode')} skipped, beyond {show.size(limit)}" * bool(saved.left_out)
    click.echo(f"{show.printable(save)}: {show.count(saved.episodes, 'episode')}, {show.size(saved.bytes)}{skipped}")


def _save_site(traces: list[gym_trace.Trace], settings: list[str] | None, site: str) -> None:
    from gym_trace.viewer import save_site

    with ProgressLine() as line:

        def on_progress(done: int, total: int) -> None:
            line.update(f"{show.size(done)} of {show.size(total)}", done / max(1, total))

        saved = save_site(*traces, target=site, settings=settings, on_progress=on_progress)
    copied = f", {show.count(saved.copied, 'trace')} copied" * bool(saved.copied)
    click.echo(f"{show.printable(site)}: {show.count(saved.episodes, 'episode')}, {show.size(saved.bytes)}{copied}")
    click.echo("put it on any host that serves byte ranges of files")
