"""gym-trace view"""

from __future__ import annotations

import errno
import os
import threading
import webbrowser

import click

import gym_trace
from gym_trace.errors import TraceError
from gym_trace_cli import show
from gym_trace_cli.completion import TraceDirectory
from gym_trace_cli.environments import RecordedEnvironment, recorded_environment_options, without_display
from gym_trace_cli.exit_codes import FINE
from gym_trace_cli.help import headed, option, section

_PORT = click.IntRange(0, 65535)


@headed("view")
@click.argument("directories", metavar="DIR...", nargs=-1, required=True, type=TraceDirectory())
@section(
    "Server",
    option("--port N", "Port. Default: a free one.", _PORT, default=0),
    option("--host ADDRESS", "Address to listen on. Default: this machine only.", default="127.0.0.1"),
    option("--no-browser", "Print the address, open no browser."),
)
@recorded_environment_options
def command(
    directories: tuple[str, ...], port: int, host: str, no_browser: bool, recorded: RecordedEnvironment
) -> int:
    """See traces in a browser: episodes, pictures, plots and steps, also live.

    Serves a page on this machine until Ctrl-C. Keys on the page flag episodes: good,
    bad, look again; 'flag' is then a column of --where. Episodes without pictures
    can be rendered there in their environment. Needs the extra [view].

    \b
    gym-trace view traces/cartpole
    gym-trace view traces/before traces/after --no-browser --port 8000
    """
    from gym_trace.viewer import serve

    traces = [gym_trace.open_trace(directory) for directory in directories]
    without_display()
    making = recorded.arguments()

    def on_start(address: str) -> None:
        from gym_trace.viewer.server import is_loopback

        if not is_loopback(host):
            click.echo(
                f"warning: --host {show.printable(host)}: other machines can connect, unencrypted; "
                "everyone with the address sees the traces and can flag episodes",
                err=True,
            )
        click.echo(f"{address}\nserving {show.count(len(traces), 'trace')}; Ctrl-C stops", err=False)
        if not no_browser:
            # A browser in the terminal would not return.
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

    try:
        serve(*traces, host=host, port=port, imports=recorded.imports, on_start=on_start, **making)
    except KeyboardInterrupt:
        click.echo("\nstopped", err=True)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL):
            raise
        problem = f"{show.printable(host)} port {port}: {os.strerror(error.errno)}"
        raise TraceError(f"{problem}; choose another one") from error
    return FINE
