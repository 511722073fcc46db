"""From pressed keys to actions: an environment's own key map, a TOML file, or a default for continuous actions.

Keys have the names that pygame gives them ("left", "space", "a"). A game pad has the keys "pad up", "pad button 0" …
and the axes "pad 0" …, the mouse the axes "mouse x" and "mouse y" while its left button is held.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from gym_trace.errors import InvalidOption
from gym_trace.printable import printable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOGETHER = " + "  # between the names of keys that are pressed together
AXES = ("mouse x", "mouse y", *(f"pad {number}" for number in range(8)))
_PAIRS = (("left", "right"), ("down", "up"), ("a", "d"), ("s", "w"), ("j", "l"), ("k", "i"))
_MAX_QUESTIONS = 32
_SUPPORTED = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)


class Inputs(NamedTuple):
    """Keys and axes that a person moves.

    keys: names, in the order in which they were pressed.
    axes: -1 to 1, by name; only axes away from their center.
    """

    keys: Sequence[str] = ()
    axes: Mapping[str, float] = {}


class Keymap:
    """Meaning of each key.

    Attributes:
        waits: True if the environment stands still until a key is pressed.
        keys: the names of all keys that do something.
    """

    waits: bool
    keys: frozenset[str]

    def action(self, inputs: Inputs) -> Any:
        """Return an action of the space; None to wait for a key."""
        raise NotImplementedError

    def described(self, labels: Sequence[str]) -> list[tuple[str, str]]:
        """Return keys and their effects, for help. labels: names of the actions, or of the elements."""
        raise NotImplementedError

    def as_toml(self) -> dict[str, Any]:
        """Return the content of a file for keymap_of_file()."""
        raise NotImplementedError


class Combinations(Keymap):
    """Actions by key or combination of keys; the largest pressed combination counts.

    rest: action while none is pressed; None: wait.
    """

    def __init__(self, actions: Mapping[frozenset[str], Any], rest: Any):
        self._actions, self._rest = dict(actions), rest
        self.waits = rest is None
        self.keys = frozenset[str]().union(*actions)

    def action(self, inputs: Inputs) -> Any:
        order = {key: position for position, key in enumerate(inputs.keys)}
        pressed = [keys for keys in self._actions if keys and keys <= order.keys()]
        if not pressed:
            return self._rest
        return self._actions[max(pressed, key=lambda keys: (len(keys), max(order[key] for key in keys)))]

    def described(self, labels: Sequence[str]) -> list[tuple[str, str]]:
        def named(action: Any) -> str:
            index = int(action) if np.ndim(action) == 0 and isinstance(action, (int, np.integer)) else -1
            return labels[index] if 0 <= index < len(labels) else f"action {np.asarray(action).tolist()}"

        found = [(TOGETHER.join(sorted(keys)), named(action)) for keys, action in self._actions.items() if keys]
        return [*found, ("no key", "wait" if self._rest is None else named(self._rest))]

    def as_toml(self) -> dict[str, Any]:
        keys = {TOGETHER.join(sorted(keys)): int(action) for keys, action in self._actions.items() if keys}
        return {"keys": keys} if self._rest is None else {"rest": int(self._rest), "keys": keys}


@dataclass(frozen=True)
class Element:
    """One number of an action: the value that each key gives it, the axes that move it, and its value at rest."""

    low: float
    high: float
    rest: float
    keys: Mapping[str, float] = field(default_factory=dict)
    axes: Sequence[str] = ()

    def value(self, inputs: Inputs, is_whole: bool) -> float:
        pressed = [self.keys[key] for key in inputs.keys if key in self.keys]
        if pressed and is_whole:
            return pressed[-1]
        if pressed:  # opposite keys cancel
            return min(max(self.rest + sum(value - self.rest for value in pressed), self.low), self.high)
        for axis in self.axes:
            if axis in inputs.axes:
                return self.low + (inputs.axes[axis] + 1) / 2 * (self.high - self.low)
        return self.rest


class Elements(Keymap):
    """Actions that are arrays: each of their numbers has keys and axes of its own."""

    waits = False

    def __init__(self, space: Any, elements: Sequence[Element]):
        self._space, self._elements = space, list(elements)
        self.keys = frozenset(key for element in elements for key in element.keys)

    def action(self, inputs: Inputs) -> Any:
        is_whole = self._space.dtype.kind != "f"
        values = [element.value(inputs, is_whole) for element in self._elements]
        return np.array(values, np.float64).astype(self._space.dtype).reshape(self._space.shape)

    def described(self, labels: Sequence[str]) -> list[tuple[str, str]]:
        found = []
        for number, element in enumerate(self._elements):
            name = labels[number] if number < len(labels) else f"[{number}]"
            found += [(key, f"{name} = {value:g}") for key, value in element.keys.items()]
            if element.axes:
                found.append((", ".join(element.axes), f"{name}: {element.low:g} to {element.high:g}"))
        return found

    def as_toml(self) -> dict[str, Any]:
        return {
            "elements": {
                str(number): {"rest": element.rest, "keys": dict(element.keys), "axes": list(element.axes)}
                for number, element in enumerate(self._elements)
                if element.keys or element.axes
            }
        }


def check_supported(space: Any) -> None:
    """Raise InvalidOption for an action space that keys cannot play."""
    if not isinstance(space, _SUPPORTED):
        names = ", ".join(kind.__name__ for kind in _SUPPORTED)
        raise InvalidOption(f"action space {printable(str(space))}: cannot be played; supported: {names}")


def keymap_of_environment(env: Any, key_name: Any) -> Keymap | None:
    """Return the key map of an environment's get_keys_to_action(), as for gymnasium.utils.play; None without one.

    key_name: returns the name of a key code. Raises InvalidOption.
    """
    try:
        key_actions = env.unwrapped.get_keys_to_action()
    except AttributeError:
        return None
    if not isinstance(key_actions, Mapping):
        raise InvalidOption(f"get_keys_to_action: returned {type(key_actions).__name__}; pass --keys FILE")
    actions: dict[frozenset[str], Any] = {}
    for keys, action in key_actions.items():
        codes = keys if isinstance(keys, (tuple, list, str)) else (keys,)
        actions[frozenset(key_name(ord(code) if isinstance(code, str) else int(code)) for code in codes)] = action
    space, rest = env.action_space, actions.get(frozenset())
    if rest is None:  # as gymnasium.utils.play
        rest = 0 if isinstance(space, spaces.Discrete) else np.zeros(space.shape, space.dtype)
    return Combinations(actions, rest)


def default_keymap(space: Any) -> Keymap | None:
    """Return arrow and letter keys, mouse and game pad for continuous actions; None for other spaces."""
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
        return None
    elements = []
    for number, (low, high) in enumerate(_bounds(space)):
        rest = min(max(0.0, low), high)
        keys = dict(zip(_PAIRS[number], (low, high))) if number < len(_PAIRS) else {}
        axes = [f"mouse {'xy'[number]}"] if number < 2 else []
        elements.append(Element(low, high, rest, keys, [*axes, f"pad {number}"] if number < 8 else []))
    return Elements(space, elements)


def _bounds(space: Any) -> Iterable[tuple[float, float]]:
    """Return minimum and maximum of each number of an action; infinities become -1 and 1."""
    if isinstance(space, spaces.MultiBinary):
        return [(0, 1)] * int(np.prod(space.shape))
    if isinstance(space, spaces.MultiDiscrete):
        starts = np.broadcast_to(getattr(space, "start", 0), space.nvec.shape).ravel().tolist()
        return [(start, start + count - 1) for start, count in zip(starts, space.nvec.ravel().tolist())]
    lows, highs = space.low.ravel().astype(np.float64), space.high.ravel().astype(np.float64)
    lows, highs = np.where(np.isfinite(lows), lows, -1.0), np.where(np.isfinite(highs), highs, 1.0)
    return list(zip(lows.tolist(), highs.tolist()))


# -- questions --------------------------------------------------------------------------------------------------------


class Question(NamedTuple):
    """Asks which key sets a value. element: index in the action; None for Discrete. value: set by the key."""

    text: str
    element: int | None
    value: int


def questions_of(space: Any, labels: Sequence[str]) -> list[Question]:
    """Return the questions needed to play a space of integers. Raises InvalidOption for too many."""
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        found = [
            Question(labels[i] if i < len(labels) else f"action {start + i}", None, start + i)
            for i in range(int(space.n))
        ]
    else:
        found = [
            Question(f"{labels[index] if index < len(labels) else f'action[{index}]'} = {value}", index, value)
            for index, (low, high) in enumerate(_bounds(space))
            for value in range(int(low), int(high) + 1)
            if value != min(max(0, low), high)
        ]
    if len(found) > _MAX_QUESTIONS:
        raise InvalidOption(f"{printable(str(space))}: {len(found)} keys are too many to ask for; pass --keys FILE")
    return found


def keymap_of_answers(space: Any, questions: Sequence[Question], keys: Sequence[str | None]) -> Keymap:
    """Return the key map of the answers. A key of None: in a Discrete space, the action while no key is pressed."""
    if isinstance(space, spaces.Discrete):
        actions = {frozenset((key,)): question.value for question, key in zip(questions, keys) if key is not None}
        rest = next((question.value for question, key in zip(questions, keys) if key is None), None)
        return Combinations(actions, rest)
    elements = []
    for index, (low, high) in enumerate(_bounds(space)):
        own = {key: value for (_, element, value), key in zip(questions, keys) if element == index and key is not None}
        elements.append(Element(low, high, min(max(0, low), high), own))
    return Elements(space, elements)


# -- files ------------------------------------------------------------------------------------------------------------


def keymap_of_file(path: Path, space: Any, known: frozenset[str]) -> Keymap:
    """Read a key map from TOML; see docs/guides/play.md. known: all names of keys. Raises InvalidOption, OSError."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        return _parsed(content, space, known)
    except (ValueError, TypeError) as error:
        raise InvalidOption(f"{path}: {error}") from error


def _parsed(content: dict[str, Any], space: Any, known: frozenset[str]) -> Keymap:
    if isinstance(space, spaces.Discrete):
        _check_names(content, {"rest", "keys"}, "the file")
        actions = {_keys(names, known): _action(space, action) for names, action in _table(content, "keys").items()}
        if not actions:
            raise ValueError('no keys; write a table [keys], such as left = 0 and "left + space" = 1')
        return Combinations(actions, _action(space, content["rest"]) if "rest" in content else None)
    _check_names(content, {"elements"}, "the file")
    elements = [Element(low, high, min(max(0, low), high)) for low, high in _bounds(space)]
    if not (tables := _table(content, "elements")):
        raise ValueError("no elements; write a table [elements.0] with keys = {left = -1.0, right = 1.0}")
    for index, table in tables.items():
        if not index.isdigit() or int(index) >= len(elements):
            raise ValueError(f"elements.{index}: not an element of the action; it has {len(elements)}, counted from 0")
        if not isinstance(table, dict):
            raise ValueError(f"elements.{index}: write a table")
        _check_names(table, {"rest", "keys", "axes"}, f"elements.{index}")
        base = elements[int(index)]
        keys = {_key(key, known): _number(value, base) for key, value in _table(table, "keys").items()}
        axes = table.get("axes", [])
        if not isinstance(axes, list) or not set(map(str, axes)) <= set(AXES):
            raise ValueError(f"elements.{index}: axes are {', '.join(AXES)}")
        rest = _number(table.get("rest", base.rest), base)
        elements[int(index)] = Element(base.low, base.high, rest, keys, axes)
    return Elements(space, elements)


def _check_names(content: dict[str, Any], names: set[str], where: str) -> None:
    if others := sorted(set(content) - names):
        raise ValueError(f"unknown {printable(others[0])!r} in {where}; known: {', '.join(sorted(names))}")


def _table(content: dict[str, Any], name: str) -> dict[str, Any]:
    table = content.get(name, {})
    if not isinstance(table, dict):
        raise ValueError(f"{name}: write a table")
    return table


def _key(name: str, known: frozenset[str]) -> str:
    if name not in known:
        raise ValueError(f"{printable(name)!r}: not a key; keys have names such as left, space, a, f3, pad up")
    return name


def _keys(names: str, known: frozenset[str]) -> frozenset[str]:
    return frozenset(_key(name, known) for name in (names.split(TOGETHER) if names != TOGETHER else [names]))


def _action(space: Any, value: Any) -> int:
    start, count = int(space.start), int(space.n)
    if isinstance(value, bool) or not isinstance(value, int) or not start <= value < start + count:
        raise ValueError(f"{printable(str(value))} is not an action; use {start} to {start + count - 1}")
    return value


def _number(value: Any, element: Element) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not element.low <= value <= element.high:
        raise ValueError(f"{printable(str(value))} is out of range; use {element.low:g} to {element.high:g}")
    return value
