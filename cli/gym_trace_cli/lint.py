"""gym-trace lint"""

from __future__ import annotations

import shlex
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

import gym_trace
from gym_trace.errors import InvalidOption
from gym_trace_cli import show
from gym_trace_cli.exit_codes import DAMAGED, ERROR, FINE
from gym_trace_cli.help import headed, option, printing_option, section
from gym_trace_cli.options import EnvArg, json_option, quiet_option, trace_argument
from gym_trace_cli.progress import ProgressLine
from gym_trace_cli.record_config import config_option
from gym_trace_cli.selection import Selection, selection_options

if TYPE_CHECKING:
    from gym_trace import Trace
    from gym_trace.results import Finding

_ABOUT_ENVIRONMENT = {"T501", "T504", "T505", "T604"}  # its starts, and whether it is deterministic
_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


def _list_rules() -> None:
    from gym_trace.linting import all_kinds, all_rules, merged_thresholds

    rules = all_rules()
    show.table(["code", "severity", "finds"], [list(kind) for kind in all_kinds(rules)])
    click.echo()
    defaults = sorted(merged_thresholds(rules, {}).items())
    show.table(["--set", "default"], [[name, f"{value:g}"] for name, value in defaults])


@headed("lint")
@trace_argument
@selection_options
@section(
    "Rules",
    option("--select CODES", "Only these codes: T1 or T101,T303 (repeatable)."),
    option("--ignore CODES", "Skip these codes (repeatable)."),
    option("--notes", "Also print notes, which are normal in many environments."),
    option("--set NAME=X", "Set a threshold (repeatable).", EnvArg("frozen_steps=50"), name="thresholds"),
    printing_option("--rules", "List codes and thresholds, and exit.", _list_rules),
    config_option,
)
@section("Output", quiet_option, json_option)
def command(
    directory: str,
    selection: Selection,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    notes: bool,
    thresholds: tuple[tuple[str, Any], ...],
    quiet: bool,
    as_json: bool,
) -> int:
    """Find what is wrong with recorded data, in one pass: NaN, frozen sensors, duplicates ...
    Exit code: 0 no findings, 1 errors or warnings, 5 damaged. Notes do not count.

    Each finding ends with the command that shows it. No environment is run.

    \b
    gym-trace lint traces/cartpole
    gym-trace lint traces/cartpole --select T1,T6 --ignore T104 --set frozen_steps=50
    """
    trace = gym_trace.open_trace(directory)
    view = selection.view_or_note(trace)
    with ProgressLine(quiet=quiet or as_json) as line:
        try:
            findings = list(
                gym_trace.lint_trace(
                    view,
                    select=_codes(select),
                    ignore=_codes(ignore),
                    notes=notes,
                    thresholds=dict(thresholds),
                    on_progress=line.counting("step"),
                )
            )
        except InvalidOption as error:
            raise click.UsageError(str(error)) from error
    problems = [finding for finding in findings if finding.severity != "note"]
    if as_json:
        steps = int(view.episodes["steps"].sum())
        show.json_line(
            {"directory": directory, "episodes": len(view), "steps": steps, "findings": list(map(vars, findings))}
        )
    else:
        for finding in findings:
            _print(finding)
        if not quiet:
            _sum_up(findings, len(view), int(view.episodes["steps"].sum()))
            _print_step_commands(trace, findings)
            _print_audit_command(trace, findings)
    if any(finding.code == "T001" for finding in problems):
        return DAMAGED
    return ERROR if problems else FINE


def _codes(lists: tuple[str, ...]) -> list[str]:
    return [code.strip() for codes in lists for code in codes.split(",")]


def _print(finding: Finding) -> None:
    where = []
    if finding.episode is not None:
        where.append(f"episode {finding.episode}")
    if finding.step is not None:
        where.append("before its first step" if finding.step < 0 else f"step {finding.step}")
    column = f"{finding.column}: " if finding.column else ""
    units = show.count(finding.count, finding.unit)
    first = f"; first: {', '.join(where)}" if where else ""
    severity = click.style(finding.severity.ljust(7), fg=_COLOURS[finding.severity])
    click.echo(f"{finding.code}  {severity}  {show.printable(f'{column}{finding.message} ({units}{first})')}")
    click.echo(f"               {show.printable(finding.command)}")


def _print_step_commands(trace: Trace, findings: list[Finding]) -> None:
    """Print the commands that open the first finding at a step."""
    for finding in findings:
        if finding.episode is not None and finding.step is not None:
            first = trace[finding.episode].first_step
            env_id = trace[[finding.episode]].env_spec.get("id")
            click.echo(f"at the first {finding.code}:")
            environment: list[str] | None = [] if env_id and not first else None
            show.step_commands(trace.directory, finding.episode, max(0, finding.step - first), environment)
            return


def _print_audit_command(trace: Trace, findings: list[Finding]) -> None:
    """Print the command that tests the environment, if a finding may be its fault."""
    found = {finding.episode for finding in findings if finding.code in _ABOUT_ENVIRONMENT}
    described = [trace[[episode]].env_spec for episode in found if episode is not None]
    if any(environment.get("made") or environment.get("spec") for environment in described):
        click.echo("whether the environment does what its seed says:")
        click.echo(f"  {show.printable(shlex.join(['gym-trace', 'audit', str(trace.directory)]))}")


def _sum_up(findings: list[Finding], episodes: int, steps: int) -> None:
    counts = Counter(finding.severity for finding in findings)
    words = [show.count(counts[name], name) for name in ("error", "warning", "note") if counts[name]]
    read = f"{show.count(episodes, 'episode')}, {show.count(steps, 'step')}"
    click.echo(f"{', '.join(words) or 'no findings'} in {read}")
