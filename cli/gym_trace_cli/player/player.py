"""Play episodes in a terminal, controlled by keys."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from gym_trace import Trace
from gym_trace.errors import CorruptTrace, EnvironmentUnavailable, RenderingError
from gym_trace.printable import key_text
from gym_trace.replay import Making, StepCaptions, observes_pictures, view_observed, view_rendered
from gym_trace_cli import show
from gym_trace_cli.player.screen import Screen
from gym_trace_cli.player.terminal import Terminal

if TYPE_CHECKING:
    from gym_trace.results import Verdict

_SMALLEST_PICTURE = 16  # pixels; smaller arrays are codes, not images
_END_HOLD_FRAMES = 15
_LEAST_DRAW_SECONDS = 0.02
_LOOK_SECONDS = 0.25  # between checks of the terminal
_LATE_SECONDS = 0.5  # playback does not catch up with a longer delay
_CURVE = 60  # drawn rewards
_JUMPS = 20  # jumps per episode
_SPEEDS = (0.001, 1000.0)
_HELP = [  # the longest line that fits is shown
    "space pause/play   ←→ seek   . or Enter one step   ↑↓ episode   +- speed   q quit",
    "space pause   ←→ seek   . one step   ↑↓ episode   +- speed   q quit",
    "space  ←→ seek  . step  ↑↓ episode  +- speed  q quit",
    "space ←→ . ↑↓ +- q",
    "q quit",
]
_HELP_WAITING = ["↑↓ episode   q quit", "q quit"]


class _Leave(Exception):
    """Leave an episode. by: 1 to the next, -1 to the previous one, None to quit."""

    def __init__(self, by: int | None):
        self.by = by


class Player:
    """Plays episodes, and is the gym_trace.replay.Viewer of each.

    Args:
        chosen: indices of the episodes in the trace.
        source: "observations" shows recorded observations, others rendered frames, see gym_trace.replay.Making. None:
            recorded images; without them rendered frames, as by "auto"; where rendering fails, recorded numbers.
        speed: factor of the environment's speed.
        paused: whether to wait for a key at each step.

    Attributes:
        damages: messages about episodes that could not be read, each once.
        fallbacks: reasons why episodes were shown as numbers, each once.
        played: indices of the episodes that were shown.
    """

    def __init__(self, trace: Trace, chosen: list[int], source: str | None, speed: float, paused: bool):
        self.damages: dict[str, None] = {}
        self.fallbacks: dict[str, None] = {}
        self.played: set[int] = set()
        self.step, self.fps = 0, 30.0
        self._trace, self._chosen, self._source = trace, chosen, source
        self._speed, self._paused = speed, paused
        self._position, self._index, self._last, self._clock = 0, 0, 0, 0.0
        self._note = ""
        self._unavailable: dict[str, str] = {}  # writers whose environment is unavailable, and why

    def run(self, terminal: Terminal, making: Making) -> None:
        """Play the episodes until the last one, or until the user quits. making: how to rebuild their environments."""
        self._terminal, self._screen, self._making = terminal, Screen(terminal), making
        by = 1
        while self._position < len(self._chosen):
            try:
                self._play(self._chosen[self._position])
            except CorruptTrace as error:
                self.damages[f"episode {self._index}: {error}"] = None
            except _Leave as leave:
                if leave.by is None:
                    return
                by = leave.by
            self._position += by
            if self._position < 0:
                self._position, by = 0, 1

    def _play(self, index: int) -> None:
        """Show an episode until _Leave is raised."""
        self._index, self.step, self._note = index, 0, ""
        episode = self._trace[index]
        self._last = len(episode)
        self._captions = StepCaptions(episode)
        self.played.add(index)
        self._clock = time.monotonic()
        try:
            if self._source == "observations" or (
                self._source is None and observes_pictures(self._trace, index, _SMALLEST_PICTURE)
            ):
                view_observed(self._trace, index, self, _SMALLEST_PICTURE)
            elif episode.writer in self._unavailable:
                raise EnvironmentUnavailable(self._unavailable[episode.writer])
            self._unseen, self._looked = -1, -math.inf  # steps since the last one shown; -1: none shown yet
            self.wait()
            view_rendered(self._trace, index, self, self._making)
        except (EnvironmentUnavailable, RenderingError) as error:
            if self._source not in (None, "observations"):
                raise
            if isinstance(error, EnvironmentUnavailable):
                self._unavailable[episode.writer] = str(error)
            self._note = f"as numbers: {error}"
            self.fallbacks[self._note] = None
            view_observed(self._trace, index, self, None)

    # -- a viewer of an episode ---------------------------------------------------------------------------------------

    def show_verdict(self, verdict: Verdict) -> None:
        what = verdict.reason or (f"differs {verdict.difference}" if verdict.difference else "")
        replayed = "as recorded" if verdict.matches else f"{verdict.verdict}: {what}"
        self._note = f"replayed, {replayed}" if what or verdict.matches else ""
        if verdict.from_states:
            self._note = f"from {show.count(verdict.from_states, 'recorded state')}; {self._note}".removesuffix("; ")
        self._clock = time.monotonic()

    def wait(self) -> None:
        self._unseen += 1
        if self._unseen == 1 or time.monotonic() < self._looked + _LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        text = f"replaying … {show.count(self._unseen, 'step')}" if self._unseen else "replaying …"
        self._screen.draw([self._title(), text], "", [], self.step, self._last, self._help(_HELP_WAITING))
        while (key := self._terminal.key(0)) is not None:
            if key in ("quit", "up", "down"):
                self._act(key)

    def see(self, frame: Any) -> None:
        shown = self.step
        self._draw(frame)
        drawn = time.monotonic()
        while self.step == shown:
            rate = self.fps * self._speed
            due = max(self._clock + 1 / rate, drawn + _LEAST_DRAW_SECONDS)
            if self.step == self._last:
                due = max(due, drawn + _END_HOLD_FRAMES / rate)
            wait = _LOOK_SECONDS if self._paused else min(_LOOK_SECONDS, due - time.monotonic())
            key = self._terminal.key(max(0.0, wait))
            if key is not None:
                self._act(key)
            elif not self._paused and time.monotonic() >= due:
                self._advance(rate)
            if self.step == shown and (key is not None or self._screen.is_stale):
                self._draw(frame)
        self._unseen, self._looked = 0, time.monotonic()

    def _advance(self, rate: float) -> None:
        """Go to the step that is due; slow drawing skips steps."""
        if self.step == self._last:
            raise _Leave(1)
        now = time.monotonic()
        steps = max(1, int((now - self._clock) * rate))
        self._clock = now if now - self._clock > _LATE_SECONDS else self._clock + steps / rate
        self.step = min(self._last, self.step + steps)

    def _act(self, key: str) -> None:
        self._clock = time.monotonic()
        jump = 1 if self._paused else max(1, self._last // _JUMPS)
        if key == "quit":
            raise _Leave(None)
        if key == "pause":
            self._paused = not self._paused
        elif key == "next":
            self._paused = True
            if self.step == self._last:
                raise _Leave(1)
            self.step += 1
        elif key in ("left", "right", "home", "end"):
            step = {"left": self.step - jump, "right": self.step + jump, "home": 0, "end": self._last}[key]
            self.step = min(self._last, max(0, step))
            self._paused = self._paused or self.step == self._last  # stay at the end for the user to see it
        elif key == "up" or (key == "down" and self._position < len(self._chosen) - 1):
            raise _Leave(1 if key == "down" else -1)
        elif key in ("faster", "slower"):
            speed = self._speed * (2 if key == "faster" else 0.5)
            self._speed = min(_SPEEDS[1], max(_SPEEDS[0], speed))

    # -- drawing -----------------------------------------------------------------------------------------------------

    def _draw(self, frame: Any) -> None:
        head = [self._title(), *([self._note] if self._note else [])]
        words = self._captions.at(self.step)
        if isinstance(frame, list):
            words.append(self._curve())
        self._screen.draw(head, frame, words, self.step, self._last, self._help(_HELP))

    def _help(self, lines: list[str]) -> list[str]:
        if self._screen.unicode:
            return lines
        return [line.replace("←→", "arrows").replace("↑↓", "up/down") for line in lines]

    def _curve(self) -> str:
        """Return the rewards of the last steps, if known."""
        rewards = self._captions.rewards[max(0, self.step - _CURVE) : self.step]
        can_draw = self._screen.unicode and rewards.ndim == 1 and rewards.dtype.kind in "iuf"
        curve = show.curve(rewards.tolist()) if can_draw else ""
        return curve and f"rewards {curve}"

    def _title(self) -> str:
        episode = self._trace[self._index]
        described = self._trace[[self._index]].env_spec
        name = described.get("id") or str(described.get("class")).rpartition(".")[2]
        several = f" ({self._position + 1:,} of {len(self._chosen):,})" if len(self._chosen) > 1 else ""
        seed = "" if episode.seed is None else f"  seed {key_text(episode.seed)}"
        state = "  paused" if self._paused else "" if self._speed == 1 else f"  {self._speed:g}x"
        return f"{name}  episode {self._index}{several}  {episode.outcome}{seed}{state}"
