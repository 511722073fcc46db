"""Replay recorded episodes in their environment, each from its recorded start, and compare the results."""

from __future__ import annotations

import logging
import math
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, cast

import gymnasium
import numpy as np

from gym_trace.data.episode import Episode
from gym_trace.data.layout import Layout
from gym_trace.data.values import EnumMember, Unstored, row_of
from gym_trace.data.vocabulary import ENVIRONMENT, FINAL, GENERATOR
from gym_trace.envs.autoreset import without_autoreset
from gym_trace.envs.consent import may_act, takes_much, together, whole
from gym_trace.envs.seeding import generator_state, restore_generator
from gym_trace.envs.states import can_restore, least_compared, restore_state, settable_states
from gym_trace.errors import CorruptTrace, EnvironmentUnavailable, RecordingError, RenderingError
from gym_trace.playback.trace import Trace
from gym_trace.printable import error_text
from gym_trace.tools.replay.compare import Comparison, Difference, EpisodeComparison, Fingerprint, FirstDifferences
from gym_trace.tools.replay.divergence import Divergence, DivergenceMeter
from gym_trace.tools.replay.lanes import Lane
from gym_trace.tools.replay.observations import ObservationRows

IDENTICAL, CLOSE, DIFFERS = "identical", "close", "differs"
UNVERIFIABLE, DAMAGED = "unverifiable", "damaged"

_MOST_CHARACTERS = 4000  # kept of a crash report
_IN_MEMORY = 64 << 20  # bytes of an episode's observations; longer episodes are read row by row
STEPS_LOST = "earlier steps were filtered out or lost"
UNKNOWN_START = "reset without a seed, and no generator state recorded"
_NOT_DETERMINISTIC = "two replays also differ: not deterministic"
_ONLY_FRESH = "matches only by itself, in a fresh environment"
_EARLIER_MISSING = (
    "by itself it differs at the reset; its start may depend on episodes that came before it in its recording and are "
    "not in this trace: verify the original"
)
_NO_STATES = "no states of it were recorded; record them with states=1 (gym-trace record --states 1)"
_PROBED_STEPS = 100  # played of an episode that is tried without those before it
NO_SEED = -1  # in the table of episodes
AUTO, REPLAY, STATES = "auto", "replay", "states"  # how environments get to a step, see Making

_log = logging.getLogger("gym_trace")
MakeEnv = Callable[..., gymnasium.Env[Any, Any]]
SetGenerator = Callable[[Any, Any], None]  # called with the environment and the state
# Called with the environment and the number of its steps, after the reset and after each step; True ends the replay.
Watch = Callable[[gymnasium.Env[Any, Any], int], Any]


@dataclass(frozen=True)
class Verdict:
    """Result of replaying one episode.

    Attributes:
        verdict: "identical" (bit for bit), "close" (within the tolerance), "differs", "unverifiable", or "damaged".
        difference: the first difference, if the verdict is "differs".
        largest: largest difference of numbers that count as close.
        reason: why it is unverifiable, what is damaged, or another note.
        crash: result of the action in progress when the recording was killed, if it was executed again.
        needed: number of episodes right before it in its lane that had to be replayed first in the same environment,
            because without them its start is unknown or its results differ. The first seeded episode of a lane that
            follows another is tried by itself; if it matches, those after it are not, and have 0. If it does not, each
            of those is, unless the environment renders.
        divergences: how far each leaf of observations and the rewards depart, the earliest first, when an episode that
            differs is replayed to its end by itself, in a fresh environment. Differences of other replays may begin at
            other steps. Empty if it cannot be started by itself.
        from_states: number of recorded states to which the environment was set; 0 for a replay from the reset. Only
            steps between states are compared, or, if each step is compared by itself (one_step of verify_trace()),
            those that began at a state; divergences are then these errors.

    Examples:
        >>> verdict = next(gym_trace.verify_trace("traces/cartpole"))
        >>> verdict.verdict, verdict.matches, verdict.steps
        ('identical', True, 12)
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
    divergences: tuple[Divergence, ...] = ()
    from_states: int = 0

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


def problem_of(verdict: Verdict) -> str:
    """Return how a replay differs from its recording, or why that is unknown."""
    if verdict.verdict != DIFFERS:
        return f"the replay may differ from the recording: {verdict.reason}"
    note = f" ({verdict.reason})" if verdict.reason else ""
    return f"the replay differs from the recording, {verdict.difference}{note}"


def _set_generator(env: gymnasium.Env[Any, Any], state: Any) -> None:
    restore_generator(env.unwrapped, state)


class _Simulation:
    """An environment to replay episodes in, and the episodes that it has replayed.

    Attributes:
        set_generator: sets the environment's random generator where its state was recorded between two steps.
        generator: state of the generator before a reset whose recording has none.
        observation: the last observation.
        begin: step of the state to which the environment was set already; None: it must be reset.
        kind: gets and sets its state.
        states: recorded states by step, to which it is set when it gets there.
        is_compared: returns whether the result of a step is compared; step -1 is the reset.
        finished: position in the lane of the episode that was just replayed to its end, or None.
        origin: position of the first episode of the unbroken sequence that was replayed.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], set_generator: SetGenerator = _set_generator):
        self.env, self.set_generator = env, set_generator
        self.generator: Any = None
        self.observation: Any = None
        self.begin: int | None = None
        self.kind: Any = None
        self.states: Mapping[int, Any] = {}
        self.is_compared: Callable[[int], bool] = lambda step: True
        self.finished: int | None = None
        self.origin = 0

    def arrive(self, step: int) -> None:
        """Set the environment to its recorded state before a step, if there is one."""
        if step in self.states:
            restore_state(self.env, self.kind, self.states[step], step)


def _step_in_a_fork(env: gymnasium.Env[Any, Any], action: Any) -> str:
    """Step an environment in a copy of this process, and describe what it returned or raised, or how it died.

    Raises EnvironmentUnavailable if the system cannot copy processes.
    """
    if not hasattr(os, "fork"):
        raise EnvironmentUnavailable("repeating the step of a crash needs os.fork")
    reading, writing = os.pipe()
    with warnings.catch_warnings():  # Python warns of other threads, but the copy only steps
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        _step_and_exit(env, action, writing)
    os.close(writing)
    try:
        with open(reading, "rb") as pipe:
            report = pipe.read()
    finally:
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"the process died of {signal.Signals(os.WTERMSIG(status)).name}"
    return report.decode("utf-8", "replace") or f"the process exited with {os.WEXITSTATUS(status)}"


def _step_and_exit(env: gymnasium.Env[Any, Any], action: Any, pipe: int) -> None:
    try:
        try:
            _, reward, terminated, truncated, _ = env.step(action)
            report = f"it returned: reward {reward}, terminated {terminated}, truncated {truncated}"
        except BaseException as error:  # user code may raise anything
            report = f"it raised {error_text(error)}"
        os.write(pipe, report[:_MOST_CHARACTERS].encode("utf-8", "replace"))
    finally:
        os._exit(0)


class _Both:
    """Passes results to a fingerprint and a meter."""

    def __init__(self, *takers: Fingerprint | DivergenceMeter):
        self._takers = takers

    def reset(self, *result: Any) -> None:
        for taker in self._takers:
            taker.reset(*result)

    def step(self, *result: Any) -> None:
        for taker in self._takers:
            taker.step(*result)


class _Measured:
    """Compares results up to the first difference, and measures all from there on.

    Args:
        until_end: see DivergenceMeter.

    Attributes:
        first: the first difference.
        meter: what measures; None while all is equal.
    """

    def __init__(self, compared: EpisodeComparison, until_end: bool):
        self._compared, self._until_end = compared, until_end
        self.first: Difference | None = None
        self.meter: DivergenceMeter | None = None

    def reset(self, *result: Any) -> None:
        self._look(self._compared.reset(*result))
        if self.meter is not None:
            self.meter.reset(*result)

    def step(self, *result: Any) -> None:
        if self.meter is None:
            self._look(self._compared.step(*result))
        if self.meter is not None:
            self.meter.step(*result)

    def _look(self, found: Difference | None) -> None:
        if found is not None:
            self.first, self.meter = found, DivergenceMeter(self._compared, self._until_end)


class LaneReplay:
    """Replays episodes of a lane in an environment. Replaying them in order is fastest.

    An episode is started as recorded: with its seed and options, or with the generator state before an unseeded reset.
    Some environments have other randomness, too, or keep state from one episode to the next. So if an episode differs,
    or its start is unknown, it is replayed after the episodes before it: from the last seeded one on, then from the
    first one on; and by itself in a fresh environment. If it matches only in one of these attempts, it must match
    there a second time, because the first match may be by chance.

    Args:
        trust: allow reset options that may name a file or a module, and states that are not checked.
        start: see Making.
        on_step: called after each step; an error that it raises ends the replay.

    Attributes:
        seen: layout of the observations of an environment that is not the recorded one; see EpisodeComparison.
    """

    def __init__(
        self,
        trace: Trace,
        lane: Lane,
        make: MakeEnv,
        comparison: Comparison,
        trust: bool = False,
        on_step: Callable[[], None] = lambda: None,
        start: str = REPLAY,
    ):
        self._start = start
        self._trace, self._lane, self._make, self._comparison = trace, lane, make, comparison
        self._on_step, self._trust = on_step, trust
        self.seen: Layout | None = None
        self._simulation: _Simulation | None = None
        self._tries_earlier = True  # False once an episode differed in all attempts: more attempts take too long
        self._depends: bool | None = None  # True if seeded episodes differ without those before them; None: unknown

    def close(self) -> None:
        if self._simulation is not None:
            self._simulation.env.close()
            self._simulation = None

    def play(self, position: int) -> Verdict:
        """Replay the episode at a position of the lane. Raises EnvironmentUnavailable."""
        verdict, origin = self._best_attempt(position)
        if verdict.verdict == DIFFERS:
            return self._checked_twice(position, verdict)
        if verdict.needed and self._is_seeded(position):
            self._depends = True
        elif self._depends and origin is not None and origin < position and self._is_seeded(position):
            is_needed = self._lane.renders or self._differs_alone(position)
            return replace(verdict, needed=(position - origin) * is_needed)
        return verdict

    def _differs_alone(self, position: int) -> bool:
        """Return True if an episode that matched in its turn differs by itself, in a fresh environment."""
        in_turn, self._simulation = self._simulation, None
        try:
            found = self._play_from(position, position, steps=_PROBED_STEPS)
        finally:
            self.close()
            self._simulation = in_turn
        return found is not None and found.verdict == DIFFERS

    def one_step(self, position: int) -> Verdict:
        """Play an episode; set the environment to each recorded state, and compare the step from there.

        Without states that can be set here, it is "unverifiable". Raises EnvironmentUnavailable.
        """
        episode = self._episode(position)
        simulation = self._simulation or self._fresh()
        try:
            self._in_states(position, simulation)
        except EnvironmentUnavailable as error:
            return verdict_on(episode, UNVERIFIABLE, reason=str(error))
        simulation.is_compared = simulation.states.__contains__
        verdict = self._attempt(simulation, -1, episode, measured=True)
        errors = tuple(one._replace(growth=None) for one in verdict.divergences)
        return replace(verdict, divergences=errors, from_states=len(simulation.states.keys() - {len(episode)}))

    def film(
        self,
        position: int,
        watch: Watch,
        make: MakeEnv | None = None,
        on_verdict: Callable[[Verdict], None] = lambda verdict: None,
    ) -> Verdict:
        """Replay an episode like play(), and then once more, with a call of watch after the reset and after each step.

        If the start is "states", or "auto" and the replay does not match, the environment is set to all recorded
        states while it is watched. Verdict.from_states is then their number, the verdict that on the steps between
        them, and its reason says how the replay differs.

        make: makes the environment to watch; None: as for play(). on_verdict: called with the verdict before watching.
        Raises RenderingError if the watched environment raises an error that the first one did not;
        EnvironmentUnavailable if the start is "states" and it has none, or they cannot be set here.
        """
        episode = self._episode(position)
        verdict = verdict_on(episode, UNVERIFIABLE, reason="") if self._start == STATES else self.play(position)
        origin, simulation = position, self._simulation
        if simulation is not None and simulation.finished == position:
            origin = simulation.origin
        usual_make, self._make = self._make, make or self._make
        in_states: _Simulation | None = None
        try:
            if self._start == STATES or (self._start == AUTO and not verdict.matches and states_in(episode)):
                try:
                    in_states = self._in_states(position)
                    verdict = replace(verdict, from_states=len(in_states.states))
                except EnvironmentUnavailable as error:
                    if self._start == STATES:
                        raise EnvironmentUnavailable(f"episode {episode.index}: {error}") from error
                    verdict = replace(verdict, reason=f"{verdict.reason}; " * bool(verdict.reason) + str(error))
            on_verdict(verdict)
            if in_states is not None:
                states = in_states.states
                in_states.is_compared = lambda step: step + 1 not in states
                watched = self._attempt(in_states, -1, episode, watch)
                problem = "" if self._start == STATES else problem_of(verdict)
                verdict = replace(watched, reason=problem or watched.reason, from_states=len(states))
            elif not episode.first_step:
                attempt = self._play_from(origin, position, watch)
                watched = attempt or self._attempt(self._fresh(), position, episode, watch)
            else:
                return verdict
            difference = watched.difference
            if difference is not None and difference.column == "error" and difference != verdict.difference:
                raise RenderingError(f"cannot render the environment: {difference}")
        finally:
            self._make = usual_make
            if make is not None or in_states is not None:
                self.close()
        return verdict

    def env_from_state(self, position: int, step: int) -> tuple[Verdict, gymnasium.Env[Any, Any], int] | None:
        """Play an episode to just before a step, from a recorded state; return verdict, environment, step of the state.

        The verdict is on the steps from the state on; the environment is now the caller's. None: there is no state, it
        cannot be restored here, or a result after it differs.
        """
        episode = self._episode(position)
        try:
            simulation = self._in_states(position)
        except EnvironmentUnavailable:
            return None
        try:
            last = step - least_compared(simulation.kind)
            if can_restore(simulation.env) and (begin := self._set(simulation, episode, last)):
                verdict = self._attempt(simulation, -1, episode[:step])
                if verdict.matches:
                    self._simulation = None
                    return replace(verdict, from_states=1), simulation.env, begin
        except EnvironmentUnavailable as error:
            _log.warning("episode %d: its states are not used: %s", episode.index, error)
        self.close()
        return None

    def env_in_state(self, position: int, step: int) -> tuple[Verdict, gymnasium.Env[Any, Any], int]:
        """Set an environment to the last recorded state before a step, and play the episode from there to the step.

        Returns the verdict on the steps between, the environment, now the caller's, and the step of the state. At a
        state nothing is compared, and the verdict is "unverifiable". Without a state before the step, the episode is
        played from its reset. Raises EnvironmentUnavailable.
        """
        episode = self._episode(position)
        simulation = self._in_states(position)
        begin = self._set(simulation, episode, step)
        if begin == step:
            verdict = verdict_on(episode, UNVERIFIABLE, reason="set to its recorded state, and nothing compared")
        else:
            verdict = self._attempt(simulation, -1, episode[:step])
        self._simulation = None
        return replace(verdict, from_states=int(begin is not None)), simulation.env, begin or 0

    def _in_states(self, position: int, simulation: _Simulation | None = None) -> _Simulation:
        """Return an environment that is set to the recorded states of an episode as it gets there.

        simulation: an environment of this class that may be used; None: make a fresh one. Raises
        EnvironmentUnavailable.
        """
        episode = self._episode(position)
        states = states_in(episode)
        if not states:
            raise EnvironmentUnavailable(STEPS_LOST if episode.first_step else _NO_STATES)
        simulation = simulation or self._fresh()
        simulation.kind, simulation.states = settable_states(simulation.env, self._trust), states
        if begin_episode := getattr(simulation.kind, "begin_episode", None):
            begin_episode(episode.reset_info or {})
        return simulation

    def _set(self, simulation: _Simulation, episode: Episode, last: int) -> int | None:
        """Reset an environment, set it to the last recorded state up to a step, and return the step of the state.

        Returns None without such a state. Raises EnvironmentUnavailable.
        """
        begin = max((step for step in simulation.states if step <= last), default=None)
        if begin is not None:
            try:
                simulation.env.reset(seed=episode.seed, options=self.options(episode))
            except Exception as error:  # user code may raise anything
                raise EnvironmentUnavailable(f"its reset raised {error_text(error)}") from error
            simulation.arrive(begin)
        simulation.begin, simulation.states = begin, {}
        return begin

    def env_before(self, position: int, step: int) -> tuple[Verdict, gymnasium.Env[Any, Any] | None]:
        """Play an episode to just before a step; return the verdict, and the environment, now the caller's.

        The whole episode is played first, because a wrong state may show only after the step. The verdict is on the
        whole episode; the environment is None if a result before the step differs. step: len(episode) is after the last
        step. Raises EnvironmentUnavailable.
        """
        verdict, origin = self._best_attempt(position)
        if origin is None:
            return verdict, None
        episode = self._episode(position)
        if verdict.reach < step:
            return self._checked_twice(position, verdict), None
        if not (verdict.matches and step == len(episode)):  # otherwise the environment is already there
            again = self._play_from(origin, position, steps=step)
            if again is None or not again.matches:
                again = again or verdict
                return again if again.verdict == UNVERIFIABLE else self._not_deterministic(episode, again), None
        simulation, self._simulation = self._simulation, None
        return verdict, None if simulation is None else simulation.env

    def generator_before(self, position: int) -> Any:
        """Return the state of the environment's random generator before the reset of an episode.

        The state is recorded, or found by replaying earlier episodes. None: the reset was seeded, or it is unknown.
        """
        episode = self._episode(position)
        if is_restorable(episode) or not self._lane.follows[position]:
            return episode.rng_state
        _, env = self.env_before(position - 1, len(self._episode(position - 1)))
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
        set_generator: SetGenerator = _set_generator,
        measured: bool = False,
    ) -> tuple[Verdict, Any]:
        """Play the first steps of an episode, from its own reset, in an environment of the caller.

        Returns the verdict on these steps, and the last observation. generator: result of generator_before().
        set_generator: called where the generator was set between two steps. measured: go on after the first difference,
        and measure from there on: Verdict.divergences.
        """
        episode = self._episode(position)
        if episode.first_step or (episode.seed is None and generator is None):
            return verdict_on(episode, UNVERIFIABLE, reason=STEPS_LOST if episode.first_step else UNKNOWN_START), None
        simulation = _Simulation(env, set_generator)
        simulation.generator = generator
        return self._attempt(simulation, -1, episode[:steps], measured=measured), simulation.observation

    def play_on(
        self,
        env: gymnasium.Env[Any, Any],
        position: int,
        watch: Callable[[FirstDifferences, int], Any],
        set_generator: SetGenerator = _set_generator,
        by_states: bool = False,
    ) -> FirstDifferences:
        """Play an episode from its own reset to its end, past differences, in an environment of the caller.

        watch: called with the differences so far and the number of steps, as Watch. set_generator: see play_in().
        by_states: set the environment to each recorded state. Returns the differences; the last one may be an error
        that the environment raised. Raises EnvironmentUnavailable.
        """
        episode = self._episode(position)
        results = FirstDifferences(self._compared(episode))
        simulation = _Simulation(env, set_generator)
        simulation = self._in_states(position, simulation) if by_states and len(episode) > 1 else simulation
        error = self._simulate(simulation, episode, results, lambda _, steps: watch(results, steps))
        results.found += [] if error is None else [error]
        return results

    def go_through_the_crash(self, position: int) -> str:
        """Execute the pending action of the episode that was just replayed; describe the result, or return "".

        Raises EnvironmentUnavailable.
        """
        action, simulation = self._episode(position).pending_action, self._simulation
        if action is None or simulation is None or simulation.finished != position:
            return ""
        if _has_unstored(action):
            raise EnvironmentUnavailable("the unanswered action could not be stored")
        return _step_in_a_fork(simulation.env, action)

    # -- attempts -----------------------------------------------------------------------------------------------------

    def _episode(self, position: int) -> Episode:
        return self._trace[self._lane.indices[position]]

    def _is_seeded(self, position: int) -> bool:
        return bool(self._trace.episodes["seed"][self._lane.indices[position]] != NO_SEED)

    def _fresh(self) -> _Simulation:
        self.close()
        self._simulation = _Simulation(without_autoreset(self._make()))
        return self._simulation

    def _is_next(self, simulation: _Simulation, position: int) -> bool:
        """Return True if the environment has just finished the episode that this one follows."""
        return self._lane.follows[position] and simulation.finished == position - 1

    def _origins(self, position: int) -> Iterator[int]:
        """Yield earlier positions to start from: the last seeded episode before, then the first of the sequence."""
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

    def _best_attempt(self, position: int) -> tuple[Verdict, int | None]:
        """Replay an episode from one origin after another, until it matches.

        Returns the verdict with the longest reach and its origin: the position of the first episode that was replayed
        for it; None if the start of the episode is unknown.
        """
        episode = self._episode(position)
        if episode.first_step:
            return verdict_on(episode, UNVERIFIABLE, reason=STEPS_LOST), None
        tries_alone = self._depends is None and self._lane.follows[position] and self._is_seeded(position)
        is_fresh, restorable = self._simulation is None or tries_alone, is_restorable(episode)
        simulation = self._fresh() if is_fresh else cast(_Simulation, self._simulation)
        origin = simulation.origin if self._is_next(simulation, position) else position
        best, best_origin = None, origin
        if restorable or origin < position:
            best = self._attempt(simulation, position, episode)
            best = best if restorable else replace(best, needed=position - origin)
            if tries_alone and best.matches:
                self._depends = False
        del simulation  # MuJoCo frees it only then, see free_contexts()
        for other in (*self._origins(origin), *([position] if restorable and not is_fresh else [])):
            if best is not None and (best.verdict != DIFFERS or (other < position and not self._tries_earlier)):
                continue
            verdict = self._play_from(other, position)
            if best is not None and verdict is not None and verdict.matches:  # perhaps by chance
                again = self._play_from(other, position)
                if again is None or not again.matches:
                    return replace(best, reason=_NOT_DETERMINISTIC), best_origin
                verdict = max(verdict, again, key=lambda one: one.largest)
            if verdict is not None and (best is None or verdict.reach > best.reach):
                note = _ONLY_FRESH if best is not None and verdict.matches and other == position else ""
                best = replace(verdict, needed=position - other, reason=verdict.reason or note)
                best_origin = other
        if best is None:
            return verdict_on(episode, UNVERIFIABLE, reason=UNKNOWN_START), None
        return best, best_origin

    def _play_from(
        self, origin: int, position: int, watch: Watch | None = None, steps: int | None = None
    ) -> Verdict | None:
        """Replay all episodes from origin to an episode; return the verdict on it, or None if an earlier one differs.

        steps: number of steps of the episode to play; None: all.
        """
        try:
            if not is_restorable(self._episode(origin)):
                return None
            simulation = self._fresh()
            for before in range(origin, position):
                if self._attempt(simulation, before, self._episode(before)).verdict == DIFFERS:
                    return None
        except CorruptTrace:
            if origin == position:
                raise
            return None  # damage in an earlier episode is not damage of the requested one
        return self._attempt(simulation, position, self._episode(position)[:steps], watch)

    def _checked_twice(self, position: int, verdict: Verdict) -> Verdict:
        """Replay an episode that differs to its end, and measure that; return its verdict, or another one if it is not
        deterministic, which takes a second replay to its end.
        """
        self._tries_earlier, episode = False, self._episode(position)
        if not is_restorable(episode):
            return self._not_deterministic(episode, verdict) if verdict.reason else verdict
        difference = verdict.difference
        by_infos = difference is not None and difference.column.startswith("infos/")
        meter = DivergenceMeter(self._compared(episode))
        try:
            first = self._fingerprint(episode, by_infos, meter)
            is_deterministic = not verdict.reason and first == self._fingerprint(episode, by_infos)
        except EnvironmentUnavailable:  # an action after the difference could not be stored
            return verdict
        finally:
            self.close()
        verdict = replace(verdict, divergences=meter.divergences())
        if not is_deterministic:
            return self._not_deterministic(episode, verdict)
        is_start = difference is not None and difference.step is None and difference.column != "error"
        if is_start and self._lane.lacks_earlier[position]:
            return verdict_on(episode, UNVERIFIABLE, reason=_EARLIER_MISSING)
        return verdict

    def _not_deterministic(self, episode: Episode, verdict: Verdict) -> Verdict:
        """Return the verdict on an episode whose replays differ from each other."""
        if episode.seed is not None:
            return replace(verdict, reason=_NOT_DETERMINISTIC)
        column = "" if verdict.difference is None else verdict.difference.column.partition("/")[0]
        first = f"{column} differ, and so do two replays" if column in Comparison.COLUMNS else "two replays differ"
        reason = f"{first}: some randomness is not restored by seed or generator state"
        return verdict_on(episode, UNVERIFIABLE, reason=reason, divergences=verdict.divergences)

    def _fingerprint(self, episode: Episode, infos: bool, meter: DivergenceMeter | None = None) -> bytes:
        """Return a hash of the results of replaying the episode by itself in a fresh environment. meter: gets each."""
        results = Fingerprint(infos)
        self._simulate(self._fresh(), episode, _Both(results, meter) if meter else results, None)
        return results.digest()

    def _compared(self, episode: Episode) -> EpisodeComparison:
        """Return what compares results with the recorded episode."""
        observations = None
        row_size = sum(leaf.row_size for leaf in self._lane.writer.layouts.observations.leaves())
        if row_size * len(episode) > _IN_MEMORY:
            observations = ObservationRows(self._trace, episode.index).tree()
        about = self._lane.writer.about
        in_arrays = about.is_vector or about.is_imported  # other formats store infos in arrays, too
        infos = about.has_all_infos and self.seen is None
        return EpisodeComparison(
            self._comparison, episode, about.layouts, observations, infos, in_arrays, replayed=True, seen=self.seen
        )

    # -- playing ------------------------------------------------------------------------------------------------------

    def _attempt(
        self,
        simulation: _Simulation,
        position: int,
        episode: Episode,
        watch: Watch | None = None,
        measured: bool = False,
    ) -> Verdict:
        if not self._is_next(simulation, position):
            simulation.origin = position
        simulation.finished = None
        results = self._compared(episode)
        measuring = _Measured(results, until_end=not simulation.states)
        try:
            difference = self._simulate(simulation, episode, measuring if measured else results, watch)
        except EnvironmentUnavailable as error:
            return verdict_on(episode, UNVERIFIABLE, reason=str(error))
        difference = measuring.first or difference
        if difference is not None:
            divergences = () if measuring.meter is None else measuring.meter.divergences()
            return verdict_on(episode, DIFFERS, difference=difference, largest=results.largest, divergences=divergences)
        simulation.finished = position
        return verdict_on(episode, IDENTICAL if results.exact else CLOSE, largest=results.largest)

    def options(self, episode: Episode) -> Any:
        """Return a copy of the reset options, which the environment may change. Raises EnvironmentUnavailable."""
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
        self,
        simulation: _Simulation,
        episode: Episode,
        results: EpisodeComparison | FirstDifferences | Fingerprint | _Both | _Measured,
        watch: Watch | None,
    ) -> Difference | None:
        """Play an episode to its end; without watch, to the first difference. Return that. results: gets each."""
        env = simulation.env
        result: Any
        first, result = None, (None,)
        if simulation.begin is None:
            start = simulation.generator if episode.rng_state is None else episode.rng_state
            if episode.seed is None and start is not None:
                restore_generator(env.unwrapped, start)
            options = self.options(episode)
            try:
                result = env.reset(seed=episode.seed, options=options)
            except RecordingError:  # of the caller, which records this, as on a full disk
                raise
            except Exception as error:  # user code may raise anything
                return _raised(None, error)
            if simulation.is_compared(-1):
                first = results.reset(*result)
            simulation.arrive(0)
        begin = simulation.begin or 0
        if watch is not None:
            watch(env, begin)
        actions = episode.actions
        are_stored = not _has_unstored(actions)
        generators = episode.states.get(GENERATOR)
        for step in range(begin, len(episode)):
            if first is not None and watch is None:
                break
            action = row_of(actions, step)
            if not are_stored and _has_unstored(action):
                raise EnvironmentUnavailable(f"its action at step {step} could not be stored")
            if generators is not None and generators[step] is not None:
                simulation.set_generator(env, generators[step])
            try:
                result = env.step(action)
            except RecordingError:  # of the caller, which records this, as on a full disk
                raise
            except Exception as error:  # user code may raise anything
                return first or _raised(step, error)
            self._on_step()
            difference = results.step(step, *result) if simulation.is_compared(step) else None
            first = first or difference
            simulation.arrive(step + 1)
            if watch is not None and watch(env, step + 1):
                break
        simulation.observation = result[0]
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


def states_in(episode: Episode) -> dict[int, Any]:
    """Return the recorded states of an episode, by the step before which they were; {} if it lacks its first steps.

    That of the step len(episode) is the state after the last one.
    """
    if episode.first_step:
        return {}
    recorded = episode.states
    rows = [*enumerate(recorded.get(FINAL, ()), 1), *enumerate(recorded.get(ENVIRONMENT, ()))]
    return {step: state for step, state in rows if state is not None}


def is_restorable(episode: Episode) -> bool:
    """Return True if the start of an episode is recorded, so that it can be played by itself."""
    return not episode.first_step and (episode.seed is not None or episode.rng_state is not None)


def verdict_on(episode: Episode, verdict: str, **more: Any) -> Verdict:
    """Return a verdict on an episode. more: other fields of the verdict."""
    return Verdict(episode.index, episode.writer, episode.episode_id, episode.lane, len(episode), verdict, **more)
