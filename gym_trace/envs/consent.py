"""Parts of a recorded environment that need the user's consent to be rebuilt.

No consent is needed for registered ids, for arguments that are registered or neither name a file nor hold a large
number, and for Gymnasium's own wrappers that only compute. Everything else would act because an untrusted file says so:
modules to import, classes to call, files, sizes. The user sees all requests in full before any is carried out; requests
that are too long to be read are rejected.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Any

import gymnasium
import numpy as np

from gym_trace.data import values
from gym_trace.envs.clipping import ClipActionParts
from gym_trace.envs.monitor import Monitor
from gym_trace.envs.recipe import Arguments, alike, argument
from gym_trace.errors import EnvironmentUnavailable, TraceError

# Wrappers in gymnasium.wrappers of any release that call no argument and touch neither disk nor screen.
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
# Our own harmless wrappers.
_OWN: dict[str, type[Any]] = {f"{kind.__module__}:{kind.__qualname__}": kind for kind in (ClipActionParts, Monitor)}
# Never rebuilt, even with trust: a replay must not write files or open windows.
_SKIPPED = frozenset(("HumanRendering", "RecordVideo", "RenderCollection"))
_FILE_NAMED = re.compile(
    r"(command|dir|directory|entry_point|file|filename|folder|library|module|path|plugin|root|script|uri|url"
    r"|(^|_)(address|binary|callback|checkpoint|class|cmd|code|endpoint|exe|executable|function|host|hostname|import"
    r"|ip|log|mjcf|package|program|rom|server|shell|socket|urdf|weight|xml))(e?s)?\d*$",
    re.IGNORECASE,
)
_FILE_LIKE = re.compile(r"[/\\:(]|\.\.|^[~.]|\.[^\W\d]|__")
# Arguments of harmless wrappers that take memory or time, and the limit of their product over all wrappers.
_LARGEST = {
    **dict.fromkeys(("frame_skip", "noop_max", "num_repeats", "repeat_action_duration", "skip"), 1 << 12),
    **dict.fromkeys(("num_stack", "stack_size"), 1 << 12),
    **dict.fromkeys(("screen_size", "shape"), 1 << 24),
    "bins": 1 << 16,  # each
}
# Other names of the same argument.
_ALIASES = {"frame_skip": "skip", "num_repeats": "skip", "num_stack": "stack_size"}
_WIDENING = frozenset(("FlattenObservation", "FrameStack", "FrameStackObservation"))
# Limits on environment arguments: a number, the elements of a shape, all letters and items together, and the smallest
# positive number (a step of time or space). FrozenLake takes 1.4 kB for each letter of its map.
_LARGEST_NUMBER, _MOST_ELEMENTS, _MOST_ITEMS, _SMALLEST = 1 << 12, 1 << 24, 1 << 16, 1e-7
_MOST_SHOWN = 1 << 14  # characters of all requests
_NAME = re.compile(r"[\w.:/-]+", re.ASCII)


def is_left_out(name: str) -> bool:
    """Return True for wrappers (module:class) that are never rebuilt: recorders, windows, video writers."""
    module, _, kind = name.partition(":")
    top = module.partition(".")[0]
    return (top == "gym_trace" and name not in _OWN) or (is_of_gymnasium(module) and kind in _SKIPPED)


def harmless_wrapper(name: str) -> type[Any] | None:
    """Return the class of a harmless wrapper; None for others. Raises LookupError if this Gymnasium lacks it."""
    module, _, kind = name.partition(":")
    if name in _OWN:
        return _OWN[name]
    if not (is_of_gymnasium(module) and kind in _HARMLESS) or module.startswith("gymnasium.wrappers.vector"):
        return None
    try:
        found: type[Any] = getattr(gymnasium.wrappers, kind)
    except (AttributeError, ImportError) as error:
        raise LookupError(f"gymnasium {gymnasium.__version__} has no {kind} here: {error}") from error
    return found


def trusted_wrapper(name: str) -> type[Any] | None:
    """Return the class of any wrapper, imported because the user trusts the trace; None to skip it."""
    kind = import_named(name)
    if not (isinstance(kind, type) and issubclass(kind, gymnasium.Wrapper)):
        raise EnvironmentUnavailable(f"{shown(name)}: not a gymnasium wrapper")
    bases = [base for base in kind.__mro__ if base is not object]
    is_skipped = any(is_left_out(f"{base.__module__}:{base.__qualname__}") for base in bases)
    return None if is_skipped else kind


def import_named(name: str) -> Any:
    """Import the module and return the object at module:attribute. Raises EnvironmentUnavailable."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:  # importing runs foreign code
        raise EnvironmentUnavailable(f"{shown(name)} cannot be imported: {type(error).__name__}: {error}") from error
    return found


def checked_arguments(kind: type[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments if a wrapper accepts them. Raises EnvironmentUnavailable."""
    try:
        inspect.signature(kind).bind(None, **arguments)
    except (TypeError, ValueError) as error:
        raise EnvironmentUnavailable(f"{kind.__name__} does not accept the recorded arguments: {error}") from error
    return dict(arguments)


def asked_of_arguments(kwargs: Arguments, known: Mapping[str, Any]) -> list[str]:
    """Describe the arguments that may act. known: arguments in the registry, which are harmless."""
    values = {}
    for name, stored in kwargs.items():
        try:
            values[name] = argument(stored, known.get(name))
        except (LookupError, TraceError):
            continue
    asked = {name: asked_of_argument(name, value, known.get(name)) for name, value in values.items()}
    return [f"pass {named(name)}={whole(values[name])}, which {why}" for name, why in asked.items() if why]


def asked_of_argument(name: str, value: Any, known: Any = None) -> str:
    """Describe what an argument of an environment may do, or return "". known: the registered value."""
    if known is not None and alike(known, value):
        return ""
    if may_act(name, value):
        return "may name a file or a module"
    return "may take much memory or time" if takes_much(name, value, known) else ""


def takes_much(name: Any, value: Any, known: Any = None) -> bool:
    """Return True if an argument or reset option is so large that it may take much memory or time.

    known: the registered value; an argument may be as large. A seed may be any number.
    """
    return _items(value) > max(_MOST_ITEMS, _items(known)) or _is_large(name, value, known)


def _items(value: Any) -> int:
    """Return the number of letters and items in a value."""
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OSU":
        return value.size
    if isinstance(value, Mapping):
        return 1 + sum(_items(key) + _items(item) for key, item in value.items())
    several = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(several, (list, tuple)):
        return 1 + sum(map(_items, several))
    return len(value) if isinstance(value, (str, bytes)) else 1


def _is_large(name: Any, value: Any, known: Any = None) -> bool:
    if str(name).endswith("seed"):
        return False
    if isinstance(value, Mapping):
        inner = known if isinstance(known, Mapping) else {}
        return any(_is_large(key, item, inner.get(key)) or _is_large("", key) for key, item in value.items())
    largest = max([_LARGEST_NUMBER, *_magnitudes(known)])
    if any(0 < size < _SMALLEST or size > largest for size in _magnitudes(value)):
        return True
    several = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(several, (list, tuple)):
        return False
    sizes = [size for size in several if type(size) is int]  # (640, 480) is a shape, a long list is not
    return (len(sizes) <= 4 and abs(math.prod(sizes)) > _MOST_ELEMENTS) or any(_is_large("", item) for item in several)


def _magnitudes(value: Any) -> Iterable[float]:
    """Return the magnitudes of the numbers in a value, except those in maps."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, (int, float, complex)):
        return () if value != value else (abs(value),)
    return (size for item in value for size in _magnitudes(item)) if isinstance(value, (list, tuple)) else ()


def asked_of_sizes(wrappers: Iterable[tuple[str, Arguments | None]]) -> list[str]:
    """Describe arguments of harmless wrappers that would take much memory or time."""
    asked, totals = [], dict.fromkeys(_LARGEST, 1)
    for wrapper, arguments in wrappers:
        kind = wrapper.partition(":")[2]
        if arguments is None or kind == "ReshapeObservation":  # its shape must have the same number of elements
            continue
        for name, stored in arguments.items():
            if name not in _LARGEST:
                continue
            try:
                value = argument(stored)
            except (LookupError, TraceError):
                continue
            same = _ALIASES.get(name, name)
            totals[same] *= max(1, _size(value, max if name == "bins" else math.prod))
            if totals[same] > _LARGEST[same]:
                asked.append(f"make {kind} with {name}={whole(value)}, which takes much memory or time")
    return asked


def asked_of_width(env: Any, wrapper: str, arguments: Arguments | None) -> str:
    """Describe a harmless wrapper that would make very large observations, or return "".

    Discrete(n) is flattened to n numbers; a stack repeats the observation stack_size times.
    """
    module, _, kind = wrapper.partition(":")
    if not (is_of_gymnasium(module) and kind in _WIDENING):
        return ""
    space = env.observation_space
    if kind == "FlattenObservation":
        try:
            count = gymnasium.spaces.flatdim(space)
        except (NotImplementedError, ValueError):  # the wrapper will raise it, too
            return ""
    else:
        sizes = [
            argument(stored) for name, stored in (arguments or {}).items() if _ALIASES.get(name, name) == "stack_size"
        ]
        count = math.prod([*(space.shape or ()), *(size for size in sizes if type(size) is int)])
    return (
        f"make {kind} return {count} numbers per observation, which takes much memory" if count > _MOST_ELEMENTS else ""
    )


def _size(value: Any, together: Callable[[list[int]], int]) -> int:
    value = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
    if isinstance(value, (list, tuple)) and value:
        return together([_size(item, together) for item in value])
    return value if isinstance(value, int) else 1


def may_act(name: Any, value: Any) -> bool:
    """Return True if an argument or a reset option may name a file or a module, judged by its name and its text."""
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


def called(name: str, arguments: Arguments | None) -> str:
    """Return the text of a call that a trace requests, with all of its arguments."""
    given = []
    for key, stored in (arguments or {}).items():
        try:
            given.append(f"{named(key)}={whole(argument(stored))}")
        except (LookupError, TraceError) as error:
            given.append(f"{named(key)}: {shown(error, plain=True)}")
    return f"{named(name)}({', '.join(given)})"


def together(asked: list[str]) -> str:
    """Return all requests in one line. Raises EnvironmentUnavailable if it is too long to be read."""
    requests = "; ".join(asked)
    if len(requests) > _MOST_SHOWN:
        raise EnvironmentUnavailable(
            f"the requests of the trace take {len(requests)} characters, more than {_MOST_SHOWN}: rejected, "
            "even with --trust (trust=True in Python)"
        )
    return requests


def named(name: Any) -> str:
    """Return a name from a trace, escaped unless it is a plain ASCII name: other letters may look like ASCII."""
    text = str(name)
    return text if _NAME.fullmatch(text) else ascii(text)


def whole(value: Any) -> str:
    """Return the full text of an argument, in ASCII: others may be invisible, reverse a line, or look like ASCII.

    Raises EnvironmentUnavailable if it cannot be shown.
    """
    try:
        with np.printoptions(threshold=sys.maxsize):
            text = hex(value) if type(value) is int and value.bit_length() > 1000 else ascii(value)
    except (ValueError, RecursionError) as error:  # more digits or levels than Python prints
        raise EnvironmentUnavailable(f"the trace names an unprintable argument: {error}") from error
    text = values.without_addresses(text)
    return text if text.isprintable() else ascii(text)[1:-1]


def shown(value: Any, plain: bool = False) -> str:
    """Return printable text of at most 200 characters for a value from a trace; requests use whole()."""
    text = str(value) if plain else values.shown(value)
    text = text if len(text) <= 200 else text[:200] + "…"
    return text if text.isprintable() else ascii(text)[1:-1]


def is_of_gymnasium(module: str) -> bool:
    """Return True for the module of a wrapper of Gymnasium itself."""
    return module == "gymnasium.wrappers" or module.startswith("gymnasium.wrappers.")
