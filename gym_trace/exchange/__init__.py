"""Files and objects of other libraries. Each module imports the library it is named for, on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_trace.on_first_use import on_first_use

if TYPE_CHECKING:
    from gym_trace.exchange import d3rlpy as d3rlpy
    from gym_trace.exchange import imitation as imitation
    from gym_trace.exchange import isaaclab as isaaclab
    from gym_trace.exchange import mjlab as mjlab
    from gym_trace.exchange import ray as ray
    from gym_trace.exchange import rllib as rllib
    from gym_trace.exchange import sample_factory as sample_factory
    from gym_trace.exchange import sb3 as sb3
    from gym_trace.exchange import torch as torch
    from gym_trace.exchange import torchrl as torchrl

_MODULES = ("d3rlpy", "imitation", "isaaclab", "mjlab", "ray", "rllib", "sample_factory", "sb3", "torch", "torchrl")

__all__: list[str] = []  # "from gym_trace.exchange import *" must not import all these libraries

if not TYPE_CHECKING:
    __getattr__ = on_first_use(__name__, {}, _MODULES)


def __dir__() -> list[str]:
    return list(_MODULES)
