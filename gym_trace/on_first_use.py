"""Import the names of a package when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

from gym_trace.errors import MissingExtra

_TRAINING_PACKAGES = ("torch", "safetensors")


def on_first_use(package: str, homes: Mapping[str, str], modules: Collection[str] = ()) -> Callable[[str], Any]:
    """Return the __getattr__ of a package.

    hasattr(), help() and inspect expect AttributeError alone. If an optional package is missing, a name is therefore a
    function that raises MissingExtra, and a module raises AttributeError with the message of its MissingExtra.

    Args:
        homes: the module of each name.
        modules: names of submodules to import on first use.
    """

    def getattr_(name: str) -> Any:
        if name in modules:
            try:
                return importlib.import_module(f"{package}.{name}")
            except MissingExtra as missing:  # "from PACKAGE import MODULE" imports it again, which raises MissingExtra
                raise AttributeError(str(missing)) from missing
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(homes[name]), name)
        except MissingExtra as missing:
            return _stand_in(name, str(missing))
        except ModuleNotFoundError as missing:
            if str(missing.name).partition(".")[0] not in _TRAINING_PACKAGES:
                raise
            return _stand_in(
                name, f"{package} needs PyTorch and safetensors ({missing}): pip install 'gym-trace[train]'"
            )
        setattr(sys.modules[package], name, value)
        return value

    return getattr_


def _stand_in(name: str, message: str) -> Callable[..., NoReturn]:
    def missing(*_: Any, **__: Any) -> NoReturn:
        raise MissingExtra(message)

    missing.__name__ = missing.__qualname__ = name
    missing.__doc__ = message
    return missing
