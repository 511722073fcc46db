"""Names of actions, and of the numbers of observations, as environments know them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from gymnasium import spaces

_MOST_NAMES, _MOST_CHARACTERS = 1024, 200
_OF_FREE_JOINTS = ("x", "y", "z", "qw", "qx", "qy", "qz"), ("vx", "vy", "vz", "wx", "wy", "wz")
_OF_BALL_JOINTS = ("qw", "qx", "qy", "qz"), ("wx", "wy", "wz")
_FREE, _BALL = 0, 1  # joint types of MuJoCo


def names_of(env: Any) -> dict[str, list[str]]:
    """Return the names of actions and observations: those of a Discrete space's values, or of an array's numbers.

    Keys are "actions" and "observations"; unknown names have no key. Sources: get_action_meanings(), an Enum in the
    attribute actions, and the joints and actuators of a Gymnasium environment of MuJoCo.
    """
    with suppress(Exception):  # the environment is another's code
        lanes = getattr(env.unwrapped, "envs", None)
        one = lanes[0] if isinstance(lanes, list) and lanes else env
        names = {"actions": action_names(one) or list(_of_actuators(one)), "observations": list(_of_joints(one))}
        sizes = {"actions": _size(one.action_space), "observations": _size(one.observation_space)}
        found = {key: [name[:_MOST_CHARACTERS] for name in names[key]] for key in names if names[key]}
        return {key: texts for key, texts in found.items() if len(texts) == sizes[key] <= _MOST_NAMES}
    return {}


def action_names(env: Any) -> list[str]:
    """Return the environment's names of its discrete actions; [] if it has none."""
    with suppress(Exception):  # most environments have no such method; others may raise anything
        return [str(name) for name in env.unwrapped.get_action_meanings()]
    with suppress(Exception):
        named = {int(member): name for name, member in env.unwrapped.actions.__members__.items()}
        return [named[number] for number in range(len(named))]
    return []


def _size(space: Any) -> int:
    return int(space.n) if isinstance(space, spaces.Discrete) else math.prod(space.shape or ())


def _of_actuators(env: Any) -> Iterator[str]:
    model: Any = getattr(env.unwrapped, "model", None)
    for number in range(getattr(model, "nu", 0)):
        actuator = model.actuator(number)
        yield actuator.name or model.joint(int(actuator.trnid[0])).name


def _of_joints(env: Any) -> Iterator[str]:
    """Yield the names of the parts of an observation that environment.observation_structure counts."""
    structure = dict(getattr(env.unwrapped, "observation_structure", {}))
    skipped = structure.pop("skipped_qpos", 0)
    for part, size in structure.items():
        if part in ("qpos", "qvel"):
            names = list(_of_coordinates(env.unwrapped.model, part == "qvel"))
            yield from names[skipped:] if part == "qpos" else names
        else:
            yield from (f"{part}[{number}]" for number in range(int(size)))


def _of_coordinates(model: Any, are_velocities: bool) -> Iterator[str]:
    for number in range(model.njnt):
        joint = model.joint(number)
        kind = int(joint.type[0])
        if kind in (_FREE, _BALL):
            ends = (_OF_FREE_JOINTS if kind == _FREE else _OF_BALL_JOINTS)[are_velocities]
            yield from (f"{joint.name}.{end}" for end in ends)
        else:
            yield f"{joint.name}.v" if are_velocities else joint.name
