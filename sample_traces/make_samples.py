"""Make the missing sample traces and add the hash of every column to expected.json.

    python sample_traces/make_samples.py [--replace] [NAME ...]

Samples of a released format version are golden: later releases must read them unchanged. Existing samples are rebuilt
only with --replace. Clock, host and file ids are fixed, so the same library versions make the same bytes (except the
address in the repr of MiniGrid's mission space).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
from gymnasium import spaces

from gym_trace import TraceRecordingWrapper, edit, open_trace
from gym_trace.format import wire

HERE = Path(__file__).parent
EXPECTED = HERE / "expected.json"
VERSION = f"format-{wire.MAJOR}.{wire.MINOR}"
LARGEST = 200_000  # bytes of one sample

sys.path.insert(0, str(HERE.parent / "tests" / "helpers"))
from column_hashes import describe_trace  # noqa: E402


def record(directory: Path, env: gymnasium.Env[Any, Any], **options: Any) -> TraceRecordingWrapper:
    """Wrap env in a recorder without timed flushes, so that chunks do not depend on timing."""
    options.setdefault("uid", "sample")
    return TraceRecordingWrapper(env, directory, flush_seconds=1e6, **options)


def play(env: TraceRecordingWrapper, steps: int = 10**9) -> None:
    """Take random steps until the episode ends."""
    for _ in range(steps):
        *_, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            break


def episodes(env: TraceRecordingWrapper, count: int, seeded: bool = True) -> None:
    env.action_space.seed(0)
    for episode in range(count):
        env.reset(seed=episode if seeded or episode == 0 else None)
        play(env)


# -- the samples ------------------------------------------------------------------------------------------------------


def cartpole(directory: Path) -> None:
    with record(directory, gymnasium.make("CartPole-v1"), metadata={"agent": "random"}) as env:
        episodes(env, 50)


def taxi(directory: Path) -> None:
    name = "Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3"
    with record(directory, gymnasium.make(name)) as env:
        episodes(env, 3)


def blackjack(directory: Path) -> None:
    """Tuple observations; all resets but the first are unseeded, so the generator state is stored."""
    with record(directory, gymnasium.make("Blackjack-v1")) as env:
        episodes(env, 20, seeded=False)


def minigrid(directory: Path) -> None:
    """Dict observations with a text column."""
    import minigrid  # noqa: F401  registers its environments

    with record(directory, gymnasium.make("MiniGrid-Empty-5x5-v0", max_steps=40)) as env:
        episodes(env, 3)


def pong(directory: Path) -> None:
    """48 frames of 100,800 bytes, in two chunks."""
    import ale_py

    gymnasium.register_envs(ale_py)
    with record(directory, gymnasium.make("ALE/Pong-v5")) as env:
        env.action_space.seed(0)
        env.reset(seed=0)
        play(env, 30)
        env.flush()
        play(env, 18)


class PicturesEnv(gymnasium.Env[Any, Any]):
    """Large observations: a moving image, four-byte depths, a row of odd size, noise."""

    observation_space = spaces.Dict(
        picture=spaces.Box(0, 255, (48, 64, 3), np.uint8),
        depth=spaces.Box(-np.inf, np.inf, (32, 33), np.float32),
        odd=spaces.Box(0, 255, (4097,), np.uint8),
        noise=spaces.Box(0, 255, (4100,), np.uint8),
    )
    action_space = spaces.Discrete(2)

    def _observation(self) -> Any:
        random = np.random.default_rng(self._steps)
        self._picture[5:9, self._steps : self._steps + 4] = self._steps
        self._odd[self._steps * self._steps * 7] = self._steps
        depth = np.linspace(0, 1, 32 * 33, dtype=np.float32).reshape(32, 33) * np.float32(1 + self._steps / 7)
        noise = random.integers(0, 256, 4100, np.uint8)
        return {"picture": self._picture, "depth": depth, "odd": self._odd, "noise": noise}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._steps, self._picture, self._odd = 0, np.zeros((48, 64, 3), np.uint8), np.zeros(4097, np.uint8)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._observation(), 0.0, self._steps == 12, False, {}


def pictures(directory: Path) -> None:
    """Large rows of every kind: few changes, bytes grouped in each row, one-byte words, uncompressed."""
    with record(directory, PicturesEnv()) as env:
        episodes(env, 2)


def halfcheetah(directory: Path) -> None:
    with record(directory, gymnasium.make("HalfCheetah-v5", max_episode_steps=60)) as env:
        episodes(env, 2)


class ValuesEnv(gymnasium.Env[Any, Any]):
    """Returns every kind of value that a trace can hold."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {
                "text": spaces.Text(12, charset="aßé𝄞 "),
                "points": spaces.Sequence(spaces.Box(-1, 1, (2,), np.float64), seed=1),
                "stacked": spaces.Sequence(spaces.Discrete(9), stack=True, seed=2),
                "graph": spaces.Graph(spaces.Box(-1, 1, (3,)), spaces.Discrete(4), seed=3),
                "either": spaces.OneOf([spaces.Discrete(3), spaces.MultiBinary(4)], seed=4),
                "nested": spaces.Tuple(
                    [spaces.MultiDiscrete([[3, 4], [5, 6]]), spaces.Dict(bits=spaces.MultiBinary(5))]
                ),
                "plain": spaces.Box(-np.inf, np.inf, (2,), np.float32),
            },
            seed=5,
        )
        self.action_space = spaces.Tuple([spaces.Box(0, 255, (2, 2), np.uint8), spaces.Discrete(3, start=-1)])
        self.np_random = np.random.default_rng(6)
        self._steps = 0

    def _observation(self) -> Any:
        quiet_nan = np.array([0x7FC0_1234], np.uint32).view(np.float32)  # a NaN with a payload, next to a negative zero
        return {**self.observation_space.sample(), "plain": np.append(quiet_nan, np.float32(-0.0))}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._steps = 0
        return self._observation(), {"reset": "info"}

    def step(self, action: Any) -> tuple[Any, np.float32, bool, bool, dict[str, Any]]:
        self._steps += 1
        info = {
            "none": None,
            "numbers": [True, 1, -1, 2**63, -(2**63), 2**64 - 1, 2**100, -(2**100), 0.1, float("inf"), float("nan")],
            "texts": ["", "aßé𝄞", 'line\nand "quote" and \\', "\x00\x1f\x7f"],
            "bytes": bytes(range(256)),
            "tuple": (1, ("two", [3.5])),
            "complex": 1 - 2j,
            "array": np.arange(6, dtype=">i2").reshape(2, 3),
            "words": np.array(["a", "bcd"]),
            "when": np.datetime64("2026-01-01T00:00", "ns"),
            "objects": np.array([None, "x", 1.5], object),
            "scalar": np.float16(self._steps / 7),
            "empty": np.empty((0, 3), np.int8),
            "foreign": range(3),
            10: {"keys": "of several kinds", (1, 2): "a tuple", 2**40: "an integer"},
        }
        return self._observation(), np.float32(self._steps / 3), self._steps == 5, False, info


def values(directory: Path) -> None:
    """Every space, every extension type, reset options and a large seed."""
    with record(directory, ValuesEnv(), record_infos=True) as env, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns of the value that cannot be stored
        env.action_space.seed(0)
        for seed, options in [(2**70, {"level": (1, np.arange(3))}), (None, None), (-3, {})]:
            env.reset(seed=seed, options=options)
            play(env)


class WanderingEnv(gymnasium.Env[Any, Any]):
    """Observations with changing dtypes, often outside the space; rewards of two numbers."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._kinds: Iterator[type] = itertools.cycle([np.float32, np.float64, np.int16])

    def _observation(self) -> Any:
        return np.array([self._steps, 0.5], self._kind)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._steps, self._kind = 0, next(self._kinds)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._steps += 1
        if self._steps == 4:
            self._kind = next(self._kinds)
        return self._observation(), np.array([self._steps, -1.0]), self._steps == 6, False, {}


def mismatch(directory: Path) -> None:
    """Values that do not match their space: in a chunk alone, among others, and in the middle of an episode."""
    with record(directory, WanderingEnv()) as env, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns of each mismatch
        for episode in range(6):
            env.reset(seed=episode)
            for step in range(6):
                env.step(step % 2)
                if episode < 3 and step in (1, 3):
                    env.flush()


def filtered(directory: Path) -> None:
    """Keep two of every five steps; with infos and annotations that some steps lack."""
    env = gymnasium.make("Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3", max_episode_steps=23)
    with record(directory, env, frame_filter=lambda step: step % 5 in (2, 3), record_infos=True) as recorder:
        recorder.action_space.seed(0)
        for episode in range(3):
            recorder.reset(seed=episode)
            for step in range(23):
                recorder.annotate(value=step / 4, logits=np.full(3, step, np.float32))
                recorder.annotate(mask=np.ones(600, bool), policy="the same words at every step, " * 20)
                if step % 3 == 0:
                    recorder.annotate(note=f"step {step}")
                play(recorder, 1)
                if step % 10 == 7:
                    recorder.flush()  # in the middle of a kept run


def outcomes(directory: Path) -> None:
    """Outcomes: terminated, truncated, cut, no step, steps after the end, closed."""
    with record(directory, gymnasium.make("CartPole-v1", max_episode_steps=12, disable_env_checker=True)) as env:
        for action in (lambda i: 0, lambda i: i % 2):  # the pole falls; stays up until truncation
            env.reset(seed=1)
            for i in range(12):
                *_, terminated, truncated, _ = env.step(action(i))
                if terminated or truncated:
                    break
        env.reset(seed=2)
        env.step(0)
        env.reset(seed=3)
        env.reset(seed=4)
        env.action_space.seed(0)
        play(env)
        with mock.patch("gymnasium.logger.warn"):
            for _ in range(3):
                env.step(0)
        env.reset(seed=5)
        env.step(1)


def batches(directory: Path) -> None:
    """Episodes that span several chunks and batches."""
    small = mock.patch("gym_trace.format.batch_files.BATCH_BYTES", 4000)
    with small, record(directory, gymnasium.make("MountainCar-v0", max_episode_steps=90)) as env:
        env.action_space.seed(0)
        for episode in range(4):
            env.reset(seed=episode)
            for _ in range(3):
                play(env, 30)
                env.flush()


def two_writers(directory: Path) -> None:
    for split, count in (("train", 5), ("eval", 2)):
        env = gymnasium.make("CartPole-v1")
        with record(directory, env, uid=f"sample-{split}", split=split, on_exist="append") as recorder:
            episodes(recorder, count)


def compacted(directory: Path) -> None:
    """Four writers merged into the files of one; a fifth with another space keeps its own files."""
    apart = directory.with_name(f".{directory.name}")
    try:
        for number in range(4):
            options = {"split": "eval" if number == 2 else "train", "metadata": {"worker": number}}
            env = gymnasium.make("CartPole-v1")
            with record(apart, env, uid=f"sample-{number}", on_exist="append", **options) as recorder:
                episodes(recorder, 3, seeded=number != 1)
        with record(apart, gymnasium.make("MountainCar-v0"), uid="sample-car", on_exist="append") as recorder:
            recorder.reset(seed=0)
            play(recorder, 20)
        with mock.patch("gym_trace.tools.editing.compact.new_writer_id", return_value="sample-compacted"):
            edit.compact(apart, directory)
    finally:
        shutil.rmtree(apart)


def agents(directory: Path) -> None:
    """A writer of agents that act at once, and come and go, one of them unknown before; and a writer of turns."""
    from agent_envs import Meadow, Passing
    from agents_log import chooser, play_aec, play_parallel

    from gym_trace.pettingzoo import record as record_agents

    class Crowded(Meadow):
        def step(self, actions: Any) -> Any:
            told = super().step(actions)
            if self.time == 6:
                for values, value in zip(told, (np.arange(3), 2.5, False, True, {"late": True})):
                    values["latecomer"] = value
            return told

    options: dict[str, Any] = {"flush_seconds": 1e6, "record_infos": True, "on_exist": "append"}
    for uid, made, play_one in (("at-once", Crowded(), play_parallel), ("turns", Passing(), play_aec)):
        env = record_agents(made, directory, uid=f"sample-{uid}", state=isinstance(made, Meadow), **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning about the latecomer
            for seed, most in ((0, 100), (1, 5), (2, 100)):
                play_one(env, seed, chooser(seed), most)
                env.flush()
        env.close()


def killed(directory: Path) -> None:
    """A writer killed in the middle of an episode; the last record is truncated.

    The ring is deleted: only the system of the killed writer could read it.
    """
    child = os.fork()
    if child == 0:
        env = record(directory, gymnasium.make("CartPole-v1"))
        episodes(env, 3)
        env.reset(seed=3)
        for _ in range(2):
            play(env, 8)
            env.flush()
        signal.raise_signal(signal.SIGKILL)
    os.waitpid(child, 0)
    for ring in directory.glob("*.ring"):
        ring.unlink()
    (part,) = directory.glob("*.part")
    os.truncate(part, part.stat().st_size - 40)


def damaged(directory: Path) -> None:
    """A sealed batch with one flipped bit in its third chunk, in the middle of an episode."""
    with record(directory, gymnasium.make("MountainCar-v0", max_episode_steps=80)) as env:
        env.action_space.seed(0)
        for episode in range(2):
            env.reset(seed=episode)
            for _ in range(4):
                play(env, 20)
                env.flush()
    (batch,) = open_trace(directory).readers[0].batches
    begin, length = (int(batch.chunks[name][2]) for name in ("offset", "length"))
    data = bytearray(Path(batch.path).read_bytes())
    data[begin + length * 3 // 4] ^= 0x10
    Path(batch.path).write_bytes(data)


def parity(directory: Path) -> None:
    """Sealed batches with parity."""
    small = mock.patch("gym_trace.format.batch_files.BATCH_BYTES", 6000)
    with small, record(directory, gymnasium.make("MountainCar-v0", max_episode_steps=80), record_infos=True) as env:
        env.action_space.seed(0)
        for episode in range(6):
            env.reset(seed=episode)
            for _ in range(4):
                play(env, 20)
                env.flush()


class NoiseEnv(gymnasium.Env[Any, Any]):
    """Observations of noise."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self.np_random.normal(size=3), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self.np_random.normal(size=3), 1.0, self._steps == 4000, False, {}


def noise(directory: Path) -> None:
    """Observations that hardly compress: blocks of rows."""
    with record(directory, NoiseEnv()) as env:
        episodes(env, 1)


def empty(directory: Path) -> None:
    """A recorder closed before its first reset: a manifest, no batch."""
    record(directory, gymnasium.make("CartPole-v1")).close()


SAMPLES: dict[str, Callable[[Path], None]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        cartpole, taxi, blackjack, minigrid, pong, pictures, halfcheetah, values, mismatch, filtered, outcomes, batches,
        two_writers, agents, killed, damaged, parity, noise, empty, compacted,
    )
}  # fmt: skip
NEEDS = {"agents": "pettingzoo", "minigrid": "minigrid", "pong": "ale_py", "halfcheetah": "mujoco"}


# -- the command ------------------------------------------------------------------------------------------------------


@contextmanager
def fixed_surroundings(name: str) -> Iterator[None]:
    """Fix everything that differs between runs and machines."""
    ticks = itertools.count()
    names = itertools.count()

    def later(start: int, tick: int) -> Callable[[], int]:
        return lambda: start + tick * next(ticks)

    def random_bytes(count: int) -> bytes:
        return hashlib.shake_256(f"{name} {next(names)}".encode()).digest(count)

    with ExitStack() as stack:
        for target, replacement in {
            "socket.gethostname": lambda: "example",
            "platform.platform": lambda: "Linux",
            "os.getpid": lambda: 4711,
            "os.urandom": random_bytes,
            "time.time_ns": later(1_767_225_600_000_000_000, 1_000_003),  # 2026-01-01; the clocks drift apart
            "time.monotonic_ns": later(5_000_000_000, 1_000_000),
        }.items():
            stack.enter_context(mock.patch(target, replacement))
        yield


def make(name: str, replace: bool) -> None:
    directory = HERE / VERSION / name
    if directory.exists() and not replace:
        return print(f"{VERSION}/{name}: already exists, kept")
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        return print(f"{VERSION}/{name}: skipped; install {NEEDS[name]} first")
    shutil.rmtree(directory, ignore_errors=True)
    with fixed_surroundings(name):
        SAMPLES[name](directory)
    size = sum(path.stat().st_size for path in directory.iterdir())
    if size > LARGEST:
        raise SystemExit(f"{VERSION}/{name}: {size} bytes exceed the limit of {LARGEST}")
    expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    expected[f"{VERSION}/{name}"] = describe_trace(directory)
    EXPECTED.write_text(json.dumps(dict(sorted(expected.items())), indent=1, ensure_ascii=False) + "\n")
    print(f"{VERSION}/{name}: made, {size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the missing sample traces.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"samples to make. Default: all of {', '.join(SAMPLES)}"
    )
    parser.add_argument("--replace", action="store_true", help="rebuild existing samples")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in SAMPLES]:
        parser.error(f"unknown sample: {', '.join(unknown)}")
    names = given.names or list(SAMPLES)
    if len(names) == 1:
        return make(names[0], given.replace)
    for name in names:  # in separate processes: a sample lists the packages loaded in its process
        command = [sys.executable, __file__, name, *(["--replace"] if given.replace else [])]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "0", "GYM_TRACE_PURE": "1"})


if __name__ == "__main__":
    main()
