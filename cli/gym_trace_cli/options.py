"""Options of several commands, and types of values."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Iterable
from functools import partial
from types import ModuleType
from typing import Any

import click

from gym_trace_cli.completion import TraceDirectory
from gym_trace_cli.help import Parsed, bundle, option, section

PATH = click.Path()
POSITIVE, NOT_NEGATIVE = click.IntRange(min=1), click.IntRange(min=0)
_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([kmg]?b)?", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
SECONDS = click.FloatRange(min=0, min_open=True)


def distinct(directories: Iterable[str]) -> list[str]:
    """Return directories and URLs, each trace once, however it is written: x, ./x/, a file URL, or a link to it."""
    from gym_trace.storage import is_url, path_of

    found: dict[str, str] = {}
    for directory in directories:
        path = path_of(directory)
        found.setdefault(str(path) if is_url(path) else os.path.realpath(path), directory)
    return list(found.values())


def episode_slice(value: str) -> slice | list[int]:
    """Parse --episodes: "5", "2:10", "-3:", "::10" or "1,4,7", as a slice or a list of indices."""
    try:
        if ":" not in value:
            return [int(index) for index in value.split(",")]
        start, stop, *step = (int(part) if part.strip() else None for part in value.split(":"))
        chosen = slice(start, stop, *step)
    except (TypeError, ValueError):
        raise click.BadParameter(f"{value!r} is not a choice of episodes; write 5, 2:10, -3:, ::10 or 1,4,7") from None
    if chosen.step == 0:
        raise click.BadParameter(f"{value!r} has a step of 0")
    return chosen


def _tolerance(value: str) -> tuple[str, float]:
    """Parse --tolerance: "rtol=1e-6", "atol=1e-8" or "rewards=1e-6", as a pair."""
    name, _, number = value.rpartition("=")
    try:
        tolerance = float(number)
    except ValueError:
        tolerance = math.nan
    if not (name and tolerance >= 0):
        raise click.BadParameter(f"{value!r}: write atol=X, rtol=X or COLUMN=X, such as rewards=1e-6")
    return name, tolerance


def byte_count(value: str) -> int:
    """Parse a number of bytes: 25MB, 1.5 GB, 500kB or 1000000."""
    match = _SIZE.fullmatch(value.strip())
    if match is None or not float(match[1]):
        raise click.BadParameter(f"{value!r} is not a size; write 25MB, 500kB or a number of bytes")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


class EnvArg(Parsed):
    """KEY=VALUE; VALUE is JSON if valid, text otherwise."""

    def __init__(self, example: str = "render_mode=rgb_array"):
        super().__init__(self.pair)
        self.name = "key=value"
        self._example = example

    def pair(self, value: str) -> Any:
        key, equals, text = value.partition("=")
        if not (key.isidentifier() and equals):
            raise click.BadParameter(f"{value!r} is not of the form KEY=VALUE, such as {self._example}")
        try:
            return key, json.loads(text)
        except ValueError:
            return key, text
        except RecursionError:
            raise click.BadParameter(f"{key}: nested too deep") from None


class FactArg(EnvArg):
    """KEY=VALUE; VALUE is JSON if that is valid for KEY, text otherwise."""

    def __init__(self) -> None:
        super().__init__("author='Ada Lovelace'")

    def pair(self, value: str) -> tuple[str, Any]:
        from gym_trace.edit import fact_from_text

        key, equals, text = value.partition("=")
        if not (key and equals):
            raise click.BadParameter(f"{value!r} is not of the form KEY=VALUE, such as {self._example}")
        return fact_from_text(key, text)


def named_callable(value: str) -> Any:
    """Import MODULE:NAME, also from the current directory; shell completion only checks the form.

    Raises click.BadParameter.
    """
    module_name, colon, name = value.partition(":")
    if module_name.endswith(".py") or not (module_name and colon and name):
        example = "agents:greedy"
        if module_name.endswith(".py"):
            example = f"{module_name.removesuffix('.py').replace('/', '.')}:{name or 'NAME'}"
        raise click.BadParameter(f"{value!r} is not of the form MODULE:NAME, such as {example}")
    ctx = click.get_current_context(silent=True)
    if ctx is not None and ctx.resilient_parsing:
        return value
    try:
        target: Any = import_here(module_name)
        for part in name.split("."):
            target = getattr(target, part)
    except ImportError as error:
        raise click.BadParameter(f"cannot import {module_name!r}: {error}") from error
    except AttributeError as error:
        raise click.BadParameter(f"{value!r}: {error}{_hiding(module_name)}") from error
    if not callable(target):
        raise click.BadParameter(f"{value!r} is not callable ({type(target).__name__})")
    return target


def callable_name(value: str) -> str:
    """Check MODULE:FUNCTION, but keep it as text, so that every process can import it."""
    named_callable(value)
    return value


trace_argument = click.argument("directory", metavar="DIR", type=TraceDirectory())
on_exist_option = option(
    "--on-exist MODE",
    "If DIR exists: error (default), append, replace.",
    ["error", "append", "replace"],
    default="error",
)
quiet_option = option("--quiet", "Print only warnings and errors.")
json_option = option("--json", "Print one JSON object.", name="as_json")
_STARTS = ["auto", "replay", "states"]
start_option = option(
    "--from START", "auto (default), replay, or recorded states.", _STARTS, name="start", default="auto"
)
source_option = partial(
    option, "--from SOURCE", "Frames: auto, replay, states, observations.", [*_STARTS, "observations"], name="source"
)
json_lines_option = option("--json", "Print JSON lines, one per episode.", name="as_json")


def new_seed() -> int:
    """Return a seed from the system's entropy."""
    return int.from_bytes(os.urandom(4), "big") >> 1


def import_here(module_name: str) -> ModuleType:
    """Import a module that the user named: installed, or in the current directory."""
    find_here(module_name)
    return importlib.import_module(module_name)


def find_here(module_name: str) -> None:
    """Let a module that the user named be imported from the current directory if not installed, also in workers."""
    top = module_name.partition(".")[0]
    if not top:
        return
    if top in sys.modules:
        origin = getattr(sys.modules[top], "__file__", None) or "built-in"
    else:
        spec = importlib.util.find_spec(top)
        origin = None if spec is None else spec.origin  # None: a directory without an __init__.py; a module precedes it
    # Python may have found it through "" in sys.path, which is another directory in a worker.
    if origin is None or os.path.abspath(origin).startswith(os.path.join(os.getcwd(), top)):
        look_in_current_directory()


def look_in_current_directory() -> None:
    """Let modules be imported from the current directory, after all others.

    Call it only for a module that the user named, or a trace that the user trusts: the current directory may be
    untrusted, and a logging.py in it must not run.
    """
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)


def _hiding(module_name: str) -> str:
    """Return a hint if another module hides one in the current directory, or ""."""
    top = module_name.partition(".")[0]
    path = getattr(sys.modules.get(top), "__file__", None)
    local = next(filter(os.path.exists, (f"{top}.py", os.path.join(top, "__init__.py"))), None)
    if local is None or (path is not None and os.path.samefile(path, local)):
        return ""
    return f"; {local} in the current directory is hidden by {path or 'a module of Python'}: rename it"


def _comparison(ignore: tuple[str, ...], tolerance: tuple[tuple[str, float], ...]) -> dict[str, Any]:
    tolerances = dict(tolerance)
    everywhere = {name: tolerances.pop(name, 0.0) for name in ("atol", "rtol")}
    return {**everywhere, "ignore": ignore, "tolerances": tolerances}


comparison_options = section(
    "Comparison",
    bundle(
        "comparison",
        _comparison,
        option("--tolerance NAME=X", "atol=X, rtol=X, or COLUMN=X for one column (repeatable).", _tolerance),
        option("--ignore COLUMN", "Skip a column, e.g. infos (repeatable)."),
    ),
    topic="tolerance",
)


def comparison_words(comparison: dict[str, Any]) -> list[str]:
    """Return the options of a comparison as words of a command line."""
    tolerances = {name: comparison[name] for name in ("atol", "rtol") if comparison[name]} | comparison["tolerances"]
    pairs = [("--tolerance", f"{name}={number}") for name, number in tolerances.items()]
    pairs += [("--ignore", column) for column in comparison["ignore"]]
    return [word for pair in pairs for word in pair]
