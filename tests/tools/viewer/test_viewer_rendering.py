"""Episodes that are simulated again for the viewer: consent, progress, limits."""

import io
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from PIL import Image
from scripted_env import Result, ToyEnv
from shell import wait_for
from starlette.testclient import TestClient
from viewer_requests import FILES, POST, asked, cartpoles

from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.errors import RenderingError
from gym_trace.tools.replay.making import Making
from gym_trace.tools.viewer import rendering
from gym_trace.tools.viewer.answers import Answers, Refused
from gym_trace.tools.viewer.rendering import Consent, Recipe, Rendering, Renderings
from gym_trace.tools.viewer.server import Viewer, pages_of

pytestmark = pytest.mark.usefixtures("forked_workers")


class Mine(ToyEnv):
    """An environment that only this module has."""

    observation_space = action_space = gymnasium.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012
    broken = False

    def __init__(self, render_mode: str | None = None):
        self.render_mode = render_mode

    def result(self, action: Any) -> Result:
        return Result(0)

    def render(self) -> Any:
        return np.full((20, 30, 3), self.t, np.uint8)


class Dying(Mine):
    def render(self) -> Any:
        os._exit(3)


class Blind(Mine):
    def render(self) -> Any:
        return np.zeros((5, 5, 7), np.float32)


def mine(directory: Path, steps: int = 40) -> Path:
    """Record it under an id that other processes do not know."""
    if "ViewedMine-v0" not in gymnasium.registry:
        gymnasium.register("ViewedMine-v0", f"{__name__}:Mine")
    with TraceRecordingWrapper(gymnasium.make("ViewedMine-v0"), directory) as env:
        env.reset(seed=1)
        for _ in range(steps):
            env.step(0)
    return directory


@pytest.fixture
def renderings() -> Iterator[Renderings]:
    made = Renderings()
    yield made
    made.close()


def answers_with(directory: Path, renderings: Renderings) -> Answers:
    return Answers([open_trace(directory)], renderings)


def finished(job: Rendering) -> Rendering:
    end = time.monotonic() + 60
    while job.state == "running" and time.monotonic() < end:
        time.sleep(0.02)
    return job


def test_a_rendered_episode_has_a_picture_at_each_position(tmp_path: Path, renderings: Renderings) -> None:
    answers = answers_with(cartpoles(tmp_path, 2), renderings)
    assert asked(answers, "/api/episode?episode=1")["frames"] == []
    job = finished(renderings.start(0, answers.traces[0].episode(1), trust=False))
    assert (job.state, job.error, job.note) == ("ready", "", "")
    facts = asked(answers, "/api/episode?episode=1")
    assert facts["frames"] == ["render"]
    assert facts["fps"] == 50
    (column,) = (one for one in facts["columns"] if one["name"] == "render")
    assert column["rows"] == facts["length"] + 1
    assert column["frame_shape"] == [400, 600]
    head, arrays = asked(answers, "/api/frames?episode=1&column=render&from=0&count=16")
    assert [*arrays] == list(map(str, range(16)))
    assert Image.open(io.BytesIO(arrays["3"].tobytes())).size == (600, 400)
    assert head["mime"] == "image/png"
    assert asked(answers, "/api/episode?episode=0")["frames"] == []


def test_the_position_that_a_page_shows_is_rendered_first(tmp_path: Path) -> None:
    renderings = Renderings(Recipe(Making(make_env=Mine)))
    answers = answers_with(mine(tmp_path), renderings)
    job = finished(renderings.start(0, answers.traces[0].episode(0), trust=False, position=23))
    assert [*job._spans] == [*range(23, 41), *range(23)]
    for start in (0, 16, 32):
        _, arrays = asked(answers, f"/api/frames?episode=0&column=render&from={start}&count=16")
        assert all(
            (np.asarray(Image.open(io.BytesIO(data.tobytes()))) == int(row)).all() for row, data in arrays.items()
        )
    renderings.close()


def test_an_episode_that_no_page_looks_at_makes_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "_PATIENCE_SECONDS", -1.0)
    renderings = Renderings(Recipe(Making(make_env=Mine)))
    answers = answers_with(cartpoles(tmp_path, 2), renderings)
    first, second = (renderings.start(0, answers.traces[0].episode(n), trust=False, is_asked=not n) for n in (1, 0))
    assert finished(first).state == "failed"
    assert asked(answers, "/api/episode?episode=1")["frames"] == []
    assert "another episode" in first.plain()["error"]
    renderings.close()
    assert second.is_asked


def test_an_environment_that_only_the_trace_names_needs_consent(tmp_path: Path, renderings: Renderings) -> None:
    viewed = answers_with(mine(tmp_path), renderings).traces[0].episode(0)
    with pytest.raises(Consent, match=r"needs trust.*test_viewer_rendering"):
        renderings.start(0, viewed, trust=False)
    job = finished(renderings.start(0, viewed, trust=True))
    assert (job.state, job.rows, job.fps) == ("ready", 41, 7)


def test_a_recipe_of_the_caller_needs_no_consent(tmp_path: Path) -> None:
    renderings = Renderings(Recipe(Making(make_env=Mine)))
    answers = answers_with(mine(tmp_path), renderings)
    finished(renderings.start(0, answers.traces[0].episode(0), trust=False))
    _, arrays = asked(answers, "/api/frames?episode=0&column=render&from=16&count=16")
    for row, data in arrays.items():
        assert (np.asarray(Image.open(io.BytesIO(data.tobytes()))) == int(row)).all()
    renderings.close()


@pytest.mark.parametrize(("kind", "said"), [(Dying, "process ended"), (Blind, "not an image|images are")])
def test_the_error_of_an_environment_that_fails_reaches_the_page(tmp_path: Path, kind: type[Mine], said: str) -> None:
    renderings = Renderings(Recipe(Making(make_env=kind)))
    answers = answers_with(mine(tmp_path), renderings)
    try:
        job = finished(renderings.start(0, answers.traces[0].episode(0), trust=False))
        error = job.error
    except RenderingError as raised:
        error = str(raised)
    assert re.search(said, error), error
    assert asked(answers, "/api/traces")
    renderings.close()


def test_the_pictures_of_other_episodes_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "_MOST_EPISODES", 1)
    renderings = Renderings(Recipe(Making(make_env=Mine)))
    directory = tmp_path
    with TraceRecordingWrapper(Mine(), directory) as env:
        for seed in range(3):
            env.reset(seed=seed)
            env.step(0)
    answers = answers_with(directory, renderings)
    for episode in range(3):
        finished(renderings.start(0, answers.traces[0].episode(episode), trust=False))
    wait_for(lambda: asked(answers, "/api/episode?episode=0")["frames"] == [])
    assert asked(answers, "/api/episode?episode=2")["frames"] == ["render"]
    with pytest.raises(Refused, match="not rendered"):
        asked(answers, "/api/frames?episode=0&column=render")
    renderings.close()


def test_an_episode_of_too_many_pictures_ends_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "_MOST_BYTES", 100)
    renderings = Renderings(Recipe(Making(make_env=Mine)))
    answers = answers_with(mine(tmp_path), renderings)
    try:
        error = finished(renderings.start(0, answers.traces[0].episode(0), trust=False)).error
    except RenderingError as raised:
        error = str(raised)
    assert "use gym-trace render" in error
    renderings.close()


def test_the_page_asks_renders_and_hears_of_progress(tmp_path: Path) -> None:
    renderings = Renderings()
    viewer = Viewer(answers_with(mine(tmp_path), renderings), pages_of(FILES))
    with TestClient(viewer.app, base_url=f"http://127.0.0.1:{viewer.port}") as client:
        client.headers["Authorization"] = f"Bearer {viewer.url.partition('token=')[2]}"
        headers = {**POST, "Origin": f"http://127.0.0.1:{viewer.port}"}
        body = {"trace": 0, "episode": 0, "trust": False}
        assert client.post("/api/render", json=body).status_code == 403
        refused = client.post("/api/render", json=body, headers=headers)
        assert refused.status_code == 409
        assert "needs trust" in refused.json()["consent"]
        for wrong in ({}, {**body, "trust": "yes"}, {**body, "episode": 9}, {**body, "trace": 3}):
            assert client.post("/api/render", json=wrong, headers=headers).status_code in (400, 404)
        begun = client.post("/api/render", json={**body, "trust": True}, headers=headers)
        assert begun.status_code == 200, begun.text
        end = time.monotonic() + 60
        while (told := client.get(f"/api/render?job={begun.json()['job']}").json())["state"] == "running":
            assert told["of"] in (1, 40)
            assert time.monotonic() < end
            time.sleep(0.02)
        assert (told["state"], told["phase"], told["done"], told["of"]) == ("ready", "rendered", 40, 40)
        assert client.get("/api/frames?episode=0&column=render&from=0&count=16").status_code == 200
        assert client.get("/api/render?job=99").status_code == 404
        assert client.get("/api/render?job=x").status_code == 400
    viewer._socket.close()
    renderings.close()


def test_closing_ends_a_rendering_and_its_process(tmp_path: Path) -> None:
    renderings = Renderings(Recipe(Making(make_env=Mine)))
    answers = answers_with(mine(tmp_path, 20_000), renderings)
    job = renderings.start(0, answers.traces[0].episode(0), trust=False)
    assert job.state == "running"
    begin = time.monotonic()
    renderings.close()
    assert time.monotonic() - begin < 30
