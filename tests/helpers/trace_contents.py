"""Contents of a trace, to compare with those of a trace made from it."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from column_hashes import describe_trace
from echo_env import EchoEnv, try_steps
from runs import record_nested
from scripted_env import CountingEnv, ImageEnv, small_blocks
from vector_wrapper import TraceRecordingVectorWrapper

from gym_trace import TraceRecordingWrapper, check_trace, open_trace
from gym_trace.data.packing import pack_lenient
from gym_trace.playback.episode_index import index_of

Key = tuple[str, int, int]
SAMPLES = sorted((Path(__file__).parents[2] / "sample_traces").glob("format-*/*"))


def contents(directory: Path) -> dict[Key, dict[str, Any]]:
    """Every episode by writer, id and first step, with hashes of all that is known of it."""
    found: dict[Key, dict[str, Any]] = {}
    trace = open_trace(directory)
    said = {
        reader.writer: {
            key: pack_lenient(value)[0] for key, value in reader.schema.items() if key not in ("batch", "type")
        }
        for reader in index_of(trace).readers
    }
    pending = {(e.writer, e.episode_id, e.first_step): pack_lenient(e.pending_action)[0] for e in trace}
    for writer in describe_trace(directory):
        assert writer["damage"] == []
        for episode in writer["episodes"]:
            key = (writer["writer"], episode["episode_id"], episode["first_step"])
            assert key not in found
            more = {"split": writer["split"], "schema": said[writer["writer"]], "pending": pending[key]}
            found[key] = {**episode, **more}
    assert len(found) == len(trace)
    return found


def check_clean(directory: Path, total: int | None = None, killed: bool = False) -> None:
    """Asserts that all bytes check, that manifests say what batches have, and how many episodes there are.

    killed: whether writers may have died.
    """
    report = check_trace(directory)
    assert report.damages == []
    assert all(killed and " killed" in remark for remark in report.remarks)
    assert total is None or len(open_trace(directory)) == total
    assert not list(directory.parent.glob(".*"))


def record_anything(directory: Path, random: np.random.Generator) -> None:
    """A trace of one to three writers of any kind: filtered, with gaps, of lanes, with and without seeds."""
    kinds = [_counted, _filtered, _with_gaps, _pictures, _lanes, record_nested_beside]
    with small_blocks(rows=int(random.integers(3, 9)), chunk=int(random.integers(200, 3000)), frame=1000):
        for _ in range(int(random.integers(1, 4))):
            kinds[int(random.integers(len(kinds)))](directory, random)


def record_nested_beside(directory: Path, random: np.random.Generator) -> None:
    apart = directory.with_name(f"{directory.name}-{random.integers(1 << 40)}")
    record_nested(apart)
    directory.mkdir(exist_ok=True)
    for path in apart.iterdir():
        path.rename(directory / path.name)
    apart.rmdir()


def _play(env: Any, random: np.random.Generator, most: int = 12) -> None:
    for _ in range(int(random.integers(1, 8))):
        seed = [None, int(random.integers(5)), 1 << 70][int(random.integers(3))]
        env.reset(seed=seed, options={"level": [1, 2]} if random.random() < 0.3 else None)
        for _ in range(int(random.integers(0, most))):
            if random.random() < 0.2:
                env.annotate(value=float(random.random()), odd=[1, "a"])
            try_steps(env, int(random.integers(0, 4)))
            if random.random() < 0.1:
                env.flush()
    env.close()


def _counted(directory: Path, random: np.random.Generator) -> None:
    infos = bool(random.integers(2))
    env = CountingEnv(length=int(random.integers(1, 9)))
    _play(TraceRecordingWrapper(env, directory, on_exist="append", record_infos=infos, split="eval"), random, 6)


def _filtered(directory: Path, random: np.random.Generator) -> None:
    kept = set(random.integers(0, 20, 8).tolist())
    env = TraceRecordingWrapper(
        CountingEnv(30), directory, on_exist="append", frame_filter=kept.__contains__, metadata={"kept": [1, 2]}
    )
    _play(env, random, 20)


def _with_gaps(directory: Path, random: np.random.Generator) -> None:
    env = EchoEnv(length=15)
    env.raises_after = set(random.integers(0, 12, 3).tolist())
    _play(TraceRecordingWrapper(env, directory, on_exist="append", record_infos=True), random, 20)


def _pictures(directory: Path, random: np.random.Generator) -> None:
    _play(TraceRecordingWrapper(ImageEnv(6), directory, on_exist="append"), random, 5)


def _lanes(directory: Path, random: np.random.Generator) -> None:
    import gymnasium

    lengths = random.integers(2, 9, 3).tolist()
    envs = gymnasium.vector.SyncVectorEnv([lambda length=length: CountingEnv(length) for length in lengths])
    recorded = TraceRecordingVectorWrapper(envs, directory, on_exist="append", record_infos=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorded.reset(seed=3)
        for _ in range(int(random.integers(1, 30))):
            recorded.step(random.integers(0, 4, 3))
            if random.random() < 0.1:
                recorded.flush()
        recorded.close()
