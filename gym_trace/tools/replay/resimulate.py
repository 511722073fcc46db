"""Play recorded episodes again in their environment, each from its recorded start, and compare the results."""

from __future__ import annotations

import logging
import math
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np

from gym_trace.data.episode import Episode
from gym_trace.data.values import EnumMember, Unstored, row_of
from gym_trace.data.vocabulary import ENVIRONMENT, GENERATOR
from gym_trace.envs.autoreset import without_autoreset
from gym_trace.envs.consent import may_act, takes_much, together, whole
from gym_trace.envs.seeding import generator_state, restore_generator
from gym_trace.envs.states import can_restore, is_checked, least_compared, restore_state, states_of
from gym_trace.errors import CorruptTrace, EnvironmentUnavailable, RenderingError
from gym_trace.playback.trace import Trace
from gym_trace.printable import error_text
from gym_trace.tools.replay.compare import Comparison, Difference, EpisodeComparison, Fingerprint
from gym_trace.tools.replay.lanes import Lane
from gym_trace.tools.replay.observations import ObservationRows

IDENTICAL, CLOSE, DIFFERS = "identical", "close", "differs"
UNVERIFIABLE, DAMAGED = "unverifiable", "damaged"

_LONGEST = 4000  # characters of what an environment says
_IN_MEMORY = 64 << 20  # bytes of an episode's observations; of longer ones single rows are read
_STEPS_LOST = "earlier steps were filtered out or lost"
_UNKNOWN_START = "reset without a seed, and no generator state recorded"
_UNSTEADY = "two replays also differ: not deterministic"
_ALONE = "matches only by itself, in a fresh environment"
NO_SEED = -1  # in the table of episodes

_log = logging.getLogger("gym_trace")
MakeEnv = Callable[..., gymnasium.Env[Any, Any]]
SetGenerator = Callable[[Any, Any], None]  # given the environment and the state
Watch = Callable[[gymnasium.Env[Any, Any], int], None]  # given the environment and how many steps it has taken


@dataclass(frozen=True)
class Verdict:
    """Result of replaying one episode.

    verdict: "identical" (bit for bit), "close" (within the tolerance), "differs", "unverifiable", or "damaged".
    difference: the first one, if it differs.
    largest: largest difference of numbers that count as close.
    reason: why it is unverifiable, what is damaged, or another note.
    crash: result of the action in progress when the recording was killed, if it was executed again.
    needed: number of episodes, those right before it in its lane, that had to be played first in the same environment:
        without them the episode has no start, or differs. 0 also if it matches in its turn, after those before it.
    """

    index: int
    writer: str
    episode_id: int
    lane: int
    steps: int
    verdict: str
    difference: Difference | None = None
    largest: float = 0.0
    reason: str = ""
    crash: str = ""
    needed: int = 0

    @property
    def matches(self) -> bool:
        """Return True if it is identical or close."""
        return self.verdict in (IDENTICAL, CLOSE)

    @property
    def reach(self) -> float:
        """Number of steps before the first difference; -1 at the reset, infinite without one."""
        if self.verdict != DIFFERS or self.difference is None:
            return math.inf
        return -1 if self.difference.step is None else self.difference.step


def _restored(env: gymnasium.Env[Any, Any], state: Any) -> None:
    restore_generator(env.unwrapped, state)


class _Simulation:
    """An environment that episodes are played in, and its position.

    set_generator: sets the environment's random generator where that was recorded between two steps.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], set_generator: SetGenerator = _restored):
        self.env, self.set_generator = env, set_generator
        self.generator: Any = None  # its state before a reset of which the recording has no start
        self.observation: Any = None  # the last one
        self.begin = 0  # step before which the environment stands already, restored from a state
        self.after: int | None = None  # position in the lane of the episode it has just played to its end
        self.origin = 0  # position from which on it has played all of them


def _executed(env: gymnasium.Env[Any, Any], action: Any) -> str:
    """Step an environment in a copy of this process, and describe what it returned or raised, or how it died.

    Raises EnvironmentUnavailable if the system cannot copy processes.
    """
    if not hasattr(os, "fork"):
        raise EnvironmentUnavailable("repeating the step of a crash needs os.fork")
    said, telling = os.pipe()
    with warnings.catch_warnings():  # about other threads: the copy only steps
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        _step_and_tell(env, action, telling)
    os.close(telling)
    try:
        with open(said, "rb") as pipe:
            words = pipe.read()
    finally:
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"the process died of {signal.Signals(os.WTERMSIG(status)).name}"
    return words.decode("utf-8", "replace") or f"the process exited with {os.WEXITSTATUS(status)}"


def _step_and_tell(env: gymnasium.Env[Any, Any], action: Any, telling: int) -> None:
    """Never returns."""
    try:
        try:
            _, reward, terminated, truncated, _ = env.step(action)
            words = f"it returned: reward {reward}, terminated {terminated}, truncated {truncated}"
        except BaseException as error:  # user code: report whatever it does
            words = f"it raised {error_text(error)}"
        os.write(telling, words[:_LONGEST].encode("utf-8", "replace"))
    finally:
        os._exit(0)


class LaneReplay:
    """Plays episodes of a lane in an environment, best in their order.

    An episode is started as it was: with its seed and options, or with the state that the environment's generator had
    before an unseeded reset. Some environments have more randomness than that, or carry something from episode to
    episode. So if an episode differs, or its start is unknown, it is replayed after the episodes before it: from the
    last seeded one on, then from the first one on; and by itself in a fresh environment. One that differs first and
    matches then has to match a second time, because it may have matched by chance.
    """

    def __init__(
        self,
        trace: Trace,
        lane: Lane,
        make: MakeEnv,
        comparison: Comparison,
        trust: bool = False,
        on_step: Callable[[], None] = lambda: None,
    ):
        self._trace, self._lane, self._make, self._comparison = trace, lane, make, comparison
        self._on_step = on_step  # called after each step that is taken; what it raises ends the replay
        self._trust = trust  # to give the environment options that may name a file or a module
        self._simulation: _Simulation | None = None
        self._hopeful = True  # replaying earlier episodes may help

    def close(self) -> None:
        if self._simulation is not None:
            self._simulation.env.close()
            self._simulation = None

    def play(self, position: int) -> Verdict:
        """Plays the episode at a position of the lane. Raises EnvironmentUnavailable."""
        verdict, _ = self._furthest(position)
        return self._doubted(self._episode(position), verdict) if verdict.verdict == DIFFERS else verdict

    def film(
        self,
        position: int,
        watch: Watch,
        make: MakeEnv | None = None,
        on_verdict: Callable[[Verdict], None] = lambda verdict: None,
    ) -> Verdict:
        """Like play(); watch is called once after the reset and after each step, in a matching replay if possible.

        make: makes the environment to watch it in; None: the same. on_verdict: called with the verdict before watching.
        Raises RenderingError if that environment raises an error that the replay did not.
        """
        verdict = self.play(position)
        on_verdict(verdict)
        simulation = self._simulation
        right = simulation is not None and simulation.after == position
        origin = simulation.origin if simulation is not None and right else position
        verified, self._make = self._make, make or self._make
        try:
            if not self._episode(position).first_step:
                seen = self._played_from(origin, position, watch)
                seen = seen or self._attempt(self._fresh(), position, self._episode(position), watch)
                trouble = seen.difference
                if trouble is not None and trouble.column == "error" and trouble != verdict.difference:
                    raise RenderingError(f"cannot render the environment: {trouble}")
        finally:
            self._make = verified
            if make is not None:
                self.close()
        return verdict

    def start_at(self, position: int, step: int) -> tuple[Verdict, gymnasium.Env[Any, Any], int] | None:
        """Like stand_at(), but from a recorded state before the step; also return the step of that state.

        The verdict is on the steps since. None: there is no state, it cannot be restored here, or a result after it
        differs.
        """
        episode = self._episode(position)
        kept: Any = [] if episode.first_step else episode.states.get(ENVIRONMENT, [])
        if not len(kept):
            return None
        simulation = self._fresh()
        states = states_of(simulation.env)
        if states is None or not (self._trust or is_checked(states)) or not can_restore(simulation.env):
            return None
        last = min(step - least_compared(states), len(kept) - 1)
        begin = next((i for i in range(last, 0, -1) if kept[i] is not None), 0)
        if not begin:
            return None
        try:
            simulation.env.reset(seed=episode.seed, options=self._options(episode))
            restore_state(simulation.env, states, kept[begin], begin)
        except Exception as error:  # user code
            _log.warning("episode %d: state before step %d not used: %s", episode.index, begin, error)
            return None
        simulation.begin = begin
        verdict = self._attempt(simulation, -1, episode[:step])
        if not verdict.matches:
            return None
        self._simulation = None
        return verdict, simulation.env, begin

    def stand_at(self, position: int, step: int) -> tuple[Verdict, gymnasium.Env[Any, Any] | None]:
        """Play an episode to just before a step; return the verdict, and the environment, now the caller's.

        The whole episode is played first, because what is missing may show only after the step. The verdict is on all
        of it; the environment is None if a result before the step differs. step: len(episode) is after its last one.
        Raises EnvironmentUnavailable.
        """
        verdict, origin = self._furthest(position)
        if origin is None:
            return verdict, None
        episode = self._episode(position)
        if verdict.reach < step:
            return self._doubted(episode, verdict), None
        if not (verdict.matches and step == len(episode)):  # where it stands already
            again = self._played_from(origin, position, steps=step)
            if again is None or not again.matches:
                again = again or verdict
                return again if again.verdict == UNVERIFIABLE else self._unsteady(episode, again), None
        simulation, self._simulation = self._simulation, None
        return verdict, None if simulation is None else simulation.env

    def generator_before(self, position: int) -> Any:
        """Return the state of the environment's random generator before the reset of an episode.

        It is recorded, or reached by playing the episodes before. None: the reset was seeded, or the state is unknown.
        """
        episode = self._episode(position)
        if _is_restorable(episode) or not self._lane.follows[position]:
            return episode.rng_state
        _, env = self.stand_at(position - 1, len(self._episode(position - 1)))
        if env is None:
            return None
        with closing(env):
            return generator_state(env.unwrapped)

    def play_in(
        self,
        env: gymnasium.Env[Any, Any],
        position: int,
        steps: int,
        generator: Any,
        set_generator: SetGenerator = _restored,
    ) -> tuple[Verdict, Any]:
        """Play the first steps of an episode, from its own reset, in an environment of the caller's.

        Return the verdict on them, and the last observation. generator: from generator_before(). set_generator: called
        where the generator was set between two steps.
        """
        episode = self._episode(position)
        if episode.first_step or (episode.seed is None and generator is None):
            return verdict_on(episode, UNVERIFIABLE, reason=_STEPS_LOST if episode.first_step else _UNKNOWN_START), None
        simulation = _Simulation(env, set_generator)
        simulation.generator = generator
        return self._attempt(simulation, -1, episode[:steps]), simulation.observation

    def go_through_the_crash(self, position: int) -> str:
        """Execute the unanswered action at the end of the episode just played; return the result, or "" without one.

        Raises EnvironmentUnavailable.
        """
        action, simulation = self._episode(position).pending_action, self._simulation
        if action is None or simulation is None or simulation.after != position:
            return ""
        if _has_unstored(action):
            raise EnvironmentUnavailable("the unanswered action could not be stored")
        return _executed(simulation.env, action)

    # -- how to get there ---------------------------------------------------------------------------------------------

    def _episode(self, position: int) -> Episode:
        return self._trace[self._lane.indices[position]]

    def _is_seeded(self, position: int) -> bool:
        return bool(self._trace.episodes["seed"][self._lane.indices[position]] != NO_SEED)

    def _fresh(self) -> _Simulation:
        self.close()
        self._simulation = _Simulation(without_autoreset(self._make()))
        return self._simulation

    def _stands_before(self, simulation: _Simulation, position: int) -> bool:
        return self._lane.follows[position] and simulation.after == position - 1

    def _origins(self, position: int) -> Iterator[int]:
        """Yield other positions to start from: the last seeded episode before, then the first of all."""
        first = position
        while self._lane.follows[first]:
            first -= 1
            if self._is_seeded(first):
                yield first
                break
        seeded = first
        while self._lane.follows[first]:
            first -= 1
        if first < seeded or (first < position and not self._is_seeded(first)):
            yield first

    def _furthest(self, position: int) -> tuple[Verdict, int | None]:
        """Play an episode in one arrangement after another, until one matches.

        Return the verdict that reaches furthest, and the position from which on episodes were played for it; None if
        the episode cannot be started.
        """
        episode = self._episode(position)
        if episode.first_step:
            return verdict_on(episode, UNVERIFIABLE, reason=_STEPS_LOST), None
        is_fresh, restorable = self._simulation is None, _is_restorable(episode)
        simulation = self._simulation or self._fresh()
        origin = simulation.origin if self._stands_before(simulation, position) else position
        best, begun = None, origin
        if restorable or origin < position:
            best = self._attempt(simulation, position, episode)
            best = best if restorable else replace(best, needed=position - origin)
        for earlier in (*self._origins(origin), *([position] if restorable and not is_fresh else [])):
            if best is not None and (best.verdict != DIFFERS or (earlier < position and not self._hopeful)):
                continue
            found = self._played_from(earlier, position)
            if best is not None and found is not None and found.matches:  # the first time perhaps by chance
                again = self._played_from(earlier, position)
                if again is None or not again.matches:
                    return replace(best, reason=_UNSTEADY), begun
                found = max(found, again, key=lambda verdict: verdict.largest)
            if found is not None and (best is None or found.reach > best.reach):
                alone = _ALONE if best is not None and found.matches and earlier == position else ""
                best, begun = replace(found, needed=position - earlier, reason=found.reason or alone), earlier
        if best is None:
            return verdict_on(episode, UNVERIFIABLE, reason=_UNKNOWN_START), None
        return best, begun

    def _played_from(
        self, origin: int, position: int, watch: Watch | None = None, steps: int | None = None
    ) -> Verdict | None:
        """Return the verdict on an episode after all from origin on; None if one of these differs.

        steps: of the episode to play; None: all.
        """
        try:
            if not _is_restorable(self._episode(origin)):
                return None
            simulation = self._fresh()
            for before in range(origin, position):
                if self._attempt(simulation, before, self._episode(before)).verdict == DIFFERS:
                    return None
        except CorruptTrace:
            if origin == position:
                raise
            return None  # damage in an earlier episode says nothing about the requested one
        return self._attempt(simulation, position, self._episode(position)[:steps], watch)

    def _doubted(self, episode: Episode, verdict: Verdict) -> Verdict:
        """Return a verdict of "differs", unless two replays differ from each other, too."""
        self._hopeful = False
        if verdict.reason:
            return self._unsteady(episode, verdict)
        if not _is_restorable(episode):
            return verdict
        by_infos = verdict.difference is not None and verdict.difference.column.startswith("infos/")
        try:
            first, second = (self._fingerprint(episode, by_infos) for _ in range(2))
        except EnvironmentUnavailable:  # behind the difference there is an action that could not be stored
            return verdict
        finally:
            self.close()
        return verdict if first == second else self._unsteady(episode, verdict)

    def _unsteady(self, episode: Episode, verdict: Verdict) -> Verdict:
        """Return the verdict on an episode whose replays differ from each other."""
        if episode.seed is not None:
            return replace(verdict, reason=_UNSTEADY)
        column = "" if verdict.difference is None else verdict.difference.column.partition("/")[0]
        first = f"{column} differ, and so do two replays" if column in Comparison.COLUMNS else "two replays differ"
        reason = f"{first}: some randomness is not restored by seed or generator state"
        return verdict_on(episode, UNVERIFIABLE, reason=reason)

    def _fingerprint(self, episode: Episode, infos: bool) -> bytes:
        """Return a hash of the results of replaying the episode by itself in a fresh environment."""
        seen = Fingerprint(infos)
        self._simulate(self._fresh(), episode, seen, None)
        return seen.digest()

    # -- playing ------------------------------------------------------------------------------------------------------

    def _attempt(self, simulation: _Simulation, position: int, episode: Episode, watch: Watch | None = None) -> Verdict:
        if not self._stands_before(simulation, position):
            simulation.origin = position
        simulation.after = None
        observations = None
        row_size = sum(leaf.row_size for leaf in self._lane.writer.layouts.observations.leaves())
        if row_size * len(episode) > _IN_MEMORY:
            observations = ObservationRows(self._trace, episode.index).tree()
        about = self._lane.writer.about
        in_arrays = about.is_vector or about.is_imported  # other formats keep infos in arrays, too
        seen = EpisodeComparison(
            self._comparison, episode, about.layouts, observations, about.has_all_infos, in_arrays, replayed=True
        )
        try:
            difference = self._simulate(simulation, episode, seen, watch)
        except EnvironmentUnavailable as error:
            return verdict_on(episode, UNVERIFIABLE, reason=str(error))
        if difference is not None:
            return verdict_on(episode, DIFFERS, difference=difference, largest=seen.largest)
        simulation.after = position
        return verdict_on(episode, IDENTICAL if seen.exact else CLOSE, largest=seen.largest)

    def _options(self, episode: Episode) -> Any:
        """Return the options of the reset, for the environment to keep. Raises EnvironmentUnavailable."""
        try:
            if _has_unstored(episode.options):
                raise EnvironmentUnavailable("its reset options could not be stored")
            acts = may_act("options", episode.options) or takes_much("options", episode.options)
            would = together([whole(episode.options)]) if acts else ""
            if self._trust or not acts:
                return deepcopy(episode.options)
        except RecursionError as error:
            raise EnvironmentUnavailable("its reset options are nested too deep") from error
        raise EnvironmentUnavailable(
            "its reset options may name a file or a module, or take much memory or time: "
            f"{would}; if you trust this trace, pass --trust (trust=True in Python)"
        )

    def _simulate(
        self, simulation: _Simulation, episode: Episode, seen: EpisodeComparison | Fingerprint, watch: Watch | None
    ) -> Difference | None:
        """Return the first difference; with watch, play to the end."""
        env = simulation.env
        told: Any
        first, told = None, (None,)
        if not simulation.begin:
            start = simulation.generator if episode.rng_state is None else episode.rng_state
            if episode.seed is None and start is not None:
                restore_generator(env.unwrapped, start)
            options = self._options(episode)
            try:
                told = env.reset(seed=episode.seed, options=options)
            except Exception as error:  # user code: report whatever it does
                return _raised(None, error)
            first = seen.reset(*told)
        if watch is not None:
            watch(env, simulation.begin)
        actions = episode.actions
        typed = not _has_unstored(actions)
        generators = episode.states.get(GENERATOR)
        for step in range(simulation.begin, len(episode)):
            if first is not None and watch is None:
                break
            action = row_of(actions, step)
            if not typed and _has_unstored(action):
                raise EnvironmentUnavailable(f"its action at step {step} could not be stored")
            if generators is not None and generators[step] is not None:
                simulation.set_generator(env, generators[step])
            try:
                told = env.step(action)
            except Exception as error:  # as above
                return first or _raised(step, error)
            self._on_step()
            first = first or seen.step(step, *told)
            if watch is not None:
                watch(env, step + 1)
        simulation.observation = told[0]
        return first


def _raised(step: int | None, error: Exception) -> Difference:
    return Difference(step, "error", (), None, error_text(error), None)


def _has_unstored(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_unstored, value.values()))
    if isinstance(value, np.ndarray):
        return value.dtype == object and any(map(_has_unstored, value.ravel().tolist()))
    return isinstance(value, (EnumMember, Unstored)) or (
        isinstance(value, (list, tuple)) and any(map(_has_unstored, value))
    )


def _is_restorable(episode: Episode) -> bool:
    return not episode.first_step and (episode.seed is not None or episode.rng_state is not None)


def verdict_on(episode: Episode, verdict: str, **more: Any) -> Verdict:
    """Make a verdict on an episode. more: its other fields."""
    return Verdict(episode.index, episode.writer, episode.episode_id, episode.lane, len(episode), verdict, **more)
