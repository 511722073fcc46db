"""Contents of the site other than the pages of docs/.

- reference/cli.md is made from the commands.
- A comment `<!-- on the site: NAME -->` becomes what ADDED has for it. In the clone it is invisible.
- PAGES of the repository are shown, too. Links to a file that is not on the site become plain text.
"""

from __future__ import annotations

import posixpath
import re
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

from gym_trace.linting import all_kinds, all_rules

ROOT = Path(__file__).parent.parent
# The site shows these pages of the repository under other names.
PAGES = {
    "CHANGELOG.md": "project/changelog.md",
    "CODE_OF_CONDUCT.md": "project/conduct.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/AUDITS.md": "project/audits.md",
    "benchmarks/MEASUREMENTS.md": "project/measurements.md",
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
    if path == "reference/troubleshooting.md":
        page.meta["search"] = {"boost": 10}  # a search for the words of a message finds them here first
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

    for name, text in ADDED.items():
        markdown = markdown.replace(f"<!-- on the site: {name} -->", text())
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
    yield "`gym-trace COMMAND --help` prints the same but for rare options, `--help-all` all of it."
    yield "[Exit codes](troubleshooting.md#exit-codes) are common to all commands."
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


def _names() -> str:
    return (ROOT / "docs" / "api_names.txt").read_text(encoding="utf-8")


def _rules() -> str:
    rows = [f"| {kind.code} | {kind.severity} | {kind.what} |" for kind in all_kinds(all_rules())]
    return "\n".join(["| code | severity | finding |", "|---|---|---|", *rows])


ADDED = {"docs/api_names.txt": _names, "gym-trace lint --rules": _rules}
