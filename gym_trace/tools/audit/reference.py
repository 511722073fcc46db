"""The reference of an audit: episodes recorded once, which every arrangement has to repeat."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gym_trace.data.episode import Episode
from gym_trace.data.values import row_of
from gym_trace.errors import EnvironmentUnavailable, RecordingError, raise_if_of_signal
from gym_trace.playback.trace import Trace, open_trace
from gym_trace.recording.single.wrapper import TraceRecordingWrapper
from gym_trace.tools.audit.actions import RandomActions
from gym_trace.tools.audit.arranged import Arranged
from gym_trace.tools.replay.compare import Comparison, Difference
from gym_trace.tools.replay.divergence import Divergence
from gym_trace.tools.replay.lanes import lanes_of
from gym_trace.tools.replay.resimulate import UNVERIFIABLE, LaneReplay


@dataclass(frozen=True)
class Script:
    """Plan of an episode. steps: at most. actions: rows of a recorded episode; None: random ones."""

    seed: int | None
    steps: int
    actions: Any = None
    options: Any = None


@dataclass(frozen=True)
class Compared:
    """Episodes and steps that were compared with the reference.

    Attributes:
        episode: index of the episode with the first difference; None without one.
        divergences: how far each leaf of that episode departs, the earliest first.
    """

    episodes: int = 0
    steps: int = 0
    episode: int | None = None
    difference: Difference | None = None
    divergences: tuple[Divergence, ...] = ()


def record(env: Arranged, directory: str | os.PathLike[str], scripts: Sequence[Script]) -> str:
    """Record episodes, and close the environment; return its error, which ends the recording, or ""."""
    recorder = TraceRecordingWrapper(env, directory)
    where, problem, policy = "", "", RandomActions(env.inner)
    try:
        for number, script in enumerate(scripts):
            where = f"reset of episode {number}"
            recorder.reset(seed=script.seed, options=script.options)
            for step, action in enumerate(_actions_of(script, policy, number)):
                where = f"step {step} of episode {number}"
                if any(recorder.step(action)[2:4]):
                    break
    except RecordingError:  # as on a full disk: nothing is known of the environment
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise_if_of_signal(error)
        problem = f"{where} raised {type(error).__name__}: {error}"
    finally:
        try:
            recorder.close()
        except RecordingError:
            raise
        except Exception as error:  # user code may raise anything
            problem = problem or f"close() raised {type(error).__name__}: {error}"
    return problem


def _actions_of(script: Script, policy: RandomActions, number: int) -> Iterator[Any]:
    if script.actions is not None:
        yield from (row_of(script.actions, step) for step in range(script.steps))
        return
    policy.seed(number)
    yield from (policy() for _ in range(script.steps))


class Reference:
    """A recorded reference, and how arranged environments compare with it.

    Attributes:
        trace: the recording.
        everything: positions of all episodes that have steps.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.trace: Trace = open_trace(directory)
        self.everything = np.flatnonzero(self.trace.episodes["steps"]).tolist()
        for lane in lanes_of(self.trace):  # no lane if the first reset raised
            self._replay = LaneReplay(self.trace, lane, _nothing, Comparison(ignore=("infos",)), trust=True)

    @property
    def steps(self) -> int:
        return int(self.trace.episodes["steps"].sum())

    def scripts(self) -> list[Script]:
        """Return what was played."""
        return [Script(e.seed, len(e), e.actions, e.options) for e in map(self.episode, self.everything)]

    def episode(self, position: int) -> Episode:
        return self.trace[position]

    def compared(self, env: Any, order: Sequence[int] | None = None) -> Compared:
        """Play episodes in an environment, up to the first difference, and close it.

        order: positions of the episodes; None: all, as recorded. Raises EnvironmentUnavailable.
        """
        episodes = steps = 0
        try:
            for position in self.everything if order is None else order:
                episode = self.episode(position)
                env.middle = len(episode) // 2
                verdict, _ = self._replay.play_in(env, position, len(episode), episode.rng_state, measured=True)
                if verdict.verdict == UNVERIFIABLE:
                    raise EnvironmentUnavailable(verdict.reason)
                episodes += 1
                found = verdict.difference
                steps += len(episode) if found is None else (found.step or 0)
                if found is not None:
                    return Compared(episodes, steps, position, found, verdict.divergences)
        finally:
            env.close()
        return Compared(episodes, steps)


def _nothing() -> Any:
    raise EnvironmentUnavailable("the reference of an audit makes no environments")
