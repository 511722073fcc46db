"""The command group, and the one place where errors become exit codes (see exit_codes.py)."""

from __future__ import annotations

import importlib
import io
import os
import re
import select
import shlex
import sys
import traceback
import warnings
from functools import partial
from typing import Any, NoReturn

import click

import gym_trace
from gym_trace.errors import (
    CorruptTrace,
    EnvironmentUnavailable,
    InvalidOption,
    ReplayDiverged,
    TraceError,
    TraceNotFound,
    UnpublishedWarning,
)
from gym_trace.printable import error_text
from gym_trace.recording import why_pure
from gym_trace_cli import show
from gym_trace_cli.exit_codes import DAMAGED, DIFFERS, ERROR, FINE, INTERRUPTED, READER_GONE, TABLE, USAGE
from gym_trace_cli.help import Group, help_all, is_full_help, option, printing_option
from gym_trace_cli.options import PATH, byte_count
from gym_trace_cli.stopping import Ended, ended_by_signals

# Module, function and help line of each command, by section of --help. A module is imported when its command is called.
MORE = "More"
SECTIONS = {
    "Record": {
        "record": ("record", "command", "Record episodes of a Gymnasium environment."),
        "play": ("play", "command", "Play an environment by hand and record it."),
        "train": ("train", "command", "Train a policy with PPO and record every step it learns from."),
    },
    "Look": {
        "ls": ("ls", "command", "List traces, or the episodes of one."),
        "info": ("info", "command", "Describe a trace: environment, spaces, writers, health."),
        "stats": ("stats", "command", "Summarize returns, lengths, outcomes and columns."),
        "compare": ("compare", "command", "Compare runs: returns with intervals, and learning curves."),
        "cat": ("cat", "command", "Print steps as a table, JSON lines, CSV or npz."),
        "sql": ("sql", "command", "Query steps and episodes with SQL (DuckDB)."),
        "view": ("view", "command", "See traces in a browser: episodes, images, plots, steps."),
        "replay": ("replay", "command", "Play episodes in the terminal or a window."),
        "render": ("render", "command", "Make videos of episodes: MP4, GIF, PNG or asciicast."),
    },
    "Check": {
        "verify": ("verify", "command", "Replay episodes in their environment and compare, bit for bit."),
        "diff": ("verify", "diff", "Compare two traces, episode by episode, bit for bit."),
        "audit": ("audit", "command", "Find out which promises an environment keeps: seeds, reset ..."),
        "lint": ("lint", "command", "Find wrong data: NaN, frozen sensors, duplicates and more."),
        "check": ("check", "check", "Verify every checksum and locate damage."),
    },
    "Change and share": {
        "edit": ("edit", "command", "Filter, merge, split, repair, compact or annotate traces."),
        "export": ("exchange", "export", "Write episodes as Minari, D4RL, LeRobot, Parquet and more."),
        "import": ("exchange", "import_", "Convert recordings of other packages to a trace."),
        "push": ("transfer", "push", "Copy a trace to an object store or a dataset hub."),
        "pull": ("transfer", "pull", "Copy a trace from a URL to a directory."),
    },
    MORE: {
        "branch": ("branch", "command", "Record new episodes that branch off at a recorded step."),
        "remake": ("remake", "command", "Record the same episodes in a changed environment."),
        "shell": ("shell", "command", "Open a Python prompt with the environment at a recorded step."),
        "proof": ("proof", "command", "Prove what any PyTorch trainer learned."),
        "doctor": ("doctor", "command", "Check whether recording works here, for bug reports."),
        "help": ("topics", "command", "Show the help of a command, or of options that many share."),
    },
}
COMMANDS = {name: command for section in SECTIONS.values() for name, command in section.items()}

# Names of commands in other tools, and the command to use here.
HINTS = {
    **dict.fromkeys(("show", "describe", "summary"), "'info' and 'stats' describe a trace, 'cat' prints its steps"),
    "watch": "'replay' plays episodes, 'view' shows them in a browser",
    **dict.fromkeys(("list", "dir"), "'ls' lists traces and episodes"),
    **dict.fromkeys(("du", "size"), "'ls' shows the size of each trace"),
    **{
        name: f"use 'edit {name}'"
        for name in ("merge", "split", "filter", "drop", "compact", "annotate", "map", "add", "rename", "repair")
    },
    **dict.fromkeys(("relabel", "transform"), "'edit map' computes columns by a function, 'remake' by an environment"),
    "rerender": "'remake' records the same episodes with another camera, 'render' makes videos",
    **dict.fromkeys(("join", "concat"), "'edit merge' makes one trace of several"),
    **dict.fromkeys(("video", "gif", "film"), "'render' makes videos"),
    **dict.fromkeys(("plot", "histogram"), "'stats' draws returns and lengths"),
    "head": "'cat --episodes 0 --steps :10' prints the first steps",
    "tail": "'cat --episodes -1 --steps -10:' prints the last steps, 'info --follow' reports new ones",
    "follow": "'info --follow' reports new episodes and steps",
    "convert": "'export' writes other formats, 'import' reads them",
    "validate": "'check' locates damage, 'lint' finds wrong data, 'verify' replays episodes and compares",
    "fsck": "'check' locates damage, 'lint' finds wrong data",
    **dict.fromkeys(("fix", "recover"), "'edit repair' writes a clean copy"),
    **dict.fromkeys(("upload", "publish"), "'push' copies a trace to a URL"),
    **dict.fromkeys(("download", "fetch", "clone"), "'pull' copies a trace from a URL"),
    "cmp": "'diff' compares traces bit for bit, 'compare' returns of runs",
    **dict.fromkeys(("check-env", "check_env"), "'audit' plays an environment in several arrangements"),
    "sync": "'push' and 'pull' copy the files that are missing",
    **dict.fromkeys(("best", "select"), "'help select' explains how to select episodes"),
    "cache": "delete the directory of --cache to clear it",
    "card": "'info --card' writes a dataset card",
    **dict.fromkeys(("query", "duckdb"), "'sql' queries steps and episodes"),
    **dict.fromkeys(("selftest", "bugreport", "env"), "'doctor' checks this installation"),
    **dict.fromkeys(("run", "collect"), "'record' records episodes"),
}

_EXAMPLES = (
    "gym-trace record CartPole-v1 -o traces/cartpole --episodes 100 --seed 0",
    "gym-trace view traces/cartpole",
    "gym-trace verify traces/cartpole",
)
_CODES = {CorruptTrace: DAMAGED, ReplayDiverged: DIFFERS, InvalidOption: USAGE}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Commands(Group):
    """Import a command when it is called. Turn its error into one line and an exit code."""

    hints = HINTS

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, function, _ = COMMANDS[name]
        command: click.Command = getattr(importlib.import_module(f"gym_trace_cli.{module}"), function)
        return command

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), help_all]

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write 39 lines of 80 columns; with --help-all also the options, the rest of the commands and exit codes."""
        is_full = is_full_help(ctx)
        formatter.write(f"Usage: gym-trace COMMAND ...\n\n{ctx.command.help}\n\nStart here:\n")
        formatter.write("".join(f"  {example}\n" for example in _EXAMPLES))
        formatter.write("\n")
        width = max(map(len, COMMANDS))
        for title, commands in SECTIONS.items():
            if title == MORE and not is_full:
                continue
            formatter.write(f"{title}:\n")
            formatter.write("".join(f"  {name:{width}}  {line}\n" for name, (*_, line) in commands.items()))
        if is_full:
            click.Command.format_options(self, ctx, formatter)  # not of Group: it would list the commands again
            with formatter.section("Exit codes"):
                formatter.write_dl(list(TABLE.items()))
            return
        formatter.write(f"\n{MORE}: {', '.join(SECTIONS[MORE])} (see --help-all)\n")
        formatter.write("'gym-trace COMMAND --help' explains a command. DIR may be a URL: s3://, hf://\n")

    def main(self, *args: Any, **options: Any) -> NoReturn:
        if "_GYM_TRACE_COMPLETE" in os.environ:
            importlib.import_module("gym_trace_cli.completion")  # registers shells
        try:
            code = super().main(*args, **options | {"standalone_mode": False})
        except click.ClickException as error:
            shown = io.StringIO()
            error.show(shown)
            usage, _, message = shown.getvalue().partition("Error: ")
            click.echo(usage, err=True, nl=False)
            if message:
                click.echo(f"error: {message[0].lower()}{message[1:].rstrip().removesuffix('.')}", err=True)
            code = error.exit_code
        sys.exit(code)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with warnings.catch_warnings():
                unpublished = show.unpublished()
                warnings.showwarning = partial(_show_warning, unpublished)
                warnings.simplefilter("always", UnpublishedWarning)
                with ended_by_signals():
                    result = super().invoke(ctx)
                    show.stdout().flush()
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            _exit_with(INTERRUPTED, "interrupted")
        except Ended as error:
            _exit_with(error.exit_code, error.message)
        except (Exception, SystemExit) as error:  # an environment may call sys.exit()
            if isinstance(error, BrokenPipeError) and _reader_is_gone():
                ctx.exit(READER_GONE)
            fail(error, next((code for kind, code in _CODES.items() if isinstance(error, kind)), ERROR))
        return result or (ERROR if unpublished else FINE)


def _exit_with(code: int, line: str) -> NoReturn:
    context = click.get_current_context()
    if context.find_root().params.get("debug"):
        traceback.print_exc()
    click.echo(line, err=True)
    context.exit(code)


def fail(error: BaseException, code: int) -> NoReturn:
    """Print an error and exit."""
    lines = f"error: {describe(error)}".splitlines()
    _exit_with(code, "\n".join(show.folded(show.printable(line), 0, sys.stderr) for line in lines))


def describe(error: BaseException) -> str:
    """Describe an error; for one of foreign code, add the line that raised it."""
    if isinstance(error, TraceNotFound) and error.directory is not None:
        return f"{error}{importlib.import_module('gym_trace_cli.ls').hint(error.directory)}"
    if isinstance(error, EnvironmentUnavailable) and error.imports:
        words = [word for module in error.imports for word in ("--import", module)]
        line = shlex.join(["gym-trace", *sys.argv[1:], *words])
        return f"{error}\nimport what the recording imported: {line}"
    if isinstance(error, TraceError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{error_text(error)}{where}; gym-trace --debug shows the traceback"


def _reader_is_gone() -> bool:
    """Return True if stdout broke, as in `gym-trace replay DIR | head`, and not a pipe of an environment."""
    poll = select.poll()
    poll.register(show.stdout().fileno(), 0)
    if not poll.poll(0):
        return False
    # Discard the buffer; otherwise Python complains at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), show.stdout().fileno())
    return True


def _show_warning(unpublished: list[str], message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning in one line, without its source line. unpublished: gets the text of an UnpublishedWarning."""
    text = _COLOUR.sub("", str(message)).removeprefix("WARN: ")
    if is_unpublished := isinstance(message, UnpublishedWarning):
        unpublished.append(text)
    click.echo(f"{'error' if is_unpublished else 'warning'}: {show.printable(' '.join(text.split()))}", err=True)


def _show_version() -> None:
    reason = why_pure()
    click.echo(f"gym-trace, version {gym_trace.__version__}")
    click.echo("C core: yes" if reason is None else f"C core: no ({reason}); pure Python, slower")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@printing_option("--version", "Show the version, and whether the C core is used.", _show_version)
@option("--debug", "Show the traceback of an error.")
@option("--cache DIR", "Cache data of URLs in DIR. Default: in memory.", PATH)
@option("--cache-limit SIZE", "Size limit of that cache. Default: 10 GiB.", byte_count)
def cli(debug: bool, cache: str | None, cache_limit: int | None) -> None:
    """Record Gymnasium environments to traces, bit for bit, and play them back."""
    if cache is not None:
        os.environ["GYM_TRACE_URL_CACHE"] = os.path.abspath(os.path.expanduser(cache))  # also for workers
    if cache_limit is not None:
        os.environ["GYM_TRACE_URL_CACHE_BYTES"] = str(cache_limit)
