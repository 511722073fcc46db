"""Vector environments whose arrays lie on a device: one packed copy per step, and steps that stay there for a while."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import pickle
import signal
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces, vector
from long_tests import LONG, sampled
from numbered_lanes import (
    MODES,
    NEXT_STEP,
    SPACES,
    FixedResultEnv,
    as_arrays_of,
    make_vector_env,
    parts_of,
    run_lanes,
)
from raising_signals import CallsAt, InterruptsAt

from gym_trace import TraceRecordingVectorWrapper, TraceWriter, open_trace
from gym_trace.errors import InvalidOption, RecordingError
from gym_trace.recording.vector import device_rows, rollouts, steps

torch = pytest.importorskip("torch")
HOT = {device_rows.__file__, steps.__file__}


class OnDevice(torch.Tensor):  # type: ignore[misc]
    """A tensor that says it is on a device, and that NumPy cannot read before cpu() copies it."""

    copies = 0
    device = property(lambda _: torch.device("privateuseone"))
    is_cpu = property(lambda _: False)

    def numpy(self, **_: Any) -> Any:
        raise TypeError("it is on a device")

    __array__ = numpy

    def cpu(self) -> Any:
        OnDevice.copies += 1
        return self.as_subclass(torch.Tensor).clone()

    def to(self, _: str, non_blocking: bool) -> Any:
        OnDevice.copies += 1
        target = torch.full(self.shape, 99).to(self.dtype)
        Streams.waiting.append((target, lambda: self))
        return target


def on_device(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: on_device(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(on_device, value))
    if isinstance(value, np.ndarray) and value.dtype != object:
        return torch.from_numpy(value.copy()).as_subclass(OnDevice)
    return value


def on_host(value: Any) -> Any:
    return as_arrays_of(value, lambda leaf: leaf.as_subclass(torch.Tensor).numpy().copy())


class DeviceEnv(vector.VectorWrapper):  # type: ignore[type-arg]
    """Tensors in, tensors out; it overwrites its arguments and the results of the step before."""

    kept: tuple[Any, ...] = ()

    def reset(self, **named: Any) -> Any:
        observations, infos = self.env.reset(**named)
        return on_device(observations), infos

    def step(self, actions: Any) -> Any:
        result = self.env.step(on_host(actions))
        for tree in (actions, *self.kept):
            as_arrays_of(tree, lambda leaf: leaf.zero_())
        self.kept = on_device(result[:4])
        return (*self.kept, result[4])


_SPACES = ["box", "discrete", "dict", "tuple", "frames", "hollow", "scalar"]


@pytest.mark.parametrize(
    ("mode", "name", "lag", "lanes"), sampled(itertools.product(MODES, _SPACES, [0, 3], [None, [0, 2]]), 5)
)
def test_a_device_is_recorded_like_the_host(tmp_path: Path, mode: Any, name: str, lag: int, lanes: Any) -> None:
    def make(kind: str, **options: Any) -> Any:
        env = make_vector_env("sync", mode, True, SPACES[name], SPACES["dict" if name == "dict" else "box"])
        env = DeviceEnv(env) if kind == "device" else env
        infos = {"record_infos": ["t"]} if name in ("box", "tuple") else {}
        return TraceRecordingVectorWrapper(env, tmp_path / kind, lanes=lanes, **infos, **options)

    plain = run_lanes(make("host"), lambda value: value, lambda value: value)
    found = run_lanes(make("device", device_lag=lag), on_device, on_host)
    assert parts_of(found) == parts_of(plain)


class Counting(vector.VectorEnv):  # type: ignore[type-arg]
    """Lanes on a device that count their steps; make: returns tensors."""

    metadata = {"autoreset_mode": NEXT_STEP}  # noqa: RUF012

    def __init__(self, make: Any = on_device, count: int = 8, end: int = 1 << 30):
        self.num_envs, self._make, self._end = count, make, end
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.single_action_space = spaces.Box(-1, 1, (), np.float32)
        self.observation_space = vector.utils.batch_space(self.single_observation_space, count)
        self.action_space = vector.utils.batch_space(self.single_action_space, count)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._time = 0
        return self._make(np.zeros((self.num_envs, 2), np.float32)), {}

    def step(self, actions: Any) -> Any:
        self._time += 1
        rows = np.arange(self.num_envs, dtype=np.float32)
        over = np.full(self.num_envs, self._time % self._end == 0)
        observations = np.stack([rows, rows + self._time], 1)
        return *map(self._make, (observations, rows + self._time, over, np.zeros_like(over))), {}


def actions_at(time: int, count: int = 8) -> Any:
    return on_device(np.arange(count, dtype=np.float32) * time)


@pytest.mark.parametrize("lanes", [None, 3])
def test_a_step_is_copied_once(tmp_path: Path, lanes: Any) -> None:
    env = TraceRecordingVectorWrapper(Counting(), tmp_path / "t", lanes=lanes)
    env.reset()
    for time in range(9):
        OnDevice.copies = 0
        env.annotate(value=actions_at(time))
        env.step(actions_at(time))
        assert OnDevice.copies == 1
    env.close()
    for episode in open_trace(tmp_path / "t"):
        assert episode.actions.tolist() == episode.annotations["value"].tolist() == [episode.lane * t for t in range(9)]
        assert episode.rewards.tolist() == [episode.lane + t for t in range(1, 10)]


def counts(directory: Path) -> set[int]:
    return {len(episode) for episode in open_trace(directory)}


def test_steps_are_recorded_later_or_by_a_flush_a_reset_and_the_end(tmp_path: Path) -> None:
    env = TraceRecordingVectorWrapper(Counting(), tmp_path / "t", device_lag=4)
    env.reset()
    for time in range(10):
        env.step(actions_at(time))
        assert counts(tmp_path / "t") == {max(0, time - 3)}
    env.flush()
    assert counts(tmp_path / "t") == {10}
    env.step(actions_at(10))
    env.reset()
    assert counts(tmp_path / "t") == {11, 0}
    env.step(actions_at(0))
    env.close()
    assert sorted(len(episode) for episode in open_trace(tmp_path / "t")) == [1] * 8 + [11] * 8


@pytest.mark.parametrize("lag", [0, 4])
def test_an_exception_in_a_step_loses_none_of_the_steps_before(tmp_path: Path, lag: int) -> None:
    env = TraceRecordingVectorWrapper(Counting(end=5), tmp_path / "t", device_lag=lag)
    env.reset()
    for time in range(3):
        env.step(actions_at(time))
    env.env.step, usual = _raise, env.env.step  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="expected"):
        env.step(actions_at(3))
    env.env.step = usual  # type: ignore[method-assign]
    for time in range(3, 8):
        env.step(actions_at(time))
    env.close()
    found = [(episode.outcome, episode.rewards.tolist()) for episode in open_trace(tmp_path / "t") if episode.lane == 1]
    assert found == [("cut", [2, 3, 4]), ("closed", [8, 9])]


def _raise(_: Any) -> Any:
    raise ValueError("expected")


def test_garbage_collection_and_the_exit_record_all_steps(tmp_path: Path) -> None:
    env = TraceRecordingVectorWrapper(Counting(), tmp_path / "collected", device_lag=4)
    env.reset()
    env.step(actions_at(0))
    del env
    gc.collect()
    assert counts(tmp_path / "collected") == {1}
    if not (child := os.fork()):
        env = TraceRecordingVectorWrapper(Counting(), tmp_path / "exit", device_lag=4)
        env.reset()
        env.step(actions_at(0))
        from multiprocessing import util

        util._exit_function()  # type: ignore[attr-defined]
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert counts(tmp_path / "exit") == {1}


def test_a_fork_and_a_copy_drop_the_steps_of_their_original(tmp_path: Path) -> None:
    env = TraceRecordingVectorWrapper(Counting(np.copy), tmp_path / "t", device_lag=4)
    env.reset()
    env.step(np.zeros(8, np.float32))
    if not (child := os.fork()):
        env.reset()
        env.step(np.zeros(8, np.float32))
        env.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    other = copy.deepcopy(env)
    other.reset()
    other.close()
    pickle.loads(pickle.dumps(env)).close()
    env.step(np.zeros(8, np.float32))
    env.close()
    assert sorted(len(episode) for episode in open_trace(tmp_path / "t") if episode.lane == 0) == [0, 1, 2]


@pytest.mark.parametrize(("lag", "first"), [(0, 0), (0, 37), (3, 0), (3, 37)])
def test_ctrl_c_at_any_line_loses_no_step_that_has_returned(tmp_path: Path, lag: int, first: int) -> None:
    number, lines = 0 if LONG else first, set()
    while True:
        directory = tmp_path / str(number)
        env = TraceRecordingVectorWrapper(Counting(end=7), directory, device_lag=lag, lanes=2)
        env.reset()
        returned: list[int] = []
        interrupts = InterruptsAt(number, KeyboardInterrupt, lambda code: code.co_filename in HOT, returns=False)
        for time in range(20):
            try:
                if time == 4:
                    with interrupts:
                        env.step(actions_at(time))
                        returned.append(time)
                        env.step(actions_at(time))
                        returned.append(time + 1)
                else:
                    env.step(actions_at(time))
                    returned.append(env.env._time - 1)  # type: ignore[attr-defined]
            except KeyboardInterrupt:
                pass
        env.close()
        found: list[int] = []
        for episode in open_trace(directory):
            if episode.lane == 4:
                found += (episode.rewards - 5).astype(int).tolist()
                assert episode.observations[1:, 1].tolist() == episode.rewards.tolist()
        resets = {7, 14}  # at these times the lanes are reset, which is not a step
        is_known = [time for time in returned if time not in resets]
        missing = set(is_known) - set(found)
        assert len(found) == len(set(found)), interrupts.line
        assert not {time for time in missing if time < 4}, interrupts.line
        assert not {time for time in missing if time > 7}, interrupts.line
        if not interrupts.line:
            assert not missing
            break
        lines.add(interrupts.line)
        number += 1 if LONG else 71
    assert len(lines) > 0


def killed_run(directory: Path, lag: int, steps: int) -> int:
    """Kill a process that records, wherever it is after this number of steps; return how many steps had returned."""
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            env = TraceRecordingVectorWrapper(
                Counting(torch.from_numpy, end=9), directory, device_lag=lag, flush_seconds=0.01
            )
            env.reset()
            for time in itertools.count():
                env.step(torch.full((8,), float(time)))
                os.write(write, b".")
        finally:
            os._exit(1)
    os.close(write)
    with open(read, "rb", 0) as pipe:
        returned = 0
        while returned < steps and (found := pipe.read(1)):
            returned += len(found)
        os.kill(child, signal.SIGKILL)
        returned += len(pipe.read())
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    return returned


@pytest.mark.parametrize("lag", [0, 3])
def test_a_kill_loses_at_most_the_lag(tmp_path: Path, lag: int) -> None:
    random = np.random.default_rng(lag)
    for number in range(50 if LONG else 3):
        returned = killed_run(tmp_path / str(number), lag, int(random.integers(1, 300)))
        known = [time for time in range(returned + 1) if time == 0 or time % 9]  # the others are resets
        parts: list[list[Any]] = [[] for _ in range(8)]
        for one in sorted(open_trace(tmp_path / str(number)), key=lambda one: one.episode_id):
            parts[one.lane].append(one)
        for lane, own in enumerate(parts):
            times = [int(action) for one in own for action in one.actions]
            assert times == known[: len(times)]
            assert len([time for time in known if time < returned - lag]) <= len(times)
            for one in own:
                assert one.rewards.tolist() == one.observations[1:, 1].tolist() == (lane + 1 + one.actions).tolist()


def test_values_outside_the_space_and_dtypes_that_numpy_lacks_are_kept(tmp_path: Path) -> None:
    def record(directory: Path, lag: int, convert: Any) -> Any:
        rows = torch.arange(6).reshape(3, 2) / 8
        given = {"obs": convert(rows.bfloat16()), "rewards": convert(torch.arange(3, dtype=torch.float16))}
        env = TraceRecordingVectorWrapper(FixedResultEnv(**given), directory, device_lag=lag)
        env.reset()
        env.step(np.zeros(3, np.int64))
        env.step(convert(torch.arange(6).reshape(3, 2).T.reshape(2, 3).T.expand(3, 2)))
        env.close()
        return open_trace(directory)

    with pytest.warns(UserWarning, match="outside the space"):
        plain = parts_of(record(tmp_path / "host", 0, lambda tensor: tensor))
    for lag in (0, 2):
        with pytest.warns(UserWarning, match="outside the space"):
            found = record(tmp_path / str(lag), lag, lambda tensor: tensor.as_subclass(OnDevice))
        assert parts_of(found) == plain


class Streams:
    """Streams of a device that copy only when the host waits for their event, as late as they may."""

    waiting: list[Any] = []  # noqa: RUF012

    def __init__(self, *_: Any):
        self.copies: list[Any] = []

    Stream = property(lambda self: Streams)
    Event = property(lambda self: Streams)

    def stream(self, _: Any) -> Any:
        return contextlib.nullcontext()

    def current_stream(self, _: Any) -> Any:
        return None

    def wait_stream(self, _: Any) -> None:
        pass

    def record(self, _: Any) -> None:
        self.copies, Streams.waiting = Streams.waiting, []

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        for to, source in self.copies:
            assert source() is not None, "memory on the device was freed before it was copied"
            to.copy_(source().as_subclass(torch.Tensor))
        self.copies = []


class LostDevice(Streams):
    """After an error, each call raises."""

    Stream = property(lambda self: LostDevice)
    Event = property(lambda self: LostDevice)

    def query(self) -> bool:
        raise RuntimeError("lost")

    synchronize = query  # type: ignore[assignment]


class Pinned(torch.Tensor):  # type: ignore[misc]
    def copy_(self, source: Any, non_blocking: bool = False) -> Any:
        to = self.as_subclass(torch.Tensor)
        if not non_blocking:
            return to.copy_(source.as_subclass(torch.Tensor))
        Streams.waiting.append((to, weakref.ref(source)))
        return self


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_rows_are_read_after_their_copy_and_their_memory_is_used_again(
    tmp_path: Path, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def pinned(size: int) -> Any:
        made.append(torch.full((size,), 255, dtype=torch.uint8).as_subclass(Pinned))
        return made[-1]

    monkeypatch.setattr(device_rows, "_stream_module", lambda _: Streams())
    monkeypatch.setattr(device_rows, "_pinned", pinned)
    env = TraceRecordingVectorWrapper(Counting(), tmp_path / "t", device_lag=lag, lanes=3)
    env.reset()
    for time in range(20):
        env.step(actions_at(time))
    env.close()
    assert len(made) == lag + 1
    for episode in open_trace(tmp_path / "t"):
        assert episode.actions.tolist() == [episode.lane * time for time in range(20)]
        assert episode.rewards.tolist() == [episode.lane + time for time in range(1, 21)]


def test_an_error_of_the_device_does_not_reach_a_step_that_has_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_rows, "_stream_module", lambda _: LostDevice())
    monkeypatch.setattr(device_rows, "_pinned", lambda size: torch.empty(size, dtype=torch.uint8).as_subclass(Pinned))
    env = TraceRecordingVectorWrapper(Counting(), tmp_path / "t", device_lag=3)
    env.reset()
    env.step(actions_at(0))
    with pytest.warns(UserWarning, match="could not be copied"):
        env.close()
    assert counts(tmp_path / "t") == {0}


class OwnRows:
    """An array of another library that gives NumPy its own memory."""

    def __init__(self, rows: Any):
        self.rows, self.shape = rows, rows.shape

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.rows

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def test_rows_that_another_library_shares_with_numpy_are_copied(tmp_path: Path) -> None:
    env = TraceRecordingVectorWrapper(Counting(lambda rows: OwnRows(rows.copy())), tmp_path / "t", device_lag=3)
    env.reset()
    for time in range(5):
        for array in env.step(actions_at(time))[:4]:
            array.rows[...] = 1
    env.close()
    for episode in open_trace(tmp_path / "t"):
        assert episode.rewards.tolist() == [episode.lane + time for time in range(1, 6)]


class Words(Counting):
    """Beside the numbers, it returns a word with as many letters as there are lanes."""

    def __init__(self) -> None:
        super().__init__()
        self.single_observation_space = spaces.Dict(word=spaces.Text(8), numbers=self.single_observation_space)
        self.observation_space = vector.utils.batch_space(self.single_observation_space, 8)

    def reset(self, **named: Any) -> Any:
        observations, infos = super().reset(**named)
        return {"word": tuple(f"letter-{lane}" for lane in range(8)), "numbers": observations}, infos

    def step(self, actions: Any) -> Any:
        observations, *rest = super().step(actions)
        return {"word": tuple(f"letter-{lane}" for lane in range(8)), "numbers": observations}, *rest


@pytest.mark.parametrize("lag", [0, 2])
def test_tuples_with_a_value_per_lane_are_not_cut(tmp_path: Path, lag: int) -> None:
    env = TraceRecordingVectorWrapper(Words(), tmp_path / "t", device_lag=lag, lanes=2)
    env.reset()
    for time in range(4):
        env.step(actions_at(time))
    env.close()
    for episode in open_trace(tmp_path / "t"):
        assert episode.observations["word"].tolist() == [f"letter-{episode.lane}"] * 5
        assert episode.rewards.tolist() == [episode.lane + time for time in range(1, 5)]


class WideEnv(Counting):
    """Its observations are outside of their space."""

    def step(self, actions: Any) -> Any:
        observations, *rest = super().step(actions)
        return torch.cat([observations, observations], 1), *rest


@pytest.mark.filterwarnings("error")
def test_a_warning_that_raises_keeps_no_step_from_the_trace(tmp_path: Path) -> None:
    env = TraceRecordingVectorWrapper(WideEnv(), tmp_path / "t", device_lag=4)
    env.reset()
    for time in range(3):
        env.step(actions_at(time))
    with pytest.raises(UserWarning, match="outside the space"):
        env.close()
    assert [(len(episode), episode.outcome) for episode in open_trace(tmp_path / "t")] == [(3, "closed")] * 8


@pytest.mark.parametrize("lag", [0, 2])
def test_no_step_that_has_returned_raises_when_writing_has_failed(tmp_path: Path, lag: int) -> None:
    env = TraceRecordingVectorWrapper(Counting(), tmp_path / "t", device_lag=lag)
    env.reset()
    env.env.step, usual = lambda actions: (env._recorder.out.fail(OSError("full")), usual(actions))[1], env.env.step  # type: ignore[method-assign, func-returns-value]
    env.step(actions_at(0))
    env.env.step = usual  # type: ignore[method-assign]
    with pytest.raises(RecordingError, match="full"):
        env.step(actions_at(1))
    assert env.env._time == 1  # type: ignore[attr-defined]
    env.close()


@pytest.mark.parametrize("lag", [0, 2])
def test_annotations_that_cannot_be_copied_are_left_out(tmp_path: Path, lag: int, monkeypatch: Any) -> None:
    env = TraceRecordingVectorWrapper(Counting(), tmp_path / "t", device_lag=lag)
    env.reset()
    env.annotate(value=actions_at(1))
    monkeypatch.setattr(env._steps._copies, "fetch", lambda _: None)
    monkeypatch.setattr(env._steps, "_annotation", lambda *_: _raise(None))
    env.step(actions_at(0))
    with pytest.warns(UserWarning, match="annotations/value: left out"):
        env.close()
    for episode in open_trace(tmp_path / "t"):
        assert list(episode.annotations["value"]) == [None]
        assert episode.rewards.tolist() == [episode.lane + 1]


@pytest.mark.parametrize(
    ("method", "options"),
    [("close", {"device_lag": 3}), ("flush", {"device_lag": 3}), ("close", {"frame_filter": lambda _: True})],
)
@pytest.mark.parametrize("first", [0, 1])
def test_close_and_flush_in_a_handler_lose_and_repeat_no_step(
    tmp_path: Path, method: str, options: Any, first: int
) -> None:
    number = first
    while True:
        env = TraceRecordingVectorWrapper(Counting(), tmp_path / str(number), lanes=2, **options)
        env.reset()
        for time in range(3):
            env.step(actions_at(time))
        with CallsAt(number, getattr(env, method), lambda code: code.co_filename in HOT, returns=False) as call:
            if "device_lag" in options:
                env.close()
            else:
                env.step(actions_at(3))
        env.close()
        wanted = [5.0, 6.0, 7.0]
        for episode in open_trace(tmp_path / str(number)):
            if episode.lane == 4:
                assert episode.rewards.tolist() in (wanted, [*wanted, 8.0]), call.line
        if not call.line:
            break
        number += 1 if LONG else 2


def test_invalid_lags_raise(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="0 or more"):
        TraceRecordingVectorWrapper(Counting(), tmp_path / "t", device_lag=-1)
    with pytest.raises(InvalidOption, match="filters"):
        TraceRecordingVectorWrapper(Counting(), tmp_path / "t", device_lag=1, episode_filter=lambda _: True)


class CurrentStream(Streams):
    """The copies to the host are on the current stream, which is waited for."""

    waits = 0

    def current_stream(self, _: Any) -> Any:
        return self

    def synchronize(self) -> None:
        CurrentStream.waits += 1
        self.record(None)
        super().synchronize()


@pytest.mark.parametrize("streams", [None, CurrentStream()])
def test_the_arrays_of_rollouts_are_copied_once_and_waited_for_together(
    tmp_path: Path, streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_rows, "_stream_module", lambda _: streams)
    monkeypatch.setattr(OnDevice, "copies", 0)
    monkeypatch.setattr(CurrentStream, "waits", 0)
    observations, actions = on_device({"a": np.arange(12.0).reshape(3, 2, 2)}), on_device(np.arange(4).reshape(2, 2))
    flags, ones = on_device(np.zeros((2, 2), np.bool_)), on_device(np.ones((2, 2), np.float32))
    with TraceWriter(tmp_path / "t") as writer:
        writer.rollouts(observations, actions, ones, flags, flags, annotations={"value": ones})
        assert (OnDevice.copies, CurrentStream.waits) == (6, int(streams is not None))
    for lane, episode in enumerate(open_trace(tmp_path / "t")):
        assert episode.observations["a"][:, 0].tolist() == [2 * lane, 2 * lane + 4, 2 * lane + 8]
        assert episode.actions.tolist() == [lane, lane + 2]
        assert episode.rewards.tolist() == episode.annotations["value"].tolist() == [1, 1]


def test_rollouts_read_arrays_on_the_host_where_they_are() -> None:
    rows, whole = np.zeros((2, 3)), np.zeros((3, 3, 4))
    given = torch.from_numpy(whole), {"a": rows}, rows, rows > 0, torch.from_numpy(rows > 0), None, {}, {"b": rows}
    batch = rollouts.Batch.of(*given)
    assert np.shares_memory(batch.observations, whole)
    assert np.shares_memory(batch.truncations, given[4].numpy())
    assert batch.actions["a"] is batch.rewards is batch.infos["b"] is rows
