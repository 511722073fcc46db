"""Environments that die on command, and diaries: a victim's own log of its run, which survives it.

Each event of a diary is written with one system call before the next thing happens:

    ("reset", seed)             a reset begins
    ("began", observation)
    ("ask", action, note)       a step begins; note: the annotation, or None
    ("inside",)                 the environment itself was called: the recorder must know of the step by now
    ("told", observation, reward, terminated, truncated, info)
    ("alarm",)                  the current call was interrupted; a reset follows
    ("lanes", actions, observations, rewards, terminations, truncations, last)  a step of all lanes
    ("masked", lanes, observations)  a reset of some lanes
"""

import ctypes
import hashlib
import marshal
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from scripted_env import Result, ToyEnv

_LENGTH = struct.Struct("<I")
LANES = 64


def canonical(value: Any) -> Any:
    """Convert a value to a form for marshal that is equal only for the same bits; numbers become 0-d arrays."""
    if type(value) in (bool, float) or (type(value) is int and -(1 << 63) <= value < 1 << 63):
        value = np.asarray(value)
    if isinstance(value, (np.ndarray, np.generic)):
        raw = value.tobytes()
        return "array", value.dtype.str, value.shape, raw if len(raw) < 4096 else hashlib.blake2b(raw).digest()
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(map(canonical, value))
    if isinstance(value, dict):
        return "map", tuple((key, canonical(value[key])) for key in sorted(value))
    assert value is None or type(value) in (str, bytes), type(value)
    return value


class CallLog:
    """The events of a victim, each written by one system call."""

    def __init__(self, path: str | Path):
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, *event: Any) -> None:
        data = marshal.dumps(event)
        os.write(self._fd, _LENGTH.pack(len(data)) + data)


def logged_calls(path: Path) -> Iterator[tuple[Any, ...]]:
    """Return the events of a diary, up to the kill of its writer."""
    data = path.read_bytes() if path.exists() else b""
    at = 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            return
        yield marshal.loads(data[at : at + length])
        at += length


# -- deaths -----------------------------------------------------------------------------------------------------------


def _exhaust() -> None:
    hoard = []
    try:
        while True:  # until the kernel kills it
            hoard.append(np.ones(1 << 20))
    except MemoryError:
        os.abort()


DEATHS: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(3),
    "abort": os.abort,
    "memory": _exhaust,
    "fork": lambda: None,
}


class DyingEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Note each call, and die in the nth call of one method."""

    def __init__(self, env: gymnasium.Env[Any, Any], diary: CallLog, death: str, where: str, count: int):
        super().__init__(env)
        self.diary, self._death, self._where, self._left = diary, death, where, count

    def _live(self, where: str) -> None:
        if where == self._where:
            self._left -= 1
            if not self._left:
                DEATHS[self._death]()

    def reset(self, **kwargs: Any) -> Any:
        self._live("reset")
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.diary.note("inside")
        self._live("step")
        result = self.env.step(action)
        self._live("late step")
        return result

    def render(self) -> Any:
        self._live("render")


# -- environments -----------------------------------------------------------------------------------------------------


class FrameEnv(ToyEnv):
    """Frames of 100 kB that change partly or completely."""

    observation_space = spaces.Box(0, 255, (210, 160, 3), np.uint8)
    action_space = spaces.Discrete(6)

    def __init__(self, noise: bool = False, length: int = 60):
        self._noise, self._length = noise, length
        self._frame = np.zeros((210, 160, 3), np.uint8)

    def result(self, action: Any) -> Result:
        if self._noise or action is None:
            self._frame[...] = self.np_random.integers(0, 255, self._frame.shape, np.uint8)
        else:
            at = 3 * self.t % 200
            self._frame[at : at + 8, at % 150 : at % 150 + 8] += np.uint8(1 + action)
        return Result(self._frame, float(self.t), self.t == self._length)


class DictEnv(ToyEnv):
    """Observations of several kinds, infos, and rewards of more than one type."""

    observation_space = spaces.Dict(
        place=spaces.Box(-np.inf, np.inf, (3,), np.float64),
        room=spaces.Discrete(9),
        said=spaces.Text(20),
        pair=spaces.Tuple([spaces.MultiBinary(3), spaces.Box(0, 255, (2, 2), np.uint8)]),
    )
    action_space = spaces.Dict(a=spaces.Discrete(9), b=spaces.Box(0, 1, (2,), np.float32))

    def result(self, action: Any) -> Result:
        t, random = self.t, self.np_random
        info: dict[str, Any] = {"t": t, "words": ["a", {"b": t / 8}]} if t else {"began": True}
        if t and t % 3 == 0:
            info["odd"] = random.normal(size=2)
        observation = {
            "place": random.normal(size=3),
            "room": np.int64(random.integers(9)),
            "said": "x" * int(random.integers(1, 20)),
            "pair": (random.integers(0, 2, 3).astype(np.int8), random.integers(0, 255, (2, 2), np.uint8)),
        }
        return Result(observation, np.float32(t) if t % 20 > 15 else t / 8, False, t == 50, info)


class TextEnv(ToyEnv):
    """Observations are words of up to 200 letters."""

    observation_space = spaces.Text(200)
    action_space = spaces.Text(5)

    def result(self, action: Any) -> Result:
        word = "begin" if action is None else action * int(self.np_random.integers(0, 40))
        return Result(word, self.t, self.t == 30)


class LaneEnv(ToyEnv):
    """A lane of a vector environment; observations hold its number, its episode and the step."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(5)

    def __init__(self, lane: int):
        self._lane = lane

    def result(self, action: Any) -> Result:
        over, even = self.t > (5 * self._lane + 3 * self.episode) % 17, self._lane % 2 == 0
        observation = np.array([self._lane, self.episode, self.t], np.float32)
        info = {} if self.t else {"began": self.episode}
        return Result(observation, self._lane + self.t / 8, over and even, over and not even, info)


KINDS = ("cartpole", "cheetah", "frames", "noise", "things", "words")
MODES = ("NextStep", "SameStep", "Disabled")


def make_env(kind: str) -> gymnasium.Env[Any, Any]:
    if kind == "cartpole":
        return gymnasium.make("CartPole-v1", disable_env_checker=True)  # an exception would break it
    if kind == "cheetah":
        name = "HalfCheetah-v5" if "HalfCheetah-v5" in gymnasium.registry else "HalfCheetah-v4"
        return gymnasium.make(name, disable_env_checker=True)
    if kind == "words":
        return TextEnv()
    return DictEnv() if kind == "things" else FrameEnv(kind == "noise")


class LoggedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Keep one diary per process in the directory $GYM_TRACE_DIARIES, for environments that others record."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._diary = CallLog(Path(os.environ["GYM_TRACE_DIARIES"], str(os.getpid())))

    def reset(self, **kwargs: Any) -> Any:
        self._diary.note("reset", kwargs.get("seed"))
        result = self.env.reset(**kwargs)
        self._diary.note("began", canonical(result[0]))
        return result

    def step(self, action: Any) -> Any:
        self._diary.note("ask", canonical(action), None)
        time.sleep(0.001)
        result = self.env.step(action)
        self._diary.note("told", *map(canonical, result))
        return result
