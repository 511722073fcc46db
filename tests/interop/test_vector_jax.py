"""Vector environments of JAX: the rows of a step are packed by one compiled function. JAX warns of forks after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import vector
from numbered_lanes import NEXT_STEP, SAME_STEP, SPACES, as_arrays_of, make_vector_env, parts_of, run_lanes

from gym_trace import TraceRecordingVectorWrapper, TraceWriter, open_trace
from gym_trace.recording.vector import device_rows, steps

jax = pytest.importorskip("jax")


@pytest.mark.parametrize(("lag", "lanes"), [(0, None), (2, None), (2, [1, 2])])
@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_jax_arrays_are_packed(
    tmp_path: Path, lag: int, lanes: Any, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_rows, "is_on_device", lambda leaf: isinstance(leaf, jax.Array))
    monkeypatch.setattr(steps, "is_on_device", lambda leaf: isinstance(leaf, jax.Array))
    convert = jax.jit(lambda tree: tree)

    class Jax(vector.VectorWrapper):  # type: ignore[type-arg]
        def reset(self, **named: Any) -> Any:
            observations, infos = self.env.reset(**named)
            return convert(observations), infos

        def step(self, actions: Any) -> Any:
            result = self.env.step(as_arrays_of(actions, np.array))
            as_arrays_of(actions, lambda leaf: leaf.delete())  # as a donation does
            return (*convert(result[:4]), result[4])

    def make(kind: str, **options: Any) -> Any:
        env = make_vector_env("sync", mode, True, SPACES["box"], SPACES["box"])
        return TraceRecordingVectorWrapper(Jax(env) if kind == "jax" else env, tmp_path / kind, lanes=lanes, **options)

    with jax.enable_x64(True):
        plain = run_lanes(make("host"), lambda value: value, np.asarray)
        found = run_lanes(make("jax", device_lag=lag), convert, np.asarray)
    assert parts_of(found) == parts_of(plain)


def test_the_arrays_of_rollouts_are_copied_by_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_rows, "is_on_device", lambda leaf: isinstance(leaf, jax.Array))
    get, calls = jax.device_get, []
    monkeypatch.setattr(jax, "device_get", lambda arrays: calls.append(len(arrays)) or get(arrays))
    observations, zeros = jax.numpy.arange(12.0).reshape(3, 2, 2), jax.numpy.zeros((2, 2))
    with TraceWriter(tmp_path / "t") as writer:
        writer.rollouts({"a": observations}, zeros, np.ones((2, 2)), zeros, zeros, annotations={"b": zeros})
    assert calls == [5]
    for episode in open_trace(tmp_path / "t"):
        assert episode.observations["a"].tolist() == observations[:, episode.lane].tolist()
