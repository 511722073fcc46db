"""Infos as jsonpickle reads them, with which imitation keeps them. Written by hand: what is in a trace may come from a
stranger, and jsonpickle calls what the keys that begin with py/ name. The only functions that are named here are dict,
complex, numpy.array, numpy.zeros, and the scalar types of NumPy.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from gym_trace.interop.steps.plain import json_text, tagged

_ENCODED = json.JSONEncoder().encode


def info_text(info: Any) -> str:
    """An info, or any other value of a trace, that jsonpickle.decode makes again.

    What Python and NumPy have no literal for (graphs, masked arrays, what could not be recorded) is text, which is JSON
    as docs/STEPS.md has it.
    """
    try:
        return "{}" if info == {} else _ENCODED(_plain(info))
    except RecursionError:
        return _ENCODED(json_text(tagged(info)))


def _plain(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return list(map(_plain, value))
    if kind is tuple:
        return {"py/tuple": list(map(_plain, value))}
    if kind is dict:
        if all(type(key) is str and not key.startswith("py/") for key in value):
            return dict(zip(value, map(_plain, value.values())))
        return _called("builtins.dict", [[_plain(key), _plain(item)] for key, item in value.items()])
    if kind is bytes:
        return {"py/b64": base64.b64encode(value).decode()}
    if kind is complex:
        return _called("builtins.complex", value.real, value.imag)
    if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return _called(f"numpy.{value.dtype.name if value.dtype.kind != 'b' else 'bool_'}", value.item())
    if kind is np.ndarray and (value.dtype.kind == "U" or (value.dtype.kind in "biuf" and value.dtype.itemsize <= 8)):
        if value.size:
            return _called("numpy.array", value.tolist(), value.dtype.str)
        return _called("numpy.zeros", {"py/tuple": list(value.shape)}, value.dtype.str)
    return json_text(tagged(value))


def _called(name: str, *arguments: Any) -> dict[str, Any]:
    return {"py/reduce": [{"py/type": name}, {"py/tuple": list(arguments)}]}
