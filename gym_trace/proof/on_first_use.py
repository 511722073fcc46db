"""Names of a package that need PyTorch and safetensors, imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from gym_trace.errors import MissingExtra


def on_first_use(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the __getattr__ of a package, which raises MissingExtra without PyTorch. homes: modules by name."""

    def getattr_(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(homes[name]), name)
        except ModuleNotFoundError as missing:
            if str(missing.name).partition(".")[0] not in ("torch", "safetensors"):
                raise
            raise MissingExtra(f"{package} needs PyTorch ({missing}): pip install 'gym-trace[train]'") from missing
        setattr(sys.modules[package], name, value)
        return value

    return getattr_
