"""gym_trace.record: record episodes in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.vector import VectorEnv

from gym_trace.data.values import Array
from gym_trace.errors import MissingExtra
from gym_trace.format.facts import add_facts
from gym_trace.recording.collecting.policies import Annotating, policy_maker
from gym_trace.recording.collecting.rollout import RolloutProgress, new_root_seed, record_episodes
from gym_trace.recording.options import RecordingKeywords, takes_recording_options
from gym_trace.recording.provenance import provenance_of, recorded_by
from gym_trace.recording.single.wrapper import TraceRecordingWrapper
from gym_trace.recording.video_schedules import Schedule
from gym_trace.storage.local import LocalStorage

if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes_recording_options
def record(
    env: gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any],
    policy: str | Callable[..., Any] | None = None,
    directory: str | os.PathLike[str] | None = None,
    *,
    episodes: int | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    bytes: int | None = None,
    seed: int | None = None,
    states: int | None = None,
    lanes: int | slice | Sequence[int] | Sequence[bool] | Array | None = None,
    video: Schedule | str | bool | None = None,
    facts: Mapping[str, Any] | None = None,
    on_progress: Callable[[RolloutProgress], Any] | None = None,
    make_env: Any = None,
    command: str = "gym_trace.record",
    argv: bool = False,
    git_diff: bool = False,
    **options: Unpack[RecordingKeywords],
) -> RolloutProgress:
    """Record episodes of an environment in this process, and close it.

    Wraps env in a recorder and runs record_episodes(). gym_trace.collect does so with several processes.

    Args:
        env: a Gymnasium environment, or a vector environment.
        policy: None or "random", "sb3:PATH", "onnx:PATH", "run:DIR", a function of the observation, or a class.
        directory … keep_if: see RecordingOptions.
        episodes, steps, seconds, bytes, seed: see record_episodes(). metadata also gets "seed".
        states, video: see TraceRecordingWrapper. lanes: see TraceRecordingVectorWrapper.
        facts: metadata of the trace (see Trace.facts), added to what it has.
        on_progress: see record_episodes().
        make_env: function that made env, stored so that verify_trace() can make it again.
        command: name of the caller, stored under provenance with the name of the policy.
        argv: store the full command line. git_diff: store the uncommitted changes of the current git repository.
            Both may contain secrets.

    Raises:
        InvalidOption, TraceExists

    Examples:
        >>> done = gym_trace.record(gymnasium.make("CartPole-v1"), "random", "traces/random", episodes=3, seed=0)
        >>> done.episodes, done.steps
        (3, 34)
    """
    recorder: Any = env
    with ExitStack() as stack:
        stack.callback(lambda: recorder.close())
        maker = policy_maker(policy)  # first, because a failure must leave no directory
        made = None if policy in (None, "random") else maker(env.observation_space, env.action_space)
        seed = new_root_seed() if seed is None else seed
        options["metadata"] = {**metadata_by_name(options.get("metadata")), "seed": seed}
        own = {"states": states, "lanes": lanes, "video": video}
        given = {name: value for name, value in own.items() if value is not None}
        with recorded_by(provenance_of(command, maker.name, argv, git_diff, make_env)):
            recorder = _wrapper_of(env)(env, directory, **given, **options)
        if facts:
            add_facts(LocalStorage(recorder.directory), dict(facts))
        acting = None if made is None else Annotating(made, recorder)
        return record_episodes(
            recorder,
            policy=acting,
            episodes=episodes,
            steps=steps,
            seconds=seconds,
            bytes=bytes,
            seed=seed,
            on_progress=on_progress,
        )


def _wrapper_of(env: Any) -> Any:
    if not isinstance(env, VectorEnv):
        return TraceRecordingWrapper
    if not hasattr(gymnasium.vector, "AutoresetMode"):
        raise MissingExtra("recording a vector environment needs gymnasium 1.1 or newer: pip install -U gymnasium")
    from gym_trace.recording.vector.wrapper import TraceRecordingVectorWrapper

    return TraceRecordingVectorWrapper


def metadata_by_name(given: Any) -> dict[str, Any]:
    """Return the user's metadata as a dict without "seed" and "run"; other values under "given"."""
    if given is None:
        return {}
    is_plain = isinstance(given, dict) and not {"seed", "run"} & set(given)
    return given if is_plain else {"given": given}
