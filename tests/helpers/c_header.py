"""Write gym_trace/format/c_kernels/constants.h: the constants of Python that the C sources share.

    python tests/helpers/c_header.py > gym_trace/format/c_kernels/constants.h

tests/test_packaging.py compares the file with what this would write.
"""

from typing import Any

import numpy as np

from gym_trace.data.vocabulary import FragmentFlag, Outcome
from gym_trace.format import kernels, wire
from gym_trace.format.ring import log, memory, row_slab
from gym_trace.format.ring.lanes.autoreset import MODES
from gym_trace.format.ring.lanes.entries import LANE
from gym_trace.recording import core

_WIDTH = 120
_LOG_KINDS = ("START", "FLAG", "VALUE", "CHANGES", "ACTIONS", "STEP")  # the others are written in Python alone
_TYPES = {"b1": "char", "u2": "uint16_t", "u4": "uint32_t", "u8": "uint64_t", "i8": "int64_t", "f8": "double"}


def header() -> str:
    """Return the text of constants.h."""
    parts = [
        "/* Constants and structures of Python's gym_trace, by tests/helpers/c_header.py. Do not edit. */",
        "#pragma once\n#include <stdint.h>\n",
        _constants("gym_trace/format/kernels.py and gym_trace/recording/core.py: of the compiled modules", _abis()),
        _constants("gym_trace/data/vocabulary.py: flags of fragments", _named("FRAGMENT", FragmentFlag)),
        _constants("gym_trace/data/vocabulary.py: outcomes of episodes", _named("OUTCOME", Outcome)),
        _constants("gym_trace/format/wire.py", {"NO_SEED": wire.NO_SEED}),
        _constants("gym_trace/format/ring/log.py: kinds of entries", {f"LOG_{n}": getattr(log, n) for n in _LOG_KINDS}),
        _constants("gym_trace/format/ring/log.py: a flag of LOG_START", {"START_HAS_INITIAL": log.START_HAS_INITIAL}),
        _constants("gym_trace/format/ring/memory.py", {"SLAB_HEADER": memory.SLAB_HEADER}),
        _constants("gym_trace/format/ring/row_slab.py", {"RESERVE": row_slab.RESERVE}),
        _constants("gym_trace/format/ring/lanes/autoreset.py: indices of MODES", _modes()),
        _structure("gym_trace/format/ring/log.py: HEADER", "LogEntry", log.HEADER),
        _structure("gym_trace/format/wire.py: FRAGMENT", "Fragment", wire.FRAGMENT),
        _structure("gym_trace/format/ring/lanes/entries.py: LANE", "Lane", LANE),
    ]
    return "\n".join(parts)


def _abis() -> dict[str, int]:
    return {"KERNELS_ABI": kernels.ABI, "CORE_ABI": core.ABI}


def _named(prefix: str, members: Any) -> dict[str, int]:
    return {f"{prefix}_{name}": int(member) for name, member in members.__members__.items()}


def _modes() -> dict[str, int]:
    words = ["".join(f"_{c}" if c.isupper() else c for c in mode).strip("_").upper() for mode in MODES]
    return {word: number for number, word in enumerate(words)}


def _constants(title: str, numbers: dict[str, int]) -> str:
    items = [f"{name} = {number}" for name, number in numbers.items()]
    one_line = f"enum {{ {', '.join(items)} }};"
    if len(one_line) > _WIDTH:
        one_line = "enum {\n" + "".join(f"    {item},\n" for item in items) + "};"
    return f"/* {title} */\n{one_line}\n"


def _structure(title: str, name: str, dtype: np.dtype[Any]) -> str:
    """Return a structure with the fields of a dtype: packed, because that is how NumPy lays them out."""
    fields = [f"    {_TYPES[dtype[field].str[1:]]} {field};\n" for field in dtype.names or ()]
    packed = "" if np.dtype(dtype.descr, align=True) == dtype else " __attribute__((packed))"
    check = f'_Static_assert(sizeof({name}) == {dtype.itemsize}, "{name}");'
    return f"/* {title} */\ntypedef struct {{\n{''.join(fields)}}}{packed} {name};\n{check}\n"


if __name__ == "__main__":
    print(header(), end="")
