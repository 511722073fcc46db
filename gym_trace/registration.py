"""Has gymnasium know our environment as soon as it is loaded, without loading it: reading traces does not need it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def _register() -> None:
    from gymnasium.envs.registration import register, registry

    if "Replay-v0" not in registry:
        register("Replay-v0", "gym_trace.replay_env:replay_of", disable_env_checker=True)


class _AfterGymnasium:
    """Finds nothing, but is asked when gymnasium is imported, and then registers after it."""

    _asking = False  # the others

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "gymnasium" or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_when_loaded() -> None:
    """Registers Replay-v0 now, or when gymnasium is imported."""
    if "gymnasium.envs.registration" in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AfterGymnasium())
