"""A Griffe extension: docstrings of gym-trace as mkdocstrings reads them.

- Exceptions without a description (Raises: A, B) get that of their class.
- Docstrings that are completed when a class is made are taken from the class.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import re
from typing import Any

import griffe

from gym_trace import errors

_NAMES = re.compile(r"^( +)((?:[A-Z]\w+(?:, |,\n +)?)+)\.?$", re.M)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        text = obj.docstring.value
        if "see RecordingOptions" in text:
            text = inspect.getdoc(getattr(importlib.import_module(obj.module.path), obj.name)) or text
        before, heading, after = text.partition("Raises:\n")
        obj.docstring.value = before + heading + _NAMES.sub(_described, after)


def _described(found: re.Match[str]) -> str:
    names = re.findall(r"\w+", found[2])
    return "\n".join(f"{found[1]}{name}: {_meaning(name)}" for name in names)


def _meaning(name: str) -> str:
    error = getattr(errors, name, None) or getattr(builtins, name)
    return (inspect.getdoc(error) or name).splitlines()[0].rstrip(".")
