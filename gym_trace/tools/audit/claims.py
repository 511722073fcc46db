"""Try each claim of an audit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium
from gymnasium.vector import SyncVectorEnv

from gym_trace.envs.agents import JointEnv
from gym_trace.envs.identity import versions_of
from gym_trace.envs.opengl import choose_opengl
from gym_trace.envs.states import can_restore, packed_state, states_of
from gym_trace.errors import EnvironmentUnavailable, TraceError, raise_if_of_signal
from gym_trace.printable import error_text
from gym_trace.tools.audit import arranged
from gym_trace.tools.audit.arranged import Arranged, Checked, InLane, Make
from gym_trace.tools.audit.fresh import compare, compare_reversed, in_fresh_process, record_again
from gym_trace.tools.audit.reference import Compared, Reference, Script, record
from gym_trace.tools.audit.report import NO, NOT_TRIED, YES, Claim
from gym_trace.tools.audit.seeds import Seeding
from gym_trace.tools.audit.world import Mode, World, modules_of

_LANES = 3
_HASH_SEEDS = 1, 2
_NO_STEP = "no step could be played"


class Audit:
    """Tries the claims about one environment, in the order of CLAIMS: later ones depend on earlier ones.

    Args:
        make: makes the environment.
        carried: the same for other processes; or why it cannot be sent there.
        scripts: what is played.
        steps: most steps of an episode, after which make's environments truncate it.
        directory: an empty directory for recordings.
        repeats: how often everything is played again.
        imports: modules that another process imports first, as it does those of the environment.

    Attributes:
        versions: of packages, once it is made.
    """

    def __init__(
        self,
        make: Make,
        carried: Make | str,
        scripts: Sequence[Script],
        steps: int,
        directory: str,
        repeats: int,
        imports: Sequence[str],
    ):
        self._make, self._carried, self._scripts, self._steps = make, carried, scripts, steps
        self._directory, self._repeats, self._imports = directory, repeats, imports
        self._world = World()
        self._reference: Reference
        self._checked: Checked
        self._unsteady = ""  # why two runs of the same cannot be compared
        self._no: set[str] = set()  # claims that do not hold
        self._shared: Compared | None = None  # the difference of a second instance in this process
        self.versions: dict[str, str] = {}

    def claims(self) -> Iterator[Claim]:
        """Yield the claims. Raises EnvironmentUnavailable if the environment cannot be made."""
        self._checked = Checked(self._make, self._world)
        self.versions = versions_of(self._checked.inner)
        with self._world.around(self._checked.inner):
            for claim in self._tried():
                if claim.verdict == NO:
                    self._no.add(claim.name)
                yield claim

    def _tried(self) -> Iterator[Claim]:
        path = os.path.join(self._directory, "reference")
        error = record(self._checked, path, self._scripts)
        self._reference = Reference(path)
        yield self._runs(error)
        for name in ("in-space", "action-unchanged", "fresh-observations"):
            if problem := self._checked.problems.get(name):
                yield self._claim(name, NO, problem)
            elif self._reference.everything:
                yield self._claim(name, YES)
            else:
                yield self._claim(name, NOT_TRIED, _NO_STEP)
        steady: dict[str, Callable[[], Claim]] = {
            "deterministic": self._deterministic,
            "own-randomness": partial(self._played, "own-randomness", Arranged, Mode.OTHER_RANDOM),
            "time-independent": partial(self._played, "time-independent", arranged.Paused, Mode.OTHER_CLOCK),
            "fresh-process": self._fresh_process,
            "seeded": self._seeded,
            "stateless-reset": self._stateless_reset,
            "lanes": self._lanes,
            "state": self._state,
            "deepcopy": self._deepcopy,
            "render-pure": self._render_pure,
        }
        for name, attempt in steady.items():
            if not self._reference.everything:
                yield self._claim(name, NOT_TRIED, _NO_STEP)
                continue
            try:
                yield attempt()
            except TraceError as problem:
                yield self._claim(name, NOT_TRIED, " ".join(str(problem).split()))
            except (Exception, SystemExit) as problem:  # user code may raise anything
                raise_if_of_signal(problem)
                yield self._claim(name, NOT_TRIED, error_text(problem))

    # -- what a claim says --------------------------------------------------------------------------------------------

    def _claim(self, name: str, verdict: str, text: str = "", compared: Compared | None = None) -> Claim:
        if compared is None:
            compared = Compared(len(self._reference.everything), self._reference.steps)
        if verdict == NOT_TRIED:
            return Claim(name, verdict, text)
        count = _counted(compared) if verdict == YES and compared.steps else ""
        return Claim(name, verdict, "; ".join(filter(None, (count, text))), **vars(compared))

    def _found(self, name: str, compared: Compared, arrangement: str = "", note: str = "") -> Claim:
        """Return a claim from a comparison with the reference."""
        if compared.difference is None:
            return self._claim(name, YES, note, compared)
        text = f"first seen in episode {compared.episode} {compared.difference.as_text('first', 'then')}".rstrip(": ")
        growths = (one.growth for one in compared.divergences if one.growth is not None)
        if growth := next(growths, None):
            text += f", grows {growth:.3g} times a step"
        return self._claim(name, NO, "; ".join(filter(None, (arrangement, text, note))), compared)

    def _played(self, name: str, kind: type[Arranged], mode: Mode) -> Claim:
        self._demand_steady()
        return self._found(name, self._reference.compared(kind(self._make, self._world, mode)))

    def _demand_steady(self, *holding: str) -> None:
        """Raise EnvironmentUnavailable if differences would say nothing about the claim. holding: other claims."""
        if self._unsteady:
            raise EnvironmentUnavailable(self._unsteady)
        for name in holding:
            if name in self._no:
                raise EnvironmentUnavailable(f"{name} does not hold, which would show here, too")

    # -- the claims ---------------------------------------------------------------------------------------------------

    def _runs(self, error: str) -> Claim:
        if error:
            return self._claim("runs", NO, error)
        outcomes = self._reference.trace.episodes["outcome"].tolist()
        counts = {name: outcomes.count(name) for name in ("terminated", "truncated")}
        cut = len(outcomes) - sum(counts.values())
        known = [f"{count} {name}" for name, count in {**counts, "cut": cut}.items() if count]
        return self._claim("runs", YES, ", ".join(known))

    def _deterministic(self) -> Claim:
        episodes = steps = 0
        for _ in range(self._repeats):
            found = self._reference.compared(Arranged(self._make, self._world, Mode.NATURAL))
            episodes, steps = episodes + found.episodes, steps + found.steps
            if found.difference is not None:
                return self._found("deterministic", found, note=self._cause())
        return self._claim("deterministic", YES, "", Compared(episodes, steps))

    def _cause(self) -> str:
        """Return why results differ from the reference."""
        again = self._reference.compared(Arranged(self._make, self._world))
        if again.difference is None:
            return "equal while the clock and the global generators are held, see own-randomness and time-independent"
        if self._fresh_ones_agree():
            self._unsteady = "instances in one process share state, which would show here, too"
            self._shared = again
            return "two fresh processes agree, so instances in one process share state"
        self._unsteady = "two runs of the same differ already"
        held = "differs, too, while the module time and the global generators are held"
        return f"{held}; perhaps an unseeded generator, another clock, a file, threads or a GPU"

    def _fresh_ones_agree(self) -> bool:
        other = os.path.join(self._directory, "fresh")
        try:
            self._in_fresh_process(_HASH_SEEDS[0], record_again, self._path, other)
            found: Compared = self._in_fresh_process(_HASH_SEEDS[0], compare, other)
        except TraceError:
            return False
        return found.difference is None

    @property
    def _path(self) -> str:
        return str(self._reference.trace.directory)

    def _in_fresh_process(self, hash_seed: int, work: Callable[..., Any], *paths: str) -> Any:
        if isinstance(self._carried, str):
            raise EnvironmentUnavailable(self._carried)
        modules = [*self._imports, *modules_of(self._checked.inner)]
        return in_fresh_process(hash_seed, work, self._carried, modules, *paths)

    def _fresh_process(self) -> Claim:
        self._demand_steady()
        found: Compared = self._in_fresh_process(_HASH_SEEDS[0], compare, self._path)
        return self._found("fresh-process", found, note="" if found.difference is None else self._cause_in_processes())

    def _cause_in_processes(self) -> str:
        """Return why a fresh process differs from this one; "" if others cannot be started."""
        other = os.path.join(self._directory, "fresh")
        try:
            self._in_fresh_process(_HASH_SEEDS[0], record_again, self._path, other)
            same, different = (self._in_fresh_process(seed, compare, other).difference for seed in _HASH_SEEDS)
        except TraceError:
            return ""
        if same is not None:
            return "two fresh processes also differ"
        if different is not None:
            return "PYTHONHASHSEED decides it: the order of a set, or hash()"
        return "two fresh processes agree: it depends on what this one did before"

    def _seeded(self) -> Claim:
        if self._shared is not None:
            self._demand_steady()
        attempt = Seeding(self._make, self._world, self._reference)
        if problem := attempt.differing_start():
            return self._claim("seeded", NO, problem)
        self._demand_steady()
        holds, text, compared = attempt.result()
        return self._claim("seeded", YES if holds else NO, text, compared)

    def _stateless_reset(self) -> Claim:
        self._demand_steady()
        everything = self._reference.everything
        arrangements: dict[str, tuple[type[Arranged], Sequence[int]]] = {
            "alone, in a new environment": (arranged.Alone, everything),
            "in reverse order": (Arranged, everything[::-1]),
            "after an episode that was cut": (arranged.AfterCut, everything),
        }
        episodes = steps = 0
        for arrangement, (kind, order) in arrangements.items():
            found = self._reference.compared(kind(self._make, self._world), order)
            if found.difference is not None:
                return self._found("stateless-reset", found, arrangement)
            episodes, steps = episodes + found.episodes, steps + found.steps
        tried = "alone, in reverse order, after cut episodes"
        if "fresh-process" not in self._no:
            with contextlib.suppress(EnvironmentUnavailable):
                found = self._in_fresh_process(_HASH_SEEDS[0], compare_reversed, self._path)
                if found.difference is not None:
                    return self._found("stateless-reset", found, "in reverse order, in a fresh process")
                episodes, steps = episodes + found.episodes, steps + found.steps
                tried += ", in reverse order in a fresh process"
        return self._claim("stateless-reset", YES, tried, Compared(episodes, steps))

    def _state(self) -> Claim:
        self._demand_steady("own-randomness", "time-independent", "stateless-reset", "lanes")
        env = self._make()
        try:
            env.reset(seed=0)
            states = states_of(env)
            if states is None:
                raise EnvironmentUnavailable("it offers no state: get_state() and set_state()")
            packed_state(env, states)
            if not can_restore(env):
                raise EnvironmentUnavailable("its wrappers have state of their own")
        finally:
            env.close()
        return self._interrupted("state", arranged.Restored(self._make, self._world))

    def _deepcopy(self) -> Claim:
        self._demand_steady("lanes")
        env = self._make()
        try:
            env.reset(seed=0)
            deepcopy(env).close()
        except Exception as error:  # user code may raise anything
            raise EnvironmentUnavailable(f"it cannot be copied: {error_text(error)}") from error
        finally:
            env.close()
        return self._interrupted("deepcopy", arranged.Copied(self._make, self._world))

    def _interrupted(self, name: str, env: Arranged) -> Claim:
        """Return a claim about something that is done in the middle of episodes."""
        found = self._reference.compared(env)
        if found.difference is None and not env.times:
            raise EnvironmentUnavailable("no episode was long enough")
        return self._found(name, found, note="" if found.difference else f"in the middle of {env.times}")

    def _render_pure(self) -> Claim:
        self._demand_steady()
        make = self._rendering()
        found = self._reference.compared(arranged.Rendered(make, self._world), self._reference.everything[:2])
        if found.difference is not None:
            silent = arranged.Rendered(make, self._world, calls=False)
            if self._reference.compared(silent, self._reference.everything[:2]).difference is not None:
                return self._found("render-pure", found, "with a render mode, even without a call of render()")
        return self._found("render-pure", found)

    def _rendering(self) -> Make:
        """Return a function that makes the environment with a render mode that opens no window."""
        env = self._make()
        try:
            mode, modes = getattr(env, "render_mode", None), (env.metadata or {}).get("render_modes") or ()
        finally:
            env.close()
        if mode in ("rgb_array", "ansi"):
            return self._make
        mode = next((name for name in ("rgb_array", "ansi") if name in modes), None)
        if mode is None:
            raise EnvironmentUnavailable("it has no render mode rgb_array or ansi")
        if mode == "rgb_array":
            choose_opengl()
        return partial(self._make, render_mode=mode)

    # -- lanes --------------------------------------------------------------------------------------------------------

    def _lanes(self) -> Claim:
        if self._shared is not None:
            return self._found("lanes", self._shared, "in a second environment of this process")
        self._demand_steady("in-space", "fresh-observations", "own-randomness", "time-independent")
        first = self._make()
        base = first.unwrapped
        first.close()
        if isinstance(base, JointEnv):
            raise EnvironmentUnavailable("agents are not played in lanes")
        if isinstance(base, InLane):
            found = self._reference.compared(Arranged(partial(self._make, salt=1), self._world))
            return self._found("lanes", found, "with other actions in the other lanes")
        if not hasattr(gymnasium.vector, "AutoresetMode"):
            raise EnvironmentUnavailable("it needs gymnasium 1.1 or newer: pip install -U gymnasium")
        reference = self._continued()
        episodes = steps = 0
        for mode in (gymnasium.vector.AutoresetMode.NEXT_STEP, gymnasium.vector.AutoresetMode.SAME_STEP):
            for lane in (0, _LANES - 1):
                found = reference.compared(arranged.Alone(partial(self._in_lane, mode, lane), self._world))
                if found.difference is not None:
                    return self._found("lanes", found, f"in lane {lane} of {_LANES}, {mode.value}")
                episodes, steps = episodes + found.episodes, steps + found.steps
        return self._claim("lanes", YES, f"in 2 of {_LANES} lanes, both autoreset modes", Compared(episodes, steps))

    def _continued(self) -> Reference:
        """Record episodes in new environments, each followed by one without a seed if that follows from the seed."""
        path = os.path.join(self._directory, "lanes")
        scripts = []
        for episode in (self._reference.episode(position) for position in self._reference.everything[:2]):
            scripts.append(Script(episode.seed, self._steps, options=episode.options))
            scripts += [] if "seeded" in self._no else [Script(None, self._steps)]
        record(arranged.AsInLane(self._make, self._world), path, scripts)
        return Reference(path)

    def _in_lane(self, mode: Any, lane: int) -> Any:
        return InLane(SyncVectorEnv([self._make] * _LANES, autoreset_mode=mode), lane)


def _counted(compared: Compared) -> str:
    words = [f"{number:,} {word}{'s' * (number != 1)}" for number, word in
             ((compared.episodes, "episode"), (compared.steps, "step"))]  # fmt: skip
    return ", ".join(words)
