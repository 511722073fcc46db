"""Observations with texts, which are stored in the log: continuing an episode in another slab keeps them."""

from pathlib import Path
from typing import Any

import pytest
from gymnasium import spaces
from runs import acted
from scripted_env import Result, ToyEnv

from gym_trace import TraceRecordingWrapper, open_trace


class Talking(ToyEnv):
    """Observes the step number as text; continues after its end."""

    observation_space = spaces.Dict({"at": spaces.Discrete(99), "said": spaces.Text(40)})
    action_space = spaces.Discrete(9)

    def result(self, action: Any) -> Result:
        return Result({"said": f"at {self.t}", "at": self.t}, 1.0, self.t in (3, 6))


def told(directory: Path) -> list[list[str]]:
    """Return the texts of each part of each episode; check each against its number."""
    parts = [episode.observations for episode in open_trace(directory)]
    assert all(list(part["said"]) == [f"at {at}" for at in part["at"]] for part in parts)
    return [list(part["said"]) for part in parts]


def texts(first: int, last: int) -> list[str]:
    return [f"at {at}" for at in range(first, last + 1)]


@pytest.mark.parametrize("flush", [False, True])
def test_a_step_after_the_end_starts_with_the_previous_text(flush: bool, tmp_path: Path) -> None:
    env = TraceRecordingWrapper(Talking(), tmp_path / "trace")
    acted(env, "reset", *[1, *["flush"] * flush] * 8, "close")
    assert told(tmp_path / "trace") == [texts(0, 3), texts(3, 6), texts(6, 8)]


def test_texts_are_readable_during_recording(tmp_path: Path) -> None:
    env = acted(TraceRecordingWrapper(Talking(), tmp_path / "trace"), "reset")
    for i in range(1, 3):
        env.step(1)
        assert told(tmp_path / "trace") == [texts(0, i)]
    env.close()
