"""gym-trace info"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import gym_trace
from gym_trace.storage import is_url
from gym_trace_cli import show
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.options import PATH, trace_argument
from gym_trace_cli.progress import ProgressLine

Info = dict[str, Any]
_LONGEST_VALUE = 600  # characters
_LONGEST_NAME = 20
_MOST_FACTS = 20
_MOST_WRITERS = 20
_LAST_BATCHES = 10
_MOST_DAMAGE = 5
_MOST_PENDING = 8  # interrupted actions, one per lane
SECONDS = 1.0  # between refreshes


def _report(path: str) -> Any:
    """Return the JSON document of a file."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path}: {error}") from error


@headed("info")
@trace_argument
@section(
    "Output",
    option("--follow", "Report changes every second until all writers close."),
    option("--json", "Print one JSON object; with --follow, JSON lines.", name="as_json"),
    option("--card FILE", "Write a dataset card, e.g. DIR/README.md; - prints it.", PATH),
    option("--audit FILE", "With --card: list the claims in this output of 'audit --json'.", _report, hidden=True),
)
def command(directory: str, follow: bool, as_json: bool, card: str | None, audit: dict[str, Any] | None) -> None:
    """Describe a trace: environment, spaces, seeds, writers, files, health.

    A dataset card is Markdown with Hugging Face metadata: the facts of 'gym-trace
    edit annotate', environment, spaces, returns and provenance, without stored
    command lines and uncommitted changes.

    \b
    gym-trace info traces/cartpole --follow
    gym-trace info traces/cartpole --card traces/cartpole/README.md
    """
    if card is not None:
        if follow or as_json:
            raise click.UsageError("--card excludes --follow and --json")
        _write_card(directory, card, audit)
        return
    if audit is not None:
        raise click.UsageError("--audit: needs --card; pass both")
    trace = gym_trace.open_trace(directory)
    if as_json and not follow:
        show.json_line(gym_trace.describe(trace), indent=2, allow_nan=False)
    elif not as_json:
        _print_info(gym_trace.describe(trace))
    if follow:
        _follow(trace, as_json)


def _write_card(directory: str, card: str, audit: dict[str, Any] | None) -> None:
    text = gym_trace.dataset_card(directory, None if card == "-" else card, audit=audit)
    if card == "-":
        click.echo(text, nl=False)
    else:
        click.echo(f"written to {show.printable(card)}")


def _follow(trace: gym_trace.Trace, as_json: bool) -> None:
    """Update a line on a terminal; print one line per change elsewhere."""
    live = not as_json and show.is_terminal(sys.stdout)
    before = None
    with ProgressLine(quiet=not live) as progress:
        while True:
            now = gym_trace.describe(trace, brief=True)
            if live:
                progress.update(_progress_line(now))
            elif now != before:
                show.json_line(now) if as_json else click.echo(_progress_line(now))
            if not now["recording"]:
                break
            before = now
            time.sleep(SECONDS)
            trace.refresh()
    if live:
        click.echo(_progress_line(now))


def _print_info(info: Info) -> None:
    show.fields((label, show.printable(value)) for label, value in _fields(info))
    _print_writers(info["writers"])
    show.title("health")
    for line in _health(info):
        click.echo(show.printable(line))


def _progress_line(now: dict[str, int]) -> str:
    written = f"{show.count(now['episodes'], 'episode')}, {show.count(now['steps'], 'step')}, {show.size(now['bytes'])}"
    return f"{written}, {show.count(now['recording'], 'writer')} recording"


def _fields(info: Info) -> Iterator[tuple[str, str]]:
    yield "trace", info["directory"]
    names = dict.fromkeys(str(writer["environment"]) for writer in info["writers"] if writer["episodes"])
    yield "environments", _cut(f"{', '.join(names)}; the first:") if len(names) > 1 else ""
    yield from _environment(info["environment"], info["function"])
    yield "observations", _cut(info["observation_space"])
    yield "actions", _cut(info["action_space"])
    yield "recorded with", ", ".join(f"{name} {version}" for name, version in _items(info["versions"]))
    yield "platform", str(info["platform"] or "")
    options = {name: value for name, value in _items(info["recorder"]) if value}
    yield "recorder", ", ".join(name if value is True else f"{name} {value}" for name, value in options.items())
    yield "made by", ", ".join(_provenance(dict(_items(info["provenance"]))))
    yield "edited", "; ".join(_edits(dict(_items(info["provenance"])).get("edits")))
    if origin := dict(_items(dict(_items(info["provenance"])).get("made_from"))):
        yield "made from", _made_from(origin)
    if origin := dict(_items(info["branch"])):
        yield (
            "branches from",
            f"step {origin.get('step')} of episode {origin.get('episode_id')} of {origin.get('writer')}",
        )
    yield from _facts(info["facts"])
    yield "metadata", "" if info["metadata"] is None else _cut(json.dumps(info["metadata"], ensure_ascii=False))
    yield "episodes", show.count(info["episodes"])
    yield "seeds", _seeds(info["seeds"])
    yield "steps", show.count(info["steps"])
    yield "on disk", show.size(info["bytes"])


def _facts(facts: Info) -> Iterator[tuple[str, str]]:
    """Yield names and values of facts; a value may be any JSON."""
    for name, value in list(facts.items())[:_MOST_FACTS]:
        text = ", ".join(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else value
        yield _cut(name)[:_LONGEST_NAME], _cut(text if isinstance(text, str) else json.dumps(text, ensure_ascii=False))


def _provenance(provenance: dict[str, Any]) -> Iterator[str]:
    for name, words in (("command", "{}"), ("policy", "policy {}"), ("gym_trace", "gym_trace {}")):
        if provenance.get(name):
            yield words.format(provenance[name])
    if provenance.get("commit"):
        yield f"commit {provenance['commit']}" + (" and uncommitted changes" if provenance.get("dirty") else "")
    if provenance.get("argv"):
        yield f"as {_cut(json.dumps(provenance['argv'], ensure_ascii=False))}"


def _edits(edits: Any) -> Iterator[str]:
    """Yield a description of each edited column. edits: untrusted JSON."""
    for edit in edits if isinstance(edits, list) else ():
        fields = dict(_items(edit))
        if fields.get("to"):
            yield f"{fields.get('column')} renamed to {fields['to']}"
        else:
            yield f"{fields.get('column')} by {fields.get('by')}"


def _made_from(origin: Info) -> str:
    changes = origin.get("changes")
    words = [str(change) for change in changes] if isinstance(changes, list) else []
    lane = f", lane {origin['lane']}" if "lane" in origin else ""
    return _cut(f"{origin.get('start')} of writer {origin.get('writer')}{lane}: {', '.join(words) or 'no changes'}")


def _environment(environment: Any, function: str | None) -> Iterator[tuple[str, str]]:
    fields = dict(_items(environment))
    yield "environment", str(fields.get("id") or "without an id")
    yield "class", str(fields.get("class") or "")
    wrappers = fields.get("wrappers")
    yield "wrappers", ", ".join(str(name).rpartition(".")[2] for name in wrappers) if isinstance(wrappers, list) else ""
    yield "render mode", str(fields.get("render_mode") or "")
    yield "function", _cut(function or "")
    yield "note", "" if function else str(fields.get("note") or "")


def _items(value: Any) -> list[tuple[str, Any]]:
    """Return the items of a map in a trace; [] for anything else."""
    return list(value.items()) if isinstance(value, dict) else []


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_VALUE else f"{line[:_LONGEST_VALUE]}… (--json has all of it)"


def _seeds(seeds: Info) -> str:
    text = f"{show.count(seeds['unseeded'])} unseeded, {show.count(seeds['seeded'])} seeded"
    if seeds["first"]:
        more = ", …" if seeds["seeded"] > len(seeds["first"]) else ""
        text += f": {', '.join(map(str, seeds['first']))}{more}"
    return text


def _print_writers(writers: list[Info]) -> None:
    show.title("writers")
    rows = [
        (writer["writer"], writer["split"] or "-", writer["state"], show.count(writer["episodes"]),
         show.count(writer["steps"]), show.size(writer["bytes"]), f"{writer['pid']}@{writer['host']}")
        for writer in writers[:_MOST_WRITERS]
    ]  # fmt: skip
    show.table(("writer", "split", "state", "episodes", "steps", "bytes", "process"), rows)
    if len(writers) > _MOST_WRITERS:
        click.echo(f"… {show.count(len(writers) - _MOST_WRITERS)} more, see --json")
    batches = list({batch["file"]: batch for writer in writers for batch in writer["batches"]}.values())
    if not batches:
        return
    last = batches[-_LAST_BATCHES:]
    several = f"the last {len(last)} of {show.count(len(batches))} "
    show.title(f"{several if len(last) < len(batches) else ''}batches")
    files = [
        (batch["file"], "sealed" if batch["sealed"] else "open", show.count(batch["chunks"]),
         show.count(batch["steps"]), show.size(batch["bytes"]), show.size(batch["torn"]) if batch["torn"] else "-")
        for batch in last
    ]  # fmt: skip
    show.table(("file", "state", "chunks", "steps", "bytes", "torn"), files)


def _health(info: Info) -> Iterator[str]:
    damage, directory = info["damage"], info["directory"]
    for damaged_range in damage[:_MOST_DAMAGE]:
        yield f"damaged: {show.damage(*damaged_range)}"
    if len(damage) > _MOST_DAMAGE:
        yield f"… {show.count(len(damage) - _MOST_DAMAGE)} more damaged places"
    in_ring = [one for one in info["writers"] if one["ring_steps"] and one["state"] in ("killed", "failed")]
    if len(in_ring) > 1:
        steps = show.count(sum(writer["ring_steps"] for writer in in_ring), "step")
        yield f"{show.count(len(in_ring), 'writer')} did not close; {steps} are in their rings"
    for writer in info["writers"][:_MOST_WRITERS]:
        if writer["state"] == "failed":
            yield f"writer {writer['writer']} stopped recording: {show.printable(writer['problem'])}"
        if writer["waited"]:
            yield f"writer {writer['writer']}: steps waited {writer['waited']:.0f} s for encoding; level=-1 is faster"
        if in_ring == [writer]:
            steps = show.count(writer["ring_steps"], "step")
            end = "was killed" if writer["state"] == "killed" else "did not close"
            yield f"writer {writer['writer']} {end}; {steps} of it are in its ring"
        for pending in writer["pending"][:_MOST_PENDING]:
            lane = f" (lane {pending['lane']})" if pending["lane"] else ""
            when = f"at the end of episode {pending['episode']}{lane}, in step {pending['step']}"
            yield f"the action that was being executed {when}: {pending['action']}"
    states = [writer["state"] for writer in info["writers"]]
    dead = states.count("killed") + states.count("failed")
    if dead:
        end = "stopped while recording" if "killed" not in states else "died while recording"
        if is_url(directory) and "killed" in states:  # which shows no locks
            end = f"did not close, or {'record' if dead > 1 else 'records'} elsewhere"
        yield f"{show.count(dead, 'writer')} {end}: episodes left open have the outcome lost"
    repair = show.command("edit", "repair", directory, "-o", "NEW")
    if damage:
        yield f"{show.command('check', directory)} names all damage, {repair} saves the rest"
    elif dead:
        yield f"no damage found; {repair} writes a copy that is sealed"
    else:
        yield f"no damage found on opening; {show.command('check', directory)} compares every checksum"
