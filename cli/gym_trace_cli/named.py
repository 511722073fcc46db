"""MODULE:NAME on the command line: somebody's own function or class."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

import click


class NamedCallable(click.ParamType):  # type: ignore[type-arg]
    """A callable as MODULE:NAME. Modules in the current directory are found."""

    name = "module:name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        module_name, colon, name = value.partition(":")
        if not (module_name and colon and name):
            self.fail(f"{value!r} is not of the form MODULE:NAME, such as agents:greedy", param, ctx)
        try:
            found: Any = import_here(module_name)
            for part in name.split("."):
                found = getattr(found, part)
        except ImportError as error:
            self.fail(f"cannot import {module_name!r}: {error}", param, ctx)
        except AttributeError as error:
            self.fail(f"{value!r}: {error}", param, ctx)
        if not callable(found):
            self.fail(f"{value!r} cannot be called, its type is {type(found).__name__}", param, ctx)
        return found


def import_here(module_name: str) -> ModuleType:
    """Imports a module as a script in the current directory would."""
    look_in_current_directory()
    return importlib.import_module(module_name)


def look_in_current_directory() -> None:
    """Has modules in the current directory found, which Python does for scripts and not for installed commands."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
