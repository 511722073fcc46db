"""Shell completion of traces, environments, policies and columns. It runs nothing that a trace names."""

from __future__ import annotations

import ast
import importlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, add_completion_class

_MOST = 200  # directories, or modules, that are searched
_REGISTERING = ("ale_py", "minigrid")  # packages that register environments on import
_POLICIES = ("random", "sb3:", "onnx:", "run:")
_LAST_NAME = re.compile(r"[\w./]*$")
_PLAIN = re.compile(r"[\w./][\w./:@%+,=-]*")  # no special characters of a shell
_TRACE = (".manifest.jsonl", ".gtb", ".gtb.part")


@add_completion_class
class Bash(BashComplete):
    """Completion in bash. Bash inserts values unquoted, so they are quoted like the word typed so far."""

    source_template = BashComplete.source_template.replace("read type", "read -r type").replace(
        "($value)", '("$value")'
    )

    def format_completion(self, item: CompletionItem) -> str:
        if item.type != "plain":
            return super().format_completion(item)
        words, at = os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"])
        return f"plain,{_quoted(item.value, ''.join(words[at : at + 1])[:1])}"


def _quoted(value: str, quote: str) -> str:
    if quote == "'":
        return value.replace("'", r"'\''")
    if quote == '"':
        return re.sub(r'([\\$`"])', r"\\\1", value).replace("!", "\"'!'\"")
    return re.sub(r"([^\w./:@%+,=~-])", r"\\\1", value)


@add_completion_class
class Fish(FishComplete):
    """Completion in fish; values may have commas."""

    source_template = FishComplete.source_template.replace('string split ","', 'string split -m 1 ","')


def _items(names: Iterable[str], start: str = "") -> list[CompletionItem]:
    """Return the plain names that begin with start. A shell could execute parts of another name."""
    return [CompletionItem(name) for name in names if name.startswith(start) and _PLAIN.fullmatch(name)]


class TraceDirectory(click.Path):
    """A directory; completes traces if the directory holds nothing else."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        head, start = os.path.split(incomplete)
        try:
            with os.scandir(os.path.expanduser(head) or ".") as entries:
                names = sorted(entry.name for entry in entries if entry.is_dir() and entry.name.startswith(start))
        except OSError:
            names = []
        names = [name for name in names if start or not name.startswith(".")]
        # Without "./", a name that begins with "-" would be an option.
        paths = [os.path.join(head, name) if head or name[0] != "-" else f"./{name}" for name in names]
        if paths and len(paths) <= _MOST and all(path.isprintable() and _is_trace(path) for path in paths):
            return [CompletionItem(path) for path in paths]
        return [CompletionItem(incomplete, type="dir")]  # the shell completes paths


def _is_trace(path: str) -> bool:
    try:
        with os.scandir(os.path.expanduser(path)) as entries:
            return any(entry.name.endswith(_TRACE) for entry in entries)
    except OSError:
        return False


def environment_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Environments registered by gymnasium, known packages and --import."""
    import gymnasium

    for module in (*_REGISTERING, *(ctx.params.get("imports") or ())):
        try:
            importlib.import_module(module)
        except Exception:  # not installed, or broken
            continue
    start = incomplete.lower()
    return _items(name for name in sorted(gymnasium.registry) if name.lower().startswith(start))


def policies(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Policy kinds, and functions in modules of the current directory, found without importing them."""
    return _items([*_POLICIES, *(() if incomplete.startswith(_POLICIES) else _functions_here())], incomplete)


def _functions_here() -> Iterator[str]:
    for path in sorted(Path().glob("*.py"))[:_MOST]:
        try:
            body = ast.parse(path.read_bytes()).body
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        names = (node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
        yield from (f"{path.stem}:{name}" for name in names if not name.startswith("_"))


def formats(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Export or import formats, by command."""
    from gym_trace.formats import exporters, importers

    names = exporters() if ctx.info_name == "export" else importers()
    return _items(names, incomplete)


def step_columns(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Columns of the trace typed so far."""
    import gym_trace

    typed = ctx.params.get("directory") or next(iter(ctx.args), None)  # in an incomplete line, click leaves it in args
    try:
        names = gym_trace.StepTable.columns_of(str(typed))
    except (OSError, gym_trace.errors.TraceError):
        return []
    return _with_last_name(incomplete, names)


def episode_columns(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Columns of the table of episodes, for --where and --sort."""
    from gym_trace.playback import EPISODE_COLUMNS

    return _with_last_name(incomplete, EPISODE_COLUMNS)


def _with_last_name(incomplete: str, names: Iterable[str]) -> list[CompletionItem]:
    """Complete the last name in a list, an order or a condition."""
    last = _LAST_NAME.search(incomplete)
    start = incomplete if last is None else last[0]
    before = incomplete[: len(incomplete) - len(start)]
    return [CompletionItem(before + item.value) for item in _items(names, start) if before.isprintable()]
