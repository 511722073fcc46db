"""The window in which a person plays, with keyboard, mouse and game pad; drawn by pygame."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from gym_trace.data.values import Array
from gym_trace.errors import MissingExtra, RenderingError
from gym_trace.printable import printable
from gym_trace.tools.playing.keymap import Inputs

os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # stdout belongs to the command
try:
    import pygame
except ImportError as missing:
    raise MissingExtra(f"playing needs pygame ({missing}): pip install 'gym-trace[play]'") from missing

CLOSED = "window closed"  # among the pressed keys
_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
_MIN_HEIGHT, _MAX_SCREEN_SHARE = 480, 0.8  # pixels of a picture; fraction of the screen
_LINE, _MARGIN = 20, 8
_DEAD_ZONE = 0.2  # ignored around the center of an axis
_REPEAT_SECONDS = 0.4  # before a held key repeats, if the environment waits for keys
_BACK, _INK, _DIM, _BANNER = (24, 26, 30), (235, 235, 235), (150, 155, 160), (255, 210, 90)
_OLD_CODES = {273: "up", 274: "down", 275: "right", 276: "left"}  # pygame 1 codes, which some environments still use
_NAMES = {pygame.key.name(getattr(pygame, name)) for name in dir(pygame) if name.startswith("K_")} - {""}
_PAD_KEYS = ("pad up", "pad down", "pad left", "pad right", *(f"pad button {number}" for number in range(16)))
KEYS = frozenset(_NAMES) | frozenset(_PAD_KEYS)


def key_name(code: int) -> str:
    return _OLD_CODES.get(code) or pygame.key.name(code)


def check_display() -> None:
    """Raise RenderingError if no window can open."""
    if sys.platform.startswith("linux") and not any(map(os.environ.get, _DISPLAYS)):
        raise _no_display("DISPLAY and WAYLAND_DISPLAY are not set")


def _no_display(problem: str) -> RenderingError:
    return RenderingError(
        f"no display: {printable(problem)}; play at a desktop or over ssh -X, open a virtual one (xvfb-run gym-trace "
        "play …, or SDL_VIDEODRIVER=dummy to show nothing), or record without a person: gym-trace record"
    )


class Window:
    """A window with a picture, lines of text below it, and perhaps text above it. A context manager.

    Attributes:
        events: names of pressed keys, in order, and CLOSED; the reader clears the list.
    """

    def __init__(self, title: str):
        self.events: list[str] = []
        self._title = title
        self._pressed: dict[str, float] = {}  # press time of each key that is down
        self._tapped: dict[str, None] = {}  # pressed since the last inputs()
        self._axes: dict[str, float] = {}
        self._pads: dict[int, Any] = {}
        self._picture_size: tuple[int, int] | None = None

    def __enter__(self) -> Window:
        try:
            pygame.display.init()
            pygame.font.init()
            pygame.joystick.init()
            pygame.display.set_caption(printable(self._title))
            self._screen = pygame.display.set_mode((720, _MIN_HEIGHT), pygame.RESIZABLE)
        except pygame.error as error:
            pygame.quit()
            raise _no_display(str(error)) from error
        self._font = pygame.font.Font(None, 22)
        return self

    def __exit__(self, *_: object) -> None:
        self._pads.clear()
        pygame.quit()

    # -- input --------------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Process all events since the last call."""
        for event in pygame.event.get():
            if event.type == pygame.QUIT:
                self.events.append(CLOSED)
            elif event.type == pygame.KEYDOWN:
                self._press(key_name(event.key))
            elif event.type == pygame.KEYUP:
                self._release(key_name(event.key))
            elif event.type == pygame.WINDOWFOCUSLOST:
                self._pressed.clear()  # no key-up event comes from another window
                self._axes.clear()
            elif event.type in (pygame.MOUSEBUTTONDOWN, pygame.MOUSEBUTTONUP, pygame.MOUSEMOTION):
                self._mouse(event)
            elif event.type == pygame.JOYDEVICEADDED:
                pad = pygame.joystick.Joystick(event.device_index)
                self._pads[pad.get_instance_id()] = pad
            elif event.type == pygame.JOYDEVICEREMOVED:
                self._pads.pop(event.instance_id, None)
                self._release_pads()
            elif event.type == pygame.JOYAXISMOTION:
                self._pad_axis(event.axis, event.value)
            elif event.type == pygame.JOYHATMOTION:
                self._press_directions(*event.value)
            elif event.type == pygame.JOYBUTTONDOWN:
                self._press(f"pad button {event.button}")
            elif event.type == pygame.JOYBUTTONUP:
                self._release(f"pad button {event.button}")

    def inputs(self, waits: bool) -> Inputs:
        """Return the keys that are pressed now or were since the last call, and the axes.

        waits: a held key counts once, and repeats only after a delay.
        """
        due = time.monotonic() - _REPEAT_SECONDS
        held = [key for key, since in self._pressed.items() if not waits or since < due]
        keys = list(dict.fromkeys([*held, *self._tapped]))
        self._tapped.clear()
        return Inputs(keys, dict(self._axes))

    def forget(self) -> None:
        """Forget keys that were pressed for another purpose."""
        self._tapped.clear()

    def _press(self, key: str) -> None:
        self.events.append(key)
        self._tapped[key] = None
        self._pressed[key] = time.monotonic()

    def _release(self, key: str) -> None:
        self._pressed.pop(key, None)

    def _mouse(self, event: Any) -> None:
        if pygame.mouse.get_pressed()[0] or (event.type == pygame.MOUSEBUTTONDOWN and event.button == 1):
            width, height = self._screen.get_size()
            self._axes["mouse x"] = min(max(2 * event.pos[0] / max(1, width) - 1, -1.0), 1.0)
            self._axes["mouse y"] = min(max(1 - 2 * event.pos[1] / max(1, height), -1.0), 1.0)
        if event.type == pygame.MOUSEBUTTONUP and event.button == 1:
            self._axes.pop("mouse x", None)
            self._axes.pop("mouse y", None)

    def _pad_axis(self, axis: int, value: float) -> None:
        value = -value if axis % 2 else value  # sticks are positive downwards
        if abs(value) < _DEAD_ZONE:
            self._axes.pop(f"pad {axis}", None)
        else:
            self._axes[f"pad {axis}"] = min(max(value, -1.0), 1.0)
        if axis < 2:
            self._press_directions(*(round(self._axes.get(f"pad {number}", 0.0)) for number in (0, 1)))

    def _release_pads(self) -> None:
        for held in (self._pressed, self._axes):
            for name in [name for name in held if name.startswith("pad ")]:
                del held[name]

    def _press_directions(self, across: int, up: int) -> None:
        for key, is_down in zip(_PAD_KEYS, (up > 0, up < 0, across < 0, across > 0)):
            if is_down and key not in self._pressed:
                self._press(key)
            elif not is_down:
                self._release(key)

    # -- output -------------------------------------------------------------------------------------------------------

    def show(self, picture: Any, lines: Sequence[str], banner: str = "", text: Sequence[tuple[str, str]] = ()) -> None:
        """Draw a picture (rows, columns, 3 or 1) or text, lines below it, and a banner or a table over it."""
        wide = self._screen.get_width() - 2 * _MARGIN
        colours = [_INK, *[_DIM] * len(lines)]
        lined = [(part, colour) for line, colour in zip(lines, colours) for part in self._wrapped(line, wide)]
        below = _LINE * len(lined) + _MARGIN
        if isinstance(picture, np.ndarray):
            self._fit(picture.shape[1], picture.shape[0], below)
        self._screen.fill(_BACK)
        width, height = self._screen.get_size()
        if isinstance(picture, np.ndarray):
            self._draw(picture, width, max(1, height - below))
        elif picture is not None:
            for number, line in enumerate(str(picture).splitlines()):
                self._write(line, _MARGIN, _MARGIN + _LINE * number, _INK)
        for number, (line, colour) in enumerate(lined):
            self._write(line, _MARGIN, height - below + _LINE * number + 4, colour)
        if text:
            self._table(text, width, height - below)
        if banner:
            self._shade(0, 0, width, 2 * _LINE)
            self._write(banner, _MARGIN, _MARGIN + 4, _BANNER)
        pygame.display.flip()

    def _wrapped(self, line: str, width: int) -> list[str]:
        """Break a line between words so that its parts are at most as wide as the window."""
        parts = [""]
        for word in line.split(" "):
            longer = f"{parts[-1]} {word}" if parts[-1] else word
            if parts[-1].strip() and self._font.size(printable(longer))[0] > width:
                parts.append(word)
            else:
                parts[-1] = longer
        return parts

    def _fit(self, width: int, height: int, below: int) -> None:
        """Resize the window when the size of pictures changes; the person may resize it afterwards."""
        if (width, height) == self._picture_size:
            return
        self._picture_size = width, height
        across, down = pygame.display.get_desktop_sizes()[0]
        scale = max(1, -(-_MIN_HEIGHT // max(1, height)))
        while scale > 1 and (
            scale * width > _MAX_SCREEN_SHARE * across or scale * height + below > _MAX_SCREEN_SHARE * down
        ):
            scale -= 1
        size = max(scale * width, 360), scale * height + below
        if self._screen.get_size() != size:
            self._screen = pygame.display.set_mode(size, pygame.RESIZABLE)

    def _draw(self, picture: Array, width: int, height: int) -> None:
        """Draw a picture as large as possible, without smoothing if it is small."""
        if picture.ndim == 2 or picture.shape[2] == 1:
            picture = np.repeat(picture.reshape(*picture.shape[:2], 1), 3, axis=2)
        surface = pygame.surfarray.make_surface(np.ascontiguousarray(picture[..., :3].swapaxes(0, 1), np.uint8))
        scale = min(width / picture.shape[1], height / picture.shape[0])
        size = max(1, int(scale * picture.shape[1])), max(1, int(scale * picture.shape[0]))
        if size != surface.get_size():
            resized = pygame.transform.scale if scale >= 2 else pygame.transform.smoothscale
            surface = resized(surface, size)
        self._screen.blit(surface, ((width - size[0]) // 2, (height - size[1]) // 2))

    def _table(self, rows: Sequence[tuple[str, str]], width: int, height: int) -> None:
        """Draw rows of two columns over the picture, in as many blocks side by side as are needed."""
        self._shade(0, 0, width, height)
        fitting = max(1, (height - 2 * _MARGIN) // _LINE)
        left = _MARGIN
        for start in range(0, len(rows), fitting):
            block = rows[start : start + fitting]
            middle = left + 16 + max(self._font.size(printable(key))[0] for key, _ in block)
            for number, (key, meaning) in enumerate(block):
                self._write(key, left, _MARGIN + _LINE * number, _BANNER)
                self._write(meaning, middle, _MARGIN + _LINE * number, _INK)
            left = middle + 24 + max(self._font.size(printable(meaning))[0] for _, meaning in block)

    def _shade(self, left: int, top: int, width: int, height: int) -> None:
        shade = pygame.Surface((width, height), pygame.SRCALPHA)
        shade.fill((*_BACK, 225))
        self._screen.blit(shade, (left, top))

    def _write(self, text: str, left: int, top: int, colour: tuple[int, int, int]) -> None:
        if text:
            self._screen.blit(self._font.render(printable(text), True, colour), (left, top))
