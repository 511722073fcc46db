"""What a shell proposes on TAB: traces, environments, policies, columns. Nothing that a trace names is run for it."""

from __future__ import annotations

import ast
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

_MOST = 200  # directories, or modules, that are looked into
_REGISTERING = ("ale_py", "minigrid")  # packages that register environments when they are imported
_POLICIES = ("random", "sb3:", "onnx:")
_TRACE = (".manifest.jsonl", ".gtb", ".gtb.part")


class TraceDirectory(click.Path):
    """A directory. A shell proposes the traces in a directory that has nothing else to go into."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        head, start = os.path.split(incomplete)
        try:
            with os.scandir(os.path.expanduser(head) or ".") as entries:
                names = sorted(entry.name for entry in entries if entry.is_dir() and entry.name.startswith(start))
        except OSError:
            names = []
        shown = [os.path.join(head, name) for name in names if start or not name.startswith(".")]
        if shown and len(shown) <= _MOST and all(map(_is_trace, shown)):
            return [CompletionItem(path) for path in shown]
        return [CompletionItem(incomplete, type="dir")]  # the shell's own way, which goes on after a slash


def _is_trace(path: str) -> bool:
    try:
        with os.scandir(os.path.expanduser(path)) as entries:
            return any(entry.name.endswith(_TRACE) for entry in entries)
    except OSError:
        return False


def environment_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Those that are registered by gymnasium, by packages known to register some, and by what --import names."""
    import gymnasium

    for module in (*_REGISTERING, *(ctx.params.get("imports") or ())):
        try:
            importlib.import_module(module)
        except Exception:  # not installed, or not well
            continue
    start = incomplete.lower()
    return [CompletionItem(name) for name in sorted(gymnasium.registry) if name.lower().startswith(start)]


def policies(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The kinds there are, and what modules in the current directory define; these are not imported."""
    known = [name for name in _POLICIES if name.startswith(incomplete)]
    if not incomplete.startswith(_POLICIES):
        known += [name for name in _functions_here() if name.startswith(incomplete)]
    return [CompletionItem(name) for name in known]


def _functions_here() -> Iterator[str]:
    for path in sorted(Path().glob("*.py"))[:_MOST]:
        try:
            body = ast.parse(path.read_bytes()).body
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        names = (node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
        yield from (f"{path.stem}:{name}" for name in names if not name.startswith("_"))


def names_in_a_list(names_of: Callable[[click.Context], list[str]]) -> Callable[..., list[CompletionItem]]:
    """Completes the last of several names with commas between them."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        return [CompletionItem(f"{before}{comma}{name}") for name in names_of(ctx) if name.startswith(last)]

    return complete


def directory_of(ctx: click.Context) -> Any:
    """The argument DIR of a command line that is being typed; None if it is not there yet."""
    return ctx.params.get("directory")
