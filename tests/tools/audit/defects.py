"""Environments with one real defect each, and some without; each names the issue that it is made after."""

import copy
import random
import struct
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Walk(gymnasium.Env[Any, Any]):
    """A point with a velocity on a line: sound, with noise, a state, pictures and deep copies."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as gymnasium.Env has it
    observation_space: Any = spaces.Box(-50, 50, (2,), np.float32)
    action_space: Any = spaces.Box(-1, 1, (1,), np.float32)
    noise, friction = 0.1, 0.9

    def __init__(self, render_mode: str | None = None):
        self.render_mode = render_mode
        self.x = self.v = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.x, self.v = self.start(), 0.0
        return self.observation(), {}

    def step(self, action: Any) -> Any:
        self.v = self.friction * self.v + 0.3 * float(action[0]) + self.noise * self.drawn()
        self.x += self.v
        return self.observation(), -abs(self.x), bool(abs(self.x) > 2), False, {}

    def start(self) -> float:
        return float(self.np_random.uniform(-1, 1))

    def drawn(self) -> float:
        return float(self.np_random.normal())

    def observation(self) -> Any:
        return np.array([self.x, self.v], np.float32)

    def render(self) -> Any:
        return np.zeros((4, 4, 3), np.uint8)

    def get_state(self) -> bytes:
        return struct.pack("<2d", self.x, self.v)

    def set_state(self, state: bytes) -> None:
        self.x, self.v = struct.unpack("<2d", state)


class FixedStart(Walk):
    """Sound: every start is the same, and the steps are random."""

    def start(self) -> float:
        return 0.5


class Fixed(FixedStart):
    """Sound: nothing is random."""

    noise = 0.0


class RareStart(Walk):
    """Sound: most starts are the same."""

    def start(self) -> float:
        return float(self.np_random.random() < 0.2)


class FromPool(Walk):
    """Starts from a pool of states, one further with each reset, whatever the seed (lerobot#4152, lerobot#4224)."""

    resets, noise = 0, 0.0

    def start(self) -> float:
        self.resets += 1
        return float((self.resets * 0.37) % 1)


class NoisyPool(FromPool):
    """Its seed decides the steps, but not the start (lerobot#4315)."""

    noise = 0.1


class CountsResets(Walk):
    """Adds something to its start with each reset, on top of what the seed decides (lerobot#2899)."""

    resets = 0

    def start(self) -> float:
        self.resets += 1
        return super().start() + 1e-3 * self.resets


class SharesDefault(Walk):
    """Instances share a mutable object of the class (kaggle-environments#156, pybullet-gym#61)."""

    robot: Any = {"episodes": 0}  # noqa: RUF012 - the defect

    def start(self) -> float:
        self.robot["episodes"] += 1
        return super().start() + 0.01 * float(self.robot["episodes"])


class GlobalNumPy(Walk):
    """Draws from np.random, which nothing seeds (opfgym#2, bluesky-gym#43)."""

    def drawn(self) -> float:
        return float(np.random.normal())


class GlobalRandomStart(Walk):
    """Draws from the module random in resets without a seed only (Gymnasium#1084)."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, info = super().reset(seed=seed)
        if seed is None:
            self.x = random.random()
        return (observation if seed is not None else self.observation()), info


class SeedsGlobals(Walk):
    """Seeds the global generator in its reset, and draws from it (tianshou#604)."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            np.random.seed(seed)
        return super().reset(seed=seed)

    def drawn(self) -> float:
        return float(np.random.normal())


class OwnGenerator(Walk):
    """Makes a generator without a seed (flappy-bird-gymnasium#1)."""

    def __init__(self, render_mode: str | None = None):
        super().__init__(render_mode)
        self._random = np.random.default_rng()

    def start(self) -> float:
        return float(self._random.uniform(-1, 1))


class AtomicSums(Walk):
    """Adds numbers in another order each time, as atomic additions of a GPU do (mujoco_warp#562, IsaacLab#7561)."""

    def step(self, action: Any) -> Any:
        order = np.random.default_rng().permutation(np.float32([1e8, 1, -1e8, 3e-1, 7e7, -7e7]))
        self.v += 1e-7 * float(sum(order, np.float32(0)))
        return super().step(action)


class IgnoresSeed(Walk):
    """Seeds its generator once, when it is made (openvla#172, Metaworld#555, f1tenth_gym#135)."""

    def __init__(self, render_mode: str | None = None):
        super().__init__(render_mode)
        self._random = np.random.default_rng(42)

    def start(self) -> float:
        return float(self._random.uniform(-1, 1))

    def drawn(self) -> float:
        return float(self._random.normal())


class LargeModulo(Walk):
    """Takes 16 bits of the seed (after no issue)."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=None if seed is None else seed % 2**16)


class FirstSeedOnly(Walk):
    """Takes the seed of the first reset alone (osim-rl#52)."""

    is_seeded = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        seed, self.is_seeded = None if self.is_seeded else seed, True
        return super().reset(seed=seed)


class SeedZero(Walk):
    """Takes seed 0 for no seed (minerl#14)."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed or None)


class Modulo(Walk):
    """Takes the seed modulo the number of its start states (review of lerobot#4315)."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=None if seed is None else seed % 50)


class RepeatsSeed(Walk):
    """Seeds itself again in each reset without a seed, so all episodes are the same (Gymnasium#1207)."""

    last = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.last = self.last if seed is None else seed
        return super().reset(seed=self.last)


class WarmStart(Walk):
    """Keeps the solver's last solution: its resets look equal (Gymnasium-Robotics#208, mujoco#270)."""

    warm = 0.0

    def step(self, action: Any) -> Any:
        self.v += 1e-6 * self.warm
        self.warm = self.v
        return super().step(action)


class KeepsVelocity(Walk):
    """Resets its position, and not its velocity (racecar_gym#22, minos#73)."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        velocity = self.v
        _, info = super().reset(seed=seed)
        self.v = velocity
        return self.observation(), info


class ResetsAtTheEnd(Walk):
    """Clears a counter at the end of an episode, and so not after one that was cut (envpool#120)."""

    count = 0

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        self.count = 0 if terminated else self.count + 1
        return observation, reward - 0.01 * self.count, terminated, truncated, info


class Drifts(Walk):
    """Its friction changes with time and is never reset (ns_gym#43)."""

    def step(self, action: Any) -> Any:
        self.friction = self.friction * 0.9999
        return super().step(action)


class KeepsOptions(Walk):
    """Goes on with the options of an earlier reset (after no issue: Gymnasium's documents say what it should do)."""

    shift = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.shift = (options or {}).get("shift", self.shift)
        return super().reset(seed=seed)

    def start(self) -> float:
        return super().start() + self.shift


class WallClock(Walk):
    """Takes the time between two steps for the length of a step (strands-labs/robots#2413, gym-gazebo#195)."""

    def start(self) -> float:
        self.then = time.perf_counter()
        return super().start()

    def step(self, action: Any) -> Any:
        now = time.perf_counter()
        self.v += 1e-3 * (now - self.then)
        self.then = now
        return super().step(action)


class ChangesAction(Walk):
    """Clips the caller's action in place (garage#273)."""

    def step(self, action: Any) -> Any:
        np.clip(action, -0.5, 0.5, out=action)
        return super().step(action)


class OneBuffer(Walk):
    """Returns the same array again and again (SuperSuit#116, baselines#418)."""

    def observation(self) -> Any:
        self.buffer = getattr(self, "buffer", np.zeros(2, np.float32))
        self.buffer[:] = self.x, self.v
        return self.buffer


class LeavesSpace(Walk):
    """Its observations leave their space (Gymnasium#752, metaworld#39)."""

    observation_space = spaces.Box(np.float32([-2, -5]), np.float32([2, 5]))


class OtherDtype(Walk):
    """Its observations have another dtype than their space (gym#2336, myosuite#205)."""

    def observation(self) -> Any:
        return np.array([self.x, self.v])


class NotFinite(Walk):
    """Its reward is NaN at the goal (gym#755)."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, float("nan") if terminated else reward, terminated, truncated, info


class RenderDraws(Walk):
    """Perturbs the camera with the generator of the dynamics (gym-duckietown#201, gym#2255)."""

    def render(self) -> Any:
        self.drawn()
        return super().render()


class SetOrder(Walk):
    """Walks over a set of texts, whose order PYTHONHASHSEED decides (PettingZoo#241, YAWNING-TITAN#8)."""

    names = frozenset(f"node {number}" for number in range(40))

    def start(self) -> float:
        return int(next(iter(self.names)).split()[1]) / 40 + super().start()


class CachesStarts(Walk):
    """Takes the start of the first seed for those of seeds like it (after no issue: a cache with too coarse a key)."""

    cache: dict[int, float] = {}  # noqa: RUF012 - the defect

    def start(self) -> float:
        start = super().start()
        return self.cache.setdefault(round(start), start)


class SharedGenerator(Walk):
    """All lanes draw from one generator, which each reset seeds (ManiSkill#1000)."""

    generator: Any = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            SharedGenerator.generator = np.random.default_rng(seed)
        return super().reset(seed=seed)

    def start(self) -> float:
        return float(SharedGenerator.generator.uniform(-1, 1))

    def drawn(self) -> float:
        return float(SharedGenerator.generator.normal())


class CopySharesGenerator(Walk):
    """Its deep copy draws from the generator of the original (LLF-Bench#6, gym#2994)."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = copy.copy(self)
        twin.np_random = self.np_random
        return twin


class CopyForgets(Walk):
    """Its deep copy is made again from its arguments (Gymnasium#779, gym#1292)."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)(self.render_mode)


class StateOfNumbers(Walk):
    """Sound; its get_state() is not the one of recorders."""

    def get_state(self) -> Any:
        return self.x, self.v


class StateForgets(WarmStart):
    """Its state lacks the solver's last solution, which its reset clears (gym#1193, dm_control#64)."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.warm = 0.0
        return super().reset(seed=seed)


class Raises(Walk):
    """Fails far from its start."""

    def step(self, action: Any) -> Any:
        if abs(self.x) > 1.5:
            raise ZeroDivisionError("the end of the world")
        return super().step(action)


class Endless(Walk):
    """Sound, and never ends."""

    def step(self, action: Any) -> Any:
        self.x = float(np.clip(self.x, -1, 1))
        observation, reward, _, _, info = super().step(action)
        return observation, reward, False, False, info
