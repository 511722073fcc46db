"""gym-trace verify and gym-trace diff"""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import gym_trace
from gym_trace.errors import CorruptTrace, EnvironmentUnavailable, TraceError
from gym_trace.printable import error_text, shown
from gym_trace.storage import redacted
from gym_trace_cli import show
from gym_trace_cli.compare import print_comparison
from gym_trace_cli.completion import TraceDirectory
from gym_trace_cli.environments import RecordedEnvironment, recorded_environment_options
from gym_trace_cli.exit_codes import DAMAGED, DIFFERS, ERROR, FINE, INTERRUPTED, UNVERIFIABLE
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.options import (
    POSITIVE,
    comparison_options,
    comparison_words,
    json_lines_option,
    json_option,
    trace_argument,
)
from gym_trace_cli.progress import ProgressLine
from gym_trace_cli.reports import Outcome, Reports, writable_file
from gym_trace_cli.selection import Selection, selection_options
from gym_trace_cli.stopping import Ended

if TYPE_CHECKING:
    from gym_trace import Trace
    from gym_trace.results import Difference, Divergence, Verdict

# Exit codes; the first that applies wins.
_CODES = {"differs": DIFFERS, "damaged": DAMAGED, "unverifiable": UNVERIFIABLE}
_VERDICT_TEXTS = {
    "identical": "identical, bit for bit",
    "close": "within the tolerance",
    "differs": "different",
    "unverifiable": "that cannot be verified",
    "damaged": "damaged",
}
_LISTED_PER_REASON = 3  # unverifiable episodes, and episodes whose divergences are printed
_NO_SEED = -1  # in the table of episodes
_LISTED = 10  # episodes, or leaves of an episode, that are printed one by one


@headed("verify")
@trace_argument
@selection_options
@recorded_environment_options
@comparison_options
@section(
    "Verification",
    option("--skip-damaged", "Verify the readable episodes of a damaged trace."),
    option("--through-the-crash", "Also run the action that a kill interrupted.", hidden=True),
    option("--one-step", "Compare each step from its recorded state."),
    option("--workers N", "Processes. Default: 1.", POSITIVE, default=1),
)
@section(
    "Output",
    option("--report FILE", "Write results as one JSON document.", writable_file),
    option("--junit FILE", "Write results as JUnit XML.", writable_file),
    json_lines_option,
)
def command(
    directory: str,
    selection: Selection,
    as_json: bool,
    recorded: RecordedEnvironment,
    comparison: dict[str, Any],
    skip_damaged: bool,
    report: Path | None,
    junit: Path | None,
    **options: Any,
) -> int:
    """Replay episodes in their environment and compare everything, bit for bit.
    Exit code, the first that applies: 3 different, 5 damaged, 4 unverifiable, 0.
    Reports are written even after damage or Ctrl-C.

    \b
    gym-trace verify traces/cartpole --workers 2 --junit results.xml
    """
    trace = gym_trace.open_trace(directory)
    chosen = selection.view_or_error(trace).indices.tolist()
    for name, path in (("--report", report), ("--junit", junit)):
        if path is not None and Path(os.path.realpath(trace.directory)) in path.parents:
            raise click.UsageError(f"{name}: {path} is in the trace's own directory; write elsewhere")
    if report is not None and report == junit:
        raise click.UsageError(f"--report and --junit name the same file, {report}")
    outcome, reports = Outcome(str(trace.directory), len(chosen)), Reports(report, junit)
    reasons: Counter[str] = Counter()
    differing: dict[str, Verdict] = {}
    try:
        options |= {**comparison, "imports": recorded.imports, "on_damage": "skip" if skip_damaged else "raise"}
        options |= recorded.arguments()
        _verify_episodes(trace, chosen, as_json, options, outcome, reports, reasons, differing)
    except CorruptTrace as error:
        outcome.ended, outcome.message = "damaged", str(error)
        click.echo(f"error: {show.printable(error)}; --skip-damaged verifies the others", err=True)
    except EnvironmentUnavailable as error:  # the exit code is that of a trace with some unavailable environments
        from gym_trace_cli.main import fail

        outcome.ended, outcome.message, outcome.exit_code = "error", str(error), UNVERIFIABLE
        fail(error, UNVERIFIABLE)
    except KeyboardInterrupt:
        outcome.ended, outcome.exit_code = "interrupted", INTERRUPTED
        raise
    except Ended as error:
        outcome.ended, outcome.exit_code = "terminated", error.exit_code
        raise
    except BaseException as error:
        outcome.ended, outcome.exit_code = "error", ERROR
        outcome.message = str(error) if isinstance(error, TraceError) else error_text(error)
        raise
    finally:
        _sum_up(trace, outcome, skip_damaged)
        reports.close(outcome)  # before printing, which may fail
        for reason, number in Counter() if as_json else reasons.items():
            if number > _LISTED_PER_REASON:
                more = show.count(number - _LISTED_PER_REASON, "more episode")
                click.echo(show.printable(f"{more} cannot be verified: {reason}"))
        if outcome.ended != "error":
            _print_outcome(trace, outcome, as_json, own_arguments="env_kwargs" in options)
        if differing and not as_json:
            if set(differing) == {"infos"}:
                click.echo("each differs first in infos: --ignore infos compares the rest")
            first = next(iter(differing.values()))
            step = first.difference.step if first.difference is not None else None
            click.echo("before the first difference:")
            # If the reset differs, the environment cannot be brought to a step.
            words = None if step is None else [*recorded.words(), *comparison_words(comparison)]
            show.step_commands(trace.directory, first.index, step or 0, words)
    return outcome.exit_code


def _verify_episodes(
    trace: Trace,
    chosen: list[int],
    as_json: bool,
    options: Any,
    outcome: Outcome,
    reports: Reports,
    reasons: Any,
    differing: dict[str, Verdict],
) -> None:
    """Verify the chosen episodes. differing: by column, gets the first verdict whose first difference is there."""
    ids: dict[str, str] = {}  # id of the environment of each writer
    verdicts: Any = gym_trace.verify_trace(trace, episodes=chosen, **options)
    measured = 0
    with ProgressLine() as line, closing(verdicts):
        line.update_count(0, len(chosen), "episode")
        for done, verdict in enumerate(verdicts, 1):
            outcome.verdicts[verdict.verdict] = outcome.verdicts.get(verdict.verdict, 0) + 1
            if verdict.matches and (verdict.needed or verdict.reason):
                outcome.needed[verdict.index] = verdict.needed
            outcome.add_errors(verdict.index, verdict.from_states, verdict.divergences)
            if verdict.difference is not None:
                differing.setdefault(verdict.difference.column.partition("/")[0], verdict)
            difference = None if verdict.difference is None else plain_difference(verdict.difference)
            plain = {
                **vars(verdict),
                "difference": difference,
                "divergences": list(map(plain_difference, verdict.divergences)),
            }
            text = _text_of(verdict, names_writer=len(trace.writers) > 1) if verdict.verdict in _CODES else ""
            if verdict.writer not in ids:
                ids[verdict.writer] = str(trace[[verdict.index]].env_spec.get("id") or "environment")
            reports.add(plain, text, ids[verdict.writer])
            if as_json:
                show.json_line(plain)
            elif text:
                reasons[verdict.reason] += verdict.verdict == "unverifiable"
                if reasons[verdict.reason] <= _LISTED_PER_REASON or verdict.verdict != "unverifiable":
                    click.echo(text)
                    measured += bool(verdict.divergences)
                    for divergence in verdict.divergences[:_LISTED] if measured <= _LISTED_PER_REASON else ():
                        click.echo(show.printable(f"  {divergence}"))
            elif verdict.crash:
                action = show.printable(shown(trace[verdict.index].pending_action))
                click.echo(f"episode {verdict.index}: action in progress at its end, {action}:")
                click.echo(f"  {show.printable(verdict.crash)}")
            line.update_count(done, len(chosen), "episode")


def _sum_up(trace: Trace, outcome: Outcome, skip_damaged: bool) -> None:
    from gym_trace.replay import differing_versions

    for name, (recorded, installed) in differing_versions(trace).items():
        outcome.versions[name] = {"recorded": recorded, "installed": installed}
    if skip_damaged:
        outcome.damage = [damage._asdict() for damage in trace.damage]
    verdicts = {name for name, number in outcome.verdicts.items() if number}
    if outcome.damage or outcome.ended == "damaged":
        verdicts.add("damaged")
    if not outcome.exit_code:
        outcome.exit_code = next((code for name, code in _CODES.items() if name in verdicts), FINE)


def _print_outcome(trace: Trace, outcome: Outcome, as_json: bool, own_arguments: bool) -> None:
    """Print the summary, also after an early end."""
    from gym_trace.replay import played_in_registered

    for name, versions in outcome.versions.items():
        here = versions["installed"] or "none"
        click.echo(show.printable(f"note: recorded with {name} {versions['recorded']}, here is {here}"), err=True)
    for name in played_in_registered(trace) if own_arguments else ():
        click.echo(show.printable(f"note: played in the {name} that is registered here"), err=True)
    for damage in outcome.damage:
        click.echo(f"skipped: {show.damage(**damage)}", err=True)
    if alone := [str(index) for index, number in outcome.needed.items() if not number]:
        match = "episode matches" if len(alone) == 1 else "episodes match"
        listed = ", ".join(alone[:_LISTED] + ["…"] * (len(alone) > _LISTED))
        click.echo(f"note: {show.count(len(alone))} {match} only by itself, in a fresh environment: {listed}", err=True)
    words = [f"{show.count(number)} {_VERDICT_TEXTS[name]}" for name, number in sorted(outcome.verdicts.items())]
    total = show.count(sum(outcome.verdicts.values()), "episode")
    stopped = outcome.ended in ("interrupted", "terminated")
    until = f", of {show.count(outcome.chosen)}, until it was {outcome.ended}" if stopped else ""
    later, number = "", len(outcome.needed) - len(alone)
    if number:
        seeded = any(number and trace[index].seed is not None for index, number in outcome.needed.items())
        why = "the seed alone does not decide the start" if seeded else "they were reset without a seed"
        later = f"; {show.count(number)} of them only after the episodes before ({why})"
    if outcome.from_states:
        steps, largest = show.count(outcome.from_states, "step"), "no one-step error"
        if outcome.error is not None:
            index, worst = outcome.error
            largest = f"largest one-step error {worst.largest:.3g} ({worst.largest_place} of episode {index})"
        later += f"; {steps} from recorded states: {largest}"
    click.echo(f"{total} replayed{until}: {', '.join(words) or 'none'}{later}", err=as_json or stopped)


def _text_of(verdict: Verdict, names_writer: bool) -> str:
    what = {"unverifiable": "cannot be verified: ", "damaged": "is damaged: "}.get(verdict.verdict)
    if what is not None:
        what += verdict.reason
    else:
        what = f"differs {verdict.difference}" + (f" ({verdict.reason})" if verdict.reason else "")
    return show.printable(f"episode {verdict.index}{f' of {verdict.writer}' if names_writer else ''} {what}")


def plain_difference(difference: Difference | Divergence) -> dict[str, Any]:
    """Return a difference as plain data; text for values that JSON lacks."""
    return {name: _jsonable(value) for name, value in difference._asdict().items()}


def _jsonable(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") and getattr(value, "size", 0) == 1 else value
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return shown(value, 1000)
    return value


# -- diff --------------------------------------------------------------------------------------------------------------


@headed("diff")
@click.argument("first", metavar="A", type=TraceDirectory())
@click.argument("second", metavar="B", type=TraceDirectory())
@selection_options
@comparison_options
@section("Output", json_option)
def diff(first: str, second: str, selection: Selection, comparison: dict[str, Any], as_json: bool) -> int:
    """Compare the episodes of traces A and B, bit for bit.
    Exit code: 0 same, 3 different, 5 damaged.

    If no episode matches, or other policies played from the same seeds, they are
    also compared as runs, as by 'compare'.

    \b
    gym-trace diff traces/before traces/after --ignore infos
    """
    opened = [gym_trace.open_trace(directory) for directory in (first, second)]
    a, b = map(selection.view, opened)
    if not (selection.is_all or len(a) or len(b)):
        counts = " and ".join(f"{show.count(len(whole), 'episode')} in {name}" for whole, name in zip(opened, "AB"))
        raise TraceError(f"none of {counts} matches")
    positions, seeds = a.indices.tolist(), a.episodes["seed"]
    differing, same, both = [], 0, max(1, min(len(a), len(b)))
    acts_first: list[bool] = []  # results for the first episode that differs, and for those with a seed
    with ProgressLine() as line:
        for number, compared in enumerate(gym_trace.diff_traces(a, b, **comparison), 1):
            if compared.difference is None:
                same += 1
            else:
                differing.append((positions[compared.index], compared.difference))
                if not acts_first or seeds[compared.index] != _NO_SEED:
                    acts_first.append(compared.difference.column.partition("/")[0] == "actions")
            line.update_count(number, both, "episode")
    identical = same == len(a) == len(b)
    is_checked = not {"seed", "observations"} & {*comparison["ignore"]} and bool((seeds != _NO_SEED).any())
    are_policies = is_checked and bool(acts_first) and all(acts_first)
    runs = gym_trace.compare({"A": [a], "B": [b]}) if are_policies or not (identical or same) else None
    if as_json:
        listed = [{"index": index, **plain_difference(difference)} for index, difference in differing]
        report = {"identical": identical, "episodes": [len(a), len(b)], "same": same, "differing": listed}
        show.json_line(report | ({"comparison": runs.to_json()} if runs else {}))
    else:
        shown = differing[: 1 if runs else _LISTED]
        for index, difference in shown:
            click.echo(show.printable(f"episode {index} differs {difference.as_text('A has', 'B has')}"))
        if len(differing) > len(shown):
            click.echo(f"… and {show.count(len(differing) - len(shown), 'more episode')}")
        if len(a) != len(b) or same + len(differing) < both:
            click.echo(f"A has {show.count(len(a), 'episode')}, B has {show.count(len(b))}")
        if runs:
            why = "the seeds agree, the policies do not" if are_policies else "no episodes match"
            click.echo(f"{why}; compared as runs, see {show.command('compare', first, second)}:")
            print_comparison(runs)
        else:
            is_exact = not (comparison["atol"] or comparison["rtol"] or comparison["tolerances"])
            all_of_them = "identical" if is_exact else "the same within the tolerance"
            verdict = all_of_them if identical else f"of which {show.count(same)} are the same"
            click.echo(f"{show.count(max(len(a), len(b)), 'episode')}, {verdict}")
    for directory, whole in zip((first, second), opened):
        show.warn_of_damage(redacted(directory), whole)
    if not identical:
        return DIFFERS
    return DAMAGED if any(whole.damage for whole in opened) else FINE
