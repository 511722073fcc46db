"""Make the environments of recorded episodes, and replay chosen episodes in them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import gymnasium

from gym_trace.envs.make import completed, headless_arguments, make_environment, takes_render_mode
from gym_trace.envs.opengl import choose_opengl, free_contexts
from gym_trace.envs.recipe import call_of, name_of
from gym_trace.errors import EnvironmentUnavailable, InvalidOption
from gym_trace.playback.episode_index import index_of, whole_of
from gym_trace.playback.trace import Trace
from gym_trace.tools.replay.compare import Comparison
from gym_trace.tools.replay.lanes import Lane, inseparable, lanes_of
from gym_trace.tools.replay.resimulate import AUTO, REPLAY, STATES, LaneReplay, MakeEnv

STARTS = (AUTO, REPLAY, STATES)


class Making(NamedTuple):
    """Settings of a replay: how environments are made, and how their results are compared; see verify_trace().

    Attributes:
        start: "replay" brings environments to a step by replaying the episode from its reset; "states" sets them to
            the recorded states (see TraceRecordingWrapper, states=) and steps them only in between. "auto": by replay,
            but by states where the replay differs from the recording.

    Examples:
        >>> making = gym_trace.replay.Making(trust=True, atol=1e-6)
        >>> making.start
        'auto'
    """

    trust: bool = False
    env_kwargs: Mapping[str, Any] | None = None
    make_env: MakeEnv | None = None
    atol: float = 0.0
    rtol: float = 0.0
    tolerances: Mapping[str, float] | None = None
    ignore: Collection[str] = ()
    wrappers: Sequence[Callable[[Any], Any]] = ()  # around the environment, innermost first
    start: str = AUTO

    @property
    def comparison(self) -> Comparison:
        return Comparison(self.atol, self.rtol, self.ignore, self.tolerances)


@dataclass(frozen=True)
class Played:
    """A replay of a lane, the position of an episode in it, and the index of the episode in the trace."""

    replay: LaneReplay
    position: int
    index: int
    lane: Lane


def replays(
    trace: Trace, chosen: list[int], making: Making, render_mode: str | None, on_step: Callable[[], None] = lambda: None
) -> Generator[Played, None, None]:
    """Yield the replay of each episode, lane by lane, because that is fastest. on_step: called after each step."""
    if making.start not in STARTS:
        raise InvalidOption(f"start={making.start!r}: unknown; pass one of {', '.join(STARTS)}")
    # With other arguments, the environment may differ as the user wants it to.
    start = REPLAY if making.env_kwargs and making.start == AUTO else making.start
    wanted = {int(index_of(trace).whole_indices[index]): index for index in chosen}
    trace = whole_of(trace)  # earlier episodes of a lane may also have to be replayed
    for lane in lanes_of(trace):
        positions = [(position, wanted[index]) for position, index in enumerate(lane.indices) if index in wanted]
        if not positions:
            continue
        if making.make_env is None and (reason := inseparable(lane.writer)):
            raise EnvironmentUnavailable(reason)
        make = partial(made_env, lane, making, render_mode)
        replay = LaneReplay(trace, lane, make, making.comparison, making.trust, on_step, start)
        try:
            yield from (Played(replay, position, index, lane) for position, index in positions)
        finally:
            replay.close()


def made_env(lane: Lane, making: Making, render_mode: str | None) -> gymnasium.Env[Any, Any]:
    """Build the environment of a lane. render_mode: required mode; None: as recorded, but headless."""
    free_contexts()
    env = _made(lane, making, render_mode)
    for wrapper in making.wrappers:
        try:
            wrapped = wrapper(env)
            if not isinstance(wrapped, gymnasium.Env):
                raise TypeError(f"returned {type(wrapped).__name__}; return a gymnasium.Env")
        except Exception as error:  # the user's code
            env.close()
            name = name_of(call_of(wrapper)[0])
            raise EnvironmentUnavailable(f"wrapper {name}: {type(error).__name__}: {error}") from error
        env = wrapped
    return env


def _made(lane: Lane, making: Making, render_mode: str | None) -> gymnasium.Env[Any, Any]:
    description = lane.writer.about.environment
    if "rgb_array" in (render_mode, description.get("render_mode")):
        choose_opengl()
    mode = {} if render_mode is None else {"render_mode": render_mode}
    if making.make_env is not None:
        env = making.make_env(**(mode if takes_render_mode(making.make_env) else {}))
        env = completed(env, description, lane.lane)
        if render_mode is None or getattr(env, "render_mode", None) == render_mode:
            return env
        env.close()
        raise EnvironmentUnavailable(f"make_env: returned {env} without render_mode={render_mode!r}; set it")
    kwargs = {**headless_arguments(description, lane.lane), **(making.env_kwargs or {}), **mode}
    env = make_environment(description, making.trust, kwargs, lane.lane)
    modes = (env.metadata or {}).get("render_modes") or ()
    if render_mode is None or render_mode in modes:
        return env
    if render_mode == "human" and "rgb_array" in modes:  # Gymnasium's HumanRendering shows the images
        return env
    env.close()
    known = ", ".join(map(str, modes)) or "none"
    instead = ""
    if render_mode == "ansi" and "rgb_array" in modes:
        instead = "; render a video such as name.mp4"
    elif render_mode == "rgb_array":
        alternative = (
            "render text to name.cast" if "ansi" in modes else "use --from observations to show recorded images"
        )
        instead = f"; {alternative}"
    raise EnvironmentUnavailable(f"{description.get('id')}: no render mode {render_mode!r}, only {known}{instead}")
