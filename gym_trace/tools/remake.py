"""gym_trace.remake: the same episodes through a changed environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from gym_trace.data.episode import Episode
from gym_trace.data.layout import layout_of
from gym_trace.data.packing import pack_lenient
from gym_trace.data.schema import as_map
from gym_trace.data.values import row_of, shown
from gym_trace.data.vocabulary import Outcome
from gym_trace.envs import spaces
from gym_trace.envs.autoreset import without_autoreset
from gym_trace.envs.recipe import call_of, changed_factory, name_of, recorded_factory
from gym_trace.envs.states import states_of
from gym_trace.errors import EnvironmentUnavailable, InvalidOption, warn
from gym_trace.format.directory import new_writer_id
from gym_trace.format.facts import write_facts
from gym_trace.playback.episode_index import whole_of
from gym_trace.playback.trace import Trace, TraceLike, as_trace
from gym_trace.recording.provenance import provenance_of, recorded_by
from gym_trace.recording.single.wrapper import TraceRecordingWrapper
from gym_trace.storage.staging import StagedStorage, new_directory
from gym_trace.tools.replay.compare import Difference, FirstDifferences, shared_leaves
from gym_trace.tools.replay.lanes import Lane
from gym_trace.tools.replay.making import Making, Played, made_env, replays
from gym_trace.tools.replay.resimulate import REPLAY, STATES, STEPS_LOST, UNKNOWN_START, MakeEnv, is_restorable

_ENDS = (Outcome.TERMINATED.word, Outcome.TRUNCATED.word)
_FACTS_OF_EPISODES = ("flags", "reference_scores")


@dataclass(frozen=True)
class RemadeEpisode:
    """A recorded episode, played again in the changed environment.

    Attributes:
        index: its index in the trace.
        writer, episode_id: of the recorded episode; the new one has the same id, from another writer.
        steps, outcome: of the new episode: "terminated", "truncated", or "cut" if the environment did not end it.
        recorded_steps, recorded_outcome: of the recorded episode.
        differences: the first difference of each column that was compared, of each leaf of the observations, and of
            each key of the infos, in the order of steps. The last one may be an error that the environment raised.
        reason: why it was not made, or not to its end; "" otherwise.

    Examples:
        >>> report = gym_trace.remake("traces/cartpole", "traces/remade", episodes=[0])
        >>> report.episodes[0].is_same, report.episodes[0].steps
        (True, 12)
    """

    index: int
    writer: str
    episode_id: int
    steps: int
    outcome: str
    recorded_steps: int
    recorded_outcome: str
    differences: tuple[Difference, ...] = ()
    reason: str = ""

    @property
    def is_same(self) -> bool:
        """True if everything that was compared is the same."""
        return not (self.differences or self.reason)

    def __str__(self) -> str:
        parts = [self.reason] if self.reason else []
        if self.differences:
            first, *others = self.differences
            parts.append(f"differs first {first.as_text('recorded', 'now')}")
            for one in others:
                where = "the reset" if one.step is None else f"step {one.step}"
                parts.append(str(one) if one.column == "error" else f"{one.column} from {where}")
        if self.outcome in _ENDS and self.steps < self.recorded_steps:
            parts.append(f"ends after {self.steps} of {self.recorded_steps} steps")
        elif self.outcome not in _ENDS and self.recorded_outcome in _ENDS and self.steps == self.recorded_steps:
            parts.append(f"has not ended after its {self.steps} steps")
        return f"episode {self.index} {'; '.join(parts) or 'is the same'}"


@dataclass(frozen=True)
class RemakeReport:
    """Result of remake().

    Attributes:
        destination: the new trace.
        episodes: the recorded episodes, in the order of the trace.
        uncompared: leaves of the recorded observations that the changed environment lacks, or has with another dtype or
            shape, such as "observations/position".
        running: episodes that were skipped, because they are still being recorded.

    Examples:
        >>> report = gym_trace.remake("traces/cartpole", "traces/again", episodes=[0, 1])
        >>> report.same, report.uncompared
        (2, ())
    """

    destination: Path
    episodes: tuple[RemadeEpisode, ...]
    uncompared: tuple[str, ...] = ()
    running: int = 0

    @property
    def same(self) -> int:
        """Number of episodes in which everything that was compared is the same."""
        return sum(episode.is_same for episode in self.episodes)


def remake(
    trace: TraceLike,
    output: str | os.PathLike[str],
    *,
    make_env: MakeEnv | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] = (),
    episodes: Collection[int] | None = None,
    start: str = REPLAY,
    trust: bool = False,
    atol: float = 0.0,
    rtol: float = 0.0,
    tolerances: Mapping[str, float] | None = None,
    ignore: Collection[str] = (),
    on_progress: Callable[[int, int], Any] | None = None,
    command: str = "gym_trace.remake",
) -> RemakeReport:
    """Record the same episodes in a changed environment: with another camera, sensor, reward or observation.

    The environment is made as recorded, with the changes. Each episode is reset with the recorded seed, options or
    generator state, after the episodes before it if it needs them, as verify_trace() does. It is stepped with the
    recorded actions until they end, or the environment ends. Results are compared with the recorded ones; of
    observations the leaves, and of infos the keys, that both have.

    Infos and states are recorded as in the recorded trace. Annotations, episode ids, splits, metadata and facts (except
    flags and reference_scores) are copied. Each lane of a vector environment becomes a writer of single episodes. The
    new trace names the writers it was made from, and verify_trace() verifies it in the changed environment.

    Args:
        trace: a trace, a view, or a directory. Running episodes are skipped.
        output: a new or empty directory. It appears when it is complete.
        make_env, env_kwargs, trust: as for verify_trace().
        wrappers: functions or classes that wrap the environment, innermost first.
        episodes: indices in the trace; None: all.
        start: "replay": each step follows the one before it. "states": each step starts from the recorded state, so
            that errors do not add up; the trace must have been recorded with states=1.
        atol, rtol, tolerances: settings of the comparison, as for verify_trace().
        ignore: columns that the changes concern, of "observations", "rewards", "terminations", "truncations", "infos".
        on_progress: called after each episode with the number done, and the total.
        command: name of the caller, stored under provenance.

    Raises:
        EnvironmentUnavailable: the environment cannot be made here, its action space lacks a recorded action, or no
            episode can be made; says why.
        InvalidOption: an option is invalid.
        TraceExists: output exists.
        TraceNotFound, CorruptTrace, RecordingError

    Examples:
        >>> from gymnasium.wrappers import TransformReward
        >>> double = lambda env: TransformReward(env, lambda reward: 2 * reward)
        >>> report = gym_trace.remake("traces/cartpole", "traces/doubled", wrappers=[double], episodes=[0, 1])
        >>> gym_trace.open_trace("traces/doubled").episodes["return"].tolist()
        [24.0, 18.0]
    """
    trace = as_trace(trace)
    for damage in trace.damage:
        raise damage.error()
    if start not in (REPLAY, STATES):
        raise InvalidOption(f'start={start!r}: pass "{REPLAY}" or "{STATES}"')
    chosen = list(range(len(trace))) if episodes is None else sorted(set(episodes))
    if not set(chosen) <= set(range(len(trace))):
        raise InvalidOption(f"episodes: the trace has {len(trace)} episodes, 0 to {len(trace) - 1}")
    running = [index for index in chosen if trace.episodes["outcome"][index] == Outcome.RUNNING.word]
    chosen = [index for index in chosen if index not in set(running)]
    if not chosen:
        why = "the selected episodes are still running, wait for their end" if running else "no episodes selected"
        raise InvalidOption(f"{output}: {why}; nothing written")
    making = Making(trust, env_kwargs, make_env, atol, rtol, tolerances, ignore, tuple(wrappers), REPLAY)
    provenance, stem = provenance_of(command, make_env=make_env), new_writer_id()
    done: list[RemadeEpisode] = []
    uncompared: dict[str, None] = {}
    with (
        new_directory(output, trace.directory) as fresh,
        closing(replays(trace, chosen, making, _render_mode(making))) as playing,
    ):
        for number, (replay, group) in enumerate(groupby(playing, attrgetter("replay"))):
            lane = list(group)
            for episode in _remade(whole_of(trace), lane, making, start, fresh, f"{stem}-{number:06}", provenance):
                done.append(episode)
                if on_progress is not None:
                    on_progress(len(done), len(chosen))
            leaves = list(lane[0].lane.writer.layouts.observations.leaves())
            shared = {leaf for leaf, *_ in shared_leaves(lane[0].lane.writer.layouts.observations, replay.seen)}
            uncompared |= {leaf.label: None for leaf in leaves if leaf not in shared}
        if all(episode.reason and not episode.steps for episode in done):
            raise EnvironmentUnavailable(f"{done[0]}; nothing written")
        facts = {name: fact for name, fact in trace.facts.items() if name not in _FACTS_OF_EPISODES}
        if facts:
            write_facts(StagedStorage(fresh), facts)
    done.sort(key=attrgetter("index"))
    return RemakeReport(Path(output), tuple(done), tuple(uncompared), len(running))


def _remade(
    trace: Trace,
    lane: list[Played],
    making: Making,
    start: str,
    directory: Path,
    uid: str,
    provenance: Mapping[str, Any],
) -> Iterator[RemadeEpisode]:
    """Record the chosen episodes of a lane in the changed environment, and yield what became of each.

    There is one environment at a time, because MuJoCo renders black frames after another one is closed.
    """
    plans = [*_plans(trace, lane)]
    lane[0].replay.close()
    with _recorder(lane[0], making, start, directory, uid, provenance) as recorder:
        recorded_space = lane[0].lane.writer.about.raw["action_space"]
        changes_actions = pack_lenient(spaces.describe(recorder.action_space)) != pack_lenient(recorded_space)
        last = -2  # position of the episode that was just played
        for played, needed, reason in plans:
            episode, position = _episode(trace, played.lane, played.position), played.position
            if not reason:
                if changes_actions:
                    _check_actions(played.index, episode, recorder.action_space, spaces.restore(recorded_space, True))
                for before in range(max(position - needed, last + 1), position):
                    watch = partial(_is_over, _episode(trace, played.lane, before))
                    played.replay.play_on(recorder.env, before, watch)
                last = position
            yield _played(played, episode, recorder, start == STATES, reason)


def _episode(trace: Trace, lane: Lane, position: int) -> Episode:
    return trace[lane.indices[position]]


def _plans(trace: Trace, lane: list[Played]) -> Iterator[tuple[Played, int, str]]:
    """Yield each episode, the number of episodes to be played before it, unrecorded, and why it cannot be made."""
    last = -2
    for played in lane:
        episode, position = _episode(trace, played.lane, played.position), played.position
        follows, needed = played.lane.follows[position], 0
        is_next = follows and last == position - 1
        if follows and not is_next:
            needed = played.replay.play(position).needed
        reason = STEPS_LOST if episode.first_step else ""
        reason = reason or ("" if is_restorable(episode) or needed or is_next else UNKNOWN_START)
        last = last if reason else position
        yield played, needed, reason


def _recorder(
    first: Played, making: Making, start: str, directory: Path, uid: str, provenance: Mapping[str, Any]
) -> TraceRecordingWrapper:
    """Make the changed environment of a lane, recorded as the lane was."""
    about = first.lane.writer.about
    env = without_autoreset(made_env(first.lane, making, _render_mode(making)))
    try:
        first.replay.seen = layout_of(spaces.describe(env.observation_space), ("observations",))
        every, infos = about.recorder.get("states"), about.recorder.get("record_infos")
        if start == STATES and every not in (None, 1):
            warn(f"states={every}: steps between the recorded states follow one another, so that errors add up there")
        if every is not None and states_of(env) is None:
            warn(f"{type(env.unwrapped).__name__}: offers no states; recorded without them")
            every = None
        with recorded_by({**provenance, **_origin(first, making, start, env, provenance)}):
            return TraceRecordingWrapper(
                env,
                directory,
                states=every,
                record_infos=infos if isinstance(infos, list) else about.layouts.infos,
                split=about.split,
                metadata=None if about.is_imported else about.metadata,
                uid=uid,
                on_exist="append",
            )
    except BaseException:
        env.close()
        raise


def _played(
    played: Played, episode: Episode, recorder: TraceRecordingWrapper, by_states: bool, reason: str
) -> RemadeEpisode:
    """Play and record an episode, unless there is a reason not to. Raises CorruptTrace."""
    steps, outcome = 0, Outcome.CUT
    differences: tuple[Difference, ...] = ()
    annotations = {} if reason else episode.annotations

    def watch(results: FirstDifferences, step: int) -> bool:
        nonlocal steps
        steps = step
        if step == len(episode) or _is_over(episode, results, step):
            return True
        values = {name: rows[step] for name, rows in annotations.items() if rows[step] is not None}
        if values:
            recorder.annotate(**values)
        return False

    if not reason:
        recorder._number_episode(episode.episode_id)
        set_generator = TraceRecordingWrapper.set_generator
        try:
            results = played.replay.play_on(recorder, played.position, watch, set_generator, by_states)
            differences, ends = tuple(results.found), (results.terminated, results.truncated)
            outcome = Outcome.CUT if not any(ends) else Outcome.TERMINATED if ends[0] else Outcome.TRUNCATED
        except EnvironmentUnavailable as error:
            reason = str(error)
        recorder._end_episode(Outcome.CUT)
    reason = reason and f"{f'is made up to step {steps}' if steps else 'cannot be made'}: {reason}"
    own = played.index, episode.writer, episode.episode_id, steps, outcome.word
    return RemadeEpisode(*own, len(episode), episode.outcome, differences, reason)


def _render_mode(making: Making) -> Any:
    return (making.env_kwargs or {}).get("render_mode")


def _is_over(episode: Episode, results: FirstDifferences, steps: int) -> bool:
    """Return True if the environment ended where the recorded episode did not."""
    ended = results.terminated or results.truncated
    return ended and not (episode.terminations[steps - 1] or episode.truncations[steps - 1])


def _check_actions(index: int, episode: Episode, space: Any, recorded: Any) -> None:
    """Raise EnvironmentUnavailable unless the actions that are in the recorded action space are in the new one."""
    actions = episode.actions
    for step in range(len(episode)):
        action = row_of(actions, step)
        if not space.contains(action) and recorded.contains(action):
            text = shown(action.tolist() if hasattr(action, "tolist") else action)
            raise EnvironmentUnavailable(
                f"episode {index}, step {step}: the recorded action {text} is not in {space}, the action space "
                "of the changed environment; change only what leaves the actions valid; nothing written"
            )


def _origin(first: Played, making: Making, start: str, env: Any, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the new writer was made from, and the modules and the function that make its environment."""
    writer, about, kwargs = first.lane.writer, first.lane.writer.about, making.env_kwargs or {}
    known = about.environment if making.make_env is None else provenance
    found: dict[str, Any] = {"imports": known["imports"]} if "imports" in known else {}
    factory = known.get("factory")
    if factory is not None and recorded_factory(known) is not None:
        found |= {"factory": changed_factory(factory, kwargs, making.wrappers)}
    changes = [f"{name}={shown(value)}" for name, value in kwargs.items()]
    if making.make_env is not None:
        made_by = found.get("factory") or {"id": getattr(env.spec, "id", None) or name_of(call_of(making.make_env)[0])}
        changes = [f"made by {made_by['id']}"]
    changes += [f"in {name_of(call_of(wrapper)[0])}" for wrapper in making.wrappers]
    lane = {"lane": first.lane.lane} if about.is_vector else {}
    origin = {"writer": writer.writer, **lane, "start": start, "changes": changes}
    policy = as_map(about.raw.get("provenance")).get("policy")
    found |= {"branch": about.branch} if about.branch else {}
    return {**found, **({"policy": policy} if policy else {}), "made_from": origin}
