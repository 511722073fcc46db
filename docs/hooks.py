"""Contents of the site other than the pages of docs/.

- reference/cli.md is made from the commands.
- PAGES of the repository are shown, too. Links to a file that is not on the site become plain text.
- {{ NAME }} is replaced by a table of benchmarks/results.json or device.json, see FIGURES.
"""

from __future__ import annotations

import functools
import json
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from gym_trace_cli.help import full_help
from gym_trace_cli.main import COMMANDS, cli
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
# The site shows these pages of the repository under other names.
PAGES = {
    "CHANGELOG.md": "project/changelog.md",
    "CODE_OF_CONDUCT.md": "project/conduct.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/RESULTS.md": "project/benchmarks.md",
    "benchmarks/TRAINING.md": "project/training-benchmarks.md",
    "sample_traces/README.md": "project/sample-traces.md",
}
PICTURES = {f"benchmarks/{name}.svg": f"project/{name}.svg" for name in ("growth", "recording", "training")}
SITE = PAGES | PICTURES
_LINK = re.compile(r"(?<!`)(!?)\[([^\]]*)\]\((?!https?:|mailto:)([^)#\s]*)(#[^)\s]*)?\)")
_WIDTH = 80
_LOADED = re.compile(r"<(?:script|img|link rel=\"stylesheet\")[^>]* (?:src|href)=\"(https?://[^\"]+)")
_SHIM = re.compile(r"https://unpkg\.com/iframe-worker/shim")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "reference/cli.md", content=cli_reference()))
    for source, place in SITE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links between the pages of docs/ and those of the repository at their places on the site."""
    path = page.file.src_uri
    source = {place: source for source, place in SITE.items()}.get(path, f"docs/{path}")

    def linked(found: re.Match[str]) -> str:
        picture, text, target, anchor = found[1], found[2], found[3], found[4] or ""
        if not target:
            return found[0]
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if wanted in SITE:
            place = SITE[wanted]
        elif wanted.startswith("docs/"):
            place = wanted.removeprefix("docs/")
        elif (ROOT / wanted).exists():
            return text
        else:
            return found[0]  # mkdocs reports it
        return f"{picture}[{text}]({posixpath.relpath(place, posixpath.dirname(path) or '.')}{anchor})"

    for name, shown in FIGURES.items():
        if f"{{{{ {name} }}}}" in markdown:
            markdown = markdown.replace(f"{{{{ {name} }}}}", shown(figures()))
    outside_of_code = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.M | re.S)
    return "".join(part if number % 2 else _LINK.sub(linked, part) for number, part in enumerate(outside_of_code))


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Load the worker that the search needs on disk from the site, not from the network."""
    place = posixpath.relpath("iframe-worker.js", posixpath.dirname(page.file.dest_uri) or ".")
    output = _SHIM.sub(place, output)
    if loaded := _LOADED.search(output):
        raise PluginError(f"{page.file.src_uri}: loads {loaded[1]} from the network; pages must open without one")
    return output


def on_post_template(output: str, template_name: str, **_: Any) -> str:
    return _SHIM.sub("iframe-worker.js", output) if template_name.endswith(".html") else output


def cli_reference() -> str:
    """Return the help of all commands as Markdown."""
    return "\n".join(_reference())


def _reference() -> Iterator[str]:
    yield "# Command line\n"
    yield "```bash\ngym-trace --version\n```\n"
    yield "`gym-trace COMMAND --help-all` prints the same; `--help` omits rare options."
    yield "[Exit codes](exit-codes.md) are common to all commands."
    yield "The [guides](../guides/record.md) explain the options by task."
    context = click.Context(cli, info_name="gym-trace")
    for name, (_, _, summary) in COMMANDS.items():
        command = cli.get_command(context, name)
        assert command is not None
        yield f"\n## gym-trace {name}\n\n{summary}\n"
        yield _help(command, f"gym-trace {name}")
        if isinstance(command, click.Group):
            inner = click.Context(command, info_name=f"gym-trace {name}")
            for part in command.list_commands(inner):
                found = command.get_command(inner, part)
                assert found is not None
                yield f"\n### gym-trace {name} {part}\n"
                yield _help(found, f"gym-trace {name} {part}")


def _help(command: click.Command, name: str) -> str:
    context = click.Context(command, info_name=name, terminal_width=_WIDTH, max_content_width=_WIDTH)
    return f"```text\n{full_help(context)}\n```"


# -- benchmarks -------------------------------------------------------------------------------------------------------


@functools.cache
def figures() -> Any:
    """Return the figures of the latest results of make bench."""
    sys.path.insert(0, str(BENCHMARKS))
    from figures import Figures

    return Figures(json.loads((BENCHMARKS / "results.json").read_text(encoding="utf-8")))


def _machine(found: Any) -> str:
    results = found.results
    machine, versions = results["machine"], results["versions"]["gym-trace"]
    return (
        f"Medians of {results['repeats']} runs on {results['date']}, {machine['cpu']}, {machine['cores']} shared, "
        f"noisy cores (Python {versions['Python']}, Gymnasium {versions['gymnasium']})."
    )


def _recording(found: Any) -> str:
    from contestants import TITLES
    from tables import table

    shown = {"cartpole": "CartPole-v1", "halfcheetah": "HalfCheetah-v5", "pong": "ALE/Pong-v5, raw frames"}
    rows = []
    for name, title in TITLES.items():
        measured = [found.recorded[workload].get(name) for workload in shown]
        cells = [_cell(one) if one and one.added else "–" for one in measured]
        rows.append([f"**{title}**" if name == "gym-trace" else title, *cells])
    return table(["µs added per step (bytes per step)", *shown.values()], rows)


def _cell(one: Any) -> str:
    from tables import median

    added = median(one.added) if one.added.median > 0 else "in the noise"
    return f"{added} ({median(one.bytes)})"


def _killed(found: Any) -> str:
    from contestants import TITLES
    from tables import between, table

    rows = [[TITLES[name], between(killed.lost)] for name, killed in found.killed.items()]
    return table(["", "lost, s (min – max)"], rows)


def _device(_: Any) -> str:
    """Return the tables of make bench-device, if there are results."""
    stored = BENCHMARKS / "device.json"
    if not stored.exists():
        return ""
    from device import report

    return report(json.loads(stored.read_text(encoding="utf-8")))


FIGURES = {"machine": _machine, "recording": _recording, "killed": _killed, "device": _device}
