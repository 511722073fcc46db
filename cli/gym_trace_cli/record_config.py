"""--config and --write-config of gym-trace record, and --config of gym-trace train: the options of a run as TOML."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator
from typing import Any

import click
from click.core import ParameterSource

import gym_trace
from gym_trace_cli import show
from gym_trace_cli.help import option
from gym_trace_cli.options import PATH, EnvArg

_ARGUMENT = "environment"  # ENV_ID in a file
_NOT_READ, _NOT_WRITTEN = ("config", "new_config"), ("resume", "shard", "quiet", "as_json")
_ESCAPES = {chr(code): f"\\u{code:04X}" for code in (*range(32), 127)} | {'"': '\\"', "\\": "\\\\", "\n": "\\n"}


def _read(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    if path is None or ctx.resilient_parsing:
        return
    params = dict(_by_key(ctx.command))
    try:
        ctx.default_map = dict(_entry(ctx, params, key, value) for key, value in _parsed(path).items())
    except ValueError as error:
        raise click.UsageError(show.printable(f"{path}: {error}"), ctx) from error


config_option = option(
    "--config FILE",
    "Read options from TOML; the command line wins.",
    PATH,
    is_eager=True,
    expose_value=False,
    callback=_read,
)
write_config_option = option(
    "--write-config FILE", "Write options as TOML, to repeat this run.", PATH, name="new_config"
)


# -- reading ----------------------------------------------------------------------------------------------------------


def _by_key(command: click.Command) -> Iterator[tuple[str, click.Parameter]]:
    """Yield the parameters allowed in a file, with their keys."""
    for param in command.params:
        if param.name in _NOT_READ:
            continue
        if isinstance(param, click.Argument):
            yield _ARGUMENT, param
        for name in param.opts:
            if name.startswith("--"):
                yield name.removeprefix("--"), param


def _parsed(path: str) -> dict[str, Any]:
    """Read a TOML file. Raises ValueError."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ValueError(error.strerror or "it cannot be read") from error
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _entry(ctx: click.Context, params: dict[str, click.Parameter], key: str, value: Any) -> tuple[str, Any]:
    """Return the name of a parameter, and its value as on the command line. Raises ValueError."""
    if key not in params:
        near = difflib.get_close_matches(key, params, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"{ctx.command_path} --help lists them"
        raise ValueError(f"no option {key!r}; {hint}")
    param = params[key]
    if not (isinstance(param, click.Option) and param.multiple):
        return str(param.name), _checked(ctx, param, key, value)
    if isinstance(param.type, EnvArg) and isinstance(value, dict):
        return str(param.name), list(value.items())
    if not isinstance(value, list):
        raise ValueError(f'{key} is {_shown(value)}: write a list, such as {key} = ["…"]')
    return str(param.name), [_checked(ctx, param, key, item) for item in value]


def _checked(ctx: click.Context, param: click.Parameter, key: str, value: Any) -> Any:
    wanted: tuple[type, ...]
    convert: Any = param.type.convert
    if isinstance(param, click.Option) and param.is_flag:
        wanted, words = (bool,), "true or false"
    elif isinstance(param.type, click.IntRange):
        wanted, words = (int,), "a whole number"
    elif isinstance(param.type, click.FloatRange):
        wanted, words = (int, float), "a number"
    else:
        wanted, words = (str,), "text in quotes"
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise ValueError(f"{key} is {_shown(value)}: write {words}")
    if isinstance(param.type, (click.IntRange, click.FloatRange, click.Choice)):
        try:
            convert(value, param, ctx)
        except click.BadParameter as error:
            raise ValueError(f"{key}: {error.message}") from error
    return value


def _shown(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)[:100]


# -- writing ----------------------------------------------------------------------------------------------------------


def write_config(ctx: click.Context, path: str, seed: int) -> None:
    """Write the options of a command line and its file, and the seed."""
    lines = [f"# gym-trace {gym_trace.__version__}: gym-trace record --config {show.printable(path)} repeats this run."]
    for param in ctx.command.params:
        name = str(param.name)
        given = name == "seed" or ctx.get_parameter_source(name) not in (ParameterSource.DEFAULT, None)
        value: Any = seed if name == "seed" else ctx.params.get(name)
        if given and name not in (*_NOT_READ, *_NOT_WRITTEN) and value not in (None, ()):
            key = next((key for key, listed in _by_key(ctx.command) if listed is param), name)
            toml_value = [_pair(*pair) for pair in value] if isinstance(param.type, EnvArg) else value
            lines.append(f"{key} = {toml_of(toml_value)}")
    try:
        content = "\n".join([*lines, ""]).encode()
        with open(path, "wb") as file:
            file.write(content)
    except UnicodeEncodeError as error:
        raise click.UsageError("--write-config: TOML cannot hold names of files that are not UTF-8", ctx) from error
    except OSError as error:
        raise click.UsageError(f"--write-config {show.printable(path)}: {error.strerror}", ctx) from error


def _pair(key: str, value: Any) -> str:
    """Return K=V as on the command line, because TOML has no null."""
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def toml_of(value: Any) -> str:
    """Return an option's value as TOML: text, number, boolean, or several of these."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml_of, value))}]"
    return '"' + "".join(_ESCAPES.get(c, c) for c in value) + '"'
