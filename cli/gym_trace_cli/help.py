"""Declare options, list them under headings in the help, and suggest a command for an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from functools import wraps
from types import FunctionType
from typing import Any

import click

from gym_trace.errors import InvalidOption
from gym_trace_cli import show

_WIDEST_NAMES = 23  # characters; the text of longer option names begins on the next line
_Decorator = Callable[[Any], Any]
_FULL = "gym_trace_cli.full_help"  # key in the meta of a context: --help-all was given


# Names of options in other tools, and the option to use here.
HINTS = {
    **dict.fromkeys(("--best", "--top"), "use --sort -return --limit N"),
    "--worst": "use --sort return --limit N",
    "--sample": "use --sort random:SEED --limit N",
    "--seed": "to select episodes, use --sort random:SEED or --where 'seed == N'",
    "--verify": "use gym-trace verify",
    "--append": "use --on-exist append",
    **dict.fromkeys(("--overwrite", "--force"), "use --on-exist replace"),
    **{name: f"use --tolerance {name[2:]}=X" for name in ("--atol", "--rtol")},
    **{name: f"use --fact {name[2:]}=TEXT" for name in ("--author", "--license", "--description")},
    "--tag": 'use --fact \'tags=["a", "b"]\'',
    **dict.fromkeys(("--argv", "--git-diff"), "use --full-provenance"),
    **dict.fromkeys(("--engine", "--address"), "use --ray ADDRESS"),
    **dict.fromkeys(("--save", "--site"), "use -o FILE.html or -o DIR"),
    "--schedule": "use --episodes ::N",
    "--render-mode": "use --env-arg render_mode=MODE",
    **dict.fromkeys(("--nice", "--cpus"), "use the commands nice and taskset"),
    **dict.fromkeys(("--cache", "--cache-limit", "--debug"), "pass it before the command, after gym-trace"),
}


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases of click alone
    """Type of an option whose text a function parses; other values stay as they are.

    The function raises click.BadParameter or InvalidOption.
    """

    def __init__(self, parse: Callable[[str], Any]):
        self.name, self._parse = parse.__name__.strip("_").replace("_", " "), parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except InvalidOption as error:
            self.fail(str(error), param, ctx)


class Headed(click.Command):
    """A command whose options are listed under the headings of section(); options with the same text share a line.

    --help names the options of a topic in one line, and omits hidden ones; --help-all describes all. With --json, only
    JSON is on the standard output.
    """

    def invoke(self, ctx: click.Context) -> Any:
        if ctx.params.get("as_json"):
            show.reserve_stdout(ctx)
        return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if (hint := HINTS.get(error.option_name)) is None:
                raise
            raise click.UsageError(f"no option {error.option_name}; {hint}", ctx) from error

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        if any(getattr(param, "topic", None) or _is_rare(param) for param in self.params):
            params.append(help_all)
        return params

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        is_full = is_full_help(ctx)
        sections: dict[str, dict[str, list[click.Option]]] = {}
        topics: dict[str, tuple[str, list[str]]] = {}
        for param in self.params:
            heading = getattr(param, "heading", "Options")
            if not isinstance(param, click.Option) or (_is_rare(param) and not is_full):
                continue
            if not is_full and (topic := getattr(param, "topic", None)):
                topics.setdefault(topic, (heading, []))[1].append(param.opts[-1])
                continue
            text = f"{param.help} Required." if param.required else str(param.help)
            sections.setdefault(heading, {}).setdefault(text, []).append(param)
        rows = {
            heading: [(_names(options), text) for text, options in lines.items()] for heading, lines in sections.items()
        }
        lengths = [len(names) for pairs in rows.values() for names, _ in pairs]
        width = max((length for length in lengths if length <= _WIDEST_NAMES), default=_WIDEST_NAMES)
        formatter.write_paragraph()
        for heading, pairs in rows.items():
            formatter.write_heading(heading)
            with formatter.indentation():
                formatter.write_dl([(names.ljust(width), text) for names, text in pairs], col_max=width)
        for topic, (heading, names) in topics.items():
            formatter.write(f"{heading} (gym-trace help {topic}): {', '.join(names)}\n")
        if rare := sum(map(_is_rare, self.params)) * (not is_full):
            formatter.write(f"--help-all lists {show.count(rare, 'more option')}.\n")


def _is_rare(param: click.Parameter) -> bool:
    return isinstance(param, click.Option) and param.hidden


def _names(options: list[click.Option]) -> str:
    if len(options) > 1:
        return ", ".join(option.opts[-1] for option in options)
    metavar = "" if options[0].is_flag else f" {options[0].metavar}"
    return ", ".join(options[0].opts) + metavar


def headed(name: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Turn a function into a Headed command. The function returns the exit code; None is 0."""
    return click.command(name, cls=Headed)


def option(spec: str, help: str, type: Any = None, *, name: str | None = None, **attributes: Any) -> _Decorator:
    """Return click.option() for a spec like "-j, --workers N"; without N the option is a flag.

    help: a help with "(repeatable)" makes the option repeatable. type: a list of choices, a function for Parsed, or a
    type of click. name: name of the parameter.
    """
    *names, last = spec.split(", ")
    last, _, metavar = last.partition(" ")
    attributes |= {"metavar": metavar} if metavar else {"is_flag": True}
    attributes |= {"multiple": True} if "(repeatable)" in help else {}
    if isinstance(type, (list, FunctionType)):
        type = click.Choice(type) if isinstance(type, list) else Parsed(type)
    return click.option(*names, last, *([name] if name else []), type=type, help=help, **attributes)


def printing_option(spec: str, help: str, print_it: Callable[[], None]) -> _Decorator:
    """Return an option that prints something and ends the command."""

    def callback(ctx: click.Context, _: click.Parameter, given: bool) -> None:
        if given and not ctx.resilient_parsing:
            print_it()
            ctx.exit()

    return option(spec, help, is_eager=True, expose_value=False, callback=callback)


def _print_full_help(ctx: click.Context, _: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        click.echo(full_help(ctx), color=ctx.color)
        ctx.exit()


def full_help(ctx: click.Context) -> str:
    """Return the help of a command with all of its options."""
    ctx.meta[_FULL] = True
    return ctx.get_help()


def is_full_help(ctx: click.Context) -> bool:
    """Return True if --help-all is given."""
    return bool(ctx.meta.get(_FULL))


help_all = click.Option(
    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_print_full_help, hidden=True
)


def section(heading: str, *options: _Decorator, topic: str | None = None) -> _Decorator:
    """Add options to a command, listed under a heading in its help.

    topic: 'gym-trace help TOPIC' explains them, and --help only names them.
    """

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        for param in command.__click_params__:
            if not hasattr(param, "heading"):
                param.heading, param.topic = heading, topic
        return command

    return decorate


def bundle(name: str, make: Callable[..., Any], *options: _Decorator, also: Sequence[str] = ()) -> _Decorator:
    """Add options to a command, which gets them as one parameter, `name`: the result of make(**values).

    also: names of other parameters of the command that make() takes.
    """

    def decorate(command: Any) -> Any:
        own: list[str] = [*also]

        @wraps(command)
        def bundling(*args: Any, **values: Any) -> Any:
            values[name] = make(**{own_name: values.pop(own_name) for own_name in own})
            return command(*args, **values)

        params = bundling.__dict__.setdefault("__click_params__", [])
        before = len(params)
        for option in reversed(options):
            option(bundling)
        own += (param.name for param in params[before:])
        return bundling

    return decorate


# -- options as dataclasses: each option, its default and its help in one place --------------------------------------


def opt(
    spec: str, help: str, type: Any = None, *, default: Any = None, under: str | None = None, **attributes: Any
) -> Any:
    """Declare a field of a dataclass as an option; the arguments are those of option().

    under: heading of this option and of those after it.
    """
    is_flag = " " not in spec.split(", ")[-1]
    attributes |= {} if default is None else {"default": default}
    default = False if is_flag and default is None else default
    make = lambda name: option(spec, help, type, name=name, **attributes)  # noqa: E731
    return field(default=default, metadata={"make": make, "heading": under})


def shared(decorator: _Decorator, under: str | None = None) -> Any:
    """Declare a field as an option, or a bundle, that several commands share."""
    return field(metadata={"make": lambda _: decorator, "heading": under})


def options_of(kind: Any) -> _Decorator:
    """Add the options of a dataclass to a command, which gets them as one parameter, `options`."""
    groups: dict[str, list[_Decorator]] = {}
    heading = "Options"
    for declared in fields(kind):
        heading = declared.metadata["heading"] or heading
        groups.setdefault(heading, []).append(declared.metadata["make"](declared.name))

    def decorate(command: Any) -> Any:
        @wraps(command)
        def with_options(*args: Any, **values: Any) -> Any:
            options = kind(**{declared.name: values.pop(declared.name) for declared in fields(kind)})
            return command(*args, options=options, **values)

        decorated: Any = with_options
        for heading, decorators in reversed(groups.items()):
            decorated = section(heading, *decorators)(decorated)
        return decorated

    return decorate


class Group(click.Group):
    """A group that suggests a command for an unknown one."""

    command_class = Headed
    hints: Mapping[str, str] = {}  # by unknown command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, commands = args[0], self.list_commands(ctx)
        if name not in commands and not name.startswith("-"):
            near = difflib.get_close_matches(name, commands, n=1, cutoff=0.5)
            suggestion = f"did you mean {near[0]!r}?" if near else f"'{ctx.command_path} --help' lists them"
            ctx.fail(f"no command {name!r}; {self.hints.get(name, suggestion)}")
        return super().resolve_command(ctx, args)
