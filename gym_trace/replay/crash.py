"""The step at which a simulator died, taken again where it can do no harm: in a process of its own."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import gymnasium

from gym_trace.errors import EnvironmentUnavailable, told

_LONGEST = 4000  # characters of what an environment says


def executed(env: gymnasium.Env[Any, Any], action: Any) -> str:
    """Step an environment with an action in a copy of this process, and describe the result.

    Returns:
        That it returned, and what; that it raised, and what; or of what the process died.

    Raises EnvironmentUnavailable where the system cannot copy processes.
    """
    if not hasattr(os, "fork"):
        raise EnvironmentUnavailable("the step of a crash is taken in a copy of the process, which needs os.fork")
    said, telling = os.pipe()
    with warnings.catch_warnings():  # of threads of others: the copy does nothing but to step
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        _step(env, action, telling)
    os.close(telling)
    try:
        with open(said, "rb") as pipe:
            words = pipe.read()
    finally:
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"the process died of {signal.Signals(os.WTERMSIG(status)).name}"
    return words.decode("utf-8", "replace") or f"the process exited with {os.WEXITSTATUS(status)}"


def _step(env: gymnasium.Env[Any, Any], action: Any, telling: int) -> None:
    """Never returns."""
    try:
        try:
            _, reward, terminated, truncated, _ = env.step(action)
            words = f"it returned: reward {reward}, terminated {terminated}, truncated {truncated}"
        except BaseException as error:  # user code: report whatever it does
            words = f"it raised {told(error)}"
        os.write(telling, words[:_LONGEST].encode("utf-8", "replace"))
    finally:
        os._exit(0)
