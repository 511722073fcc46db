"""The lines for completion that gym-trace doctor prints, in real shells: TAB inserts one word, and runs nothing."""

import os
import pty
import re
import select
import shutil
import signal
import sys
from pathlib import Path

import gymnasium
import pytest
from gym_trace_cli.doctor import COMPLETION
from runs import record_lengths

from gym_trace import TraceRecordingWrapper

SHELLS = {  # command that starts it, and line that enables completion
    "bash": (["bash", "--norc", "--noprofile", "-i"], COMPLETION["bash"][0]),
    "zsh": (["zsh", "-f", "-i"], f"autoload -Uz compinit; compinit -D -u; {COMPLETION['zsh'][0]}"),
    "fish": (["fish", "--no-config", "-i"], COMPLETION["fish"][0]),
}
NAME = """it's "a" $(touch ran) !*"""

each_shell = pytest.mark.parametrize(
    "shell",
    [
        pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"needs {name}"))
        for name in SHELLS
    ],
)


def words_after_tab(shell: str, line: str, directory: Path) -> list[str]:
    """Type a line and TAB; return the words of the completed line."""
    command, turn_on = SHELLS[shell]
    home = directory / ".home"
    home.mkdir(exist_ok=True)
    tell, words = home / "tell", home / "words"
    tell.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > '{words}'\n")
    tell.chmod(0o755)
    path = os.pathsep.join((str(home), str(Path(sys.executable).parent), os.environ["PATH"]))
    child, terminal = pty.fork()
    if not child:
        try:
            os.chdir(directory)
            os.execvpe(command[0], command, {**os.environ, "PATH": path, "HOME": str(home), "TERM": "xterm"})
        finally:
            os._exit(1)
    said = b""
    try:
        for typed, end in (
            (f"{turn_on}; echo rea''dy\n", rb"ready\r?\n"),
            (f"{line}\t\x01tell \necho; echo do''ne\n", rb"done\r?\n"),  # \x01: to the begin of the line
        ):
            os.write(terminal, typed.encode())
            while not re.search(end, said):
                assert select.select([terminal], [], [], 60)[0], said
                said += os.read(terminal, 65536)
    finally:
        os.close(terminal)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return words.read_text().splitlines()


@each_shell
def test_a_directory_called_like_an_option_does_not_become_one(tmp_path: Path, shell: str) -> None:
    record_lengths(tmp_path / "--make=m:f", [2])
    found = words_after_tab(shell, "gym-trace verify ", tmp_path)[-1]
    assert found == ("verify" if shell == "fish" else "./--make=m:f")  # fish inserts nothing


@each_shell
def test_names_of_a_trace_that_a_shell_would_run_are_not_offered(tmp_path: Path, shell: str) -> None:
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / "t")
    env.reset(seed=1)
    for name in ("$(touch${IFS}ran)", "`touch ran`", "a;touch ran", "line\nbreak", "plain"):
        env.annotate(**{name: 1.0})
    env.step(0)
    env.close()
    assert words_after_tab(shell, "gym-trace cat t --columns rewards,annotations/", tmp_path)[-1] == (
        "rewards,annotations/plain"
    )
    assert not (tmp_path / "ran").exists()


@each_shell
@pytest.mark.parametrize(("begin", "quote"), [("", ""), ("in\\ here/", ""), ("in here/", "'"), ("in here/", '"')])
def test_a_directory_of_any_name_is_completed_to_one_word(tmp_path: Path, shell: str, begin: str, quote: str) -> None:
    parent = tmp_path / begin.replace("\\", "")
    record_lengths(parent / NAME, [1])
    assert words_after_tab(shell, f"gym-trace stats {quote}{begin}", tmp_path) == [
        "gym-trace", "stats", f"{begin}{NAME}".replace("in\\", "in"),
    ]  # fmt: skip
    (parent / "another").mkdir()  # now the shell completes paths
    found = words_after_tab(shell, f"gym-trace stats {quote}{begin}i", tmp_path)[-1]
    assert found.rstrip("/") == f"{begin}{NAME}".replace("in\\", "in")
    assert not (tmp_path / "ran").exists()


@each_shell
@pytest.mark.parametrize("typed", ['"steps > 3 and out', r"steps\ \>\ 3\ and\ out"])
def test_a_condition_stays_one_word(tmp_path: Path, shell: str, typed: str) -> None:
    record_lengths(tmp_path / "t", [1])
    assert words_after_tab(shell, f"gym-trace ls t --where {typed}", tmp_path)[-1] == "steps > 3 and outcome"
    assert not (tmp_path / "3").exists()
