"""Feed mutated traces to everything that reads traces. Only TraceError may be raised.

    python tests/helpers/fuzz_reader.py --inputs 100000 --seed 0

prints what came out how often; a failure is kept as a directory that reproduces it.
"""

import argparse
import collections
import contextlib
import faulthandler
import random
import resource
import shutil
import signal
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
from batch_forgery import Forgery, Record, taken_apart
from numbered_env import record
from ring_mutations import mutated_ring
from scripted_env import CountingEnv
from vector_wrapper import TraceRecordingVectorWrapper

from gym_trace import (
    Trace,
    TraceRecordingWrapper,
    check_trace,
    diff_traces,
    edit,
    open_trace,
    repair_trace,
    scan_recorded_traces,
    summarize,
)
from gym_trace.data.origins import ORIGINS, packed_origins, unpacked_origins
from gym_trace.errors import TraceError
from gym_trace.exchange.formats.legacy.monitor import load_results
from gym_trace.format import fragments, wire
from gym_trace.tools.statistics.describe import describe

SECONDS = 60  # time limit per input
MEMORY = 2 << 30  # bytes of address space
_ODD_NUMBERS = (0, 1, 2, 7, 8, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, -1)
_ODD_VALUES = (
    *_ODD_NUMBERS,
    (1 << 64) - 1,
    None,
    True,
    1.5,
    float("nan"),
    "",
    "O",
    "|O",
    "<f8",
    "msgpack",
    "|V80",
    b"\xff",
)
_ODD_THINGS = (*_ODD_VALUES, [], {}, [[]], {"": 1}, ["x"], "<U9999", "|S0", "<M8[s]", "\ud800", "../../etc/passwd")


def read_everything(
    directory: Path, repaired: Path | None = None, other: Path | None = None, thoroughly: bool = True
) -> collections.Counter[str]:
    """Call everything that reads a trace; return the outcome of each. Raises any error except TraceError.

    Args:
        repaired: where to repair it to; None: not at all.
        other: a trace to compare it with; None: itself.
        thoroughly: also by what mostly reads it as others do: a plain scan, statistics, differences, checks, a repair.
    """
    outcomes: collections.Counter[str] = collections.Counter()
    traces: list[Trace] = []

    def attempt(name: str, call: Any) -> None:
        try:
            call()
            outcomes[f"{name}: fine"] += 1
        except TraceError as error:
            outcomes[f"{name}: {type(error).__name__}"] += 1

    def read(trace: Trace) -> None:
        attempt("skip", lambda: [_use(episode) for episode in trace.scan(on_damage="skip")])
        attempt("call back", lambda: scan_recorded_traces(trace, lambda o, a, r: None))
        attempt("get", lambda: [_use(trace[i]) for i in (0, -1) if len(trace)])
        if thoroughly:
            attempt("scan", lambda: [_use(episode) for episode in trace])
            attempt("about", lambda: _about(trace))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        attempt("open", lambda: traces.append(open_trace(directory)))
        for trace in traces:
            read(trace)
        if thoroughly:
            attempt("describe", lambda: (describe(open_trace(directory)), describe(open_trace(directory), brief=True)))
            attempt("summarize", lambda: summarize(open_trace(directory), columns=True, by="outcome"))
            attempt("diff", lambda: list(diff_traces(directory, other or directory)))
            attempt("results", lambda: load_results(directory))
            attempt("check", lambda: check_trace(directory))
        if repaired is not None:
            attempt("repair", lambda: _repair(directory, repaired))
    return outcomes


def _use(episode: Any) -> None:
    """Access everything in an episode. Each access may raise for damage."""
    names = ("observations", "actions", "rewards", "terminations", "truncations", "infos", "annotations", "seed")
    names += (
        "pending_action",
        "options",
        "rng_state",
        "reset_info",
        "start_time",
        "end_time",
        "start_monotonic",
        "end_monotonic",
    )
    for name in (*names, "outcome", "total_reward", "split"):
        with contextlib.suppress(TraceError):
            getattr(episode, name)
    repr(episode)


def _about(trace: Trace) -> None:
    for name in ("metadata", "env_spec", "observation_space", "action_space", "damage", "writers"):
        with contextlib.suppress(TraceError):
            getattr(trace, name)


def _repair(directory: Path, repaired: Path) -> None:
    shutil.rmtree(repaired, ignore_errors=True)
    if not repair_trace(directory, repaired).writers:
        assert not repaired.exists()
        return
    try:
        assert check_trace(repaired).damages == []
    finally:
        shutil.rmtree(repaired, ignore_errors=True)


# -- mutations --------------------------------------------------------------------------------------------------------


def mutated(chance: random.Random, seeds: list[Path]) -> bytes:
    """Mutate a seed, as a bad disk would (invalid checksums) or as an attacker would (valid checksums)."""
    path = chance.choice(seeds)
    if chance.random() < 0.4:
        data = bytearray(path.read_bytes())
        for _ in range(chance.choice((1, 1, 2, 5))):
            _damage(chance, data, seeds)
        return bytes(data)
    forgery = taken_apart(path)
    try:
        for _ in range(chance.choice((1, 1, 2, 4))):
            _forge(chance, forgery)
        data = forgery.data(reindexed=chance.random() < 0.7)
    except (TraceError, ValueError, LookupError, TypeError, ArithmeticError):
        data = path.read_bytes()  # cannot be rebuilt
    if chance.random() < 0.1:
        spoiled = bytearray(data)
        _damage(chance, spoiled, seeds)
        return bytes(spoiled)
    return data


def _damage(chance: random.Random, data: bytearray, seeds: list[Path]) -> None:
    at = chance.randrange(len(data) + 1)
    length = chance.choice((1, 8, 64, 500))
    kind = chance.randrange(6)
    if kind == 0 and at < len(data):
        data[at] ^= 1 << chance.randrange(8)
    elif kind == 1:
        data[at : at + length] = chance.randbytes(min(length, len(data) - at))
    elif kind == 2:
        del data[at : at + length]
    elif kind == 3:
        start = chance.randrange(len(data) + 1)
        data[at:at] = data[start : start + length]
    elif kind == 4:
        other = chance.choice(seeds).read_bytes()
        data[at : at + length] = other[at : at + length]
    else:
        data[at:] = bytes(chance.choice((0, 1, 100)))


def _forge(chance: random.Random, forgery: Forgery) -> None:
    record = chance.choice(forgery.records)
    kind = chance.randrange(8)
    if kind == 0 and record.columns:
        path = chance.choice(list(record.columns))
        field = chance.choice(("dtype", "shape", "rows", "encoding", "raw", "path", "stored"))
        record.describe(path, **{field: _odd(chance)})
    elif kind == 1 and record.columns:
        path = chance.choice(list(record.columns))
        blob = bytearray(record.blobs[record.columns[path]])
        if blob:
            _twist(chance, blob)
        record.store(path, bytes(blob))
    elif kind == 2 and record.kind in (wire.CHUNK, wire.INDEX) and ("fragments",) in record.columns:
        record.change_fragments(lambda table: _twisted_table(chance, table))
    elif kind == 3 and record.kind == wire.INDEX:
        record.put_table("chunks", _twisted_table(chance, record.table("chunks", wire.CHUNK_ENTRY)))
    elif kind == 4:
        record.claims = {
            chance.choice(("type", "flags", "metadata_length", "body_length")): chance.choice((0, 1, 2, 9, 800))
        }
    elif kind == 5:
        _twist_tree(chance, record.metadata)
    elif kind == 6:
        at = chance.randrange(len(forgery.records))
        if chance.random() < 0.5:
            forgery.records.insert(at, record)
        else:
            forgery.records.remove(record)
    elif record.columns:
        _twist_column(chance, record)


def _twist(chance: random.Random, blob: bytearray) -> None:
    at = chance.randrange(len(blob))
    if chance.random() < 0.7:
        blob[at] = chance.randrange(256)
    else:
        del blob[at:]


def _twist_column(chance: random.Random, record: Record) -> None:
    """Swap in the descriptor or bytes of another column, or remove a column."""
    one, other = chance.choice(list(record.columns.values())), chance.choice(list(record.columns.values()))
    columns, blobs = record.metadata["columns"], record.blobs
    kind = chance.randrange(3)
    if kind == 0:
        blobs[one], columns[one][5], columns[one][7] = blobs[other], columns[other][5], columns[other][7]
    elif kind == 1:
        columns[one], columns[other] = columns[other], columns[one]
    else:
        del columns[one], blobs[one]


def _odd(chance: random.Random) -> Any:
    value = chance.choice(_ODD_THINGS)
    return [value, chance.choice(_ODD_THINGS)] if chance.random() < 0.3 else value


def _twisted_table(chance: random.Random, table: Any) -> Any:
    table = table.copy()
    if not len(table):
        return table
    kind = chance.randrange(4)
    row = chance.randrange(len(table))
    if kind == 0:
        return np.delete(table, row)
    if kind == 1:
        return np.concatenate([table, table[row : row + 1]])
    field = chance.choice(table.dtype.names)
    dtype = table.dtype[field]
    number = chance.choice(_ODD_NUMBERS) if chance.random() < 0.5 else chance.randrange(-3, 70)
    table[field][row] = np.frombuffer((number % (1 << 64)).to_bytes(8, "little")[: dtype.itemsize], dtype)[0]
    return table


def _twist_tree(chance: random.Random, tree: Any) -> None:
    """Change one value in nested maps and arrays."""
    if isinstance(tree, dict) and isinstance(packed := tree.get(ORIGINS), bytes) and chance.random() < 0.8:
        origins = unpacked_origins(packed)
        _twist_tree(chance, origins)
        tree[ORIGINS] = packed_origins(origins)
        return
    if isinstance(tree, dict) and tree:
        key: Any = chance.choice(list(tree))
    elif isinstance(tree, list) and tree:
        key = chance.randrange(len(tree))
    else:
        return
    if isinstance(tree[key], (dict, list)) and tree[key] and chance.random() < 0.8:
        _twist_tree(chance, tree[key])
    elif isinstance(tree, dict) and chance.random() < 0.2:
        del tree[key]
    else:
        tree[key] = _odd(chance)


def mutated_manifest(chance: random.Random, manifest: bytes) -> bytes:
    data = bytearray(manifest)
    at = chance.randrange(len(data))
    odd = chance.choice(
        (b"null", b"[]", b"{}", b"-1", b"1e999", b"9" * 30, b'"../x"', b"[" * 3000, b'"\\u0000"', b"\n", b"")
    )
    data[at : at + chance.choice((1, 4, 20))] = odd
    return bytes(data)


# -- runs -------------------------------------------------------------------------------------------------------------


def seed_files(directory: Path) -> list[Path]:
    """Small traces to mutate: sealed and unsealed, with infos and annotations, filtered, with frames."""
    kinds: dict[str, dict[str, Any]] = {
        "sealed": {}, "open": {"closed": False}, "filtered": {"frame_filter": lambda step: step % 3 != 1}
    }  # fmt: skip
    files = [record(directory / name, **options) for name, options in kinds.items()]
    with TraceRecordingWrapper(FramesEnv(), directory / "frames", uid="w", flush_seconds=1000.0) as env:
        for _ in range(3):
            env.reset()
            for _ in range(6):
                env.step(0)
            env.flush()
    return [*files, directory / "frames" / "w.000000.gtb", _compacted(directory)]


def _compacted(directory: Path) -> Path:
    """A batch with episodes of three writers, in several chunks."""
    for number in range(3):
        apart = directory / f"one-{number}"
        record(apart, uid=f"w{number}")
        shutil.copytree(apart, directory / "several", dirs_exist_ok=True)
    with mock.patch.multiple("gym_trace.format.ring.chunk_builder", SMALL_CHUNK=1000, FULL_CHUNK=1000):
        edit.compact(directory / "several", directory / "compacted")
    (batch,) = (directory / "compacted").glob("*.gtb")
    return batch


def seed_rings(directory: Path) -> list[Path]:
    """Directories of unfinished recordings with a ring that holds all kinds of entries."""
    made: list[Path] = []
    warnings.filterwarnings("ignore", "actions: got a str")
    for name, env in (("counts", CountingEnv(length=4)), ("frames", FramesEnv())):
        recorder = TraceRecordingWrapper(env, directory / name, uid="w", record_infos=True, flush_seconds=1000.0)
        for episode in range(4):
            recorder.reset(seed=episode, options={"episode": episode} if episode % 2 else None)
            for step in range(3 + episode % 2):
                recorder.annotate(note=np.float32(step), text="x" * step)
                recorder.step("odd" if episode == 2 and step == 1 else step % 4)
            if episode == 0:
                recorder.flush()
        made.append(directory / f"killed-{name}")
        shutil.copytree(directory / name, made[-1])
        recorder.close()
    if hasattr(gymnasium.vector, "AutoresetMode"):
        made.append(_lanes_ring(directory))
    return made


def _lanes_ring(directory: Path) -> Path:
    envs = gymnasium.vector.SyncVectorEnv([partial(CountingEnv, length) for length in (2, 3, 9)])
    recorder = TraceRecordingVectorWrapper(envs, directory / "lanes", uid="w", record_infos=True)
    recorder.reset(seed=1)
    for step in range(7):
        recorder.annotate(note=np.full(3, step), text=["x" * step] * 3)
        recorder.step(np.full(3, step % 4))
        if step == 2:
            recorder.flush()
    shutil.copytree(directory / "lanes", directory / "killed-lanes")
    recorder.close()
    return directory / "killed-lanes"


class FramesEnv(CountingEnv):
    """Frames with few changed words."""

    def __init__(self) -> None:
        super().__init__(length=6, shape=(520,))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        count = int(self._buffer[0]) + 1
        self._buffer[[0, 3 * count, -1]] = count
        return self._buffer, float(count), count >= self.length, False, {}


def fuzz(inputs: int, seed: int, scratch: Path) -> collections.Counter[str]:
    """Run `inputs` mutated traces; raise at the first error other than TraceError."""
    chance = random.Random(seed)
    seeds = seed_files(scratch / "seeds")
    manifest = (seeds[0].parent / "w.manifest.jsonl").read_bytes()
    outcomes: collections.Counter[str] = collections.Counter()
    killed = seed_rings(scratch / "rings")
    for number in range(inputs):
        directory = scratch / f"input-{seed}-{number}"
        if number % 4 == 3:
            shutil.copytree(chance.choice(killed), directory)
            (directory / "w.ring").write_bytes(mutated_ring(chance, (directory / "w.ring").read_bytes()))
            outcomes += read_everything(directory, scratch / "repaired", thoroughly=number % 8 == 3)
            shutil.rmtree(directory)
            continue
        directory.mkdir()
        name = "w.000000.gtb" + (".part" if chance.random() < 0.4 else "")
        (directory / name).write_bytes(mutated(chance, seeds))
        if chance.random() < 0.8:
            changed = mutated_manifest(chance, manifest) if chance.random() < 0.3 else manifest
            (directory / "w.manifest.jsonl").write_bytes(changed)
        rarely = number % 10 == 0
        with mock.patch.object(fragments, "_LEAST_ROWS", chance.choice((1, 4096))):  # as of large tables
            outcomes += read_everything(directory, scratch / "repaired" if rarely else None, thoroughly=rarely)
        shutil.rmtree(directory)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round", type=int, default=1000, help="inputs after which figures are printed")
    options = parser.parse_args()
    faulthandler.enable()
    signal.signal(signal.SIGALRM, _too_slow)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    total: collections.Counter[str] = collections.Counter()
    begin, done = time.monotonic(), 0
    scratch = Path(tempfile.mkdtemp(prefix="fuzz-reader-"))
    while done < options.inputs:
        count = min(options.round, options.inputs - done)
        signal.alarm(SECONDS + count)
        place = scratch / f"round-{done}"
        total += fuzz(count, options.seed * 1_000_003 + done, place)
        shutil.rmtree(place)
        done += count
        print(f"{done} inputs, {time.monotonic() - begin:.0f} s", flush=True)
    signal.alarm(0)
    shutil.rmtree(scratch)
    for name, times in sorted(total.items()):
        print(f"{times:8d}  {name}")


def _too_slow(*_: Any) -> None:
    raise TimeoutError("an input takes too long")


if __name__ == "__main__":
    main()
