"""Arrangements: environments that do something besides playing, which must not change what is played.

They are not wrappers, so that a replay that sets the generator of an environment does not reach the audited one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import islice
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from gym_trace.data.tensors import plain_array
from gym_trace.data.trees import leaves_of
from gym_trace.data.values import copied
from gym_trace.envs.autoreset import FINAL_OBSERVATION, vector_mode
from gym_trace.envs.states import packed_state, restore_state, states_of
from gym_trace.errors import EnvironmentUnavailable
from gym_trace.format.ring.lanes.autoreset import SAME_STEP
from gym_trace.tools.audit.actions import RandomActions
from gym_trace.tools.audit.world import Mode, World

Make = Callable[..., Any]
OTHER_SEED = 977_431_207  # of resets whose episodes do not count
_REMEMBERED = 4  # observations that are compared with their copies in later steps
_DETOUR = 5  # most steps of an episode that does not count
_RENDERED = 50  # first steps of an episode that are rendered
_PAUSES, _PAUSE = 3, 0.01  # of an episode, seconds each


class Arranged(gymnasium.Env[Any, Any]):
    """Plays an environment as it is.

    Args:
        make: makes the environment.
        mode: how the world is while it plays.

    Attributes:
        middle: number of steps of the episode before something is done; set before each episode.
        turn: number of the episode, from 0.
        times: how often something was done in the middle.
        t: steps since the reset.
    """

    middle = 0

    def __init__(self, make: Make, world: World, mode: Mode = Mode.HELD):
        self._make, self._world, self._mode = make, world, mode
        self._opened: list[Any] = []
        self.turn, self.t, self.times = -1, 0, 0
        self.inner = self.opened()
        self.observation_space, self.action_space = self.inner.observation_space, self.inner.action_space

    def opened(self) -> Any:
        """Return a new environment, which close() closes."""
        self._opened.append(self._make())
        return self._opened[-1]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.turn, self.t = self.turn + 1, 0
        self.before_reset(seed)
        self._world.begin(self._mode)
        result = self.inner.reset(seed=seed, options=options)
        self.after()
        return result  # type: ignore[no-any-return]

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self.t == self.middle > 0:
            self.in_the_middle()
        self.before_step()
        self._world.proceed()
        result = self.inner.step(action)
        self.t += 1
        self.after()
        return result  # type: ignore[no-any-return]

    def before_reset(self, seed: int | None) -> None:
        """Do something before a reset."""

    def in_the_middle(self) -> None:
        """Do something before the middle step."""

    def before_step(self) -> None:
        """Do something before each step."""

    def after(self) -> None:
        """Do something after each reset and step."""

    def detour(self, env: Any, seed: int) -> None:
        """Play the beginning of another episode."""
        actions = RandomActions(env)
        with self._world.aside():
            env.reset(seed=seed)
            for _ in range(_DETOUR):
                if any(env.step(actions())[2:4]):
                    break

    def close(self) -> None:
        for env in self._opened:
            env.close()


class Alone(Arranged):
    """Plays each episode, and those without a seed after it, in a new environment."""

    def before_reset(self, seed: int | None) -> None:
        if seed is not None and self.turn:
            self._opened.pop().close()
            self.inner = self.opened()


class AsInLane(Alone):
    """Returns rewards of the type that a vector environment gives them: float64."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, *others = super().step(action)
        return (observation, np.float64(reward), *others)


class AfterCut(Arranged):
    """Cuts an episode of the same or another seed before each episode."""

    def before_reset(self, seed: int | None) -> None:
        self.detour(self.inner, int(seed or 0) if self.turn % 2 else OTHER_SEED)


class Reseeded(Arranged):
    """Replaces the seeds of resets: by the first one in episode 0, and so on."""

    def __init__(self, make: Make, world: World, seeds: list[int]):
        super().__init__(make, world)
        self._seeds = seeds

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=self._seeds[self.turn + 1], options=options)


class Rendered(Arranged):
    """Renders after resets and steps. calls: whether it does; False: only its render mode differs."""

    def __init__(self, make: Make, world: World, calls: bool = True):
        self._calls = calls
        super().__init__(make, world)

    def after(self) -> None:
        if self._calls and self.t <= _RENDERED:
            self.inner.render()


class Paused(Arranged):
    """Pauses before some steps; the clock of its world also differs."""

    def before_step(self) -> None:
        if self.t % max(1, self.middle) == 0 and self.turn < _PAUSES and self.t // max(1, self.middle) < _PAUSES:
            time.sleep(_PAUSE)


class Copied(Arranged):
    """Goes on in a deep copy in episodes 0, 2, 4 …, and in the original in the others; plays with the other one."""

    def in_the_middle(self) -> None:
        self.times += 1
        twin = deepcopy(self.inner)
        self._opened.append(twin)
        other, self.inner = (twin, self.inner) if self.turn % 2 else (self.inner, twin)
        with self._world.aside():
            other.step(RandomActions(other)())
        self.detour(other, OTHER_SEED)


class Restored(Arranged):
    """Saves the state, plays something else, and sets the state again: in a new environment, and in the same one."""

    def in_the_middle(self) -> None:
        states = states_of(self.inner)
        saved = None if states is None else packed_state(self.inner, states)
        if saved is None:  # the environment can give it only later
            self.middle += 1
            return
        self.times += 1
        if self.turn % 2 == 0:
            self.inner = self.opened()
        self.detour(self.inner, OTHER_SEED)
        with self._world.aside():
            self.inner.reset(seed=OTHER_SEED)
        new_states = states_of(self.inner)
        if new_states is None:
            raise EnvironmentUnavailable("another environment offers no state")
        restore_state(self.inner, new_states, saved, self.t)


class InLane(gymnasium.Env[Any, Any]):
    """Plays one lane of a vector environment; the other lanes get random actions.

    A reset without a seed right after the end of an episode is that of the vector environment itself.

    Args:
        envs: the vector environment.
        lane: index of the lane that is played.
        salt: seed of what the other lanes do.
    """

    def __init__(self, envs: Any, lane: int, salt: int = 0):
        self._envs, self._lane = envs, lane
        self.observation_space, self.action_space = envs.single_observation_space, envs.single_action_space
        self._others = deepcopy(envs.single_action_space)
        self._salt = salt
        self._following: Any = None  # the first observation of the next episode, where a step has it
        self._separate = isinstance(envs.unwrapped, (gymnasium.vector.SyncVectorEnv, gymnasium.vector.AsyncVectorEnv))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is None:
            if self._following is None:
                self._following = self._stepped(self._others.sample())[0]
            return self._following, {}
        self._others.seed(self._salt)
        seeds: Any = seed
        if self._separate:
            seeds = [OTHER_SEED + self._salt + lane for lane in range(self._envs.num_envs)]
            seeds[self._lane] = seed
        observations, _ = self._envs.reset(seed=seeds, options=options)
        return self._own(observations), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, infos = self._stepped(action)
        self._following = None
        if (terminated or truncated) and vector_mode(self._envs) == SAME_STEP:
            self._following = observation
            finals = next(infos[name] for name in FINAL_OBSERVATION if name in infos)
            observation = finals[self._lane]
        return observation, reward, terminated, truncated, {}

    def close(self) -> None:
        self._envs.close()

    def _stepped(self, action: Any) -> tuple[Any, Any, bool, bool, Mapping[str, Any]]:
        actions = [self._others.sample() for _ in range(self._envs.num_envs)]
        actions[self._lane] = action
        empty: Any = create_empty_array(self.action_space, len(actions))
        batch = concatenate(self.action_space, actions, empty)
        observations, rewards, terminations, truncations, infos = self._envs.step(batch)
        flags = bool(terminations[self._lane]), bool(truncations[self._lane])
        return self._own(observations), rewards[self._lane], *flags, infos

    def _own(self, observations: Any) -> Any:
        return copied(next(islice(iterate(self._envs.observation_space, observations), self._lane, None)))


# -- what is seen while the reference is recorded ---------------------------------------------------------------------


class Checked(Arranged):
    """Checks each value. problems: the first one by name of the claim, as text with episode and step."""

    def __init__(self, make: Make, world: World):
        super().__init__(make, world)
        self.problems: dict[str, str] = {}
        self._recent: deque[tuple[str, list[Any], list[Any]]] = deque(maxlen=_REMEMBERED)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        result = super().reset(seed=seed, options=options)
        self._check(result[0], "reset")
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        given = copied(action)
        result = super().step(action)
        where = f"step {self.t - 1}"
        for before, after in zip(_arrays(given), _arrays(action)):
            if before.tobytes() != after.tobytes():
                at = tuple(np.argwhere(before != after)[0].tolist()) if before.shape else ()
                text = f"given {before[at][()]}, afterwards {after[at][()]}"
                self._note("action-unchanged", where, f"action{list(at) or ''}: {text}")
        self._check(result[0], where)
        misfit = _misfit_of_reward(result[1], hasattr(self.inner.unwrapped, "reward_space"))
        for name, flag in zip(("terminated", "truncated"), result[2:4]):
            misfit = misfit or ("" if np.asarray(flag).dtype == np.bool_ else f"{name} is {type(flag).__name__}")
        if misfit:
            self._note("in-space", where, misfit)
        return result

    def _check(self, observation: Any, where: str) -> None:
        for then, kept, returned in self._recent:
            if any(one.tobytes() != other.tobytes() for one, other in zip(kept, returned)):
                self._note("fresh-observations", where, f"it changed the observation that {then} had returned")
        self._recent.append((where, list(map(np.copy, _arrays(observation))), _arrays(observation)))
        if misfit := misfit_of(self.observation_space, observation):
            self._note("in-space", where, misfit)

    def _note(self, claim: str, where: str, text: str) -> None:
        self.problems.setdefault(claim, f"first seen at episode {self.turn}, {where}: {text}")


def _arrays(tree: Any) -> list[Any]:
    leaves = map(plain_array, leaves_of(tree))
    return [leaf for leaf in leaves if isinstance(leaf, np.ndarray) and leaf.dtype != object]


def _misfit_of_reward(reward: Any, may_be_array: bool) -> str:
    if isinstance(reward, np.ndarray) and not (may_be_array or reward.size == 1):
        return f"the reward is an array of shape {reward.shape}"
    try:
        return "" if np.isfinite(np.asarray(reward, np.float64)).all() else f"the reward is {reward}"
    except (TypeError, ValueError):
        return f"the reward is {type(reward).__name__}, not a number"


def misfit_of(space: Any, value: Any, name: str = "observations") -> str:
    """Return what keeps a value out of its space; "" if it is in it."""
    value = plain_array(value)
    value = np.asarray(value) if isinstance(space, spaces.Box) and isinstance(value, np.generic) else value
    parts: Any = ()
    if isinstance(space, spaces.Dict) and isinstance(value, Mapping) and value.keys() == space.spaces.keys():
        parts = [(f"{name}/{key}", part, value[key]) for key, part in space.spaces.items()]
    elif isinstance(space, spaces.Tuple) and isinstance(value, tuple) and len(value) == len(space.spaces):
        parts = [(f"{name}/{i}", part, value[i]) for i, part in enumerate(space.spaces)]
    if parts:
        return next(filter(None, (misfit_of(part, item, path) for path, part, item in parts)), "")
    if not isinstance(space, spaces.Box):
        return "" if space.contains(value) else f"{name} is {str(value)[:100]}, not in {space}"
    if not isinstance(value, np.ndarray):
        return f"{name} is {type(value).__name__}, not an array"
    if value.shape != space.shape:
        return f"{name} has the shape {value.shape}, its space {space.shape}"
    if space.dtype is not None and not np.can_cast(value.dtype, space.dtype):
        return f"{name} is {value.dtype}, its space {space.dtype}"
    inside = (value >= space.low) & (value <= space.high)
    if inside.all():
        return ""
    at = tuple(np.argwhere(~inside)[0].tolist())
    index = f"[{', '.join(map(str, at))}]" if at else ""
    return f"{name}{index} is {value[at]}, its space {space.low[at]} to {space.high[at]}"
