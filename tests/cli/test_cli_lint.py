"""gym-trace lint: output, exit codes and options."""

import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from shell import run

from gym_trace import TraceRecordingWrapper, record_episodes


class Broken(gymnasium.ObservationWrapper):  # type: ignore[type-arg]
    """Wrapper that observes NaN in the fourth step of every episode."""

    def reset(self, **options: object) -> tuple[object, dict[str, object]]:
        self._steps = -1
        return super().reset(**options)

    def observation(self, observation: object) -> object:
        self._steps += 1
        return np.full(4, np.nan, np.float32) if self._steps == 4 else observation


@pytest.fixture
def broken(here: Path) -> str:
    with TraceRecordingWrapper(Broken(gymnasium.make("CartPole-v1")), "broken") as env:
        record_episodes(env, seed=0, episodes=3)
    return "broken"


@pytest.fixture
def sound(here: Path) -> str:
    with TraceRecordingWrapper(gymnasium.make("CartPole-v1"), "sound") as env:
        record_episodes(env, seed=0, episodes=3)
    return "sound"


def test_a_sound_trace_exits_with_0(sound: str) -> None:
    done = run("lint", sound)
    assert done.exit_code == 0
    assert done.stdout.startswith("no findings in 3 episodes, ")


def test_findings_exit_with_1_and_name_the_command_that_shows_them(broken: str) -> None:
    done = run("lint", broken)
    assert done.exit_code == 1
    first, command, last, _, shell, view = done.stdout.splitlines()
    assert first.startswith("T101  error    observations: NaN in observations, actions or rewards (3 steps; first: ")
    assert first.endswith("episode 0, step 3)")
    assert command.strip().endswith("broken --episodes 0 --steps 1:6")
    assert last.startswith("1 error in 3 episodes")
    assert shell.startswith("  gym-trace shell ")
    assert shell.endswith("broken --episode 0 --step 3")
    assert view.replace("view", "shell") == shell


def test_findings_about_starts_end_with_the_audit_of_the_environment(here: Path) -> None:
    with TraceRecordingWrapper(gymnasium.make("FrozenLake-v1"), "fixed") as env:
        record_episodes(env, seed=0, episodes=3)
    assert run("lint", "fixed").stdout.startswith("no findings")
    done = run("lint", "fixed", "--select", "T505")
    assert done.stdout.splitlines()[-1].startswith("  gym-trace audit ")
    assert done.exit_code == 0


def test_notes_are_shown_on_request_and_do_not_count(sound: str) -> None:
    done = run("lint", sound, "--notes")
    assert done.exit_code == 0
    assert "T301  note" in done.stdout


def test_json_has_one_object(broken: str) -> None:
    done = run("lint", broken, "--json")
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert (told["episodes"], len(told["findings"])) == (3, 1)
    assert told["findings"][0] | {"command": ""} == {
        "code": "T101", "severity": "error", "what": "NaN in observations, actions or rewards",
        "message": "NaN in observations, actions or rewards", "count": 3, "unit": "step", "episode": 0, "step": 3,
        "column": "observations", "command": "",
    }  # fmt: skip


def test_ignored_findings_do_not_count(broken: str) -> None:
    assert run("lint", broken, "--ignore", "T101,T2").exit_code == 0
    assert run("lint", broken, "--select", "T2", "--select", "T3").exit_code == 0


def test_options_come_from_a_file_too(broken: str) -> None:
    Path("lint.toml").write_text('ignore = ["T101"]\n[set]\nfrozen_steps = 4\n', encoding="utf-8")
    assert run("lint", broken, "--config", "lint.toml").exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--select", "T999"], "no rule has this code; use one of T001, "),
        (["--set", "frozen_step=3"], "did you mean 'frozen_steps'?"),
        (["--set", "frozen_steps=many"], "pass a number of 0 or more"),
    ],
)
def test_wrong_options_exit_with_2(sound: str, words: list[str], said: str) -> None:
    done = run("lint", sound, *words)
    assert done.exit_code == 2
    assert said in done.stderr


def test_rules_are_listed_without_a_trace() -> None:
    done = run("lint", "--rules")
    assert done.exit_code == 0
    assert "T101  error" in done.stdout
    assert "frozen_steps" in done.stdout


def test_damage_exits_with_5(here: Path) -> None:
    damaged = Path(__file__).parents[2] / "sample_traces" / "format-1.1" / "damaged"
    done = run("lint", str(damaged))
    assert done.exit_code == 5
    assert "T001  error" in done.stdout
