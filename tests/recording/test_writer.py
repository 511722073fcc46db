"""TraceWriter: what it records, infers, and refuses."""

import contextlib
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from long_tests import LONG
from raising_signals import InterruptsAt
from runs import warned
from scripted_env import small_blocks

from gym_trace import TraceRecordingWrapper, TraceWriter, check_trace, open_trace, verify_trace
from gym_trace.errors import EnvironmentUnavailable, InvalidOption, TraceExists, UnstorableValue
from gym_trace.playback.episode_index import index_of

ZERO, ONE = np.zeros(2, np.float32), np.ones(2, np.float32)


def test_a_loop_is_recorded_as_the_wrapper_records_it(tmp_path: Path) -> None:
    actions = np.random.default_rng(1).integers(0, 2, 300).tolist()
    made, env = (gymnasium.make("CartPole-v1") for _ in range(2))
    wrapped = TraceRecordingWrapper(made, tmp_path / "wrapper", record_infos=True)
    given = {"observation_space": env.observation_space, "action_space": env.action_space, "environment": env.spec}
    with TraceWriter(tmp_path / "writer", record_infos=True, **given) as writer:
        over, seed = True, 0
        for action in actions:
            if over:
                wrapped.reset(seed=seed, options={"low": -0.01})
                observation, info = env.reset(seed=seed, options={"low": -0.01})
                writer.begin(observation, info, seed=seed, options={"low": -0.01})
                seed += 1
            if seed % 2:
                writer.act(action)
            wrapped.annotate(value=action / 2)
            wrapped.step(action)
            observation, reward, terminated, truncated, info = env.step(action)
            writer.step(action, observation, reward, terminated, truncated, info, value=action / 2)
            over = terminated or truncated
    wrapped.close()
    mine, theirs = open_trace(tmp_path / "writer"), open_trace(tmp_path / "wrapper")
    assert len(mine) == len(theirs) > 5
    for one, other in zip(mine, theirs):
        assert (one.outcome, one.seed, one.options, len(one)) == (other.outcome, other.seed, other.options, len(other))
        for name in ("observations", "actions", "rewards", "terminations", "truncations"):
            a, b = getattr(one, name), getattr(other, name)
            assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes())
        assert one.annotations["value"].tolist() == other.annotations["value"].tolist()
        assert list(one.infos) == list(other.infos)
    assert {verdict.verdict for verdict in verify_trace(tmp_path / "writer")} == {"identical"}


@pytest.mark.parametrize(
    ("value", "space"),
    [
        (np.zeros((2, 3), np.uint8), spaces.Box(0, 255, (2, 3), np.uint8)),
        (np.float16(2), spaces.Box(-np.inf, np.inf, (), np.float16)),
        (3, spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (), np.int64)),
        (0.5, spaces.Box(-np.inf, np.inf, (), np.float64)),
        (
            {"b": ZERO, "a": (ONE, ONE)},
            spaces.Dict(
                [
                    ("b", spaces.Box(-np.inf, np.inf, (2,), np.float32)),
                    ("a", spaces.Tuple([spaces.Box(-np.inf, np.inf, (2,), np.float32)] * 2)),
                ]
            ),
        ),
    ],
)
def test_a_space_that_is_not_given_is_inferred_from_the_first_value(tmp_path: Path, value: Any, space: Any) -> None:
    def record() -> None:
        with TraceWriter(tmp_path) as writer:
            writer.begin(value)
            writer.step(value, value, 1)

    assert warned(record) == []
    trace = open_trace(tmp_path)
    assert trace.observation_space == trace.action_space == space
    assert index_of(trace).locate(0)[0].schema["recorder"]["inferred"] == ["observation_space", "action_space"]


@pytest.mark.parametrize("value", ["text", ["a", 1], None, {}, (), b"bytes", {1.5: 2}, 1 << 70, np.complex64(1j)])
def test_values_without_a_typed_space_are_recorded_one_by_one(tmp_path: Path, value: Any) -> None:
    with TraceWriter(tmp_path) as writer:
        writer.begin(value)
        writer.act(value)
        writer.step(value, value, 0.0)
    (episode,) = open_trace(tmp_path)
    assert [*episode.observations, *episode.actions] == [value] * 3


def test_a_value_unlike_the_first_is_recorded_exactly_with_one_warning(tmp_path: Path) -> None:
    def record() -> None:
        with TraceWriter(tmp_path) as writer:
            writer.begin(ZERO)
            writer.step(0, np.zeros(3), 0.0)
            writer.step(0, "lost", 0.0)
            writer.step(0, ONE, 0.0)

    said = warned(record)
    assert len(said) == 1
    assert "got float64 of shape (3,), but the space has float32 of shape (2,)" in said[0]
    (episode,) = open_trace(tmp_path)
    assert episode.observations[1].dtype == np.float64
    assert episode.observations[2] == "lost"
    assert episode.observations[3].dtype == np.float32


def test_episodes_that_began_before_the_first_action_are_kept(tmp_path: Path) -> None:
    observation, info = ZERO.copy(), {"a": [1]}
    with TraceWriter(tmp_path, record_infos=True) as writer:
        writer.begin(observation, info, seed=1)
        observation += 1
        info["a"].append(2)
        writer.begin(observation, info, seed=2)
        writer.end("terminated")
        writer.begin(observation, seed=3)
        writer.annotate(value=0.5)
        writer.step(1, observation, 1.0)
    first, second, third = open_trace(tmp_path)
    assert [(e.outcome, e.seed, len(e)) for e in (first, second, third)] == [
        ("cut", 1, 0),
        ("terminated", 2, 0),
        ("closed", 3, 1),
    ]
    assert (first.observations[0].tolist(), first.reset_info) == ([0, 0], {"a": [1]})
    assert (second.observations[0].tolist(), second.reset_info) == ([1, 1], {"a": [1, 2]})
    assert third.annotations["value"].tolist() == [0.5]


def test_a_trace_without_any_action_keeps_its_observations(tmp_path: Path) -> None:
    with TraceWriter(tmp_path) as writer:
        writer.begin(ONE)
    (episode,) = open_trace(tmp_path)
    assert (len(episode), episode.outcome, episode.observations[0].tolist()) == (0, "closed", [1, 1])


@pytest.mark.parametrize("outcome", ["terminated", "truncated", "cut", "closed"])
def test_end_gives_the_episode_its_outcome(tmp_path: Path, outcome: str) -> None:
    with TraceWriter(tmp_path) as writer:
        writer.begin(ZERO)
        writer.step(0, ONE, 1.0)
        writer.act(1)
        writer.end(outcome)
        writer.begin(ZERO)
    assert [(e.outcome, len(e)) for e in open_trace(tmp_path)] == [(outcome, 1), ("closed", 0)]
    assert not check_trace(tmp_path).damages


def begun(writer: TraceWriter) -> TraceWriter:
    writer.begin(ZERO)
    writer.step(0, ONE, 1.0)
    return writer


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (lambda w: w.step(0, ONE, 1.0), r"step\(\): no episode is open; call begin\(\) first"),
        (lambda w: w.act(0), r"act\(\): no episode is open; call begin\(\) first"),
        (lambda w: w.end(), r"end\(\): no episode is open"),
        (lambda w: w.annotate(a=1), r"annotate\(\): no episode is open"),
        (lambda w: [begun(w).step(0, ONE, 1.0, True), w.step(0, ONE, 1.0)], r"step\(\): no episode is open"),
        (lambda w: [begun(w).end(), w.end()], r"end\(\): no episode is open"),
        (lambda w: begun(w).end("lost"), r"end\('lost'\): pass one of terminated, truncated, cut, closed"),
        (lambda w: [begun(w).act(0), w.act(1)], r"act\(\): the previous action has no result"),
        (lambda w: [begun(w).act(0), w.step(1, ONE, 1.0)], r"step\(\): the action is not that of act\(\)"),
        (lambda w: begun(w).step(0, ONE, 1.0, ONE > 0), r"terminated and truncated are one truth value each"),
        (lambda w: [w.close(), w.begin(ZERO)], r"begin\(\): the writer is closed"),
        (lambda w: [begun(w).close(), w.step(0, ONE, 1.0)], r"step\(\): the writer is closed"),
        (lambda w: [w.close(), w.lane(1)], r"lane\(\): the writer is closed"),
        (lambda w: w.lane(-1), r"lane\(-1\): pass a number from 0 to 16777215"),
        (lambda w: w.lane(True), r"lane\(True\): pass a number"),
        (lambda w: w.lane(1).lane(2), r"lane\(2\): this writer is lane 1; ask the writer that made it"),
    ],
)
def test_a_call_out_of_order_says_what_to_do(tmp_path: Path, misuse: Callable[[TraceWriter], Any], says: str) -> None:
    with TraceWriter(tmp_path) as writer, pytest.raises(InvalidOption, match=says):
        misuse(writer)


def test_a_refused_call_changes_nothing(tmp_path: Path) -> None:
    with TraceWriter(tmp_path) as writer:
        begun(writer).act(1)
        for call in (lambda: writer.act(2), lambda: writer.step(2, ONE, 0.0), lambda: writer.end("lost")):
            with pytest.raises(InvalidOption):
                call()
        with pytest.raises(UnstorableValue):
            writer.step(1, ONE, 2.0, value=object())
        writer.step(1, ONE, 3.0, True)
    (episode,) = open_trace(tmp_path)
    assert (episode.actions.tolist(), episode.rewards.tolist(), episode.outcome) == ([0, 1], [1.0, 3.0], "terminated")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"observation_space": (2,)}, "observation_space: got a tuple; pass a space of Gymnasium or omit it"),
        ({"action_space": 3}, "action_space: got a int"),
        ({"environment": 3}, "environment: got a int; pass an EnvSpec, an id, or a dict of facts"),
        ({"level": 99}, "level=99"),
        ({"uid": "a/b"}, "uid='a/b': invalid writer id"),
        ({"reward_classes": [1], "frame_filter": bool}, "reward_classes: cannot be combined"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidOption, match=says):
        TraceWriter(tmp_path / "t", **options)
    assert not (tmp_path / "t").exists()


def test_a_directory_that_holds_a_trace_is_left_alone(tmp_path: Path) -> None:
    with TraceWriter(tmp_path) as writer:
        begun(writer)
    with pytest.raises(TraceExists):
        TraceWriter(tmp_path)
    with TraceWriter(tmp_path, on_exist="append") as writer:
        begun(writer)
    assert len(open_trace(tmp_path)) == 2


def in_thread(call: Callable[[], Any]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_two_threads_cannot_share_an_episode(tmp_path: Path) -> None:
    said: list[str] = []

    def other(call: Callable[[], Any]) -> None:
        try:
            call()
        except InvalidOption as error:
            said.append(str(error))

    with TraceWriter(tmp_path) as writer:
        begun(writer)
        for call in (lambda: writer.step(0, ONE, 1.0), lambda: writer.begin(ZERO), lambda: writer.act(0)):
            in_thread(lambda call=call: other(call))
        writer.step(0, ONE, 1.0, True)
        in_thread(lambda: begun(writer))  # a new episode may be of another thread
        writer.step(0, ONE, 5.0)  # which has ended
    assert len(said) == 3
    assert "the open episode belongs to the thread MainThread; use a lane() for each thread" in said[0]
    assert [e.rewards.tolist() for e in open_trace(tmp_path)] == [[1.0, 1.0], [1.0, 5.0]]


def test_lanes_step_on_their_own_time_in_threads(tmp_path: Path) -> None:
    def run(writer: TraceWriter, lane: int) -> None:
        for episode in range(3):
            writer.begin(np.float32([lane, episode]))
            for step in range(50 * (lane + 1)):
                writer.step(step, np.float32([lane, episode]), float(step), step == 50 * (lane + 1) - 1)

    with TraceWriter(tmp_path, uid="robots") as writer:
        threads = [threading.Thread(target=run, args=(writer.lane(lane), lane)) for lane in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert writer.lane(2) is writer.lane(2)
        writer.flush()
        assert len(open_trace(tmp_path)) == 12
    trace = open_trace(tmp_path)
    assert sorted((e.lane, len(e)) for e in trace) == [(lane, 50 * (lane + 1)) for lane in range(4) for _ in range(3)]
    assert all((e.observations[:, 0] == e.lane).all() for e in trace)
    assert {index_of(trace).locate(i)[0].writer for i in range(12)} == {f"robots-lane{lane}" for lane in range(4)}


def test_filters_choose_episodes_and_steps(tmp_path: Path) -> None:
    filters: dict[str, Any] = {"episode_filter": lambda i: i % 2 == 0, "frame_filter": lambda i: i % 3 != 2}
    with TraceWriter(tmp_path, **filters) as writer:
        for episode in range(3):
            writer.begin(np.float32(episode))
            for step in range(6):
                if step % 2:
                    writer.act(step)
                writer.step(step, np.float32(step), float(step), step == 5, value=step)
    parts = [(e.episode_id, e.first_step, e.rewards.tolist()) for e in open_trace(tmp_path)]
    assert parts == [(0, 0, [0, 1]), (0, 3, [3, 4]), (2, 0, [0, 1]), (2, 3, [3, 4])]
    assert [e.annotations["value"].tolist() for e in open_trace(tmp_path)] == [[0, 1], [3, 4]] * 2


def test_without_an_environment_a_replay_says_what_to_pass(tmp_path: Path) -> None:
    for number, environment in enumerate((None, "my/Robot-v0", {"id": "robot", "firmware": [1, 2]})):
        with TraceWriter(tmp_path / str(number), environment=environment) as writer:
            begun(writer)
        with pytest.raises(EnvironmentUnavailable, match=r"recorded with TraceWriter.*--make MODULE:FUNCTION"):
            list(verify_trace(tmp_path / str(number)))
    described = [index_of(open_trace(tmp_path / str(number))).locate(0)[0].schema["environment"] for number in range(3)]
    assert [one["id"] for one in described] == [None, "my/Robot-v0", "robot"]
    assert described[2]["facts"] == {"id": "robot", "firmware": [1, 2]}


def test_a_trace_is_verified_in_an_environment_that_the_user_makes(tmp_path: Path) -> None:
    env = gymnasium.make("CartPole-v1")
    with TraceWriter(tmp_path, environment="my simulator of a pole") as writer:
        writer.begin(*env.reset(seed=3), seed=3)
        for _ in range(5):
            writer.step(1, *env.step(1))
    (verdict,) = verify_trace(tmp_path, make_env=lambda: gymnasium.make("CartPole-v1"))
    assert verdict.verdict == "identical"


def test_an_interrupt_within_a_step_leaves_a_gap(tmp_path: Path) -> None:
    class Interrupting(dict):  # type: ignore[type-arg]
        def __getitem__(self, key: Any) -> Any:
            raise KeyboardInterrupt

    with TraceWriter(tmp_path, record_infos=["a"]) as writer:
        writer.begin(ZERO)
        for step in range(3):
            writer.step(step, ONE, float(step), info={"a": step})
        with pytest.raises(KeyboardInterrupt):
            writer.step(3, ONE, 3.0, info=Interrupting(a=3))
        for step in range(4, 7):
            writer.step(step, ONE, float(step), info={"a": step})
    assert [(e.first_step, e.rewards.tolist()) for e in open_trace(tmp_path)] == [(0, [0, 1, 2]), (5, [5, 6])]


def is_hot(code: CodeType) -> bool:
    """Return True for what act(), begin() and step() call: an interrupt before that is one of the loop itself."""
    return code.co_filename.endswith(HOT) and code.co_name not in NOT_HOT


NOT_HOT = ("step", "begin", "_demand_thread", "<genexpr>", "__init__", "_attach", "close", "lose", "_end_episode")
HOT = ("recording/writer.py", "single/steps.py", "single/episodes.py", "single/slabs.py", "single/packing.py")
OPTIONS: list[dict[str, Any]] = [{}, {"record_infos": True}, {"frame_filter": lambda step: step != 1}]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "infos", "filtered"])
def test_a_signal_exception_at_any_line_joins_no_unrelated_steps(tmp_path: Path, options: dict[str, Any]) -> None:
    number, functions, parts = 0, set(), 0
    while True:
        interrupts = InterruptsAt(number, KeyboardInterrupt, is_hot)
        with small_blocks(rows=4), TraceWriter(tmp_path / str(number), flush_seconds=1000.0, **options) as writer:
            begun(writer).end()
            with interrupts:
                for episode in range(3):
                    with contextlib.suppress(KeyboardInterrupt, InvalidOption):  # an interrupted begin()
                        writer.begin(np.array([episode, 0], np.float32))
                    for step in range(1, 8):
                        now = np.array([episode, step], np.float32)
                        if step % 2:
                            with contextlib.suppress(KeyboardInterrupt, InvalidOption):
                                writer.act(step)
                        with contextlib.suppress(KeyboardInterrupt, InvalidOption):
                            writer.step(step, now, float(step), note=step)
        for part in list(open_trace(tmp_path / str(number)))[1:]:
            (episode,), steps = set(part.observations[:, 0].tolist()), part.observations[:, 1].tolist()
            assert steps == list(range(int(steps[0]), int(steps[0]) + len(part) + 1)), interrupts.line
            assert part.actions.tolist() == part.rewards.tolist() == steps[1:], interrupts.line
            assert [note for note in part.annotations.get("note", []) if note is not None] == [
                step for step, note in zip(steps[1:], part.annotations.get("note", [])) if note is not None
            ], interrupts.line
            parts += 1
        if not interrupts.line:
            break
        functions.add(interrupts.line.split(",")[0])
        number += 1 if LONG else 193 if "frame_filter" in options else 83
    assert parts > 10
    assert functions >= {"_step"}


def test_an_exit_without_close_saves_everything(tmp_path: Path) -> None:
    writer = begun(TraceWriter(tmp_path))
    del writer
    assert [(e.outcome, len(e)) for e in open_trace(tmp_path)] == [("closed", 1)]


def test_a_full_disk_is_reported_once_and_the_loop_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gym_trace.format.batch_files import BatchFiles

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        writer = begun(TraceWriter(tmp_path, on_error="warn"))
        monkeypatch.setattr(BatchFiles, "write", full)
        writer.flush()
        for _ in range(3):
            writer.step(0, ONE, 1.0)
        writer.begin(ZERO)
        writer.step(0, ONE, 1.0)
        writer.close()
    assert ["No space left" in str(warning.message) for warning in caught] == [True]
