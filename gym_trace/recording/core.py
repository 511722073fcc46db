"""Select the compiled C core, or its slower twin in pure Python."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from gym_trace.data.deltas import changed_words
from gym_trace.format.ring.lanes.events import PYTHON_LOOPS, InnerLoops
from gym_trace.format.ring.lanes.slab import LaneSlab
from gym_trace.format.ring.row_slab import RowSlab

__all__ = ["CORE", "LANE_LOOPS", "LaneSlab", "RowSlab", "changed_words", "pcg64_state"]

ABI = 14  # ABI of the compiled core that matches this version

CORE = "pure"  # or "compiled"
LANE_LOOPS = PYTHON_LOOPS


def pcg64_state(bit_generator: Any, parts: tuple[bytes, ...]) -> bytes | None:
    """Return the numbers of the state of a PCG64 (NumPy's default generator), each after its part; None for others."""
    state = bit_generator.state
    if state["bit_generator"] != "PCG64":
        return None
    numbers = [state["state"][name].to_bytes(17, "little") for name in ("state", "inc")]
    numbers += [b"\1" if state["has_uint32"] else b"\0", state["uinteger"].to_bytes(4, "big")]
    return b"".join(part + number for part, number in zip(parts, numbers))


def _reads_generators(found: Callable[[Any, tuple[bytes, ...]], bytes | None]) -> bool:
    """Return True if the core reads the state of a generator correctly in this version of NumPy."""
    generator = np.random.Generator(np.random.PCG64(7))
    generator.integers(9, dtype=np.uint32)  # leaves 32 buffered bits
    parts = (b"",) * 4
    return found(generator.bit_generator, parts) == pcg64_state(generator.bit_generator, parts)


if os.environ.get("GYM_TRACE_PURE", "0") in ("", "0"):
    try:
        from gym_trace.recording import _core
    except ImportError:  # not compiled, or for another interpreter
        pass
    else:
        if _core.ABI == ABI:  # otherwise a leftover of another version
            RowSlab = _core.RowSlab  # type: ignore[assignment, misc]
            LaneSlab = _core.LaneSlab  # type: ignore[assignment, misc]
            LANE_LOOPS = InnerLoops(_core.lane_rows, _core.lane_fragments)
            changed_words, CORE = _core.changed_words, "compiled"
            if _reads_generators(_core.pcg64_state):
                pcg64_state = _core.pcg64_state
