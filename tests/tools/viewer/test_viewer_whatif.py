"""Branches that the page asks for: what is recorded where, what the page gets of it, what it may ask for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from starlette.testclient import TestClient
from viewer_requests import FILES, POST, arrays_of, asked, cartpoles

from gym_trace import TraceRecordingWrapper, branch, open_trace, verify_trace
from gym_trace.errors import InvalidOption
from gym_trace.tools.replay.making import Making
from gym_trace.tools.viewer import opinions
from gym_trace.tools.viewer.answers import Answers
from gym_trace.tools.viewer.opinions import Question
from gym_trace.tools.viewer.proofs import Proofs
from gym_trace.tools.viewer.rendering import Recipe
from gym_trace.tools.viewer.server import Viewer, pages_of
from gym_trace.tools.viewer.whatif import Plan, WhatIf, record

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture
def answers(tmp_path: Path) -> Iterator[Answers]:
    recipe = Recipe()
    proofs = Proofs(recipe)
    what_if = WhatIf(recipe, {}, tmp_path / "branches", is_kept=True)
    yield Answers([open_trace(cartpoles(tmp_path / "cart", 2))], proofs=proofs, what_if=what_if)
    proofs.close()


def ask(answers: Answers, body: dict[str, Any] | None = None, **changes: Any) -> int:
    """Ask for branches, or send a body, as the page does, wait for the end, and return the status of the answer."""
    viewer = Viewer(answers, pages_of(FILES))
    origin = f"http://127.0.0.1:{viewer.port}"
    headers = {**POST, "Authorization": f"Bearer {viewer.url.partition('token=')[2]}", "Origin": origin}
    body = body or {
        "trace": 0,
        "episode": 1,
        "step": 4,
        "policy": "random",
        "episodes": 3,
        "seed": 5,
        "trust": False,
        **changes,
    }
    with TestClient(viewer.app, base_url=origin) as client:
        status = client.post("/api/proofs", content=json.dumps(body), headers=headers).status_code
    viewer._socket.close()
    assert answers.proofs is not None
    if answers.proofs._thread is not None:
        answers.proofs._thread.join(60)
    return status


def test_branches_are_a_trace_that_verifies_and_that_branch_repeats(answers: Answers, tmp_path: Path) -> None:
    assert ask(answers) == 200
    (found,) = asked(answers, "/api/branches?trace=0&episode=1")["branches"]
    directory = Path(found["directory"])
    assert directory == tmp_path / "branches" / "cart-1-4"
    assert [verdict.verdict for verdict in verify_trace(directory)] == ["identical"] * 3
    again = branch(tmp_path / "cart", 1, 4, directory=tmp_path / "again", episodes=3, seed=5)
    assert [one["return"] - 4 for one in found["episodes"]] == again.returns.tolist()
    assert found["returns"][::4] == [again.min + 4, again.max + 4]  # type: ignore[operator]
    assert found["outcomes"] == {"terminated": 3}
    assert "--episode 1 --step 4 --policy random --episodes 3 --seed 5" in found["command"]
    assert [trace["branches"] for trace in asked(answers, "/api/traces")] == [False, True]
    assert len(asked(answers, "/api/runs")["groups"]) == 1
    _, lines = asked(answers, "/api/fan?trace=1&episodes=0,2&column=return&from=3")
    assert list(lines) == ["0", "2"]
    assert asked(answers, "/api/branches?trace=0&episode=0")["branches"] == []


@pytest.mark.parametrize(
    ("changes", "status"),
    [({"policy": "os:system"}, 400), ({"episodes": 0}, 400), ({"episode": 9}, 404), ({"step": "4"}, 400)],
    ids=str,
)
def test_the_page_gets_no_other_policy_and_no_other_numbers(
    answers: Answers, tmp_path: Path, changes: dict[str, Any], status: int
) -> None:
    assert ask(answers, **changes) == status
    assert not (tmp_path / "branches").exists()


def test_a_step_after_the_end_is_an_error_that_says_which_steps_there_are(answers: Answers) -> None:
    last = len(answers.traces[0].trace[1])
    ask(answers, step=last)
    assert f"pass 0 to {last - 1}" in asked(answers, "/api/proofs?trace=0")["branch"]["error"]


def test_a_run_offers_its_versions_and_named_files_need_consent(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trace = open_trace(cartpoles(run / "trace", 1))
    (run / "run.json").write_text("{}")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "000000012.safetensors").touch()
    recipe = Recipe()
    proofs = Proofs(recipe)
    what_if = WhatIf(recipe, {"mine": "run:mine"}, tmp_path / "branches", is_kept=False)
    answers = Answers([trace], proofs=proofs, what_if=what_if)
    labels = [policy["label"] for policy in asked(answers, "/api/branches?trace=0&episode=0")["policies"]]
    assert labels[:2] == ["random actions", "mine"]
    assert "version 12, sampled" in labels
    with pytest.raises(InvalidOption, match="name it with --policy"):
        what_if.plan(answers.traces[0], 0, 0, "run:elsewhere", 1, 0)
    plan = what_if.plan(answers.traces[0], 0, 0, "random", 1, 0)._replace(needs="reads files. Pass --trust")
    proofs.start(answers.traces[0], "branch", plan, False)
    assert proofs._thread is not None
    proofs._thread.join(60)
    assert asked(answers, "/api/proofs?trace=0")["branch"]["consent"] == "reads files. Pass --trust"


class Kept(CartPoleEnv):
    """An environment with a state, which it does not check."""

    def get_state(self) -> bytes:
        return np.array(self.state, np.float64).tobytes()

    def set_state(self, state: bytes) -> None:
        self.state = tuple(np.frombuffer(state))


@pytest.mark.parametrize("trust", [True, False])
def test_a_recorded_state_is_used_at_once_or_else_steps_are_repeated(tmp_path: Path, trust: bool) -> None:
    with TraceRecordingWrapper(Kept(), tmp_path / "kept", states=1) as env:
        env.reset(seed=0)
        for _ in range(4):
            env.step(1)
    plan = Plan(0, 3, "random", "", 2, 0, str(tmp_path / "branches"))
    said = record(open_trace(tmp_path / "kept"), Recipe(Making(trust=trust, make_env=Kept)), plan, lambda *_: None)
    assert ("its steps were repeated" in said) is not trust
    assert said.startswith("2 branches")
    assert [episode.prefix for episode in open_trace(tmp_path / "branches")] == [3, 3]


def test_a_policy_is_asked_at_each_step_of_a_recorded_episode(answers: Answers) -> None:
    (viewed,) = answers.traces
    episode = viewed.trace[1]

    def leaning(observation: Any) -> Any:
        chance = np.float32(0.25 + 0.5 * (observation[2] > 0))
        return int(observation[2] > 0), {"probabilities": np.array([1 - chance, chance]), "why": "it leans"}

    question = Question(1, viewed.episode(1).key, "mine", leaning, "")
    opinion = opinions.ask(viewed.trace, Recipe(), question, lambda done, of: None)
    assert opinion.keys() == {"actions", "probabilities"}
    leans = episode.observations[:-1, 2] > 0
    assert opinion["actions"].tolist() == leans.tolist()
    viewed.opinions[question.key] = {"mine": opinion}
    columns = {one["name"]: one for one in asked(answers, "/api/episode?episode=1")["columns"]}
    assert columns["actions of mine"]["values"] == {"start": 0, "count": 2, "names": None}
    assert columns["probabilities of mine"]["stacked"] is True
    chances = arrays_of(answers, "/api/plot?episode=1&column=probabilities%20of%20mine&from=2&to=5&items=1:2")["y"]
    assert chances.tolist() == [[0.75 if one else 0.25 for one in leans[2:5]]]
    assert "actions of mine" not in {one["name"] for one in asked(answers, "/api/episode?episode=0")["columns"]}


def test_the_page_asks_a_policy_and_gets_its_actions_as_a_column(answers: Answers) -> None:
    assert ask(answers, {"trace": 0, "episode": 0, "ask": "random", "trust": False}) == 200
    assert asked(answers, "/api/proofs?trace=0")["ask"]["summary"] == "see actions of random actions in the plots"
    drawn = arrays_of(answers, "/api/plot?column=actions%20of%20random%20actions&episode=0")["y"]
    assert drawn.shape == (1, len(answers.traces[0].trace[0]))
    assert set(drawn.ravel().tolist()) == {0, 1}
