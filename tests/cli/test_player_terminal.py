"""The player in a real terminal: however it ends, it restores the terminal."""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from shell import ok, run, wait_for
from terminals import Console, console

TAKEN, GIVEN_BACK = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
LOUD = """
import os
import gymnasium
import numpy as np

class Loud(gymnasium.Env):
    metadata = {"render_modes": ["ansi"], "render_fps": 50}
    observation_space = gymnasium.spaces.Discrete(9)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None, way=None):
        self.render_mode, self.way, self.renders = render_mode, way, 0

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return 0, {}

    def step(self, action):
        self.steps += 1
        return self.steps, 0.0, self.steps == 5, False, {}

    def render(self):
        self.renders += 1
        if self.way == "talk":
            print("said by python")
            os.write(2, b"said by \\x1b[31mC\\x1b[0m\\n")
        if self.way == "exit" and self.renders == 3:
            os._exit(7)
        if self.way == "raise" and self.renders == 3:
            raise SystemExit(3)
        if self.way == "abort" and self.renders == 3:
            os.abort()
        return f"frame {self.steps}"

gymnasium.register("Loud-v0", entry_point="loud:Loud")
"""


pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def trace(here: Path) -> None:
    ok("record", "CartPole-v1", "-o", "t", "--episodes", 3, "--seed", 0)


@pytest.fixture
def loud(here: Path) -> Iterator[tuple[str, ...]]:
    import gymnasium

    Path("loud.py").write_text(LOUD)
    ok("record", "loud:Loud-v0", "-o", "t", "--episodes", 1, "--seed", 0)
    yield "replay", "t", "--import", "loud", "--paused"
    gymnasium.registry.pop("Loud-v0")
    sys.modules.pop("loud")


ENDS = [("q", 0), ("\x03", 130), ("\x04", 0), *((n, 128 + n) for n in (signal.SIGTERM, signal.SIGHUP))]


@pytest.mark.usefixtures("trace")
@pytest.mark.parametrize(("end", "code"), ENDS, ids=["q", "ctrl-c", "ctrl-d", "SIGTERM", "SIGHUP"])
def test_the_terminal_is_restored_after_every_end_of_the_player(end: str | signal.Signals, code: int) -> None:
    with console("replay", "t", "--from", "observations", "--speed", "0.01") as player:
        player.wait_for(TAKEN)
        player.wait_for("reset")
        assert not player.is_as_it_was
        if isinstance(end, signal.Signals):
            player.process.send_signal(end)
        else:
            player.send(end)
        assert player.ended() == code
        player.wait_for(GIVEN_BACK)
        assert player.is_as_it_was
        assert (b"played 1 of 3 episodes" in player.raw) == (code == 0)
        assert (b"interrupted" in player.raw) == (code == 130)


@pytest.mark.usefixtures("trace")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=["SIGKILL", "SIGSEGV"])
def test_a_sudden_death_gives_the_terminal_back_too(number: signal.Signals) -> None:
    with console("replay", "t", "--from", "observations", "--paused") as player:
        player.wait_for("reset")
        player.process.send_signal(number)
        assert player.ended() == -number
        player.wait_for(GIVEN_BACK)
        wait_for(lambda: player.is_as_it_was)


@pytest.mark.parametrize(("way", "code"), [("exit", 7), ("abort", -6), ("raise", 1)], ids=str)
def test_an_environment_that_ends_the_process_leaves_the_terminal_whole(
    loud: tuple[str, ...], way: str, code: int
) -> None:
    with console(*loud, "--env-arg", f"way={way}") as player:
        for _ in range(2):
            player.wait_for("frame")
            player.send(".")
        assert player.ended() == code
        player.wait_for(GIVEN_BACK)
        wait_for(lambda: player.is_as_it_was)


def test_output_of_an_environment_is_shown_once_after_the_player(loud: tuple[str, ...]) -> None:
    with console(*loud, "--env-arg", "way=talk") as player:
        for step in range(3):
            player.wait_for(f"frame {step}")
            player.send("\r")
        player.send("q")
        assert player.ended() == 0
        before, _, after = player.raw.decode().partition(GIVEN_BACK)
        assert "said" not in before
        assert after.count("said by python") == after.count("said by C") == 1


@pytest.mark.usefixtures("trace")
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs a shell with jobs")
def test_ctrl_z_gives_the_terminal_back_and_fg_goes_on() -> None:
    bash = "import os; os.execlp('bash', 'bash', '--norc', '--noediting', '-i')"
    with Console(sys.executable, "-c", bash) as shell:
        command = (
            f"{sys.executable} -c 'from gym_trace_cli.main import cli; cli()' replay t --from observations --paused"
        )
        shell.send(command + "\n")
        shell.wait_for("reset")
        shell.send(".")
        shell.wait_for("reward")
        shell.send("\x1a")
        shell.wait_for(GIVEN_BACK)
        shell.wait_for("Stopped")
        shell.send("stty -a\n")
        shell.wait_for(" icanon")
        shell.wait_for(" echo ")
        shell.send("fg\n")
        shell.wait_for(TAKEN)
        shell.wait_for("step 1")  # at the same step as before
        shell.send("q")
        shell.wait_for(GIVEN_BACK)
        shell.wait_for("played 1 of 3")
        shell.send("exit 5\n")
        assert shell.ended() == 5


@pytest.mark.usefixtures("trace")
def test_a_resized_terminal_is_redrawn() -> None:
    with console("replay", "t", "--from", "observations", "--paused", columns=80, rows=24) as player:
        player.wait_for("\x1b[24;1H")
        player.resize(50, 10)
        player.wait_for("\x1b[2J")
        player.wait_for("\x1b[10;1H")
        player.send("q")
        assert player.ended() == 0


PATIENT = """
from gym_trace_cli.main import cli
from gym_trace_cli.player import terminal
terminal._ANSWER_SECONDS = 60
cli()
"""


@pytest.mark.usefixtures("trace")
def test_answers_of_the_terminal_are_not_keys() -> None:
    ok("record", "rendered_env:Rendered-v0", "-o", "p", "--episodes", 1, "--env-arg", "pictures=true")
    with Console(sys.executable, "-c", PATIENT, "replay", "p", "--paused", answer="") as player:
        player.wait_for("\x1b[c")
        player.send("\x1b[6;20;10t\x1b[?1;0;256S\x1b[?62;4;22c")
        player.wait_for('\x1bP0;1;0q"1;1;')
        player.send("\x1b[?62;4;22c\x1b[5~\x1b[200~x\x1b")  # a late answer, unused keys, Escape
        player.send("\x1bOC")
        player.wait_for("step 1")
        player.send("q")
        assert player.ended() == 0


@pytest.mark.usefixtures("trace")
@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {"TERM": "xterm"}], ids=str)
def test_without_a_terminal_that_can_do_it_there_is_the_list(environ: dict[str, str]) -> None:
    if environ["TERM"] == "dumb":
        with console("replay", "t", environ=environ) as listing:
            assert listing.ended() == 0
            said = listing.raw.decode()
    else:
        said = ok("replay", "t").stdout
    assert TAKEN not in said
    assert len(said.splitlines()) == 4


@pytest.mark.usefixtures("trace")
@pytest.mark.parametrize("option", [["--paused"], ["--from", "observations"], ["--speed", "2"]], ids=str)
def test_options_of_the_player_need_a_terminal(option: list[str]) -> None:
    result = run("replay", "t", *option)
    assert result.exit_code == 2
    assert f"{option[0]} needs a terminal" in result.stderr


@pytest.mark.usefixtures("trace")
def test_a_terminal_without_unicode_or_colours_is_enough() -> None:
    environ = {"PYTHONIOENCODING": "ascii", "NO_COLOR": "1", "SDL_VIDEODRIVER": "dummy"}
    with console("replay", "t", "--paused", environ=environ) as player:
        player.wait_for("reset")
        player.send(".q")
        assert player.ended() == 0
        assert player.raw.isascii()
        assert b"38;" not in player.raw


def test_no_environment_is_made_because_a_trace_says_so(tmp_path: Path, loud: tuple[str, ...]) -> None:
    marker = tmp_path / "marker"
    Path("loud.py").write_text(f"open({str(marker)!r}, 'w')\n{LOUD}")
    with console("replay", "t", "--paused") as player:
        player.wait_for("as numbers: Loud-v0: needs trust")
        player.send("q")
        assert player.ended() == 0
        assert b"--trust" in player.raw
    assert not marker.exists()
    with console("replay", "t", "--paused", "--trust") as player:
        player.wait_for("frame 0")
        player.send("q")
        assert player.ended() == 0
    assert marker.exists()
    assert os.path.exists("t")
