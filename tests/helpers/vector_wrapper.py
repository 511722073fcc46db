"""TraceRecordingVectorWrapper for mixed tests; without vector environments in gymnasium, the test is skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium
import pytest

__all__ = ["TraceRecordingVectorWrapper"]

if TYPE_CHECKING or hasattr(gymnasium.vector, "AutoresetMode"):
    from gym_trace import TraceRecordingVectorWrapper
else:

    class TraceRecordingVectorWrapper:
        def __init__(self, *_: Any, **__: Any):
            pytest.skip("vector environments need gymnasium 1.1")
