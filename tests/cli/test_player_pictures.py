"""Images and text in cells of a terminal: colours, sizes, and no control characters."""

import re
from typing import Any

import numpy as np
import pytest
from gym_trace_cli.player.screen import Screen, colours_of, fitted, fitting, half_blocks, shades, sixel
from gym_trace_cli.player.terminal import Abilities
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from terminals import Scripted

from gym_trace.data.showing.pictures import as_picture
from gym_trace.errors import RenderingError

SGR = re.compile(r"\x1b\[[0-9;]*m")


def random_picture(height: int, width: int, seed: int = 0, colours: int = 256) -> Any:
    levels = np.random.default_rng(seed).integers(0, colours, (height, width, 3))
    return (levels * (255 // (colours - 1))).astype(np.uint8)


def decoded(sequence: str) -> Any:
    """Decode a sixel sequence to an image of palette colours, in hundredths."""
    found = re.fullmatch(r'\x1bP0;1;0q"1;1;(\d+);(\d+)((?:#\d+;2;\d+;\d+;\d+)*)(.*)\x1b\\', sequence, re.S)
    assert found is not None
    width, height = int(found[1]), int(found[2])
    palette = {int(n): [int(p) for p in rgb.split(";")] for n, rgb in re.findall(r"#(\d+);2;([\d;]+)", found[3])}
    picture = np.full((height + 6, width, 3), -1)
    row = column = 0
    colour: Any = None
    for token in re.finditer(r"#(\d+)|!(\d+)(.)|(\$)|(-)|([?-~])", found[4]):
        if token[1]:
            colour = palette[int(token[1])]
        elif token[4]:
            column = 0
        elif token[5]:
            row, column = row + 6, 0
        else:
            bits, times = ord(token[3] or token[6]) - 63, int(token[2] or 1)
            for bit in range(6):
                if bits >> bit & 1:
                    picture[row + bit, column : column + times] = colour
            column += times
    assert (picture[height:] == -1).all()
    return picture[:height]


@pytest.mark.parametrize("shape", [(1, 1), (6, 4), (7, 5), (20, 31)], ids=str)
def test_a_sixel_picture_of_few_colours_is_exact(shape: tuple[int, int]) -> None:
    picture = random_picture(*shape, colours=4)
    assert decoded(sixel(picture)).tolist() == ((picture.astype(int) * 100 + 127) // 255).tolist()


def test_a_sixel_picture_of_many_colours_is_near() -> None:
    picture = random_picture(24, 40)
    assert np.abs(decoded(sixel(picture)) * 2.55 - picture).max() <= 27


def test_half_blocks_have_a_colour_for_each_of_two_pixels() -> None:
    picture = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [1, 2, 3]]], np.uint8)
    assert half_blocks(picture, 2, 1, 1 << 24) == [
        "\x1b[38;2;255;0;0;48;2;0;0;255m▀\x1b[38;2;0;255;0;48;2;1;2;3m▀\x1b[0m"
    ]
    assert half_blocks(picture, 2, 1, 256) == ["\x1b[38;5;196;48;5;21m▀\x1b[38;5;46;48;5;16m▀\x1b[0m"]


def test_greys_are_among_the_greys_of_256_colours() -> None:
    (line,) = half_blocks(np.full((2, 1, 3), 118, np.uint8), 1, 1, 256)
    assert line == "\x1b[38;5;243;48;5;243m▀\x1b[0m"


def test_shades_go_from_spaces_to_the_densest_character() -> None:
    picture = np.repeat(np.arange(0, 250, 25, dtype=np.uint8), 2 * 3).reshape(10, 2, 3).transpose(1, 0, 2)
    assert shades(as_picture(picture), 10, 1) == [" .:-=+*#%@"]
    assert shades(np.zeros((2, 3, 3), np.uint8), 3, 1) == ["   "]


@given(*map(st.integers, [1] * 4, [300, 300, 90, 40]), st.sampled_from([0, 256, 1 << 24]))
def test_pictures_of_any_size_stay_in_place(height: int, width: int, columns: int, rows: int, colours: int) -> None:
    picture = random_picture(height, width)
    lines = half_blocks(picture, columns, rows, colours) if colours else shades(picture, columns, rows)
    lengths = {len(SGR.sub("", line)) for line in lines}
    assert 1 <= len(lines) <= rows
    assert len(lengths) == 1
    assert max(lengths) <= columns
    assert max(fitting(picture, columns, rows).shape[:2]) <= max(columns, rows)


def test_a_smaller_picture_is_the_mean_of_its_pixels() -> None:
    picture = random_picture(40, 60)
    small = fitting(picture, 6, 4)
    assert np.abs(small - picture.reshape(4, 10, 6, 10, 3).mean((1, 3))).max() <= 1


@pytest.mark.parametrize(
    "frame",
    [
        np.zeros((2, 3, 3)),
        np.zeros((0, 3, 3), np.uint8),
        np.zeros((2, 2, 2), np.uint8),
        np.zeros(4, np.uint8),
        [[None]],
    ],
    ids=["floats", "empty", "two channels", "a row", "nothing"],
)
def test_an_invalid_image_raises(frame: Any) -> None:
    with pytest.raises(RenderingError, match="not an image"):
        as_picture(frame)


@pytest.mark.parametrize(
    ("environ", "colours"),
    [
        ({"TERM": "xterm-256color"}, 256),
        ({"TERM": "xterm", "COLORTERM": "truecolor"}, 1 << 24),
        ({"TERM": "xterm-256color", "COLORTERM": "24bit", "NO_COLOR": "1"}, 0),
        ({"TERM": "xterm-256color", "NO_COLOR": ""}, 256),
        ({"TERM": "vt100"}, 0),
        ({}, 0),
    ],
    ids=str,
)
def test_colours_are_those_that_the_terminal_has_and_somebody_wants(environ: dict[str, str], colours: int) -> None:
    assert colours_of(environ) == colours


@given(st.text(max_size=40), st.integers(1, 30))
def test_lines_are_exactly_as_wide_as_the_screen(text: str, columns: int) -> None:
    line = fitted("".join(c for c in text if c.isprintable()).replace("b", "\x1b[1m"), columns)
    assert cell_len(SGR.sub("", line)) == columns


@given(st.text(alphabet=st.characters() | st.sampled_from("\x1b[]0;m\x07"), max_size=200))
def test_nothing_that_is_drawn_steers_the_terminal(text: str) -> None:
    terminal = Scripted(size=(40, 9))  # its screen asserts that
    screen = Screen(terminal)  # type: ignore[arg-type]
    screen.draw([text, text], text, [text], 1, 2, [""])
    screen.draw([text, text], [(text, text), (text, np.array([text]))], [text], 2, 2, [""])


def test_texts_keep_their_colours_or_stand_out_without(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    for colour in ("", "1"):
        monkeypatch.setenv("NO_COLOR", colour)
        monkeypatch.setenv("TERM", "xterm")
        terminal = Scripted(size=(10, 8))
        screen = Screen(terminal)  # type: ignore[arg-type]
        monkeypatch.setattr(terminal, "write", written.append)
        screen.draw(["t"], "\x1b[41m@\x1b[0m\x1b]0;x\x07\x1b[2Jy\n", [], 0, 1, [""])
    assert ["\x1b[41m@\x1b[0m" in text for text in written if "@" in text] == [True, False]
    assert ["\x1b[7m@\x1b[0m" in text for text in written if "@" in text] == [False, True]
    assert not any("\x1b]" in text or "\x07" in text for text in written)


def test_a_terminal_that_shows_pictures_gets_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "")
    terminal = Scripted(abilities=Abilities(sixel=True, cell=(10, 20)))
    Screen(terminal).draw(["t"], random_picture(100, 100, colours=2), ["a", "b"], 0, 1, ["keys"])  # type: ignore[arg-type]
    ((row, column, sequence),) = terminal.drawn.pictures
    height, width = decoded(sequence).shape[:2]
    assert row == 1
    assert height <= 19 * 20
    assert column * 10 + width <= 800
    assert abs(height - width) <= 1


def test_a_picture_of_another_size_or_none_clears_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "")
    terminal = Scripted(abilities=Abilities(sixel=True, cell=(10, 20)))
    screen, written = Screen(terminal), []  # type: ignore[arg-type]
    monkeypatch.setattr(terminal, "write", written.append)
    wide, high = random_picture(10, 100), random_picture(100, 10)
    pictures, cleared = [], []
    for head, frame in ((["t"], wide), (["t"], wide), (["t"], high), (["t", "note"], high), (["t", "note"], "text")):
        written.clear()
        screen.draw(head, frame, [], 0, 1, [""])
        pictures.append("".join(written).count("\x1bP"))
        cleared.append("".join(written).count("\x1b[2J"))
    assert pictures == [1, 0, 1, 1, 0]  # an equal picture is not drawn twice
    assert cleared == [1, 0, 1, 1, 1]
