"""Steps that raised: the steps before and after the gap are never joined."""

import contextlib
import os
import pkgutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import echo_env
import gymnasium
import numpy as np
import pytest
from echo_env import EchoEnv, check_echoes, try_steps
from long_tests import LONG
from raising_signals import InterruptsAt
from runs import acted, recorder_of
from scripted_env import CountingEnv, small_blocks

import gym_trace
from gym_trace import TraceRecordingWrapper, open_trace, verify_trace
from gym_trace.data import deltas
from gym_trace.errors import CorruptTrace, TraceError
from gym_trace.format.ring import log, row_slab


@pytest.mark.parametrize(
    ("length", "infos", "episodes", "parts"),
    [
        (99, False, [[0, 1, 9, 2, 3, 4], [5]], [(0, 0, [0, 1]), (0, 4, [3, 4]), (1, 0, [5])]),
        (99, True, [[9, 9, 0, 1, 9, 9, 9, 2, 9, 3, 4]], [(0, 0, []), (0, 3, [1]), (0, 8, []), (0, 10, [4])]),
        (  # the episode ends with the first step after the gap
            3,
            False,
            [[0, 9, 1, 2, 3], [0, 1, 2]],
            [(0, 0, [0]), (0, 3, []), (0, 3, [2]), (0, 4, [3]), (1, 0, [0, 1, 2])],
        ),
    ],
)
def test_a_step_that_raises_ends_the_part_and_the_next_step_begins_another(
    tmp_path: Path, length: int, infos: bool, episodes: list[list[int]], parts: list[Any]
) -> None:
    env = TraceRecordingWrapper(EchoEnv(length=length), tmp_path, record_infos=infos)
    for seed, actions in enumerate(episodes):
        env.reset(seed=seed)
        try_steps(env, *actions)
    env.close()
    assert check_echoes(tmp_path, infos=infos) == parts
    assert [part.seed for part in open_trace(tmp_path)] == [episode for episode, _, _ in parts]
    usual = ["closed" if episode == len(episodes) - 1 else "cut" for episode, _, _ in parts]
    expected = ["terminated"] * len(parts) if length == 3 else usual
    assert [part.outcome for part in open_trace(tmp_path)] == expected


@pytest.mark.parametrize(
    "options", [{"frame_filter": lambda step: step % 4 != 1}, {"frame_filter": bool}, {"reward_classes": [0.0]}]
)
def test_filtered_steps_around_a_gap_are_not_joined(tmp_path: Path, options: dict[str, Any]) -> None:
    env = TraceRecordingWrapper(EchoEnv(), tmp_path, record_infos=True, **options)
    for _ in range(2):
        env.reset()
        for i in range(20):
            env.annotate(note=i)
            try_steps(env, 9 if i in (5, 6, 12) else i % 9)
    env.close()
    steps = [first + i for episode, first, actions in check_echoes(tmp_path, infos=True) for i in range(len(actions))]
    kept = options.get("frame_filter", lambda step: True)
    assert steps == 2 * [step for step in range(20) if kept(step) and step not in (5, 6, 7, 12, 13)]


def test_annotations_of_a_step_that_raised_do_not_reach_the_next(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(EchoEnv(), tmp_path)
    env.reset()
    for i, action in enumerate((0, 9, 1, 2, 9, 9, 3, 4)):
        env.annotate(note=i)
        try_steps(env, action)
    env.close()
    assert check_echoes(tmp_path) == [(0, 0, [0]), (0, 3, [2]), (0, 7, [4])]
    assert [part.annotations["note"].tolist() for part in open_trace(tmp_path)] == [[0], [3], [7]]


@pytest.mark.parametrize("shape", [(3,), (40, 50, 3)])
def test_gaps_anywhere_in_blocks_and_chunks_leave_true_transitions(tmp_path: Path, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(5)
    with small_blocks(rows=7, chunk=500, frame=1000):
        env = TraceRecordingWrapper(EchoEnv(50, shape), tmp_path)
        asked = 0
        for _ in range(6):
            env.reset()
            for _ in range(60):
                try_steps(env, int(random.integers(0, 10)))
                if not random.integers(0, 12):
                    env.flush()
                asked += 1
        env.close()
    parts = check_echoes(tmp_path)
    assert asked * 0.7 < sum(len(actions) for _, _, actions in parts) < asked


def test_steps_before_a_gap_verify_and_steps_after_it_cannot(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(EchoEnv(), tmp_path)
    for seed in (3, None):
        env.reset(seed=seed)
        try_steps(env, 0, 1, 9, 2, 3)
    env.reset()
    try_steps(env, 4)
    env.close()
    first, *others = verify_trace(tmp_path, make_env=EchoEnv)
    assert (first.verdict, first.steps) == ("identical", 2)
    assert [verdict.verdict for verdict in others if verdict.steps == 1 and verdict.episode_id < 2] == 2 * [
        "unverifiable"
    ]


# -- Ctrl-C anywhere ---------------------------------------------------------------------------------------------------

HOUSE = os.path.dirname(gym_trace.__file__)
NAMES = ("wrapper", "episodes", "slabs", "packing")
SHARED = ("filters", "live_video", "recorder", "background")
HOT = {os.path.join(HOUSE, "recording", f"{name}.py") for name in (*(f"single/{name}" for name in NAMES), *SHARED)}
HOT |= {deltas.__file__, echo_env.__file__, row_slab.__file__, log.__file__}


def is_hot(code: CodeType) -> bool:
    """Return True for the functions of the recorder, and for those of the environment that act."""
    is_of_environment = code.co_filename == echo_env.__file__
    return code.co_filename in HOT and (not is_of_environment or code.co_name in ("step", "reset", "_told"))


def plays() -> Iterator[str]:
    yield from ("reset", "step", "step", "note", "step", "step", "step", "reset", "step", "step", "step", "step")
    yield from ("step", "step", "reset", "step", "step")


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "infos": {"record_infos": True},
    "filtered": {"frame_filter": lambda step: step != 1},
    "rewards": {"reward_classes": [0.0]},
}


@pytest.mark.parametrize("raises", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize(("first", "what"), list(enumerate([*OPTIONS, "frames"])))
def test_a_signal_exception_at_any_line_joins_no_unrelated_steps(
    tmp_path: Path, first: int, what: str, raises: type[BaseException]
) -> None:
    number, functions = 0 if LONG else 19 * first, set()  # each at other lines of what they have in common
    while True:
        directory = tmp_path / str(number)
        interrupts = InterruptsAt(number, raises, is_hot)
        with small_blocks(rows=4, chunk=400, frame=1000):
            inner = EchoEnv(4, (20, 30, 3) if what == "frames" else (3,))
            env = TraceRecordingWrapper(inner, directory, flush_seconds=1000.0, **OPTIONS.get(what, {}))
            env.reset()
            try_steps(env, 0, 1)
            for act in plays():
                try:
                    with interrupts if not interrupts.line else contextlib.nullcontext():
                        if act == "reset":
                            env.reset()
                        elif act == "note":
                            env.annotate(note=inner.asked)
                        else:
                            env.step(inner.asked % 9)
                except raises:
                    if act == "note":  # it may be kept; with the next step it must not be another's
                        env.step(inner.asked % 9)
            assert not env._recorder.failed, interrupts.line
            env.close()
        try:
            parts = _look_at_interrupted(directory)
        except (AssertionError, TraceError) as error:
            raise AssertionError(f"after a signal at {interrupts.line}") from error
        assert parts, interrupts.line
        if not interrupts.line:
            break
        functions.add(interrupts.line.split(",")[0])
        number += 1 if LONG else 503 if what == "frames" else 257
    assert len(functions) > 3
    assert not LONG or functions > {"step", "reset"}


@pytest.mark.parametrize("raises", [KeyboardInterrupt, TimeoutError])
def test_a_signal_exception_in_the_first_reset_does_not_end_the_recording(
    tmp_path: Path, raises: type[BaseException]
) -> None:
    number, lines = 0, 0
    while True:
        directory = tmp_path / str(number)
        inner = EchoEnv(4, (3,))
        env, interrupts = TraceRecordingWrapper(inner, directory), InterruptsAt(number, raises, is_hot)
        with contextlib.suppress(raises), interrupts:
            env.reset()
        env.reset()
        for _ in range(3):
            env.step(inner.asked % 9)
        env.close()
        assert len(open_trace(directory)[-1]) == 3, interrupts.line
        if not interrupts.line:
            break
        number, lines = number + (1 if LONG else 7), lines + 1
    assert lines > 5


def _look_at_interrupted(directory: Path) -> list[tuple[int, int, list[int]]]:
    """As look_at(), of episodes that may have been reset without being recorded; none of their steps may come twice."""
    parts, seen = [], set()
    for part in open_trace(directory):
        told = part.observations.reshape(len(part) + 1, -1)[:, :3]
        (episode,) = set(told[:, 0].tolist())
        first = told[0, 1]
        assert part.first_step - first in (0, 1)  # Ctrl-C may fall before the environment itself counts the step
        assert told[:, 1].tolist() == list(range(first, first + len(part) + 1))
        assert told[1:, 2].tolist() == part.actions.tolist()
        assert part.rewards.tolist() == told[1:, 1].tolist()
        for step, note in enumerate(part.annotations.get("note", [])):
            assert note is None or note == told[step, 1]
        steps = {(episode, step) for step in told[1:, 1].tolist()}
        assert not steps & seen
        seen |= steps
        parts.append((part.episode_id, part.first_step, part.actions.tolist()))
    return parts


@pytest.mark.parametrize("lanes", [False, True])
def test_a_signal_while_a_slab_is_decoded_is_not_mistaken_for_damage(
    lanes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lanes:
        pytest.importorskip("gymnasium", minversion="1.1")
    place = "recording.vector.slabs.decoded" if lanes else "format.ring.rows.RowDecoder.decode"
    decode, alarms = pkgutil.resolve_name(f"gym_trace.{place}"), []

    def interrupted(*arguments: Any) -> Any:
        if not alarms:
            alarms.append(True)
            try:  # as a library that is interrupted
                signal.raise_signal(signal.SIGALRM)
            except TimeoutError as error:
                raise CorruptTrace("not a valid value") from error
        return decode(*arguments)

    def time_out(number: int, frame: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(f"gym_trace.{place}", interrupted)
    before = signal.signal(signal.SIGALRM, time_out)
    try:
        env, action = recorder_of(lambda: gymnasium.make("CartPole-v1"), tmp_path, 2 * lanes)
        env.reset(seed=0)
        acted(env, *[action, action + 1] * 2)
        with pytest.raises(TimeoutError):
            env.flush()
        acted(env, *[action, action + 1] * 2, "close")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert open_trace(tmp_path).episodes["steps"].sum() == 8 * (1 + lanes)


def test_a_second_ctrl_c_keeps_the_steps_after_the_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = TraceRecordingWrapper(CountingEnv(), tmp_path)
    env.reset()
    env.step(0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(env.env, "step", mock.Mock(side_effect=KeyboardInterrupt))
        drop = env._slabs.drop_incomplete_row

        def interrupted_drop() -> set[int]:
            signal.raise_signal(signal.SIGINT)
            return drop()

        patched.setattr(env._slabs, "drop_incomplete_row", interrupted_drop)
        env.step(0)
    signal.signal(signal.SIGINT, before)
    acted(env, 0, 0, 0, "close")
    assert [(part.first_step, len(part)) for part in open_trace(tmp_path)] == [(0, 1), (3, 2)]
