"""A Griffe extension: docstrings of gym-trace as mkdocstrings reads them.

- Exceptions without a description (Raises: A, B) get that of their class.
- Docstrings that are completed when a class is made are taken from the class, and so are the options of recorders.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import re
from dataclasses import fields
from typing import Any

import griffe

from gym_trace import errors
from gym_trace.recording.options import RecordingOptions

_NAMES = re.compile(r"^( +)((?:[A-Z]\w+(?:, |,\n +)?)+)\.?$", re.M)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if isinstance(obj, griffe.Function) and "Unpack[RecordingKeywords]" in map(str, _annotations(obj)):
            own = [parameter for parameter in obj.parameters if parameter.kind is not griffe.ParameterKind.var_keyword]
            obj.parameters = griffe.Parameters(*own, *_options({parameter.name for parameter in own}))
        if obj.docstring is None:
            return
        text = obj.docstring.value
        if "see RecordingOptions" in text:
            text = inspect.getdoc(getattr(importlib.import_module(obj.module.path), obj.name)) or text
        before, heading, after = text.partition("Raises:\n")
        obj.docstring.value = before + heading + _NAMES.sub(_described, after)


def _annotations(function: griffe.Function) -> list[Any]:
    return [parameter.annotation for parameter in function.parameters]


def _options(known: set[str]) -> list[griffe.Parameter]:
    kind = griffe.ParameterKind.keyword_only
    return [
        griffe.Parameter(field.name, annotation=str(field.type), kind=kind, default=repr(field.default))
        for field in fields(RecordingOptions)
        if field.name not in known
    ]


def _described(found: re.Match[str]) -> str:
    names = re.findall(r"\w+", found[2])
    return "\n".join(f"{found[1]}{name}: {_meaning(name)}" for name in names)


def _meaning(name: str) -> str:
    error = getattr(errors, name, None) or getattr(builtins, name)
    return (inspect.getdoc(error) or name).splitlines()[0].rstrip(".")
