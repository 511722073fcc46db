"""Session: a person plays episodes in a window, and a recorder stores them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gym_trace.data.returns import number_of
from gym_trace.recording.single.wrapper import TraceRecordingWrapper
from gym_trace.tools.playing.asking import legend
from gym_trace.tools.playing.keymap import Keymap
from gym_trace.tools.playing.report import PlayReport
from gym_trace.tools.playing.window import CLOSED, Window
from gym_trace.tools.video.frames import rendered_frame

HELP, PAUSE, MARK, RESTART, DISCARD, SAVE, QUIT = "f1", "f2", "f6", "f5", "f8", "f9", "escape"
COMMANDS = {
    HELP: "this help",
    PAUSE: "pause or resume",
    RESTART: "restart from the same seed; keeps this attempt",
    DISCARD: "discard this episode (asks first)",
    SAVE: "end and keep this episode, and begin the next",
    QUIT: "quit; keeps everything",
}
NEXT = "return"
RESERVED = frozenset((*COMMANDS, NEXT))
_IDLE_SECONDS = 1 / 60  # between checks of the keyboard
_REDRAW_SECONDS = 0.25  # interval for an unchanged picture


class Session:
    """Let a person play until they quit, `stop` is true, or `most` episodes have ended and were not discarded.

    Args:
        recorder: the environment, recorded; the session resets and steps it.
        begin: resets the recorder for an attempt at episode k = 0, 1, 2 …; returns steps and return so far.
        notes: annotations of every step.
        marks: annotation by key; True in steps for which the key was pressed.
        fps: steps per second, unless the environment waits for keys.
    """

    def __init__(
        self,
        recorder: TraceRecordingWrapper,
        window: Window,
        keymap: Keymap,
        begin: Callable[[TraceRecordingWrapper, int], tuple[int, float]],
        *,
        fps: float,
        marks: Mapping[str, str],
        notes: Mapping[str, Any],
        help_rows: list[tuple[str, str]],
        most: int | None = None,
        stop: Callable[[], bool] = lambda: False,
    ):
        self.played = PlayReport()
        self._recorder, self._window, self._keymap, self._begin_at = recorder, window, keymap, begin
        self._notes = dict(notes)
        self._period, self._marks, self._most, self._stop = 1 / fps, marks, most, stop
        mark_rows = [(key, f"annotate the next step: {name}") for key, name in marks.items()]
        self._legend = legend(help_rows)
        self._help = [*help_rows, *mark_rows, ("", ""), *COMMANDS.items()]
        self._fps = fps
        self._has_quit = self._paused = self._shows_help = self._episode_ended = self._confirms_discard = False
        self._number = 0  # number of the episode, for its seed
        self._steps, self._return = 0, 0.0
        self._times: deque[float] = deque()
        self._marked: set[str] = set()
        self._due = 0.0
        self._picture: Any = None

    def run(self) -> PlayReport:
        """Play. Raises what the environment raises; steps before that are recorded."""
        self._begin()
        drawn = 0.0
        while not (self._has_quit or self._stop()):
            self._window.poll()
            changed = bool(self._window.events)
            self._handle_keys()
            now = time.monotonic()
            if self._plays and now >= self._due:
                changed |= self._step(now)
            if changed or now - drawn > _REDRAW_SECONDS:
                self._draw()
                drawn = now
            wait = self._due - time.monotonic() if self._plays else _IDLE_SECONDS
            if wait > 0:
                time.sleep(min(wait, _IDLE_SECONDS))
        return self.played

    @property
    def _plays(self) -> bool:
        return not (self._paused or self._shows_help or self._episode_ended or self._confirms_discard or self._has_quit)

    # -- commands -----------------------------------------------------------------------------------------------------

    def _handle_keys(self) -> None:
        events, self._window.events = self._window.events, []
        for key in events:
            if key == CLOSED or (key == QUIT and not self._confirms_discard):
                self._has_quit = True
            elif self._confirms_discard:
                self._confirms_discard = False
                if key == DISCARD:
                    self._discard()
            elif key == HELP:
                self._shows_help = not self._shows_help
                self._restart_clock()
            elif key == PAUSE and not self._episode_ended:
                self._paused = not self._paused
                self._restart_clock()
            elif key == RESTART:
                self._begin()
            elif key == DISCARD:
                self._confirms_discard = True
            elif key == SAVE or (key == NEXT and self._episode_ended):
                self._next()
            elif key in self._marks:
                self._marked.add(self._marks[key])

    def _discard(self) -> None:
        self.played.discarded.append(self.played.episodes - 1)
        if self._episode_ended:
            self.played.kept.pop()
        self._next()

    def _next(self) -> None:
        if self._most is not None and len(self.played.kept) >= self._most:
            self._has_quit = True
            return
        self._number += 1
        self._begin()
        self._recorder.flush()

    def _begin(self) -> None:
        self.played.episodes += 1  # first: an error during the reset leaves an episode, too
        self._steps, self._return = self._begin_at(self._recorder, self._number)
        self._episode_ended = self._paused = False
        self._marked.clear()
        self._picture = self._rendered()
        self._restart_clock()

    def _restart_clock(self) -> None:
        """Do not count the time in which nothing is played."""
        self._times.clear()
        self._window.forget()
        self._due = time.monotonic() + self._period

    # -- steps --------------------------------------------------------------------------------------------------------

    def _step(self, now: float) -> bool:
        action = self._keymap.action(self._window.inputs(self._keymap.waits))
        if action is None:
            self._due = now + _IDLE_SECONDS
            return False
        marked = {name: np.bool_(name in self._marked) for name in self._marks.values()}
        self._recorder.annotate(**self._notes, **marked)
        self._marked.clear()
        _, reward, terminated, truncated, _ = self._recorder.step(action)
        self._steps += 1
        self.played.steps += 1
        self._return += number_of(reward)
        self._picture = self._rendered()
        # Late steps are not made up for: the person would not see them.
        self._due = max(self._due + self._period, time.monotonic())
        if not self._keymap.waits:
            self.played.seconds += now - self._times[-1] if self._times else self._period
        self._times.append(now)
        while now - self._times[0] > 1:
            self._times.popleft()
        if terminated or truncated:
            self._episode_ended = True
            self.played.kept.append(self._return)
        return True

    def _rendered(self) -> Any:
        picture = rendered_frame(self._recorder)
        return picture if isinstance(picture, str) else np.asarray(picture)

    # -- output -------------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        banner = ""
        if self._confirms_discard:
            banner = f"Discard this episode? {DISCARD.upper()}: yes, any other key: no"
        elif self._episode_ended:
            banner = f"Over: return {self._return:g} in {self._steps} steps. Enter: next, F5: again, F8: discard"
        elif self._paused:
            banner = "Paused. F2: resume"
        marks = " ".join(sorted(self._marked))
        facts = [f"episode {self._number + 1}", f"step {self._steps}", f"return {self._return:g}", self._speed(), marks]
        lines = ["   ".join(filter(None, facts)), self._legend, "F1: help   Escape: quit, everything is kept"]
        self._window.show(self._picture, lines, banner, self._help if self._shows_help else ())

    def _speed(self) -> str:
        if self._keymap.waits:
            return "waits for a key"
        if len(self._times) < 2:
            return f"{self._fps:g} fps"
        reached = (len(self._times) - 1) / (self._times[-1] - self._times[0])
        return f"{reached:.0f} of {self._fps:g} fps" if reached < 0.95 * self._fps else f"{reached:.0f} fps"
