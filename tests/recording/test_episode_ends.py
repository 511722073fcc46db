"""Recorded steps are kept, however an episode or a recording ends."""

import copy
import gc
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked_python
import gymnasium
import numpy as np
import pytest
from forked_python import HELPERS
from gymnasium import spaces
from runs import acted, batch_reader, manifest_entries, outcomes, play, recorded, warned
from scripted_env import CountingEnv, ImageEnv, Result, ScriptedEnv, bits, images, small_blocks
from shell import wait_for

from gym_trace import TraceRecordingWrapper, check_trace, open_trace
from gym_trace.format.ring.memory import Ring
from gym_trace.format.ring.row_slab import RowSlab
from gym_trace.format.ring.rows import RowDecoder
from gym_trace.recording.background import SlabWriter
from gym_trace.recording.single.episodes import EpisodeRecorder
from gym_trace.recording.single.slabs import RowSlabs

# -- how episodes end --------------------------------------------------------------------------------------------------


def test_reset_mid_episode_keeps_the_partial_episode_as_cut(tmp_path: Path) -> None:
    acted(TraceRecordingWrapper(CountingEnv(), tmp_path), "reset", 1, 2, "reset", "reset", 3, "close")
    trace = open_trace(tmp_path)
    assert outcomes(tmp_path) == ["cut", "cut", "closed"]
    assert [episode.actions.tolist() for episode in trace] == [[1, 2], [], [3]]
    assert [len(episode.observations) for episode in trace] == [3, 1, 2]
    assert not trace[0].terminations.any()


def test_steps_after_the_end_are_kept_as_further_parts(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=2), tmp_path)
    env.reset(seed=1)
    acted(env, 0, 1, 2, 3, "reset", 0, "close")
    trace = open_trace(tmp_path)
    assert [(e.episode_id, e.first_step, len(e)) for e in trace] == [(0, 0, 2), (0, 2, 1), (0, 3, 1), (1, 0, 1)]
    assert [e.observations[:, 0].tolist() for e in trace] == [[0, 1, 2], [2, 3], [3, 4], [0, 1]]
    assert [e.actions.tolist() for e in trace] == [[0, 1], [2], [3], [0]]
    assert [e.seed for e in trace] == [1, 1, 1, None]
    assert all(trace[i].terminations[-1] for i in range(3))


def test_steps_after_the_end_keep_their_images(tmp_path: Path) -> None:
    acted(TraceRecordingWrapper(ImageEnv(length=2), tmp_path), "reset", 0, 0, 0, "flush", 0, 0, "close")
    parts, expected = list(open_trace(tmp_path)), images(6)
    assert [part.first_step for part in parts] == [0, 2, 3, 4]
    for part in parts:
        assert bits(part.observations) == bits(np.array(expected[part.first_step : part.first_step + len(part) + 1]))


def test_episodes_longer_than_a_block_of_images_round_trip(tmp_path: Path) -> None:
    length = 1500  # a block holds about 1,090 of these images
    acted(TraceRecordingWrapper(ImageEnv(length), tmp_path), "reset", *[0] * length, "close")
    (episode,) = open_trace(tmp_path)
    assert len(episode) == length
    for i, image in enumerate(images(length + 1)):
        assert (episode.observations[i] == image).all(), i


def test_an_environment_that_raises_loses_nothing_recorded_before(tmp_path: Path) -> None:
    class Failing(CountingEnv):
        def reset(self, **kwargs: Any) -> Any:
            if self.calls.count("reset") == 1:
                self.calls.append("reset")
                raise OSError("the simulator is gone")
            return super().reset(**kwargs)

        def step(self, action: Any) -> Any:
            if action == 3:
                raise ValueError("no such action")
            return super().step(action)

    env = acted(TraceRecordingWrapper(Failing(), tmp_path), "reset", 0)
    with pytest.raises(ValueError, match="no such action"):
        env.step(3)
    acted(env, 1, 2)
    with pytest.raises(OSError, match="simulator"):
        env.reset()
    env.step(2)  # belongs to no known episode
    acted(env, "reset", 2, "close")
    assert [episode.actions.tolist() for episode in open_trace(tmp_path)] == [[0], [2], [2]]
    assert outcomes(tmp_path) == ["cut", "cut", "closed"]


def test_seeds_options_and_generator_states_are_kept(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path)
    env.reset(seed=12)
    options = {"low": -0.01, "high": 0.01}
    state = copy.deepcopy(env.unwrapped.np_random.bit_generator.state)
    env.reset(options=options)
    env.step(0)
    options["low"] = 5.0
    env.reset(seed=2**70)
    env.close()
    first, second, third = open_trace(tmp_path)
    assert (first.seed, first.options, first.rng_state) == (12, None, None)
    assert (second.seed, second.options) == (None, {"low": -0.01, "high": 0.01})
    assert second.rng_state == state
    assert third.seed == 2**70


def test_a_recorded_generator_state_reproduces_the_reset(tmp_path: Path) -> None:
    acted(TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path), "reset", "reset", "close")
    again = gymnasium.make("CartPole-v1").unwrapped
    for episode in open_trace(tmp_path):
        again.np_random.bit_generator.state = episode.rng_state
        assert bits(again.reset()[0]) == bits(episode.observations[0])


@pytest.mark.parametrize("kind", ["MT19937", "Philox", "SFC64", "PCG64DXSM"])
def test_the_state_of_any_numpy_generator_is_recorded(tmp_path: Path, kind: str) -> None:
    inner = CountingEnv()
    inner.np_random = np.random.Generator(getattr(np.random, kind)(3))
    state = inner.np_random.bit_generator.state
    acted(TraceRecordingWrapper(inner, tmp_path), "reset", "close")
    assert bits(open_trace(tmp_path)[0].rng_state) == bits(state)


def test_a_generator_of_an_unknown_kind_does_not_stop_the_recording(tmp_path: Path) -> None:
    bits_of_mine = types.SimpleNamespace(state={"bit_generator": "Mine", "state": object()})
    inner = CountingEnv()
    inner.np_random = types.SimpleNamespace(bit_generator=bits_of_mine)  # type: ignore[assignment]
    env = TraceRecordingWrapper(inner, tmp_path)
    warned(lambda: play(env, 2, seed=None), env.close)
    assert len(open_trace(tmp_path)) == 2


def test_times_of_episodes_are_in_order(tmp_path: Path) -> None:
    recorded(tmp_path, 3)
    trace = open_trace(tmp_path)
    for episode in trace:
        assert episode.start_time <= episode.end_time
        assert episode.start_monotonic <= episode.end_monotonic
    starts = trace.episodes["start_time"]
    assert (starts[1:] >= starts[:-1]).all()


# -- closing -----------------------------------------------------------------------------------------------------------


def test_the_trace_is_safe_before_the_environment_is_closed(tmp_path: Path) -> None:
    class Exploding(CountingEnv):
        def close(self) -> None:
            self.calls.append("close")
            self.entries = manifest_entries(tmp_path)
            self.outcomes = outcomes(tmp_path)
            raise OSError("the simulator does not want to go")

    inner = Exploding()
    env = acted(TraceRecordingWrapper(inner, tmp_path), "reset", 0)
    with pytest.raises(OSError, match="does not want"):
        env.close()
    assert [entry["type"] for entry in inner.entries] == ["writer", "batch", "closed"]
    assert inner.outcomes == ["closed"]


@pytest.mark.parametrize("options", [{}, {"frame_filter": lambda step: True}])
def test_a_closed_recorder_steps_unrecorded_with_one_warning(tmp_path: Path, options: Any) -> None:
    inner = CountingEnv()
    env = acted(TraceRecordingWrapper(inner, tmp_path, **options), "reset", 0, "close")
    assert env.step(0)[1] == 2.0
    with pytest.warns(UserWarning, match="closed"):
        env.reset()
    acted(env, 0, "reset")  # a second warning would be an error
    assert inner.calls.count("step") == 3
    env.close()
    assert [len(episode) for episode in open_trace(tmp_path)] == [1]


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_a_garbage_collected_recorder_saves(tmp_path: Path, in_a_cycle: bool) -> None:
    env = acted(TraceRecordingWrapper(CountingEnv(), tmp_path), "reset", 0)
    if in_a_cycle:
        env.myself = env
    del env
    gc.collect()
    assert [entry["type"] for entry in manifest_entries(tmp_path)] == ["writer", "batch", "closed"]
    assert outcomes(tmp_path) == ["closed"]


def test_a_process_that_ends_without_closing_saves(tmp_path: Path) -> None:
    """Without forks, too: test_fork.py has all other ends."""
    script = f"""
import sys
sys.path.insert(0, {HELPERS!r})
from scripted_env import CountingEnv
from gym_trace import TraceRecordingWrapper
env = TraceRecordingWrapper(CountingEnv(), {str(tmp_path)!r}, flush_seconds=100)
env.reset()
for _ in range(3):
    env.step(0)
raise ValueError('no close')
"""
    forked_python.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=False)
    assert [entry["type"] for entry in manifest_entries(tmp_path)] == ["writer", "batch", "closed"]
    assert len(open_trace(tmp_path)[0]) == 3


def test_leaving_a_with_block_saves_and_closing_again_changes_nothing(tmp_path: Path) -> None:
    with TraceRecordingWrapper(CountingEnv(), tmp_path) as env:
        acted(env, "reset", 0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    env.close()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert outcomes(tmp_path) == ["closed"]


def test_a_recorder_without_steps_leaves_a_trace_without_episodes(tmp_path: Path) -> None:
    TraceRecordingWrapper(CountingEnv(), tmp_path).close()
    trace = open_trace(tmp_path)
    assert (len(trace), list(trace)) == (0, [])
    assert trace.observation_space == CountingEnv().observation_space


def test_flush_lets_others_read_all_steps_so_far(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=3), tmp_path, flush_seconds=1000)
    play(env, 2)
    env.flush()
    assert len(open_trace(tmp_path)) == 2
    env.flush()
    env.close()


def test_recorded_steps_are_flushed_automatically(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=3), tmp_path, flush_seconds=0.01)
    play(env, 1)
    trace = open_trace(tmp_path)
    wait_for(lambda: len(trace) or trace.refresh())
    assert len(trace) == 1
    env.close()


def test_a_late_flush_happens_at_the_next_step(tmp_path: Path) -> None:
    """Even for fast steps, the recorder checks the clock often enough."""
    env = TraceRecordingWrapper(CountingEnv(length=10**9), tmp_path, flush_seconds=0.1)
    env.reset()
    flushed, late = time.monotonic(), 0
    while late < 3:
        env.step(0)
        if (now := time.monotonic()) > flushed + 0.25:
            flushed, late = now, late + 1
    (batch,) = tmp_path.glob("*.part")
    wait_for(lambda: batch_reader(batch).chunks["observation_rows"].size >= late)
    rows = batch_reader(batch).chunks["observation_rows"]
    assert rows.size <= 20 + rows.sum() // rows.max()  # full chunks are written as they fill
    env.close()


# -- flushing and closing where something else is under way ------------------------------------------------------------


def in_a_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def in_a_handler(call: Callable[[], None]) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: call())
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


HOWS = pytest.mark.parametrize("how", [in_a_thread, in_a_handler])
INSIDES = ["step", "record_result", "_release", "switch_slab", "_next_slab", "wait"]


def within(env: TraceRecordingWrapper, inside: str, monkeypatch: pytest.MonkeyPatch, call: Callable[[], None]) -> None:
    """Run call() inside that function during the next step."""
    episodes, slabs = env._steps.episodes, env._slabs
    owners = {"step": env.env, "wait": env._recorder.out, "switch_slab": slabs, "_next_slab": slabs}
    owner = owners.get(inside, episodes)
    function = getattr(owner, inside)
    left = [1]

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if left and threading.current_thread() is threading.main_thread():
            left.pop()
            call()
        return function(*arguments, **options)

    monkeypatch.setattr(owner, inside, interrupted)


@HOWS
@pytest.mark.parametrize("inside", INSIDES)
def test_flushing_within_a_step_is_done_by_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any, inside: str
) -> None:
    with small_blocks(rows=6):
        env = TraceRecordingWrapper(CountingEnv(length=100), tmp_path, flush_seconds=1000, record_infos=True)
        env.reset()
        for _ in range(3):
            env.step(0)
        flushes = 0

        def flush() -> None:
            nonlocal flushes
            flushes += 1
            env.flush()

        within(env, inside, monkeypatch, lambda: how(flush))
        for _ in range(20):
            env.step(0)
    assert flushes
    (batch,) = tmp_path.glob("*.part")
    assert sum(batch_reader(batch).fragments["steps"]) >= 3
    env.close()
    (episode,) = open_trace(tmp_path)
    assert episode.observations[:, 0].tolist() == list(range(len(episode) + 1))
    assert [info["count"] for info in episode.infos] == list(range(1, len(episode) + 1))
    assert len(episode) == env.unwrapped.calls.count("step")


def test_flushing_from_another_thread_is_done_by_the_next_step(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=100), tmp_path, flush_seconds=1000)
    acted(env, "reset", *[0] * 40)  # the next step does not check the clock
    in_a_thread(env.flush)
    assert _steps_in_batches(tmp_path) == 0
    for _ in range(2):
        env.step(0)
        assert _steps_in_batches(tmp_path) == 40
    env.close()


def _steps_in_batches(directory: Path) -> int:
    return sum(int(batch_reader(path).fragments["steps"].sum()) for path in directory.glob("*.gtb*"))


@HOWS
@pytest.mark.parametrize("infos", [False, True])
@pytest.mark.parametrize("inside", INSIDES)
def test_closing_within_a_step_saves_the_earlier_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any, inside: str, infos: bool
) -> None:
    with small_blocks(rows=6):
        env = TraceRecordingWrapper(CountingEnv(length=100), tmp_path, flush_seconds=1000, record_infos=infos)
        env.reset()
        for _ in range(3):
            env.step(0)
        closed = []

        def close() -> None:
            closed.append(env.unwrapped.calls.count("step"))
            env.close()

        within(env, inside, monkeypatch, lambda: how(close))
        for _ in range(9):
            env.step(0)
        if not closed:  # without infos, other functions write the row
            env.close()
            return
    assert env.unwrapped.calls.count("step") == 12
    env.close()
    (episode,) = open_trace(tmp_path)
    assert episode.outcome == "closed"
    assert closed[0] - 1 <= len(episode) <= closed[0] + 1
    assert episode.observations[:, 0].tolist() == list(range(len(episode) + 1))
    assert check_trace(tmp_path).damages == []
    assert not list(tmp_path.glob("*.ring"))


class _Slab(RowSlab):
    """A slab in pure Python, so that its methods can be interrupted."""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (EpisodeRecorder, "make_room"),
        *((RowSlabs, name) for name in ("make_room", "switch_slab", "submit", "_next_slab")),
        (RowDecoder, "decode"),
        *((SlabWriter, name) for name in ("submit", "wait")),
        *((_Slab, name) for name in ("begin", "append")),
        (Ring, "next_slab"),
    ],
)
def test_ctrl_c_while_a_slab_turns_corrupts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: str
) -> None:
    function = getattr(owner, name)
    calls, stepping = 0, False

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        if threading.current_thread() is not threading.main_thread() or not stepping:
            return function(*arguments, **options)
        calls += 1
        if calls == 4 and when == "before":
            raise KeyboardInterrupt
        result = function(*arguments, **options)
        if calls == 4:
            raise KeyboardInterrupt
        return result

    with small_blocks(rows=8, chunk=100, frame=16):
        env = TraceRecordingWrapper(CountingEnv(length=5), tmp_path, flush_seconds=1000)
        env._slabs.slab = _Slab(env._slabs.layout)
        monkeypatch.setattr(owner, name, interrupted)
        interruptions = 0
        for _ in range(12):
            env.reset()
            taken = before = 0
            while taken < 5:
                try:
                    before = env.unwrapped.calls.count("step")
                    stepping = True
                    env.step(0)
                    taken += 1
                except KeyboardInterrupt:
                    interruptions += 1
                    taken += env.unwrapped.calls.count("step") - before
                finally:
                    stepping = False
        env.close()
    assert interruptions == 1
    trace = open_trace(tmp_path)
    assert sum(len(episode) for episode in trace) in (58, 59, 60)  # the interrupted step, and the next
    for episode in trace:
        first = episode.first_step
        assert episode.observations[:, 0].tolist() == list(range(first, first + len(episode) + 1))
    assert check_trace(tmp_path).damages == []


@pytest.mark.parametrize("what", ["text", "options", "info", "annotation"])
def test_values_larger_than_a_slab_get_a_larger_slab(tmp_path: Path, what: str) -> None:
    large = "x" * 300_000
    with small_blocks(rows=16):
        told = [
            Result("y", info={"a": 1}),
            Result(large, info={"a": large if what == "info" else 2}),
            Result("z", info={}),
        ]
        scripts = [("first", told), ("", [Result("")])]
        env = TraceRecordingWrapper(
            ScriptedEnv(spaces.Text(400_000), spaces.Discrete(2), scripts), tmp_path, uid="w", record_infos=True
        )
        env.reset(options={"a": large} if what == "options" else {"a": "small"})
        before = 0 if what == "options" else (tmp_path / "w.ring").stat().st_size
        for i in range(3):
            if what == "annotation":
                env.annotate(note=large if i == 1 else "small")
            env.step(0)
        live = open_trace(tmp_path)
        assert [text[:3] for text in live[0].observations] == ["fir", "y", "xxx", "z"]
        assert (tmp_path / "w.ring").stat().st_size > max(before, 300_000)
        env.reset()
        env.step(0)
        env.close()
    one, other = open_trace(tmp_path)
    assert list(one.observations) == ["first", "y", large, "z"]
    assert list(other.observations) == ["", ""]
    assert [info.get("a") for info in one.infos] == [1, large if what == "info" else 2, None]
    assert one.options == {"a": large if what == "options" else "small"}
    if what == "annotation":
        assert list(one.annotations["note"]) == ["small", large, "small"]
    assert check_trace(tmp_path).damages == []
    assert not list(tmp_path.glob("*.ring*"))


def test_closing_again_after_ctrl_c_during_close_saves_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = acted(TraceRecordingWrapper(CountingEnv(length=1000), tmp_path, flush_seconds=1000), "reset", *[0] * 100)
    end = EpisodeRecorder.end

    def interrupted(*arguments: Any) -> None:
        end(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(EpisodeRecorder, "end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            env.close()
    env.close()
    assert [(len(episode), episode.outcome) for episode in open_trace(tmp_path)] == [(100, "closed")]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signals")
def test_signal_handlers_may_flush_while_the_recorder_is_flushing(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=10**9), tmp_path, flush_seconds=0.01)
    env.reset()
    before = signal.signal(signal.SIGALRM, lambda *_: env.flush())
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        steps = 0
        until = time.monotonic() + 0.4
        while time.monotonic() < until:
            env.step(0)
            env.flush()
            steps += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    env.close()
    assert [len(episode) for episode in open_trace(tmp_path)] == [steps]


@pytest.mark.parametrize("seconds", [1e11, float("inf")])
def test_flush_seconds_may_be_infinite(tmp_path: Path, seconds: float) -> None:
    acted(TraceRecordingWrapper(CountingEnv(), tmp_path, flush_seconds=seconds), "reset", 0, "close")
    assert [len(episode) for episode in open_trace(tmp_path)] == [1]
