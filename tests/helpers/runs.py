"""Short runs to record, and the expected contents of their traces."""

import copy
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from scripted_env import CountingEnv, Result, ScriptedEnv

from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.format.batch_reader import BatchReader
from gym_trace.storage.local import LocalStorage


def play(env: Any, episodes: int, seed: int | None = 0) -> list[Any]:
    """Return all results of an environment in some episodes, with the same actions in each call."""
    random = np.random.default_rng(5)
    said: list[Any] = []
    for number in range(episodes):
        said.append(copy.deepcopy(env.reset(seed=seed if number == 0 else None)))
        over = False
        while not over:
            result = env.step(int(random.integers(0, 2)))
            said.append(copy.deepcopy(result))
            over = result[2] or result[3]
    return said


def acted(env: Any, *acts: Any) -> Any:
    """Call the environment; return it. A string is a method to call, a dict are annotations, all else is an action."""
    for act in acts:
        if isinstance(act, str):
            getattr(env, act)()
        elif isinstance(act, dict):
            env.annotate(**act)
        else:
            env.step(act)
    return env


def warned(*calls: Callable[[], Any]) -> list[str]:
    """Make the calls; return their warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in calls:
            call()
    return [str(warning.message) for warning in caught]


def recorder_of(make_env: Callable[[], Any], directory: Path, lanes: int, **options: Any) -> tuple[Any, Any]:
    """Return a recorded environment, or a vector environment if there are lanes, and its action 0."""
    if not lanes:
        return TraceRecordingWrapper(make_env(), directory, **options), 0
    from vector_wrapper import TraceRecordingVectorWrapper

    envs = gymnasium.vector.SyncVectorEnv([make_env] * lanes)
    return TraceRecordingVectorWrapper(envs, directory, **options), np.zeros(int(lanes), int)


def in_a_child(call: Callable[[], Any]) -> None:
    """Make the call in a forked child, and wait for it."""
    child = os.fork()
    if not child:
        status = 1
        try:
            call()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def batch_reader(path: Path) -> BatchReader:
    return BatchReader(LocalStorage(path.parent), path.name)


def chunks_of(path: Path) -> list[tuple[int, int]]:
    """Return the first and last byte (exclusive) of each chunk."""
    return [(offset, offset + length) for offset, length, *_ in batch_reader(path).chunks.tolist()]


def place_of(path: Path, chunk: int, column: str) -> int:
    """Return the offset of a byte of a column of a chunk."""
    batch = batch_reader(path)
    with batch.open() as file:
        _, _, columns = batch._chunk_record(file, chunk)
    return next(at + stored.stored // 2 for stored, at in columns if stored.path[0] == column)


def manifest_entries(directory: Path) -> list[dict[str, Any]]:
    """Return the entries of all manifests of a trace."""
    paths = sorted(directory.glob("*.manifest.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def outcomes(directory: Path) -> list[str]:
    return [str(outcome) for outcome in open_trace(directory).episodes["outcome"]]


def recorded(directory: Path, episodes: int = 1, **options: Any) -> None:
    env = TraceRecordingWrapper(CountingEnv(), directory, **options)
    play(env, episodes)
    env.close()


def record_lengths(directory: Path, lengths: list[int], env: Any = None, flush_after: int = 0, **options: Any) -> None:
    """Record episodes of the given lengths. flush_after: numbers of steps after which a chunk ends."""
    wrapped = TraceRecordingWrapper(CountingEnv(length=10**6) if env is None else env, directory, **options)
    steps = 0
    for number, length in enumerate(lengths):
        wrapped.reset(seed=number)
        for step in range(length):
            wrapped.step(step % 4)
            steps += 1
            if flush_after and steps % flush_after == 0:
                wrapped.flush()
    wrapped.close()


def counts_of(episode: Any) -> list[int]:
    counts: list[int] = episode.observations[:, 0].tolist()
    return counts


def check_counts(trace: Any, lengths: list[int]) -> None:
    assert [counts_of(episode) for episode in trace] == [list(range(length + 1)) for length in lengths]


NESTED = spaces.Dict(
    {"image": spaces.Box(0, 255, (8, 8), np.uint8), "pair": spaces.Tuple([spaces.Discrete(5), spaces.Text(3)])}
)


def record_nested(directory: Path) -> None:
    def observation(i: int) -> Any:
        return {"image": np.full((8, 8), i % 200, np.uint8), "pair": (np.int64(i % 5), "abc"[: i % 3])}

    objects = np.empty(2, object)
    objects[:] = [np.arange(3), {"deep": [1]}]
    info = {"list": [1, [2]], "array": np.arange(3.0), "objects": objects, "map": {"a": {"b": 1}}}
    steps = [Result(observation(i), 0.5 * i, info=info) for i in range(1, 30)]
    env = ScriptedEnv(NESTED, spaces.Box(-1, 1, (2,)), [(observation(0), steps)] * 4)
    wrapped = TraceRecordingWrapper(env, directory, record_infos=True)
    for number in range(4):
        wrapped.reset(options={"a": {"b": [1, 2]}} if number % 2 else None)
        for i in range(29):
            wrapped.annotate(logits=np.full(2, i, np.float32), odd=[i] if i % 2 else np.arange(i))
            wrapped.step(np.full(2, i / 40, np.float32))
            if i % 11 == 0:
                wrapped.flush()
    wrapped.close()
