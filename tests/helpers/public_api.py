"""The public interface as text: names, signatures, attributes, commands, options.

    python tests/helpers/public_api.py > tests/public_api.txt    after an intended change; needs PyTorch

Annotations are those of the source, so that the text is the same on every Python and Gymnasium. The public modules are
gym_trace, those in gym_trace._MODULES, and the modules of gym_trace.exchange, of which only the names are listed: their
libraries need not be installed.
"""

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Generic

import click
import gymnasium

import gym_trace

ROOT = Path(gym_trace.__file__).parent
MODULES = ("gym_trace", "gym_trace.errors", *(f"gym_trace.{name}" for name in gym_trace._MODULES if name != "exchange"))
EXCHANGE = tuple(f"gym_trace.exchange.{name}" for name in gym_trace.exchange._MODULES)
EXTRAS = {f"gym_trace.{name}": name for name in ("dm_env", "pettingzoo")}  # modules that need a package
SPECIAL = ("__call__", "__contains__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__")
NEEDS_VECTORS = "TraceRecordingVectorWrapper"  # has only a line of its own where gymnasium has no such environments
# Likewise where PyTorch or safetensors is missing.
NEED_TORCH = (
    *("Exchange", "Relearnt", "RunPolicies", "RunPolicy", "Steps", "Trained", "UpdateLog", "train", "verify"),
    *("described_environment", "needs_trust", "verify_run"),
)
NEED_ARROW = ("Partition",)


@cache
def names_of(module: str) -> tuple[str, ...]:
    """The names in __all__ of a public module, which is not imported; those of gym_trace with train."""
    if module == "gym_trace":
        return tuple(sorted({*gym_trace.__all__, "train"}))
    place = ROOT.joinpath(*module.split(".")[1:])
    source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            return tuple(sorted(ast.literal_eval(node.value)))  # type: ignore[attr-defined]
    raise AssertionError(f"{module}: has no __all__")


def is_public(name: str) -> bool:
    """Return True for a public module, or a dotted name in one, perhaps with attributes after it."""
    modules = {*MODULES, *EXCHANGE, "gym_trace.exchange"}
    if name in modules:
        return True
    parts = name.split(".")
    module = next(m for m in (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)) if m in modules)
    return parts[module.count(".") + 1] in ("__version__", *names_of(module))


def annotation_text(annotation: Any) -> str:
    text = getattr(annotation, "__forward_arg__", annotation)
    return text if isinstance(text, str) else getattr(annotation, "__name__", repr(annotation))


def signature_text(function: Any, name: str) -> str:
    """name(parameters) -> what it returns."""
    parameters, kinds = [], set()
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not kinds & {parameter.kind, parameter.VAR_POSITIONAL}:
            parameters.append("*")
        kinds.add(parameter.kind)
        text = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {annotation_text(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            default = parameter.default
            text += (
                f" = {default.__name__ if isinstance(default, type) or inspect.isfunction(default) else repr(default)}"
            )
        parameters.append(text)
    returns = signature.return_annotation
    arrow = "" if returns is signature.empty else f" -> {annotation_text(returns)}"
    return f"{name}({', '.join(parameters)}){arrow}"


def is_ours(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] == "gym_trace"


def bases_of(kind: type) -> Iterator[str]:
    """Names of the bases of a class that others can name: errors, and those of other packages."""
    for base in kind.__bases__:
        if is_ours(base) and base.__module__ != "gym_trace.errors":
            yield from bases_of(base)
        elif base not in (object, Generic):
            yield base.__name__


def class_lines(kind: type, path: str) -> Iterator[str]:
    """Its bases, how it is made, and what it has of its own or from bases in this package."""
    ours = [base for base in kind.__mro__ if is_ours(base)]
    yield f"class {path}({', '.join(dict.fromkeys(bases_of(kind)))})"
    if any("__init__" in vars(base) or "__new__" in vars(base) for base in ours):
        yield f"    {signature_text(kind, kind.__name__)}"
    members: dict[str, Any] = {}
    for base in reversed(ours):
        annotations = inspect.get_annotations(base)
        members |= {name: annotation_text(text) for name, text in annotations.items()}
        members |= {name: value for name, value in vars(base).items() if name not in annotations}
    for name, value in sorted(members.items()):
        if name.startswith("_") and name not in SPECIAL:
            continue
        if isinstance(value, str):
            yield f"    {name}: {value}"
        elif isinstance(value, (property, cached_property)):
            getter = value.fget if isinstance(value, property) else value.func
            yield "    property " + signature_text(getter, name).replace("(self)", "")
        elif isinstance(value, (classmethod, staticmethod)):
            yield f"    {type(value).__name__} {signature_text(value.__func__, name)}"
        elif inspect.isfunction(value):
            yield f"    {signature_text(value, name)}"


def results_of(thing: Any) -> Iterator[type]:
    """The classes of this package that a function says it returns, or that attributes of such a class are of."""
    if inspect.isfunction(thing):
        texts, names = [thing.__annotations__.get("return", "")], thing.__globals__
    else:
        texts = [text for name, text in inspect.get_annotations(thing).items() if not name.startswith("_")]
        names = vars(sys.modules[thing.__module__])
    for name in re.findall(r"\w+", " ".join(map(annotation_text, texts))):
        if isinstance(names.get(name), type) and is_ours(names[name]):
            yield names[name]


def is_here(module: str, name: str) -> bool:
    """Return True if the packages that a name needs are installed."""
    if name == NEEDS_VECTORS and not hasattr(gymnasium.vector, "AutoresetMode"):
        return False
    needed = ("torch", "safetensors") if name in NEED_TORCH else ("pyarrow",) if name in NEED_ARROW else ()
    extra = (EXTRAS[module],) if module in EXTRAS else ()
    return all(importlib.util.find_spec(package) is not None for package in (*needed, *extra))


def public_things() -> dict[Any, str]:
    """The public functions and classes with the first path of each."""
    found: dict[Any, str] = {}
    for module in MODULES:
        for name in names_of(module):
            if is_here(module, name):
                thing = getattr(importlib.import_module(module), name)
                if inspect.isfunction(thing) or isinstance(thing, type):
                    found.setdefault(thing, f"{module}.{name}")
    return found


def unnamed_results() -> set[str]:
    """The classes that public functions return, or that attributes of these are of, and that have no public name."""
    things = public_things()
    results = {result for thing in things if inspect.isfunction(thing) for result in results_of(thing)}
    parts = {part for result in results for part in results_of(result)}
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in {*results, *parts} - {*things}}


def library_lines() -> Iterator[str]:
    for module in (*MODULES, *EXCHANGE):
        yield from (f"{module}.{name}" for name in names_of(module))
    for thing, path in sorted(public_things().items(), key=lambda item: item[1]):
        yield ""
        if isinstance(thing, type):
            yield from class_lines(thing, path)
        else:
            yield f"def {signature_text(thing, path)}"


def command_lines() -> Iterator[str]:
    from gym_trace_cli.main import cli

    context = click.Context(cli)
    yield "gym-trace"
    yield from map(parameter_line, cli.params)
    for name in sorted(cli.list_commands(context)):
        command = cli.get_command(context, name)
        assert command is not None
        yield ""
        yield f"gym-trace {name}"
        yield from map(parameter_line, command.params)


def parameter_line(parameter: click.Parameter) -> str:
    """Its spellings, what it takes, and how often."""
    names = [*parameter.opts, *parameter.secondary_opts]
    words = [" ".join(names) if isinstance(parameter, click.Option) else str(parameter.name).upper()]
    kind = parameter.type
    flag = isinstance(parameter, click.Option) and parameter.is_flag
    words += ["flag"] if flag else [kind.name]
    if isinstance(kind, click.Choice):
        words.append("|".join(map(str, kind.choices)))
    for bound in ("min", "max"):
        if getattr(kind, bound, None) is not None:
            words.append(f"{bound} {getattr(kind, bound)}")
    if isinstance(parameter.default, (str, int, float)) and not flag:
        words.append(f"default {parameter.default}")
    words += ["required"] * parameter.required + ["repeated"] * parameter_repeats(parameter)
    return f"    {', '.join(words)}"


def parameter_repeats(parameter: click.Parameter) -> bool:
    return parameter.nargs == -1 or bool(getattr(parameter, "multiple", False))


def text() -> str:
    return "\n".join([*library_lines(), "", *command_lines()]) + "\n"


if __name__ == "__main__":
    if not is_here("gym_trace", "train"):
        sys.exit("public_api.py: without PyTorch the names of training would be lost; pip install -e '.[train]'")
    print(text(), end="")
