"""Ask a person once for the key of each action, and store the answers in the user's configuration."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gym_trace.storage.staging import replaced_file
from gym_trace.tools.playing.keymap import Keymap, Question
from gym_trace.tools.playing.window import CLOSED, Window

_LEGEND = 200  # characters
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


def keys_file(environment: str, space: Any) -> Path:
    """Return the file with the keys of an environment with this action space: below $XDG_CONFIG_HOME or ~/.config."""
    root = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    digest = hashlib.blake2b(f"{environment}\n{space}".encode("utf-8", "backslashreplace"), digest_size=4).hexdigest()
    name = _UNSAFE.sub("-", environment)[:80].strip(".") or "environment"
    return root / "gym-trace" / "keys" / f"{name}-{digest}.toml"


def save_keys(keymap: Keymap, path: Path, environment: str, space: Any) -> None:
    """Write a key map to a file. Raises OSError."""
    title = " ".join(f"{environment}, {space}".split())
    with replaced_file(path) as staged:
        staged.write_text(f"# gym-trace play: keys of {title}\n{_toml(keymap.as_toml())}", encoding="utf-8")


def _toml(content: dict[str, Any], name: str = "") -> str:
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    lines = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in content.items() if key not in tables]
    head = [f"[{name}]"] if name and lines else []
    parts = ["\n".join([*head, *lines, ""])] if lines else []
    return "\n".join([*parts, *(_toml(table, f"{name}.{key}" if name else key) for key, table in tables.items())])


def legend(rows: Sequence[tuple[str, str]]) -> str:
    """Return keys and what they do in one line, as far as they fit."""
    text = "   ".join(f"{key}: {meaning}" for key, meaning in rows)
    return text if len(text) <= _LEGEND else f"{text[: _LEGEND - 1]}…"


def ask(
    window: Window,
    environment: str,
    questions: Sequence[Question],
    reserved: frozenset[str],
    may_rest: bool,
    stop: Callable[[], bool],
    picture: Callable[[Question], Any] = lambda question: None,
) -> list[str | None] | None:
    """Show the questions one by one; return the key of each, or None if the person quits.

    picture: returns a picture of what the action of a question does, for this moment, or None.
    may_rest: one key may be None, by Enter: the action while no key is pressed.
    """
    answers: list[str | None] = []
    note = ""
    while len(answers) < len(questions):
        rows = [("no key" if key is None else key, question.text) for question, key in zip(questions, answers)]
        wanted = f"press the key for: {questions[len(answers)].text}"
        hints = ["Backspace: back, Escape: quit"]
        if may_rest and None not in answers:
            hints += ["Enter: do this while no key is pressed (otherwise, steps wait for a key)"]
        title, shown = f"{environment}: key {len(answers) + 1} of {len(questions)}", picture(questions[len(answers)])
        if shown is None:
            window.show(None, [title, *hints], note, [*rows, ("?", wanted)])
        else:
            window.show(shown, [f"{title}, {wanted}", legend(rows), *hints], note)
        window.poll()
        events, window.events = window.events, []
        for key in events:
            if key in (CLOSED, "escape"):
                return None
            if key == "backspace":
                answers, note = answers[:-1], ""
            elif key == "return" and may_rest and None not in answers:
                answers, note = [*answers, None], ""
            elif key in reserved or key in answers:
                note = f"{key}: {'already taken' if key in answers else 'used by gym-trace'}; press another"
            else:
                answers, note = [*answers, key], ""
            if len(answers) == len(questions):
                break
        if stop():
            return None
        time.sleep(0.01)
    window.forget()
    return answers
