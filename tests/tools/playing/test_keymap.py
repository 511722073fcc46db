"""Key maps: which action pressed keys choose, and files that say so."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("pygame")

from gym_trace.errors import InvalidOption
from gym_trace.tools.playing.asking import keys_file, save_keys
from gym_trace.tools.playing.keymap import (
    Inputs,
    check_supported,
    default_keymap,
    keymap_of_answers,
    keymap_of_environment,
    keymap_of_file,
    questions_of,
)
from gym_trace.tools.playing.window import KEYS, key_name

STEERING = spaces.Box(np.array([-1, 0], np.float32), np.array([1, np.inf], np.float32))


def _read(tmp_path: Path, text: str, space: Any) -> Any:
    (tmp_path / "keys.toml").write_text(text, encoding="utf-8")
    return keymap_of_file(tmp_path / "keys.toml", space, KEYS)


class _WithKeys:
    """Stands for an environment with a key map, as gymnasium.utils.play reads it."""

    def __init__(self, keys: Any, space: Any):
        self.action_space = space
        self.unwrapped = self
        self._keys = keys

    def get_keys_to_action(self) -> Any:
        return self._keys


@pytest.mark.parametrize(
    ("pressed", "action"),
    [([], 0), (["w"], 1), (["w", "space"], 2), (["space", "w"], 2), (["w", "s"], 3), (["s", "w"], 1), (["x"], 0)],
)
def test_the_combination_of_the_most_keys_counts_and_then_the_latest(pressed: list[str], action: int) -> None:
    own = {(): 0, ("w",): 1, (ord("w"), ord(" ")): 2, "s": 3}
    keymap = keymap_of_environment(_WithKeys(own, spaces.Discrete(4)), key_name)
    assert keymap is not None
    assert keymap.action(Inputs(pressed)) == action


def test_key_codes_of_pygame_1_still_name_the_arrows() -> None:
    keymap = keymap_of_environment(_WithKeys({(276,): 0, (275,): 2}, spaces.Discrete(3)), key_name)
    assert keymap is not None
    assert keymap.keys == {"left", "right"}


def test_a_file_names_keys_combinations_and_the_action_at_rest(tmp_path: Path) -> None:
    keymap = _read(tmp_path, 'rest = 2\n[keys]\nleft = 0\n"left + space" = 1\n"pad button 0" = 3\n', spaces.Discrete(4))
    assert [keymap.action(Inputs(keys)) for keys in ([], ["left"], ["left", "space"])] == [2, 0, 1]
    assert not keymap.waits
    assert _read(tmp_path, "[keys]\nleft = 0", spaces.Discrete(4)).action(Inputs()) is None


def test_a_file_gives_numbers_of_an_action_keys_and_axes(tmp_path: Path) -> None:
    text = '[elements.0]\nkeys = {a = -1.0, d = 0.5}\naxes = ["pad 2"]\n[elements.1]\nrest = 0.25\nkeys = {w = 1}\n'
    keymap = _read(tmp_path, text, STEERING)
    for inputs, action in (
        (Inputs(), [0, 0.25]),
        (Inputs(["d", "w"]), [0.5, 1]),
        (Inputs(["a", "d"]), [-0.5, 0.25]),
        (Inputs((), {"pad 2": -0.5}), [-0.5, 0.25]),
        (Inputs(["d"], {"pad 2": -0.5}), [0.5, 0.25]),
    ):
        found = keymap.action(inputs)
        assert (found.tolist(), found.dtype) == (action, np.float32)
        assert STEERING.contains(found)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", r"no keys; write a table \[keys\]"),
        ("[keys]\nlfet = 0", "'lfet': not a key"),
        ("[keys]\nleft = 4", "4 is not an action; use 0 to 3"),
        ("[keys]\nleft = true", "True is not an action"),
        ("[key]\nleft = 0", "unknown 'key' in the file; known: keys, rest"),
        ("keys = 3", "keys: write a table"),
        ("[keys", "Expected"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InvalidOption, match=f"keys.toml: .*{problem}"):
        _read(tmp_path, text, spaces.Discrete(4))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no elements"),
        ("[elements.2]\n", "not an element of the action; it has 2"),
        ("[elements.0]\nkeys = {left = 3}", "3 is out of range; use -1 to 1"),
        ('[elements.0]\naxes = ["mouse z"]', "axes are mouse x, mouse y"),
        ("[elements.0]\nkey = {}", "unknown 'key' in elements.0"),
    ],
)
def test_a_wrong_file_for_continuous_actions_says_what_is_wrong(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InvalidOption, match=f"keys.toml: .*{problem}"):
        _read(tmp_path, text, STEERING)


@pytest.mark.parametrize(
    "space", [spaces.Discrete(3, start=5), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3)], ids=str
)
def test_answers_play_every_action_and_survive_their_file(tmp_path: Path, space: Any) -> None:
    questions = questions_of(space, ["first"])
    keys = ["left", "right", "up", "down"][: len(questions)]
    asked = keymap_of_answers(space, questions, keys)
    save_keys(asked, tmp_path / "config" / "keys.toml", "Env\nwith lines", space)
    kept = keymap_of_file(tmp_path / "config" / "keys.toml", space, KEYS)
    found = set()
    for pressed in ([], *([key] for key in keys), keys):
        action = kept.action(Inputs(pressed))
        np.testing.assert_array_equal(action, asked.action(Inputs(pressed)))
        if action is not None:
            assert space.contains(action)
            found.add(np.asarray(action).tobytes())
    assert len(found) >= len(keys)


def test_default_keys_rest_at_zero_or_the_nearest_bound() -> None:
    keymap = default_keymap(spaces.Box(np.array([-2, 0, 1]), np.array([2, 1, 3]), dtype=np.float64))
    assert keymap is not None
    assert keymap.action(Inputs()).tolist() == [0, 0, 1]
    assert keymap.action(Inputs(["right", "up", "d"])).tolist() == [2, 1, 3]
    assert keymap.action(Inputs((), {"mouse x": 0.5, "mouse y": 1.0})).tolist() == [1, 1, 1]
    assert default_keymap(spaces.Discrete(3)) is None


def test_spaces_without_keys_raise() -> None:
    with pytest.raises(InvalidOption, match=r"Dict.*: cannot be played; supported: Discrete"):
        check_supported(spaces.Dict({"a": spaces.Discrete(2)}))
    with pytest.raises(InvalidOption, match="500 keys are too many to ask for; pass --keys FILE"):
        questions_of(spaces.Discrete(500), [])


def test_kept_keys_differ_by_environment_and_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    files = {keys_file(name, space) for name in ("A/b", "A-b", "../x") for space in ("Discrete(2)", "Discrete(3)")}
    assert len(files) == 6
    assert {file.parent for file in files} == {tmp_path / "gym-trace" / "keys"}
