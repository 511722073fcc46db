"""Record PettingZoo environments of many agents, and replay their episodes: record() and replay()."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium

from gym_trace.data.agents import JointRow, key_in
from gym_trace.data.vocabulary import Outcome
from gym_trace.envs.agents import AEC, PARALLEL, JointEnv, is_of_agents
from gym_trace.envs.factories import spec_of
from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.trace import TraceLike
from gym_trace.recording.options import RecordingKeywords, takes_recording_options
from gym_trace.recording.single.wrapper import TraceRecordingWrapper
from gym_trace.recording.video_schedules import Schedule
from gym_trace.tools.replay.replay_env import ReplayEnv

try:
    from pettingzoo import AECEnv, ParallelEnv
    from pettingzoo.utils.wrappers import BaseParallelWrapper, BaseWrapper
except ImportError as missing:
    raise MissingExtra(
        f"recording many agents needs PettingZoo ({missing}): pip install 'gym-trace[pettingzoo]'"
    ) from missing

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["RecordedAEC", "RecordedParallel", "record", "replay"]


@takes_recording_options
def record(
    env: Any,
    directory: str | os.PathLike[str] | None = None,
    *,
    state: bool = False,
    states: int | None = None,
    video: Schedule | str | bool | None = None,
    **options: Unpack[RecordingKeywords],
) -> RecordedAEC | RecordedParallel:
    """Return an environment that records every step of all agents; use it in place of env.

    One episode of the environment is one episode of the trace: ``episode.agents`` has its agents, and
    ``episode["player_0"]`` the steps of one. The reward of a step is the sum over all agents.

    In an AEC environment, the recorder calls last() once after each step and reset; your next call of last() or
    observe() returns that result. So env.observe() is called as often as without a recorder.

    record_infos must be True (infos of all agents) or False (none).

    Args:
        env: an AEC or parallel environment of PettingZoo.
        directory … keep_if: see RecordingOptions.
        state: also record what env.state() returns after each reset and step.
        states, video: see TraceRecordingWrapper.

    Returns:
        An environment of the same kind, with the attribute directory (pathlib.Path), and annotate(**values) and
        flush() as TraceRecordingWrapper has them. close() saves the trace.

    Raises:
        TraceExists: the directory holds a trace of an earlier run and on_exist is "error".
        InvalidOption: an argument is invalid.

    Examples:
        >>> env = gym_trace.pettingzoo.record(pettingzoo.make("classic/rps-v2"), "traces/rps")  # doctest: +SKIP
        >>> env.reset(seed=0)  # doctest: +SKIP
    """
    if not is_of_agents(env):
        raise InvalidOption(f"{type(env).__name__}: is neither an AEC nor a parallel environment of PettingZoo")
    if not isinstance(record_infos := options.get("record_infos", False), bool):
        raise InvalidOption(
            f"record_infos={record_infos!r}: pass True or False; keys of agents' infos cannot be selected"
        )
    joint = JointEnv(env, state=state)
    joint.spec = spec_of(joint)
    recorder = TraceRecordingWrapper(joint, directory, states=states, video=video, **options)
    return RecordedAEC(joint, recorder) if joint.kind == AEC else RecordedParallel(joint, recorder)


class _Recorded:
    """Base of both kinds of recorded environments; the other base is PettingZoo's wrapper."""

    def __init__(self, joint: JointEnv, recorder: TraceRecordingWrapper):
        super().__init__(joint.inner)  # type: ignore[call-arg]
        self.directory: Path = recorder.directory
        self._joint, self._recorder = joint, recorder

    def close(self) -> None:
        """Save the trace, then close the environment. Closing twice is fine."""
        self._recorder.close()

    def annotate(self, **values: Any) -> None:
        """Record further values with the next step; see TraceRecordingWrapper.annotate()."""
        self._recorder.annotate(**values)

    def flush(self) -> None:
        """Write all steps so far, so that other processes can read them. Raises RecordingError if that fails."""
        self._recorder.flush()


class RecordedAEC(_Recorded, BaseWrapper):
    """An AEC environment that is recorded; see record().

    Examples:
        >>> for agent in env.agent_iter():  # doctest: +SKIP
        ...     observation, reward, terminated, truncated, info = env.last()
        ...     env.step(None if terminated or truncated else env.action_space(agent).sample())
    """

    _unseen = False  # True until the caller gets the recorded result of last()

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self._end_if_dead()
        self._unseen = False
        self._recorder.reset(seed=seed, options=options)
        self._unseen = True

    def step(self, action: Any) -> None:
        self._unseen = False
        self._recorder.step(self._joint.pass_on(action))
        self._unseen = True

    def last(self, observe: bool = True) -> Any:
        if not observe or not self._consume_unseen():
            return self.env.last(observe)
        return self._joint.answer

    def observe(self, agent: Any) -> Any:
        if self._unseen and agent == self.env.agent_selection and self._consume_unseen():
            return self._joint.answer[0]
        return self.env.observe(agent)

    def agent_iter(self, max_iter: int = 2**63) -> Any:
        return self.env.agent_iter(max_iter)

    def close(self) -> None:
        """Save the trace, then close the environment. Closing twice is fine."""
        self._end_if_dead()
        super().close()

    def _consume_unseen(self) -> bool:
        """Return True once after each step, if an agent is left."""
        unseen, self._unseen = self._unseen, False
        return unseen and self._joint.answer is not None

    def _end_if_dead(self) -> None:
        """End an episode whose agents are all terminated or truncated, even before the steps that remove them."""
        if (flags := self._joint.all_dead) is not None:
            self._recorder._end_episode(Outcome.TERMINATED if flags[0] else Outcome.TRUNCATED)


class RecordedParallel(_Recorded, BaseParallelWrapper):
    """A parallel environment that is recorded; see record().

    Examples:
        >>> observations, infos = env.reset(seed=0)  # doctest: +SKIP
        >>> results = env.step({agent: env.action_space(agent).sample() for agent in env.agents})  # doctest: +SKIP
    """

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._recorder.reset(seed=seed, options=options)
        return self._joint.answer

    def step(self, actions: dict[Any, Any]) -> Any:
        self._recorder.step(self._joint.pass_on(actions))
        return self._joint.answer


# -- replay -----------------------------------------------------------------------------------------------------------


def replay(
    trace: TraceLike, *, episodes: Collection[int] | None = None, on_divergence: str = "ignore"
) -> AECEnv | ParallelEnv:
    """Return a PettingZoo environment that replays recorded episodes without a simulator, as ReplayEnv does.

    It is AEC or parallel, as recorded. An episode that did not end is truncated after its last step. In an AEC
    environment, observe(agent) returns what the agent observed at its last turn.

    Args:
        trace, episodes, on_divergence: see ReplayEnv.

    Raises:
        InvalidOption: no episode can be played, an argument is invalid, or the trace is of single agents.

    Examples:
        >>> env = gym_trace.pettingzoo.replay("traces/rps")  # doctest: +SKIP
        >>> env.reset(options={"episode": 0})  # doctest: +SKIP
    """
    env = ReplayEnv(trace, episodes=episodes, on_divergence=on_divergence)
    kinds = [reader.about.agents.get("kind") for reader in index_of(env.trace).readers]
    if all(kind == AEC for kind in kinds):
        return ReplayAEC(env)
    if all(kind == PARALLEL for kind in kinds):
        return ReplayParallel(env)
    raise InvalidOption(f"{env.trace.directory}: not a trace of many agents of one kind; use gym_trace.ReplayEnv")


def _truncate(row: JointRow) -> None:
    """Truncate the remaining agents."""
    row.truncations |= {name: not row.terminations.get(name) for name in row.agents if not row.truncations.get(name)}


class _ReplayBase:
    """Base of both kinds of replay: a ReplayEnv, and the spaces of its agents."""

    def __init__(self, replay: ReplayEnv):
        self._replay = replay
        self._row: JointRow | None = None
        self._spaces = replay.observation_space, replay.action_space
        if isinstance(self._spaces[0], gymnasium.spaces.Dict):
            key = key_in(self._spaces[0].spaces)
            self.possible_agents = [name for name in self._spaces[0].spaces if name != key]
        name = index_of(replay.trace).readers[0].about.environment.get("id")
        self.metadata = {"render_modes": [], "name": f"replay<{name}>", "is_parallelizable": False}
        self.render_mode = None
        self._joint = JointEnv(self)  # packs actions

    def observation_space(self, agent: Any) -> Any:
        return self._space(self._spaces[0], agent)

    def action_space(self, agent: Any) -> Any:
        return self._space(self._spaces[1], agent)

    def _space(self, space: Any, agent: Any) -> Any:
        if not isinstance(space, gymnasium.spaces.Dict):
            raise InvalidOption(f"{agent}: its spaces were unknown before it appeared, and are not in the trace")
        return space[agent]

    def state(self) -> Any:
        """Return the recorded state. Raises NotImplementedError if it was not recorded."""
        if self._row is None or self._row.state is None:
            raise NotImplementedError("state() was not recorded; record with state=True")
        return self._row.state

    def close(self) -> None:
        self._replay.close()


class ReplayParallel(_ReplayBase, ParallelEnv):
    """Recorded episodes as a parallel environment; see replay()."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._row = row = JointRow(*self._replay.reset(seed=seed, options=options))
        self.agents = row.agents
        return row.observations, row.infos

    def step(self, actions: dict[Any, Any]) -> Any:
        if not self.agents:
            return {}, {}, {}, {}, {}
        observed, _, terminated, truncated, infos = self._replay.step(self._joint.encoded(actions))
        self._row = row = JointRow(observed, infos)
        self.agents = row.agents
        if terminated or truncated:
            _truncate(row)
            self.agents = []
        rewards = dict.fromkeys(row.rewards, 0.0) if "diverged" in infos else row.rewards
        return row.observations, rewards, row.terminations, row.truncations, row.infos


class ReplayAEC(_ReplayBase, AECEnv):
    """Recorded episodes as an AEC environment; see replay()."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self._observed: dict[Any, Any] = {}
        self._cumulative_rewards: dict[Any, Any] = {}
        self._is_over, self._skip_agent_selection = False, None
        self._set_row(JointRow(*self._replay.reset(seed=seed, options=options)))

    def step(self, action: Any) -> None:
        if not self.agents:
            return
        if self._is_over:  # the recording has ended: only remove agents
            self._was_dead_step(action)
            return
        observed, _, terminated, truncated, infos = self._replay.step(self._joint.encoded(action, self.agent_selection))
        self._is_over, row = terminated or truncated, JointRow(observed, infos)
        if self._is_over:
            _truncate(row)
        self._cumulative_rewards[self.agent_selection] = 0
        self._set_row(row)

    def _set_row(self, row: JointRow) -> None:
        self._row = row
        self.agents, self.rewards, self.infos = row.agents, row.rewards, row.infos
        self.terminations, self.truncations = row.terminations, row.truncations
        sums = self._cumulative_rewards
        self._cumulative_rewards = {name: sums.get(name, 0) + reward for name, reward in row.rewards.items()}
        self._observed.update(row.observations)
        if row.turn is not None:
            self.agent_selection = row.turn
            self._cumulative_rewards[row.turn] = row.reward

    def observe(self, agent: Any) -> Any:
        """Return what the agent observed at its last turn; None before its first one."""
        return self._observed.get(agent)
