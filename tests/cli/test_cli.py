"""The command line: help, errors and exit codes, and how numbers, tables and progress look."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from gym_trace_cli import show
from gym_trace_cli.main import COMMANDS, HINTS
from gym_trace_cli.options import episode_slice
from gym_trace_cli.progress import ProgressLine, _drawn
from rich.console import Console
from runs import recorded
from shell import ok, process, run

import gym_trace
from gym_trace.recording import compiled, core


@pytest.mark.parametrize("args", [["--help"], ["recrod"]], ids=str)
def test_help_loads_neither_gymnasium_nor_numpy_nor_rich(args: list[str]) -> None:
    code = f"""
import sys
from gym_trace_cli.main import cli
try:
    cli({args!r})
finally:
    print(sorted(sys.modules.keys() & {{"gymnasium", "numpy", "rich", "msgpack", "zstandard"}}))
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert output.splitlines()[-1] == "[]"


def test_version_names_the_library_and_whether_it_is_compiled() -> None:
    first, second = ok("--version").output.splitlines()
    assert first == f"gym-trace, version {gym_trace.__version__}"
    assert second.startswith("C core: yes" if core.CORE == "compiled" else "C core: no (")


@pytest.mark.parametrize(
    ("variables", "implementation", "reason"),
    [
        ({"Py_GIL_DISABLED": 1}, "CPython", "free-threaded CPython"),
        ({}, "PyPy", "PyPy"),
        ({}, "CPython", "not compiled at installation; pip install -v shows why"),
    ],
)
def test_version_says_why_the_core_is_missing(
    variables: dict[str, int], implementation: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GYM_TRACE_PURE", raising=False)
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(compiled.sysconfig, "get_config_var", variables.get)
    monkeypatch.setattr(compiled.platform, "python_implementation", lambda: implementation)
    assert ok("--version").output.splitlines()[1] == f"C core: no ({reason}); pure Python, slower"


def test_version_says_that_a_core_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GYM_TRACE_PURE", raising=False)
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(core, "CORE", "pure")  # as with another ABI
    reason = "compiled for another version; install gym-trace again"
    assert ok("--version").output.splitlines()[1] == f"C core: no ({reason}); pure Python, slower"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    assert name in ok("--help").output
    assert f"gym-trace {name}" in ok(name, "-h").output


def test_the_first_help_fits_a_screen_of_80_columns() -> None:
    lines = ok("--help").output.splitlines()
    assert len(lines) <= 39
    assert max(map(len, lines)) <= 80


def test_help_shows_a_command_or_the_options_that_many_share() -> None:
    assert ok("help", "edit", "filter").output == ok("edit", "filter", "--help").output
    assert "--where" in ok("ls", "--help").output
    for text in ("--where EXPR", "--sort -return --limit 3"):
        assert text in ok("help", "select").output
        assert text not in ok("ls", "--help").output
    assert "did you mean 'record'?" in run("help", "recrod").stderr
    assert "no topic 'selection'; did you mean 'select'?" in run("help", "selection").stderr
    assert run("help", "ls", "more").exit_code == 2


def test_rare_options_are_in_the_full_help_alone() -> None:
    assert ok("--help-all").output.count("  record ") == 1
    assert "--level" not in ok("record", "--help").output
    assert "--level N" in ok("record", "--help-all").output
    assert "--where EXPR" in ok("ls", "--help-all").output


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("ls t --best 3", "use --sort -return --limit N"), ("replay t --verify", "use gym-trace verify"),
        ("record CartPole-v1 --append", "use --on-exist append"),
        ("ls --cache cache s3://bucket/traces", "pass it before the command, after gym-trace"),
        ("verify t --seed 3", "use --sort random:SEED or --where 'seed == N'"),
    ],
)  # fmt: skip
def test_an_option_of_another_name_gets_a_hint(words: str, hint: str) -> None:
    refused = run(*words.split())
    assert (refused.exit_code, hint in refused.stderr) == (2, True)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_fits_a_screen_of_80_columns(name: str) -> None:
    lines = ok(name, "--help").output.splitlines()
    assert len(lines) <= 39
    assert all(line.startswith("  gym-trace ") for line in lines if len(line) > 80)  # commands of the example


@pytest.mark.parametrize(
    "args",
    [["--nope"], ["recrod"], ["record", "--episodes", "0"], ["record", "x", "--steps", "0"], ["edit", "mrege"],
     ["cat"], ["replay"], ["replay", "x", "--nope"], ["record", "x", "--seed", "-1"]],
    ids=str,
)  # fmt: skip
def test_wrong_usage_prints_one_lower_case_error_line(args: list[str]) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith("Usage: gym-trace")
    assert [line for line in result.stderr.splitlines() if line.lower().startswith("error:")] == [
        line for line in result.stderr.splitlines() if line.startswith("error: ") and not line.endswith(".")
    ]
    assert "error: " in result.stderr


def test_an_unknown_command_of_edit_gets_a_hint() -> None:
    assert "no command 'mrege'; did you mean 'merge'?" in run("edit", "mrege").stderr
    assert "'gym-trace edit --help' lists them" in run("edit", "export").stderr


def test_a_trace_error_is_one_line_on_stderr(tmp_path: Path) -> None:
    result = run("replay", tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {tmp_path}: no trace here")
    assert result.stderr.count("\n") == 1


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = run("--debug", "replay", tmp_path)
    assert result.exit_code == 1
    assert "Traceback (most recent call last)" in result.stderr
    assert "error: " in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PermissionError(13, "Permission denied", "a/b"), 1, "error: a/b: Permission denied\n"),
        (OSError(28, "No space left on device"), 1, "error: No space left on device\n"),
        (gym_trace.errors.TraceError("\x1b[2Jgone"), 1, "error: \\x1b[2Jgone\n"),
        (ValueError("two\nlines"), 1, f"error: ValueError: two lines ({__file__}, line "),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
    ids=["file", "no file", "escape sequence", "foreign code", "ctrl-c"],
)
def test_an_error_is_one_line(error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(directory: str) -> None:
        raise error

    monkeypatch.setattr(gym_trace, "open_trace", fails)
    result = run("replay", "x")
    assert result.exit_code == code
    assert result.stderr.startswith(said)
    assert result.stderr.count("\n") == 1


def test_a_reader_that_leaves_ends_the_command_without_a_word(here: Path) -> None:
    ok("record", "clicks:CliClock-v0", "-o", "t", "--episodes", 20, "--env-arg", "length=1")
    for options in ([], ["--json"]):
        read, write = os.pipe()
        os.close(read)
        with process("replay", "t", *options, stdout=write) as running:
            os.close(write)
            assert running.stderr is not None
            assert running.stderr.read() == ""
        assert running.returncode == 141


def test_a_broken_pipe_of_the_environment_is_an_error(here: Path) -> None:
    arguments = ["--env-arg", "fail_at=3", "--env-arg", "failure=BrokenPipeError"]
    with process("record", "clicks:CliClock-v0", "-o", "t", *arguments) as running:
        assert "BrokenPipeError" in running.communicate()[1]
    assert running.returncode == 1


def test_warnings_are_one_line_without_colours(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    (here / "noisy.py").write_text("import warnings\nwarnings.warn('\\x1b[33mWARN: old\\nenvironment\\x1b[0m')\n")
    with process("record", "CartPole-v1", "--import", "noisy", "-o", "t", "--steps", 1) as running:
        assert running.communicate()[1] == "warning: old environment\n"
    assert running.returncode == 0


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("5", [5]),
        ("-1", [-1]),
        ("1,4,7", [1, 4, 7]),
        ("2:10", slice(2, 10)),
        ("-3:", slice(-3, None)),
        ("::10", slice(None, None, 10)),
        (":", slice(None)),
    ],
)
def test_a_choice_of_episodes_is_read_as_in_python(text: str, chosen: object) -> None:
    assert episode_slice(text) == chosen


@pytest.mark.parametrize("text", ["", "a", "1,", "2-3", "1:2:3:4", "::0", "1,2:3", "1.5", "9" * 5000])
def test_a_senseless_choice_of_episodes_is_a_usage_error(text: str) -> None:
    with pytest.raises(click.BadParameter):
        episode_slice(text)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (12345, "12.3 kB"), (999_499, "999 kB"), (999_500, "1.00 MB")],
)
def test_sizes_are_short(number: int, text: str) -> None:
    assert show.size(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.045, "45 ms"),
        (0.9996, "1.0 s"),
        (59.96, "1 min"),
        (200, "3 min 20 s"),
        (3599.7, "1 h"),
        (7500, "2 h 5 min"),
        (360_000, "4 d 4 h"),
        (None, "-"),
    ],
)
def test_durations_are_short_and_never_say_60(seconds: float | None, text: str) -> None:
    assert show.duration(seconds) == text


def test_a_table_widens_when_later_rows_need_it(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(show, "_TABLE_BLOCK", 2)
    show.table(["n", "name"], [["1", "a"], ["2", "b"], ["1,000", "c"]])
    assert capsys.readouterr().out == "n  name\n1  a\n2  b\n1,000  c\n"


@pytest.mark.parametrize(
    ("last", "drawn"),
    [("52,647 steps/s", " 40%  3 min left  5,925 episodes  131,688 steps"), ("(it hangs)", "131,688 steps  (it …")],
)
def test_a_narrow_terminal_leaves_out_facts_and_cuts_only_a_trouble(last: str, drawn: str) -> None:
    terminal = Console(width=54)
    with terminal.capture() as capture:
        terminal.print(_drawn(["3 min left", "5,925 episodes", "131,688 steps", last], 0.4, 54))
    assert capture.get().rstrip().endswith(drawn)


def test_progress_is_plain_lines_without_a_terminal_and_nothing_when_quiet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_trace_cli.progress._PLAIN_SECONDS", 0.0)
    for quiet in (False, True):
        with ProgressLine(quiet=quiet) as progress:
            progress.update("1 of 2", 0.5)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", " 50%  1 of 2\n")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        *[("show", "'info'"), ("sync", "'push'"), ("card", "'info --card'")],
        *[("list", "'ls'"), ("head", "'cat"), ("tail", "'cat")],
        *[("merge", "'edit merge'"), ("filter", "'edit filter'"), ("video", "'render'"), ("plot", "'stats'")],
        *[("convert", "'export'"), ("validate", "'check'"), ("fix", "'edit repair'"), ("cmp", "'diff'")],
        *[("recrod", "did you mean 'record'?"), ("xyzzy", "'gym-trace --help' lists them")],
    ],
)
def test_a_command_name_of_another_tool_gets_a_hint(name: str, hint: str) -> None:
    result = run(name, "traces")
    assert result.exit_code == 2
    assert f"no command {name!r}; " in result.stderr
    assert hint in result.stderr


def test_every_command_in_a_hint_exists() -> None:
    for hint in HINTS.values():
        for words in re.findall(r"'([^']+)'", hint):
            assert words.split()[0] in COMMANDS


@pytest.mark.parametrize(
    "words",
    [
        ["render", "t", "-o", "x.avi"], ["export", "t", "--to", "nothing", "-o", "x"],
        ["cat", "t", "--columns", "nothing"], ["verify", "t", "--ignore", "nothing"],
        ["edit", "drop", "t", "--columns", "nothing", "-o", "x"],
        ["ls", "t", "--episodes", "7"], ["render", "t", "-o", "x", "--sort", "weekly"], ["record"], ["xyzzy"],
    ],
)  # fmt: skip
def test_wrong_usage_exits_with_2_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    recorded(tmp_path / "t")
    assert run(*words).exit_code == 2
