"""What a trace may bring about when its environment is made again, and what only its reader may allow.

Ids that are registered here and plain arguments are data, and so are Gymnasium's own wrappers that only compute. All
else that a trace names would act because a stranger wrote it down: modules to import, classes to call, files.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Any

import gymnasium
import numpy as np

from gym_trace.envs.clipping import ClipActionParts
from gym_trace.envs.recipe import Arguments, argument
from gym_trace.errors import EnvironmentUnavailable, TraceError
from gym_trace.model import values

# Of gymnasium.wrappers, over all its releases: they call nothing that they are given, and touch no disk and no screen.
# fmt: off
_HARMLESS = frozenset((
    "AddRenderObservation", "AddWhiteNoise", "ArrayConversion", "AtariPreprocessing", "AutoResetWrapper",
    "Autoreset", "ClipAction", "ClipReward", "DelayObservation", "DiscretizeAction", "DiscretizeObservation",
    "DtypeObservation", "FilterObservation", "FlattenObservation", "FrameStack", "FrameStackObservation",
    "GrayScaleObservation", "GrayscaleObservation", "JaxToNumpy", "JaxToTorch", "MaxAndSkipObservation",
    "NormalizeObservation", "NormalizeReward", "NumpyToTorch", "ObstructView", "OrderEnforcing",
    "PassiveEnvChecker", "PixelObservationWrapper", "RecordEpisodeStatistics", "RepeatAction", "RescaleAction",
    "RescaleObservation", "ReshapeObservation", "ResizeObservation", "StickyAction", "TimeAwareObservation",
    "TimeLimit",
))
# fmt: on
_CLIPPING = f"{ClipActionParts.__module__}:{ClipActionParts.__qualname__}"  # which is as harmless
# Never made again, whoever trusts whom: what they do besides is nothing that a replay should do.
_LEFT_OUT = frozenset(("HumanRendering", "RecordVideo", "RenderCollection"))
_FILE_NAMED = re.compile(
    r"(command|dir|directory|entry_point|file|filename|folder|library|module|path|plugin|root|script|uri|url"
    r"|(^|_)(address|binary|callback|checkpoint|class|cmd|code|endpoint|exe|executable|function|host|hostname|import"
    r"|ip|log|mjcf|package|program|rom|server|shell|socket|urdf|weight|xml))(e?s)?\d*$",
    re.IGNORECASE,
)
_FILE_LIKE = re.compile(r"[/\\:(]|\.\.|^[~.]|\.[^\W\d]|__")
# Arguments of harmless wrappers that take memory or time, and the most that all in a row may ask for, multiplied.
_LARGEST = {
    **dict.fromkeys(("frame_skip", "noop_max", "num_repeats", "repeat_action_duration", "skip"), 1 << 12),
    **dict.fromkeys(("num_stack", "stack_size"), 1 << 12),
    **dict.fromkeys(("screen_size", "shape"), 1 << 24),
    "bins": 1 << 16,  # each
}


def is_left_out(name: str) -> bool:
    """Whether a wrapper, named as module:class, is none to make again: our recorders, windows, writers of videos."""
    module, _, kind = name.partition(":")
    top = module.partition(".")[0]
    return (top == "gym_trace" and name != _CLIPPING) or (_is_of_gymnasium(module) and kind in _LEFT_OUT)


def harmless_wrapper(name: str) -> type[Any] | None:
    """The class of a wrapper out of the list above, by its name alone; None for all others. Raises LookupError."""
    module, _, kind = name.partition(":")
    if name == _CLIPPING:
        return ClipActionParts
    if not (_is_of_gymnasium(module) and kind in _HARMLESS) or module.startswith("gymnasium.wrappers.vector"):
        return None
    try:
        found = getattr(gymnasium.wrappers, kind)
    except (AttributeError, ImportError) as error:
        raise LookupError(f"gymnasium {gymnasium.__version__} has no {kind} here: {error}") from error
    return found  # type: ignore[no-any-return]


def trusted_wrapper(name: str) -> type[Any] | None:
    """The class of any wrapper, imported because the reader trusts the trace; None if it is to be left out."""
    kind = import_named(name)
    if not (isinstance(kind, type) and issubclass(kind, gymnasium.Wrapper)):
        raise EnvironmentUnavailable(f"the trace names {shown(name)} as a wrapper, which it is not")
    bases = [base for base in kind.__mro__ if base is not object]
    out = any(is_left_out(f"{base.__module__}:{base.__qualname__}") for base in bases)
    return None if out else kind


def import_named(name: str) -> Any:
    """What module:attribute is. Imports the module. Raises EnvironmentUnavailable."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:  # other people's code runs when it is imported
        raise EnvironmentUnavailable(f"{shown(name)} cannot be imported: {type(error).__name__}: {error}") from error
    return found


def checked_arguments(kind: type[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for a wrapper, if it has such parameters. Raises EnvironmentUnavailable."""
    try:
        inspect.signature(kind).bind(None, **arguments)
    except (TypeError, ValueError) as error:
        raise EnvironmentUnavailable(f"{kind.__name__} is not made with what the trace says: {error}") from error
    return dict(arguments)


def asked_of_arguments(kwargs: Arguments, known: Mapping[str, Any]) -> list[str]:
    """Which arguments may name a file or a module, in words. known: those of the registry, which are no question."""
    asked = []
    for name, stored in kwargs.items():
        try:
            value = argument(stored)
        except (LookupError, TraceError):
            continue
        if not (name in known and _same(known[name], value)) and may_act(name, value):
            asked.append(f"pass {shown(name, plain=True)}={shown(value)}, which may name a file or a module")
    return asked


def asked_of_sizes(wrappers: Iterable[tuple[str, Arguments | None]]) -> list[str]:
    """Which arguments of harmless wrappers would take very much memory or time, in words."""
    asked, totals = [], dict.fromkeys(_LARGEST, 1)
    for wrapper, arguments in wrappers:
        kind = wrapper.partition(":")[2]
        for name in arguments or () if kind != "ReshapeObservation" else ():  # whose shape has to hold what there is
            if name not in _LARGEST:
                continue
            try:
                value = argument(arguments[name])  # type: ignore[index]
            except (LookupError, TraceError):
                continue
            totals[name] *= max(1, _size(value, max if name == "bins" else math.prod))
            if totals[name] > _LARGEST[name]:
                asked.append(f"make {kind} with {name}={shown(value)}, which takes much memory or time")
    return asked


def _size(value: Any, together: Callable[[list[int]], int]) -> int:
    value = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
    if isinstance(value, (list, tuple)) and value:
        return together([_size(item, together) for item in value])
    return value if isinstance(value, int) else 1


def may_act(name: Any, value: Any) -> bool:
    """Whether an argument, or an option of a reset, may name a file or a module: by its name, or as it looks."""
    if isinstance(value, PurePath):
        return True
    if isinstance(value, (str, bytes)):
        text = value.decode("latin-1") if isinstance(value, bytes) else value
        return bool(_FILE_LIKE.search(text) or _FILE_NAMED.search(str(name)))
    if isinstance(value, Mapping):
        inner = name if _FILE_NAMED.search(str(name)) else ""
        return any(may_act(inner or key, item) or may_act("", key) for key, item in value.items())
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "OSU" and may_act(name, value.ravel().tolist())
    return isinstance(value, (list, tuple)) and any(may_act(name, item) for item in value)


def shown(value: Any, plain: bool = False) -> str:
    """Something out of a trace, fit to be printed."""
    text = str(value) if plain else values.shown(value)
    text = text if len(text) <= 200 else text[:200] + "…"
    return text if text.isprintable() else ascii(text)[1:-1]


def _same(known: Any, value: Any) -> bool:
    try:
        return bool(type(known) is type(value) and known == value)
    except (TypeError, ValueError):  # arrays
        return False


def _is_of_gymnasium(module: str) -> bool:
    return module == "gymnasium.wrappers" or module.startswith("gymnasium.wrappers.")
