"""Seeded recordings and the bytes they write, as lines that are equal on every machine and in every run.

    python tests/helpers/written_bytes.py > tests/written_bytes.txt      after an intended change of the bytes

Each line is a column of a chunk: its descriptor, and hashes of its decompressed and of its stored bytes. The stored
bytes depend on the zstd version, so they are compared only with the version in the first line of the file. Ids, times,
processes, hosts and versions are omitted, because they differ between runs. This module parses the files by
docs/FORMAT.md and does not use the package's reader.
"""

from __future__ import annotations

import hashlib
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import msgpack
import numpy as np
import zstandard
from click.testing import CliRunner
from gym_trace_cli.main import cli
from gymnasium import spaces

import gym_trace

ZSTD = ".".join(map(str, zstandard.ZSTD_VERSION))
SAMPLES = Path(__file__).parents[2] / "sample_traces"
HAS_VECTORS = hasattr(gymnasium.vector, "AutoresetMode")
HEADER = 64
TIMES = 48  # offset in a fragment of 80 bytes; only times follow
SCHEMA_KEYS = ("format", "split", "observation_space", "action_space", "recorder", "metadata")


# -- contents of a file -----------------------------------------------------------------------------------------------


def aligned(size: int) -> int:
    return -(-size // 8) * 8


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def unpacked(data: bytes) -> Any:
    return msgpack.unpackb(data, strict_map_key=False)


def lines_of(directory: Path) -> Iterator[str]:
    """Yield the lines of all batches of a trace with one writer."""
    for path in sorted(directory.glob("*.gtb*")):
        data = path.read_bytes()
        assert not any(data[36:60]), "the file header is padded with zeros"
        offset, kinds = HEADER, []
        while offset + HEADER < len(data):
            kind, flags, length, body, at, sequence = struct.unpack_from("<HHIQQQ", data, offset + 8)
            assert (at, sequence) == (offset, len(kinds))
            metadata = unpacked(data[offset + HEADER :][:length])
            begin = offset + HEADER + aligned(length)
            assert not any(data[offset + HEADER + length : begin])
            kinds.append(f"{kind}/{flags}")
            if kind != 4:  # parity is that of ids and times, too
                yield from record_lines(kind, len(kinds) - 1, metadata, data[begin : begin + body])
            offset = begin + body
        yield f"records {' '.join(kinds)}, {len(data) - offset} bytes of footer"


def record_lines(kind: int, number: int, metadata: dict[str, Any], body: bytes) -> Iterator[str]:
    if kind == 1:
        yield f"schema: {' '.join(metadata)}"
        for key in SCHEMA_KEYS:
            yield f"schema {key}: {digest(msgpack.packb(metadata[key]))}"
        return
    yield f"record {number}: {' '.join(metadata)}"
    begin = 0
    for path, dtype, shape, rows, encoding, stored, raw, *_ in metadata["columns"]:
        blob = body[begin : begin + stored]
        data = (
            zstandard.ZstdDecompressor().decompressobj(read_across_frames=True).decompress(blob)
            if encoding & 1
            else blob
        )
        assert len(data) == raw
        varies = path in (["fragments"], ["chunks"], ["columns"], ["blocks"])
        if varies:
            data = without_what_varies(path, data, encoding, rows)
        begin += aligned(stored)
        name = "/".join(map(str, path))
        form = f"{dtype} {shape} * {rows}, encoding {'-' if varies else encoding}, {raw} bytes"
        yield f"record {number}: {name}: {form}: {digest(data)}" + ("" if varies else f" zstd {digest(blob)}")
    yield f"record {number}: {len(body) - begin} bytes behind"
    for path, full, _ in metadata.get("totals", ()):
        yield f"total {'/'.join(map(str, path))}: {full}"


def without_what_varies(path: list[Any], data: bytes, encoding: int, rows: int) -> bytes:
    """Return fragments without times, chunks without offsets, columns by chunk, form and rows, and no blocks."""
    if path == ["blocks"]:
        return b""
    width = 80 if path == ["fragments"] else 32
    assert not encoding & ~11, "tables are shuffled, constant, or plain"
    table = np.frombuffer(data, np.uint8)
    table = table.reshape(width, -1).T if encoding & 2 else table.reshape(-1, width)
    table = np.broadcast_to(table, (rows, width))
    kept = {"fragments": np.r_[:TIMES], "chunks": np.r_[16:32], "columns": np.r_[8:14, 16:20]}[path[0]]
    return bytes(table[:, kept].tobytes())


# -- environments ------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """Result of one scripted step; error: the step raises."""

    observation: Any
    reward: Any = 1.0
    terminated: Any = False
    truncated: Any = False
    info: Any = None
    error: bool = False


class Scripted(gymnasium.Env[Any, Any]):
    """Returns the results of tell(random, step).

    Scripts draw only integers and floats below 1 from random: they are equal on every machine.
    """

    def __init__(self, observation_space: Any, action_space: Any, tell: Callable[[Any, int], Result]):
        self.observation_space, self.action_space, self.tell = observation_space, action_space, tell
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        told = self.tell(self.np_random, 0)
        return told.observation, {} if told.info is None else told.info

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.count += 1
        told = self.tell(self.np_random, self.count)
        if told.error:
            raise ArithmeticError("scripted")
        return told.observation, told.reward, told.terminated, told.truncated, {} if told.info is None else told.info


def play(
    env: Any,
    act: Callable[[int], Any],
    steps: int,
    flush_every: int = 0,
    resets: Callable[[int], dict[str, Any]] = lambda episode: {"seed": 7} if episode == 0 else {},
    annotate: Callable[[int], dict[str, Any]] | None = None,
) -> None:
    """Take `steps` steps, with a reset after each episode; then close."""
    env.reset(**resets(0))
    episodes = 1
    for number in range(1, steps + 1):
        if annotate is not None:
            env.annotate(**annotate(number))
        try:
            _, _, terminated, truncated, _ = env.step(act(number))
        except ArithmeticError:
            continue
        if terminated or truncated:
            env.reset(**resets(episodes))
            episodes += 1
        if flush_every and number % flush_every == 0:
            env.flush()
    env.close()


def recorder(env: Any, directory: Path, **options: Any) -> gym_trace.TraceRecordingWrapper:
    return gym_trace.TraceRecordingWrapper(env, directory, flush_seconds=3600.0, **options)


FOUR = spaces.Box(-np.inf, np.inf, (4,), np.float32)
TWO = spaces.Discrete(2)


def four_numbers(random: Any, step: int) -> Result:
    return Result(random.random(4).astype(np.float32), float(random.integers(0, 5)) / 4, step == 37)


# -- recordings --------------------------------------------------------------------------------------------------------


def cartpole(directory: Path) -> str:
    """Record CartPole and return a hash of its results. Its sines may differ between machines: then it is skipped."""
    said = hashlib.sha256()

    class Listening(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            told = self.env.step(action)
            said.update(np.asarray(told[0]).tobytes() + repr([told[1], told[2], told[3]]).encode())
            return told

    env = Listening(gymnasium.make("CartPole-v1"))
    said.update(env.observation_space.high.tobytes())  # differs in Gymnasium 0.29
    play(recorder(env, directory), lambda number: number // 3 % 2, 900, flush_every=250)
    return said.hexdigest()[:16]


def many_numbers(directory: Path) -> None:
    """Record enough steps for several chunks."""
    play(recorder(Scripted(FOUR, TWO, four_numbers), directory), lambda number: number * 7 % 5 % 2, 30_000)


def short_episodes(directory: Path) -> None:
    def tell(random: Any, step: int) -> Result:
        return Result(np.int64(random.integers(0, 9)), -1.0, step >= 2, step == 3)

    env = Scripted(spaces.Discrete(9), spaces.Box(-1, 1, (2,), np.float64), tell)
    play(recorder(env, directory, level=5), lambda number: np.full(2, number / 64), 5_000, flush_every=1_999)


def trees(directory: Path) -> None:
    space = spaces.Dict(
        {
            "bits": spaces.MultiBinary(5),
            "image": spaces.Box(0, 255, (8, 8), np.uint8),
            "pair": spaces.Tuple([spaces.Discrete(5), spaces.Text(6, charset="abc")]),
            "several": spaces.Sequence(spaces.Discrete(4)),
        }
    )

    def tell(random: Any, step: int) -> Result:
        observation = {
            "bits": random.integers(0, 2, 5).astype(np.int8),
            "image": np.full((8, 8), step, np.uint8),
            "pair": (np.int64(step % 5), "abcabc"[: step % 7]),
            "several": tuple(range(step % 4)),
        }
        return Result(observation, step / 8, step == 50)

    actions = spaces.Tuple([spaces.MultiDiscrete([3, 4]), spaces.Box(0, 1, (), np.float32)])
    env = recorder(Scripted(space, actions, tell), directory)
    play(env, lambda number: (np.array([number % 3, number % 4]), np.float32(number / 1024)), 400, flush_every=130)


def frames(directory: Path) -> None:
    """Record frames: most change little, some change completely, some are noise."""
    picture = np.zeros((84, 84, 3), np.uint8)

    def tell(random: Any, step: int) -> Result:
        row = int(random.integers(0, 80))
        picture[row : row + 3, 10:20] ^= np.uint8(step)
        if step % 90 == 89:
            picture[...] = random.integers(0, 256, picture.shape if step % 180 == 89 else (1, 1, 3))
        return Result(picture, 0.0, False, step == 120)

    env = Scripted(spaces.Box(0, 255, picture.shape, np.uint8), spaces.Discrete(6), tell)
    play(recorder(env, directory), lambda number: number % 6, 700, flush_every=300)


def noise(directory: Path) -> None:
    def tell(random: Any, step: int) -> Result:
        return Result(random.integers(0, 256, (40, 40, 3), np.uint8), 0.0, step == 25)

    env = Scripted(spaces.Box(0, 255, (40, 40, 3), np.uint8), TWO, tell)
    play(recorder(env, directory, level=-3), lambda number: number % 2, 120, flush_every=50)


def infos(directory: Path) -> None:
    def tell(random: Any, step: int) -> Result:
        info = {"count": step, "array": np.arange(step % 3), "map": {"a": [1, (2, None)]}, "odd": Fraction(1, 3)}
        return Result(random.random(4).astype(np.float32), 0.5, step == 21, info=info)

    def annotate(number: int) -> dict[str, Any]:
        notes: dict[str, Any] = {"value": np.float32(number / 32), "logits": np.full(2, number, np.float64)}
        return notes if number % 5 else {"value": np.float32(0), "word": "x" * (number % 9)}

    env = recorder(Scripted(FOUR, TWO, tell), directory, record_infos=True, metadata={"note": [1, 2.5, "ü"]})
    play(env, lambda number: number % 2, 300, flush_every=77, annotate=annotate)


def chosen_infos(directory: Path) -> None:
    def tell(random: Any, step: int) -> Result:
        return Result(np.zeros(4, np.float32), 0.0, step == 9, info={"kept": step, "dropped": "x" * step})

    play(recorder(Scripted(FOUR, TWO, tell), directory, record_infos=["kept"]), lambda number: 1, 50)


def resets(directory: Path) -> None:
    """Record resets: seeds of every size, options, and generator states before unseeded resets."""
    given: list[dict[str, Any]] = [
        {"seed": 0},
        {},
        {"options": {"level": 3, "deep": {"list": [1, 2], "array": np.arange(3)}}},
        {"seed": 2**70, "options": {}},
        {"seed": 2**62},
        {},
    ]
    env = recorder(Scripted(FOUR, TWO, four_numbers), directory)
    play(env, lambda number: 0, 300, flush_every=90, resets=lambda episode: given[episode % len(given)])


def filtered_steps(directory: Path) -> None:
    env = Scripted(FOUR, TWO, four_numbers)
    wrapped = recorder(env, directory, frame_filter=lambda step: step % 7 < 4, episode_filter=lambda i: i % 3 != 1)
    play(wrapped, lambda number: number % 2, 600, flush_every=170)


def odd_values(directory: Path) -> None:
    """Record values outside their spaces, rewards of several types, steps that raise, and resets in mid-episode."""
    nan = np.frombuffer(b"\x01\x00\xa0\x7f" * 4, np.float32)
    told = [
        Result(np.arange(4.0), 1),
        Result(np.arange(4, dtype=np.float32), np.float32(0.1)),
        Result(nan, float("nan")),
        Result([1.0, 2.0], 10**30),
        Result(None, None),
        Result(np.arange(4, dtype=">f4"), True),
        Result(np.zeros((2, 2), np.float32), np.array([1.0, 2.0])),
        Result({"a": 1}, "text", np.bool_(True)),
        Result(np.zeros(4, np.float32), error=True),
        Result(np.ma.masked_array(np.arange(4, dtype=np.float32), [0, 1, 0, 1])),
        Result(np.array([1, "a", None, 2.5], object), 1 + 2j),
        Result(Fraction(2, 3), Fraction(1, 2), False, 1),
    ]

    def tell(random: Any, step: int) -> Result:
        return Result(np.ones(4, np.float32)) if step % 40 < 20 else told[step % len(told)]

    acts: list[Any] = [0, 1, np.int64(1), np.int32(0), 1.0, 5, "left", None, np.array([1])]
    env = recorder(Scripted(FOUR, TWO, tell), directory)
    play(env, lambda number: acts[number % len(acts)] if number % 50 > 40 else number % 2, 200, flush_every=60)


def cuts(directory: Path) -> None:
    """Record resets in mid-episode, and steps after the end of an episode."""
    env = recorder(Scripted(FOUR, TWO, four_numbers), directory, reward_classes=[0.0, 0.5])
    for length in (5, 0, 40, 3, 37, 1):
        env.reset(seed=length)
        for number in range(length):
            env.step(number % 2)
    env.close()


def repaired(directory: Path) -> None:
    gym_trace.repair_trace(SAMPLES / "format-1.0" / "damaged", directory)


def imported(directory: Path) -> None:
    """Record with the command line."""
    old = SAMPLES / "legacy" / "gym_recording-json" / "Pixels"
    CliRunner().invoke(cli, ["import", str(old), "-o", str(directory)], catch_exceptions=False)


def vectors(directory: Path, mode: str, of: str = "numbers", **options: Any) -> None:
    envs = counting_lanes(mode, of)
    wrapped = gym_trace.TraceRecordingVectorWrapper(envs, directory, flush_seconds=3600.0, **options)
    wrapped.reset(seed=3)
    for number in range(1, 161):
        if number % 4:
            wrapped.annotate(value=np.arange(3) + number)
        _, _, terminated, truncated, _ = wrapped.step(np.arange(3) * number % 4)
        over = terminated | truncated
        if mode == "DISABLED" and over.any():
            wrapped.reset(options={"reset_mask": over})
        if number % 50 == 0:
            wrapped.flush()
    wrapped.close()


LANES = {
    "numbers": FOUR,
    "pictures": spaces.Box(0, 255, (80, 80), np.uint8),
    "trees": spaces.Dict({"four": FOUR, "pair": spaces.Tuple([spaces.Discrete(99), spaces.Text(9, charset="ab")])}),
}


def counting_lanes(mode: str, of: str) -> Any:
    """Three lanes that count their steps and end after 5, 8 and 11 steps. Observations are one of LANES."""

    class Lanes(gymnasium.vector.VectorEnv[Any, Any, Any]):
        metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode[mode]}  # noqa: RUF012
        num_envs = 3
        single_observation_space = LANES[of]
        single_action_space = spaces.Discrete(4)
        observation_space = gymnasium.vector.utils.batch_space(single_observation_space, 3)
        action_space = gymnasium.vector.utils.batch_space(single_action_space, 3)

        def seen(self) -> Any:
            if of == "trees":
                words = tuple("ab" * (count % 5) for count in self.counts)
                return {
                    "four": np.outer(self.counts, [1, 0, 2, 0]).astype(np.float32),
                    "pair": (self.counts.copy(), words),
                }
            space = LANES[of]
            seen = np.zeros((3, *space.shape), space.dtype)
            for lane, count in enumerate(self.counts):
                seen[lane].flat[count % seen[lane].size] = count + 16 * lane
            return seen

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            mask = np.ones(3, bool) if options is None else options["reset_mask"]
            self.counts = np.where(mask, 0, getattr(self, "counts", np.zeros(3, int)))
            self.over = np.zeros(3, bool)
            return self.seen(), {"start": self.counts.copy(), "_start": mask}

        def step(self, actions: Any) -> Any:
            begin = self.over & (mode == "NEXT_STEP")
            self.counts = np.where(begin, 0, self.counts + 1)
            ends = self.counts == [5, 8, 11]
            terminated, truncated = ends & [True, False, True], ends & [False, True, True]
            self.over = ends
            rewards = np.where(begin, 0.0, actions / 4)
            info: dict[str, Any] = {"count": self.counts.copy(), "_count": ~begin}
            if mode == "SAME_STEP" and ends.any():
                final = np.array([row if end else None for row, end in zip([*self.seen(), 0], [*ends, False])], object)
                info["final_obs"], info["_final_obs"] = final[:3], ends
                info["final_info"] = {"count": self.counts.copy(), "_count": ends}
                info["_final_info"] = ends
                self.counts = np.where(ends, 0, self.counts)
            return self.seen(), rewards, terminated, truncated, info

    return Lanes()


RECORDINGS: dict[str, Callable[[Path], str | None]] = {
    recording.__name__: recording
    for recording in (
        cartpole,
        many_numbers,
        short_episodes,
        trees,
        frames,
        noise,
        infos,
        chosen_infos,
        resets,
        filtered_steps,
        odd_values,
        cuts,
        repaired,
        imported,
    )
}
VECTORS: dict[str, dict[str, Any]] = {
    "vector_next_step": {"mode": "NEXT_STEP", "record_infos": True},
    "vector_same_step": {"mode": "SAME_STEP", "record_infos": True},
    "vector_disabled": {"mode": "DISABLED", "record_infos": ["count"]},
    "vector_frames": {"mode": "NEXT_STEP", "of": "pictures"},
    "vector_trees": {"mode": "NEXT_STEP", "of": "trees"},
    "vector_filtered": {"mode": "SAME_STEP", "frame_filter": lambda step: step % 4 < 2, "split": "eval"},
}


def recorded(name: str, directory: Path) -> list[str]:
    """Make the named recording in an empty directory; return its lines."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about odd values
        if name in VECTORS:
            said = None
            vectors(directory, **VECTORS[name])
        else:
            said = RECORDINGS[name](directory)
    return [*([] if said is None else [f"said {said}"]), *lines_of(directory)]


def names() -> list[str]:
    return [*RECORDINGS, *VECTORS]


def main() -> None:
    print(f"# zstd {ZSTD}; made by: python tests/helpers/written_bytes.py > tests/written_bytes.txt")
    for name in names():
        with tempfile.TemporaryDirectory() as directory:
            for line in recorded(name, Path(directory) / "trace"):
                print(f"{name}: {line}")


if __name__ == "__main__":
    main()
