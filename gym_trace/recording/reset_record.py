"""The record of a reset, next to the fragment table: options, generator state, info, a large seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from gymnasium import vector

from gym_trace.data.packing import pack, pack_lenient
from gym_trace.envs.seeding import generator_state, has_own_generator
from gym_trace.errors import raise_if_of_signal
from gym_trace.format import wire
from gym_trace.recording.core import pcg64_state

# Start of an episode: its id, lane, seed as in the fragment table, row of the column "starts", UTC and monotonic time
# in ns. A plain tuple, which is cheaper than a class: there is one for each episode.
Start = tuple[int, int, int, bytes, int, int]


def stored_seed(seed: Any) -> int:
    """Return a seed in the form of the fragment table."""
    if seed is None:
        return wire.NO_SEED
    if isinstance(seed, (int, np.integer)) and 0 <= seed < 1 << 63:
        return int(seed)
    return wire.SEED_ELSEWHERE


def packed_generator(env: Any) -> bytes | None:
    """Return packed {"rng_state": state} of an unwrapped environment's generator; None if its type is unknown.

    A PCG64 state is joined from prepacked parts, which saves 5 % of the recording time of CartPole.
    """
    try:
        packed = pcg64_state(env.np_random.bit_generator, PCG64)
    except Exception as error:  # user code may raise anything
        raise_if_of_signal(error)
        packed = None
    if packed is None and (state := generator_state(env)) is not None:
        packed = pack_lenient({"rng_state": state})[0]
    return packed


def packed_generators(envs: Any, lanes: Sequence[int], is_whole: bool) -> Mapping[int, bytes | None]:
    """Return packed_generator() of lanes that are about to be reset, by lane; {} if they are not accessible.

    Workers of an AsyncVectorEnv return the generators of all lanes, so they are called only before a reset of all
    lanes (is_whole), and only if that cannot fail: an error in a worker ends the run.
    """
    base = envs.unwrapped
    if isinstance(base, vector.SyncVectorEnv):
        return {lane: packed_generator(base.envs[lane].unwrapped) for lane in lanes}
    if not (
        is_whole and lanes and type(base) is vector.AsyncVectorEnv and all(map(has_own_generator, base.call("__str__")))
    ):
        return {}
    found = base.get_attr("np_random")
    return {lane: packed_generator(SimpleNamespace(np_random=found[lane])) for lane in lanes}


def packed_start(
    seed: Any, options: bytes | None, rng_state: bytes | None, reset_info: bytes | None
) -> tuple[bytes, list[str]]:
    """Return the row of the column "starts", and warnings for values that could not be stored. options: packed."""
    elsewhere = seed is not None and stored_seed(seed) == wire.SEED_ELSEWHERE
    if options is None and reset_info is None and not elsewhere:
        return (NOTHING if rng_state is None else rng_state), []
    parts: list[bytes] = []
    remarks: list[str] = []
    if options is not None:
        parts.append(pack("options") + options)
    if rng_state is not None:
        parts.append(rng_state[1:])
    if reset_info is not None:
        parts.append(pack("reset_info") + pack(reset_info))
    if elsewhere:
        packed, remarks = pack_lenient(seed)
        parts.append(pack("seed") + packed)
    return bytes([0x80 | len(parts)]) + b"".join(parts), remarks  # header of a map


def _pcg64_parts() -> tuple[bytes, ...]:
    """Return the bytes between the numbers in a packed PCG64 state: integers of 17 and 4 bytes, and a small one."""
    marker = 1 << 128
    state = {"state": {"state": marker, "inc": marker}, "has_uint32": 1, "uinteger": 0xFFFFFFFF}
    packed = pack({"rng_state": {"bit_generator": "PCG64", **state}})
    head, middle, tail = packed.split(marker.to_bytes(17, "little"))
    last = b"\xa8uinteger\xce"
    return head, middle, tail[: tail.index(last) - 1], last


NOTHING = pack({})
PCG64 = _pcg64_parts()
