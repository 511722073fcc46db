"""A Griffe extension: docstrings of gym-trace as mkdocstrings reads them.

- A list of exceptions without descriptions (Raises: A, B) becomes a sentence.
- Docstrings that are completed when a class is made are taken from the class.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe

_EXCEPTIONS = re.compile(r"^Raises:\n +((?:\w+(?:, |,\n +)?)+)\.?$", re.M)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        text = obj.docstring.value
        if "see RecordingOptions" in text:
            text = inspect.getdoc(getattr(importlib.import_module(obj.module.path), obj.name)) or text
        obj.docstring.value = _EXCEPTIONS.sub(lambda found: f"Raises {' '.join(found[1].split())}.", text)
