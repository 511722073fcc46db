"""Play an environment by hand and record it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from gym_trace.envs.names import action_names
from gym_trace.envs.seeding import episode_seed
from gym_trace.errors import InvalidOption, TraceError, warn
from gym_trace.format.facts import add_facts
from gym_trace.playback.trace import open_trace
from gym_trace.recording.collecting.rollout import metadata_by_name, new_root_seed
from gym_trace.recording.provenance import provenance_of, recorded_by
from gym_trace.recording.single.wrapper import TraceRecordingWrapper
from gym_trace.storage.local import LocalStorage
from gym_trace.tools.editing.episodes import filter_trace
from gym_trace.tools.playing.asking import ask, keys_file, save_keys
from gym_trace.tools.playing.continued import Continued
from gym_trace.tools.playing.demonstration import Demonstration
from gym_trace.tools.playing.keymap import (
    Keymap,
    Question,
    check_supported,
    default_keymap,
    keymap_of_answers,
    keymap_of_environment,
    keymap_of_file,
    questions_of,
)
from gym_trace.tools.playing.report import PlayReport
from gym_trace.tools.playing.session import MARK, RESERVED, Session
from gym_trace.tools.playing.window import KEYS, Window, check_display, key_name
from gym_trace.tools.video.simulate import fps_of

PLAYED = "played"  # annotation: True for steps after the recorded ones
MARKS: Mapping[str, str] = {MARK: "mark"}


def play(
    env: Any,
    directory: str | os.PathLike[str],
    *,
    seed: int | None = None,
    name: str = "",
    keys: Path | None = None,
    asks_again: bool = False,
    fps: float | None = None,
    episodes: int | None = None,
    marks: Mapping[str, str] = MARKS,
    facts: Mapping[str, Any] | None = None,
    stop: Callable[[], bool] = lambda: False,
    make_env: Any = None,
    command: str = "gym_trace.play",
    metadata: Any = None,
    **recording: Any,
) -> PlayReport:
    """Open a window in which a person plays, and record every step. The environment is closed at the end.

    All steps are saved when the window closes, `stop` is true, or the environment raises; an unfinished episode then
    has the outcome "closed". Discarded episodes are removed from the trace at the end.

    Args:
        env: with render_mode="rgb_array", or "ansi" for text. A Continued starts from a recorded step: its episodes
            begin with the recorded steps, so that they verify; annotations.played is True for the others.
        directory: directory of the trace.
        seed: root seed, also stored in the metadata; None takes one from the system's entropy. Attempts at episode k
            are reset with the seed of episode k of gym-trace record --seed.
        name: name of the environment, for the window and the file of its keys. Default: its id.
        keys: a TOML file with a key map. Default: answers to earlier questions, the map of the environment, arrows
            and mouse for continuous actions, or questions.
        asks_again: ask even if there is a key map.
        fps: steps per second. Default: render_fps of the environment's metadata, else 30.
        episodes: stop after this number of episodes that ended by themselves and were not discarded.
        marks: annotations by key; each is a column, True in the steps for which the key was pressed.
        facts: facts of the trace, such as author.
        stop: called between steps; True ends the session.
        make_env: function that made env, stored so that verify_trace() can call it.
        command: name of the caller, stored under provenance.
        metadata, recording: options of TraceRecordingWrapper.

    Raises:
        InvalidOption: a key map or an option is invalid, or keys cannot play the action space.
        RenderingError: no display, or the environment renders neither pictures nor text.
        MissingExtra: pygame is not installed.
        TraceExists: see TraceRecordingWrapper.

    Examples:
        >>> env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
        >>> gym_trace.play(env, "traces/played", episodes=1)  # doctest: +SKIP
    """
    with ExitStack() as stack:
        owner = [env]  # its close() closes all wrappers
        stack.callback(lambda: owner[0].close())
        check_display()
        seed = new_root_seed() if seed is None else seed
        metadata = {**metadata_by_name(metadata), "seed": seed}
        if isinstance(env, Continued):
            metadata["from"] = env.described
        name = name or getattr(env.spec, "id", None) or type(env.unwrapped).__name__
        check_supported(env.action_space)
        if env.render_mode not in ("rgb_array", "rgb_array_list", "ansi"):
            raise InvalidOption(f'{name}: render_mode is {env.render_mode!r}; playing needs "rgb_array" or "ansi"')
        _check_marks(marks)
        if isinstance(env, Continued) and recording.get("record_infos") and not env.has_infos:
            raise InvalidOption("infos: the trace to continue has none; omit --infos")
        keymap = None if keys is None else keymap_of_file(keys, env.action_space, KEYS)
        shown = stack.enter_context(closing(Demonstration(env, make_env)))
        window = stack.enter_context(Window(f"{name} - gym-trace play"))
        window.show(None, [f"{name}: starting"])
        if keymap is None:
            keymap = _keymap(env, window, name, RESERVED | set(marks), asks_again, stop, shown.picture)
        if keymap is None:
            return PlayReport(seed)
        if taken := sorted(keymap.keys & (RESERVED | set(marks))):
            raise InvalidOption(f"key {taken[0]}: used by gym-trace; bind another, or choose another --mark")
        with recorded_by(provenance_of(command, "person", make_env=make_env)):
            owner[0] = recorder = TraceRecordingWrapper(env, directory, metadata=metadata, **recording)
        if facts:
            add_facts(LocalStorage(directory), dict(facts))
        rows = keymap.described(action_names(env))
        session = Session(
            recorder,
            window,
            keymap,
            _begin_function(env, seed, marks),
            fps=fps or fps_of(env),
            marks=marks,
            notes={PLAYED: np.True_} if isinstance(env, Continued) else {},
            help_rows=rows,
            most=episodes,
            stop=stop,
        )
        report, is_returned = session.played, False
        report.seed = seed
        try:
            try:
                session.run()
            finally:
                writer = recorder._recorder.writer_id
                stack.close()
            is_returned = True
        finally:
            if report.discarded:
                report.left = _remove(Path(directory), writer, report.discarded)
                if report.left and not is_returned:  # an error is raised, so the caller gets no report
                    warn(f"discarded episodes are still in the trace: {report.left}")
    return report


def _begin_function(
    env: Any, seed: int, marks: Mapping[str, str]
) -> Callable[[TraceRecordingWrapper, int], tuple[int, float]]:
    """Return a function that begins an attempt at an episode."""

    def reset(recorder: TraceRecordingWrapper, number: int) -> tuple[int, float]:
        recorder.reset(seed=episode_seed(seed, number))
        return 0, 0.0

    def continue_recorded(recorder: TraceRecordingWrapper, number: int) -> tuple[int, float]:
        annotations = dict.fromkeys((PLAYED, *marks.values()), np.False_)
        return env.begin(recorder, lambda: recorder.annotate(**annotations))  # type: ignore[no-any-return]

    return continue_recorded if isinstance(env, Continued) else reset


def _check_marks(marks: Mapping[str, str]) -> None:
    for key, name in marks.items():
        if name == PLAYED:
            raise InvalidOption(f"mark {key}={name}: the name is used by gym-trace; choose another")
        if key not in KEYS or key in RESERVED:
            problem = "used by gym-trace" if key in RESERVED else "not a key"
            raise InvalidOption(f"mark {key}={name}: {key} is {problem}; choose another key, such as g or f7")


def _keymap(
    env: Any,
    window: Window,
    name: str,
    reserved: frozenset[str],
    asks_again: bool,
    stop: Callable[[], bool],
    picture: Callable[[Question], Any],
) -> Keymap | None:
    """Return the key map, if needed after asking; None if the person quits."""
    space, answers_file = env.action_space, keys_file(name, env.action_space)
    if not asks_again:
        if answers_file.is_file():
            return keymap_of_file(answers_file, space, KEYS)
        keymap = keymap_of_environment(env, key_name) or default_keymap(space)
        if keymap is not None:
            return keymap
    questions = questions_of(space, action_names(env))
    answers = ask(window, name, questions, reserved, hasattr(space, "n") and not space.shape, stop, picture)
    if answers is None:
        return None
    keymap = keymap_of_answers(space, questions, answers)
    save_keys(keymap, answers_file, name, space)
    return keymap


def _remove(directory: Path, writer: str, episodes: list[int]) -> str:
    """Remove these episodes of a writer from the trace; return "", or the reason if that failed."""
    trace = open_trace(directory)
    table = trace.episodes
    discarded = (table["writer"] == trace.writers.index(writer)) & np.isin(table["episode_id"], episodes)
    if discarded.all():  # an error came before the next episode began
        return f"{directory}: holds no other episodes; delete it" if len(trace) else ""
    try:
        filter_trace(trace, episodes=~discarded, in_place=True)
    except (TraceError, OSError) as error:
        condition = f'not (writer == "{writer}" and episode_id in {episodes})'
        return f"{error}; later: gym-trace edit filter {directory} --in-place --where '{condition}'"
    return ""
