"""Lint, check, verify and conditions on steps that the page runs: results, consent, one at a time."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest
from starlette.testclient import TestClient
from viewer_requests import FILES, POST, asked, cartpoles

from gym_trace import Trace, TraceRecordingWrapper, open_trace
from gym_trace.errors import TraceError
from gym_trace.tools.audit.report import Claim
from gym_trace.tools.viewer.answers import Answers
from gym_trace.tools.viewer.proofs import Proofs, _proved
from gym_trace.tools.viewer.rendering import Recipe
from gym_trace.tools.viewer.server import Viewer, pages_of

pytestmark = pytest.mark.usefixtures("forked_workers")


class Pushed(gymnasium.Wrapper):  # type: ignore[type-arg]
    """Only this module has it."""


def pushed(directory: Path) -> Path:
    """Record two episodes; in the second one, something outside of the environment moves the cart before step 2."""
    with TraceRecordingWrapper(gymnasium.make("CartPole-v1"), directory) as env:
        for episode in range(2):
            env.reset(seed=episode)
            for step in range(4):
                if episode and step == 2:
                    x, *others = env.unwrapped.state  # type: ignore[attr-defined]
                    env.unwrapped.state = (x + 1.0, *others)  # type: ignore[attr-defined]
                env.step(0)
    return directory


@pytest.fixture
def proofs() -> Iterator[Proofs]:
    made = Proofs(Recipe())
    yield made
    made.close()


def proved(answers: Answers, proofs: Proofs, tool: str, where: str = "", trust: bool = False) -> dict[str, Any]:
    """Run a tool to its end, and return its state."""
    proofs.start(answers.traces[0], tool, where, trust)
    assert proofs._thread is not None
    proofs._thread.join(60)
    return asked(answers, "/api/proofs?trace=0")[tool]  # type: ignore[no-any-return]


def test_a_difference_is_marked_where_its_observation_is_shown(tmp_path: Path, proofs: Proofs) -> None:
    answers = Answers([open_trace(pushed(tmp_path))], proofs=proofs)
    assert proved(answers, proofs, "verify")["summary"] == "1 identical, 1 differs"
    (mark,) = asked(answers, "/api/marks?trace=0")
    assert (mark["episode"], mark["position"], mark["severity"]) == (1, 3, "error")
    head, arrays = asked(answers, "/api/episodes?trace=0")
    words = head["texts"]["verify"]["words"]
    assert [words[code] for code in arrays["verify"]] == ["identical", "differs"]
    assert arrays["found"].tolist() == [0, 1]


def test_steps_of_a_condition_are_marks_and_a_wrong_condition_an_error(tmp_path: Path, proofs: Proofs) -> None:
    answers = Answers([open_trace(pushed(tmp_path))], proofs=proofs)
    assert proved(answers, proofs, "steps", "step > 1")["summary"] == "4 steps in 2 episodes"
    marks = asked(answers, "/api/marks?trace=0")
    assert [(mark["episode"], mark["position"]) for mark in marks] == [(0, 2), (0, 3), (1, 2), (1, 3)]
    assert "no column 'stepp'" in proved(answers, proofs, "steps", "stepp > 1")["error"]
    assert asked(answers, "/api/marks?trace=0") == []


def test_check_and_lint_find_nothing_in_a_sound_trace(tmp_path: Path, proofs: Proofs) -> None:
    answers = Answers([open_trace(cartpoles(tmp_path, 3))], proofs=proofs)
    assert proved(answers, proofs, "check")["good"]
    assert proved(answers, proofs, "lint")["good"]


def test_verify_runs_code_that_only_the_trace_names_after_consent_alone(tmp_path: Path, proofs: Proofs) -> None:
    with TraceRecordingWrapper(Pushed(gymnasium.make("CartPole-v1")), tmp_path) as env:
        env.reset(seed=0)
        env.step(0)
    answers = Answers([open_trace(tmp_path)], proofs=proofs)
    assert "test_viewer_proofs:Pushed" in proved(answers, proofs, "verify")["consent"]
    assert proved(answers, proofs, "verify", trust=True)["summary"] == "1 identical"


def test_one_tool_runs_at_a_time_and_can_be_canceled(tmp_path: Path, proofs: Proofs) -> None:
    answers = Answers([open_trace(cartpoles(tmp_path, 2))], proofs=proofs)
    proofs.start(answers.traces[0], "verify", "", False)
    with pytest.raises(TraceError, match="verify is running"):
        proofs.start(answers.traces[0], "lint", "", False)
    proofs.cancel()
    assert asked(answers, "/api/proofs?trace=0")["verify"]["state"] == "canceled"
    assert proved(answers, proofs, "lint")["state"] == "done"


def test_only_a_post_of_the_page_runs_a_tool(tmp_path: Path, proofs: Proofs) -> None:
    viewer = Viewer(Answers([open_trace(cartpoles(tmp_path, 1))], proofs=proofs), pages_of(FILES))
    origin = f"http://127.0.0.1:{viewer.port}"
    token = {"Authorization": f"Bearer {viewer.url.partition('token=')[2]}"}
    ask = '{"trace": 0, "tool": "lint", "where": "", "trust": false}'
    with TestClient(viewer.app, base_url=origin) as client:
        assert client.get("/api/proofs?trace=0&tool=lint&trust=true", headers=token).json() == {}
        assert client.post("/api/proofs", content=ask, headers={**POST, **token}).status_code == 403
        headers = {**POST, **token, "Origin": origin}
        assert client.post("/api/proofs", content='{"tool": 3}', headers=headers).status_code == 400
        assert client.post("/api/proofs", content=ask.replace("lint", "rm"), headers=headers).status_code == 400
        assert client.post("/api/proofs", content=ask, headers=headers).status_code == 200
    viewer._socket.close()


def test_an_audit_sends_its_claims_and_has_a_directory_for_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    seen: list[str] = []

    def audited(trace: Trace, on_claim: Callable[[Claim], None], **_: Any) -> None:
        seen.append(tempfile.mkdtemp())
        on_claim(Claim("seeded", "yes", "4 of 4"))
        on_claim(Claim("lanes", "no", "differs in lane 2"))

    monkeypatch.setattr("gym_trace.tools.viewer.proofs.audit", audited)
    monkeypatch.setattr("tempfile.tempdir", None)  # and restored, as the variable
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    connection = SimpleNamespace(send=sent.append)
    _proved(connection, str(tmp_path), "audit", open_trace(cartpoles(tmp_path / "cart", 1)), Recipe(), "")
    _, summary, is_good, marks, _, claims, _ = sent[-1]
    assert (summary, is_good, marks) == ("1 of 2 claims hold, 1 fails", False, [])
    assert claims == [("seeded", "yes", "4 of 4"), ("lanes", "no", "differs in lane 2")]
    assert Path(seen[0]).parent == tmp_path
