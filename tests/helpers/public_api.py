"""The public interface as text: names, signatures, attributes, commands, options.

    python tests/helpers/public_api.py > tests/public_api.txt    after an intended change; needs PyTorch

Annotations are those of the source, so that the text is the same on every Python and Gymnasium. The classes of what the
public functions return are public, too.
"""

import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Generic

import click
import gymnasium

MODULES = (
    *("gym_trace", "gym_trace.errors", "gym_trace.wrappers", "gym_trace.playback"),
    *("gym_trace.proof", "gym_trace.training", "gym_trace.viewer"),
    *(("gym_trace.pettingzoo",) if importlib.util.find_spec("pettingzoo") else ()),
)
SPECIAL = ("__call__", "__contains__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__")
NEEDS_VECTORS = "TraceRecordingVectorWrapper"  # has only a line of its own where gymnasium has no such environments
# Likewise where there is no PyTorch.
NEED_TORCH = (
    *("Exchange", "Relearnt", "RunPolicies", "RunPolicy", "Steps", "Trained", "UpdateLog", "train", "verify"),
    "verify_run",
)


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
            text += f" = {default.__name__ if isinstance(default, type) else repr(default)}"
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


def class_lines(kind: type) -> Iterator[str]:
    """Its bases, how it is made, and what it has of its own or from bases in this package."""
    ours = [base for base in kind.__mro__ if is_ours(base)]
    yield f"class {kind.__name__}({', '.join(dict.fromkeys(bases_of(kind)))})"
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


def library_lines() -> Iterator[str]:
    seen: dict[Any, None] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        lazy = {"train"} if module_name == "gym_trace" else set()  # not for "import *"
        for name in sorted({*module.__all__, *lazy}):
            yield f"{module_name}.{name}"
            if name == NEEDS_VECTORS and not hasattr(gymnasium.vector, "AutoresetMode"):
                continue
            if name in NEED_TORCH and importlib.util.find_spec("torch") is None:
                continue
            thing = getattr(module, name)
            if not inspect.ismodule(thing):
                seen[thing] = None
    functions = [thing for thing in seen if inspect.isfunction(thing)]
    results = [result for function in functions for result in results_of(function)]
    parts = [part for result in results if result not in seen for part in results_of(result)]
    seen |= dict.fromkeys([*results, *parts])
    for thing in sorted(seen, key=lambda thing: str(thing.__name__)):
        yield ""
        if isinstance(thing, type):
            yield from class_lines(thing)
        else:
            yield f"def {signature_text(thing, thing.__name__)}"


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
    if importlib.util.find_spec("torch") is None:
        sys.exit("public_api.py: without PyTorch the names of training would be lost; pip install -e '.[train]'")
    print(text(), end="")
