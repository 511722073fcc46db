"""Requests of the viewer's page, and a page for tests of the server alone."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import gymnasium
import numpy as np

from gym_trace import TraceRecordingWrapper, TraceWriter, edit, open_trace
from gym_trace.data.values import Array
from gym_trace.tools.viewer.answers import Answers
from gym_trace.tools.viewer.container import unpacked
from gym_trace.tools.viewer.server import Viewer, pages_of

FILES = {"index.html": b"<!doctype html><title>page</title>", "app.js": b"1;\n", "app.css": b"b{}\n"}
POST = {"X-Requested-With": "gym-trace-viewer", "Content-Type": "application/json"}


def asked(answers: Answers, url: str) -> Any:
    """Return the JSON of an answer, or its head and arrays."""
    parts = urlsplit(url)
    answer = answers.get(parts.path, dict(parse_qsl(parts.query, keep_blank_values=True)))
    return json.loads(answer.body) if answer.mime == "application/json" else unpacked(answer.body)


def arrays_of(answers: Answers, url: str) -> dict[str, Array]:
    return asked(answers, url)[1]  # type: ignore[no-any-return]


def viewed(*directories: Path) -> Answers:
    return Answers([open_trace(directory) for directory in directories])


def cartpoles(directory: Path, episodes: int = 12, **options: Any) -> Path:
    """Record episodes of seeds 0, 1, 2 …, of random actions, with infos and an annotation."""
    with TraceRecordingWrapper(gymnasium.make("CartPole-v1"), directory, record_infos=True, **options) as env:
        for seed in range(episodes):
            env.action_space.seed(seed)
            env.reset(seed=seed)
            done, step = False, 0
            while not done:
                _, _, terminated, truncated, _ = env.step(env.action_space.sample())
                env.annotate(value=float(step))
                done, step = terminated or truncated, step + 1
    return directory


def compacted_noise(directory: Path) -> Path:
    """Write a compacted trace of 6 episodes of 1,000 steps in one chunk; its observations are in 8 blocks."""
    random = np.random.default_rng(0)
    with TraceWriter(directory, uid="w") as writer:
        for _ in range(6):
            writer.begin(random.normal(size=5))
            for step in range(1000):
                writer.step(step, random.normal(size=5), 1.0, terminated=step == 999)
    edit.compact(directory, in_place=True)
    return directory


def flagged(answers: Answers, episode: int, flag: str | None) -> dict[str, int]:
    """Flag an episode as the page does, and return how many episodes have which flag."""
    return answers.traces[0].set_flag(episode, asked(answers, f"/api/episode?episode={episode}")["identity"], flag)


@contextmanager
def served(answers: Answers, **options: Any) -> Iterator[Viewer]:
    """Run a server in a thread."""
    viewer = Viewer(answers, pages_of(FILES), **options)
    thread = Thread(target=viewer.run)
    thread.start()
    try:
        yield viewer
    finally:
        viewer.stop()
        thread.join(60)
        assert not thread.is_alive()
