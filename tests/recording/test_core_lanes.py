"""The C core records steps of lanes with the results and bytes of the pure Python slab, for any input."""

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hostile_objects import Child, tree_value_for
from hypothesis import given, settings
from hypothesis import strategies as st
from test_core import leaf, leaks
from test_core_trees import tree_for

from gym_trace.data.layout import Branch, Layout, Leaf
from gym_trace.format.ring.lanes.autoreset import DISABLED, NEXT_STEP, SAME_STEP
from gym_trace.format.ring.lanes.decoder import decoded
from gym_trace.format.ring.lanes.entries import LANE, NOTHING, End, LaneState, Observed, Reset, StepExtras
from gym_trace.format.ring.lanes.events import PYTHON_LOOPS, InnerLoops, LaneEvents
from gym_trace.format.ring.lanes.layout import LaneLayout
from gym_trace.format.ring.lanes.slab import LaneSlab
from gym_trace.format.ring.lanes.writer import LaneWriter, Step
from gym_trace.format.ring.log import ACTIONS, RESET, STEP, LogFull, entries
from gym_trace.format.ring.segment import Segment

core = pytest.importorskip("gym_trace.recording._core", reason="the C core was not compiled")

NEVER = 1 << 62
RAISED = (ValueError, OverflowError, TypeError, LogFull)
TIMES = 32  # offset of the times in an entry; there are two


def of_lanes(layout: Layout, lanes: int) -> Layout:
    """Return the layout of a batch."""
    if isinstance(layout, Leaf):
        return Leaf(layout.path, layout.dtype, (lanes, *layout.shape))
    return Branch(layout.keys, [of_lanes(child, lanes) for child in layout.children])


class Both:
    """A slab in Python and one in C that get the same calls."""

    def __init__(self, observation: Layout, action: Layout, random: np.random.Generator, lanes: int, same_step: bool):
        self._random, self._lanes, self._sequence = random, lanes, 0
        self.steps = int(random.integers(1, 6))
        self.trees = [of_lanes(tree, lanes) for tree in (observation, action)]
        self.slabs = [kind(observation, action, self.steps, same_step) for kind in (LaneSlab, core.LaneSlab)]
        self._since = time.time_ns(), time.monotonic_ns()
        self.begin()

    def begin(self) -> None:
        """Begin a slab in used memory."""
        self._sequence += 1
        size, self._log = 8 * int(self._random.integers(30, 200)), 8 * int(self._random.integers(8, 20))
        before = self._random.bytes(size)
        self.columns: list[list[np.ndarray]] = [[], []]
        for slab in self.slabs:
            slab.begin(memoryview(bytearray(before)), self._sequence, self._log)
        self.expect()
        self.do("enable_fast_path", NEVER)

    def expect(self) -> None:
        """Give the slabs columns: of each leaf, of rewards, and of flags."""
        fixed = [leaf("r", ["f8", "f4", "i2"][self._random.integers(3)]), leaf("t", "?"), leaf("t", "?")]
        leaves = [*self.trees[1].leaves(), *self.trees[0].leaves(), *(of_lanes(one, self._lanes) for one in fixed)]
        if any(one.dtype is None for one in leaves):
            return
        actions, code = len(list(self.trees[1].leaves())), int(self._random.integers(9))
        orders = self._random.integers(0, 2, len(leaves))
        self.columns = [[_column(self.steps, *one) for one in zip(leaves, orders)] for _ in self.slabs]
        for slab, columns in zip(self.slabs, self.columns):
            slab.expect(tuple(columns[:actions]), tuple(columns[actions:]), code)

    def do(self, name: str, *args: Any, **named: Any) -> Any:
        """Call a method of both; both must return or raise the same."""
        results = [_outcome(getattr(slab, name), args, named) for slab in self.slabs]
        assert results[0] == results[1], f"{name}{args}: {results}"
        self.compare()
        return results[0]

    def compare(self) -> None:
        names = ("steps", "position", "end", "last", "is_waiting", "sequence")
        states = [[getattr(slab, name) for name in names] for slab in self.slabs]
        assert states[0] == states[1]
        for slab in self.slabs:
            for entry in entries(slab.memory, self._log, slab.end, slab.sequence):
                if entry.kind == STEP and entry.c:
                    assert self._since[0] <= entry.c <= time.time_ns()
                    assert self._since[1] <= entry.d <= time.monotonic_ns()
                    slab.memory[entry.at + TIMES : entry.at + TIMES + 16] = bytes(16)
        assert self.slabs[0].memory == self.slabs[1].memory
        assert [column.tobytes() for column in self.columns[0]] == [column.tobytes() for column in self.columns[1]]


def _column(times: int, batch: Leaf, is_by_time: int) -> np.ndarray:
    column = np.zeros((times, *batch.shape), batch.dtype)
    return column if is_by_time else column.swapaxes(0, 1).copy().swapaxes(0, 1)


def _outcome(method: Any, args: Any, named: Any) -> Any:
    try:
        return method(*args, **named)
    except RAISED as error:
        return (type(error), error.args) if isinstance(error, LogFull) else type(error)


def odd_lane_run(seed: int) -> None:
    """Do random steps of random lanes, most of them usual."""
    random = np.random.default_rng(seed)
    trees = [tree_for(random, name) for name in ("observations", "actions")]
    if random.random() < 0.5:  # no leaf without a column
        trees = [
            leaf("observations", "f4", (3,)),
            Branch(["a", 1], [leaf("actions", "i8"), leaf("actions", "?", (2,))]),
        ]
    both = Both(*trees, random, int(random.integers(4)), bool(random.integers(2)))
    for _ in range(int(random.integers(30))):
        chosen = random.integers(30)
        if chosen == 0:
            both.do("disable_fast_path")
        elif chosen == 1:
            both.do("append", RESET, random.bytes(int(random.integers(60))), a=-(2**63), d=2**63 - 1)
        elif chosen == 2:
            both.do("append", int(random.integers(20, 26)), **{str(random.choice(["column", "a"])): 7})
        elif chosen == 3:
            both.expect()
        elif chosen == 4:
            last = int(random.integers(both.slabs[0].end + 9))
            for slab in both.slabs:
                slab.last = last
        elif chosen == 5:
            both.begin()
        elif chosen < 8:
            both.do("enable_fast_path", NEVER if chosen == 6 else 0)
        if both.slabs[0].steps == both.steps:
            both.begin()
        both.do("left")
        odd = random.random() < 0.2
        both.do("record_action", tree_value_for(random, both.trees[1]) if odd else usual(random, both.trees[1]))
        odd = random.random() < 0.2
        observations = tree_value_for(random, both.trees[0]) if odd else usual(random, both.trees[0])
        if random.random() < 0.3:
            times = time.time_ns(), time.monotonic_ns()
            odd = random.random() < 0.2
            actions = tree_value_for(random, both.trees[1]) if odd else usual(random, both.trees[1])
            both.do("record_step", actions, observations, *rewards_and_flags(random, both), *times)
        both.do("record_result", observations, *rewards_and_flags(random, both))


def usual(random: np.random.Generator, layout: Layout) -> Any:
    """Return a batch as the space says; some arrays are strided."""
    if isinstance(layout, Leaf):
        array = random.integers(0, 2, layout.shape).astype(layout.dtype or "f4")
        orders = [array, np.asfortranarray(array), np.repeat(array, 2, 0)[::2], array[::-1]]
        return orders[random.integers(4)] if array.ndim else array
    parts = [usual(random, child) for child in layout.children]
    return tuple(parts) if layout.keys is None else dict(zip(layout.keys, parts))


def rewards_and_flags(random: np.random.Generator, both: Both) -> list[Any]:
    columns = both.columns[0][-3:] or [np.zeros((1, 2)), np.zeros((1, 2), bool), np.zeros((1, 2), bool)]
    batches: list[Any] = [(random.random(column.shape[1:]) < 0.1).astype(column.dtype) for column in columns]
    if random.random() < 0.1:
        one = random.integers(3)
        odd = [batches[one].view(Child), batches[one].tolist(), batches[one][None], batches[one].astype("c8"), None]
        batches[one] = odd[random.integers(len(odd))]
    return batches


@settings(max_examples=5 * settings().max_examples)
@given(st.integers(0, 2**32))
def test_the_c_core_writes_the_bytes_of_pure_python(seed: int) -> None:
    odd_lane_run(seed)


def cartpoles(kind: Any = core.LaneSlab, lanes: int = 2, times: int = 3, size: int = 4096) -> Any:
    """Return a slab that accepts steps, and a column for each part."""
    slab = kind(leaf("o", "f4", (4,)), leaf("a", "i8"), times, False)
    slab.begin(memoryview(bytearray(size)), 7, 64)
    forms: list[Any] = [("i8", ()), ("f4", (4,)), ("f8", ()), ("?", ()), ("?", ())]
    columns = [np.zeros((times, lanes, *shape), dtype) for dtype, shape in forms]
    slab.expect(tuple(columns[:1]), tuple(columns[1:]), 1)
    slab.enable_fast_path(NEVER)
    return slab, columns


def answers(lanes: int = 2) -> list[np.ndarray]:
    flags = np.zeros(lanes, bool)
    return [np.ones((lanes, 4), "f4"), np.ones(lanes), flags, flags]


@pytest.mark.parametrize("lanes", [1, 3, 70])  # batches of up to 256 KiB, and larger ones
@pytest.mark.parametrize("row", [4096, 4100, 5003])
def test_large_rows_are_copied_to_any_address(row: int, lanes: int) -> None:
    observations = np.random.default_rng(row).integers(0, 256, (lanes + 1, row), np.uint8)[1:]
    numbers = np.zeros(lanes, np.uint8)
    for shift, is_by_time in itertools.product((0, 1, 15), (True, False)):
        memory = np.zeros(2 * lanes * row + 16, np.uint8)[shift : 2 * lanes * row + shift]
        column = memory.reshape(2, lanes, row) if is_by_time else memory.reshape(lanes, 2, row).swapaxes(0, 1)
        slab = core.LaneSlab(leaf("observations", "u1", (row,)), leaf("actions", "u1"), 2, False)
        slab.begin(memoryview(bytearray(800)), 1, 64)
        slab.expect((np.zeros((2, lanes), np.uint8),), (column, *np.zeros((3, 2, lanes), np.uint8)), 1)
        slab.enable_fast_path(NEVER)
        assert slab.record_action(numbers)
        assert slab.record_result(observations, numbers, numbers, numbers)
        assert np.array_equal(column[0], observations)
        assert not column[1].any()


@pytest.mark.parametrize("kind", [LaneSlab, core.LaneSlab])
def test_a_slab_takes_as_many_steps_as_it_has_room_for(kind: Any) -> None:
    slab, columns = cartpoles(kind)
    for step in range(3):
        assert not slab.record_result(*answers())
        assert slab.record_action(np.array([step, 9]))
        assert slab.is_waiting
        assert not slab.record_action(np.array([step, 9]))
        assert slab.record_result(*answers())
        assert not slab.is_waiting
    assert not slab.record_action(np.array([1, 2]))
    assert columns[0].tolist() == [[0, 9], [1, 9], [2, 9]]
    kinds = [entry.kind for entry in entries(slab.memory, 64, 4096, 7)]
    assert kinds == [ACTIONS, STEP] * 3


@pytest.mark.parametrize("kind", [LaneSlab, core.LaneSlab])
def test_a_step_is_declined_when_the_log_has_no_room_for_it(kind: Any) -> None:
    slab, _ = cartpoles(kind, size=64 + 3 * 56)
    assert slab.record_action(np.array([1, 2]))
    assert slab.record_result(*answers())
    assert not slab.record_action(np.array([1, 2]))
    with pytest.raises(LogFull) as caught:
        slab.append(RESET, bytes(9))
    assert caught.value.args == (72,)


@pytest.mark.parametrize("kind", [LaneSlab, core.LaneSlab])
def test_an_answer_after_its_time_is_declined(kind: Any) -> None:
    slab, _ = cartpoles(kind)
    slab.enable_fast_path(time.monotonic_ns() - 1)
    assert slab.record_action(np.array([1, 2]))
    assert not slab.record_result(*answers())
    slab.enable_fast_path(NEVER)
    assert slab.record_result(*answers())


def test_invalid_memory_numbers_and_columns_raise() -> None:
    slab, columns = cartpoles()
    good = memoryview(bytearray(4096))
    columns[0].flags.writeable = False
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        *((TypeError, "", lambda args=args: slab.begin(*args)) for args in ((bytearray(4096), 1, 64), (good, 1), ())),
        (BufferError, "", lambda: slab.begin(memoryview(bytes(4096)), 1, 64)),
        (ValueError, "aligned", lambda: slab.begin(memoryview(bytearray(4104))[1:4097], 1, 64)),
        (BufferError, "", lambda: slab.begin(memoryview(bytearray(8192))[::2], 1, 64)),
        (OverflowError, "", lambda: slab.begin(good, 1 << 32, 64)),
        *((ValueError, "log", lambda at=at: slab.begin(good, 1, at)) for at in (0, 68, -8, 4096, 4048, 1 << 62)),
        (ValueError, "log", lambda: slab.begin(memoryview(bytearray(8)), 1, 64)),
        (TypeError, "", lambda: slab.expect([], (), 1)),
        (OverflowError, "", lambda: slab.expect((), (), -1)),
        (OverflowError, "", lambda: slab.append(1 << 16)),
        (OverflowError, "", lambda: slab.append(1, column=-1)),
        (TypeError, "", lambda: slab.append(1, "text")),
        (TypeError, "", lambda: slab.enable_fast_path("1")),
        (TypeError, "", lambda: slab.record_result(1, 2, 3)),
        (AttributeError, "", lambda: setattr(slab, "steps", 10**6)),
        (TypeError, "once", lambda: slab.__init__(leaf("o", "f4"), leaf("a", "f4"), 1, False)),
        (ValueError, "steps", lambda: core.LaneSlab(leaf("o", "f4"), leaf("a", "f4"), 0, False)),
        (AttributeError, "", lambda: core.LaneSlab(None, None, 1, False)),
        (ValueError, "read-only", lambda: slab.record_action(np.array([1, 2]))),
    ]
    before = bytes(slab.memory)
    for error, match, call in wrong:
        with pytest.raises(error, match=match or None):
            call()
    assert (bytes(slab.memory), slab.steps, slab.sequence) == (before, 0, 7)


def test_an_uninitialized_slab_writes_nothing() -> None:
    for slab in (core.LaneSlab.__new__(core.LaneSlab), core.LaneSlab(leaf("o", "f4"), leaf("a", "f4"), 1, False)):
        slab.expect((), (), 1)
        slab.enable_fast_path(NEVER)
        assert not slab.record_action(np.zeros(1, "f4"))
        assert not slab.record_result(np.zeros(1, "f4"), *answers(1)[1:])
        with pytest.raises(LogFull):
            slab.append(RESET)


def test_invalid_columns_are_not_filled() -> None:
    slab, columns = cartpoles()
    for odd in ((None,), (), (np.zeros(3),), (np.zeros((0, 2), "i8"),), (columns[0], columns[0])):
        slab.expect(odd, tuple(columns[1:]), 1)
        assert not slab.record_action(np.array([1, 2]))


def test_the_c_core_leaks_no_references() -> None:
    layout, memory = leaf("o", "f4", (4,)), memoryview(bytearray(1 << 16))
    _, columns = cartpoles()
    action, (observations, rewards, *flags) = np.array([1, 2]), answers()
    held = [layout, layout.dtype, memory, columns, *columns, action, observations, rewards, *flags, LogFull]

    def use() -> None:
        slab = core.LaneSlab(layout, leaf("a", "i8"), 3, True)
        for sequence in (1, 2):
            slab.begin(memory, sequence, 64)
            for _ in range(2):
                slab.expect(tuple(columns[:1]), tuple(columns[1:]), 1)
            slab.enable_fast_path(NEVER)
            for seen in (observations, None):
                slab.record_action(action)
                slab.record_result(seen, rewards, *flags)
            with pytest.raises(LogFull):
                slab.append(RESET, bytes(1 << 17))

    use()
    leaked = np.min([leaks(use, 300, held) for _ in range(3)], 0)  # as in test_core
    assert leaked.max() < 150, leaked


@pytest.mark.skipif("GYM_TRACE_STEPS" not in os.environ, reason="make flat: how many steps to watch the memory for")
def test_memory_does_not_grow_over_many_steps_of_lanes() -> None:
    slab, columns = cartpoles(times=100, size=1 << 16)
    action, strided, results, peaks = np.array([1, 2]), np.arange(4)[::2], answers(), []
    for _ in range(10):
        for i in range(int(os.environ["GYM_TRACE_STEPS"]) // 10):
            if not slab.record_action(strided if i % 7 == 0 else action):
                slab.begin(slab.memory, 1 + i % 1000, 64)
                slab.expect(tuple(columns[:1]), tuple(columns[1:]), 1)
                slab.enable_fast_path(NEVER)
            slab.record_result(*results)
        with open("/proc/self/statm", encoding="ascii") as file:
            peaks.append(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert peaks[-1] - peaks[1] < 1 << 20


# -- full slabs --------------------------------------------------------------------------------------------------------


def odd_slab_run(seed: int) -> None:
    """Decode a slab of random steps, resets and ends in Python and with the inner loops in C."""
    random = np.random.default_rng(seed)
    lanes, times = int(random.choice([1, 2, 3, 8, 9, 17, 40])), int(random.integers(1, 40))
    mode = str(random.choice([NEXT_STEP, SAME_STEP, DISABLED]))
    forms: list[Any] = [
        ("f4", (4,)),
        ("u1", ()),
        ("i8", (2,)),
        ("f2", (3,)),
        ("?", (2, 2)),
        ("c16", (9,)),
        ("i4", (0,)),
    ]
    leaves = [
        [Leaf((root, i), np.dtype(dtype), shape) for i, (dtype, shape) in enumerate(_some(random, forms))]
        for root in ("observations", "actions")
    ]
    layout = LaneLayout(lanes, times, mode, False, *leaves)
    slab = LaneSlab(Branch(None, [*leaves[0]]), Branch(None, [*leaves[1]]), times, mode == SAME_STEP)
    memory = memoryview(bytearray(random.bytes(layout.log + 200 * lanes * times + (1 << 14))))
    writer = LaneWriter(layout, slab, memory, 1, b"")
    rare = float(random.choice([0.0, 0.02, 0.3]))
    for time_ in range(int(random.integers(times + 1))):
        if random.random() < 0.05:
            writer.end(End(None if random.random() < 0.5 else 4, time_, time_))
        if random.random() < 0.1:
            of = np.arange(lanes) if random.random() < 0.5 else np.flatnonzero(random.integers(0, 2, lanes))
            observations = [_batch(random, leaf, len(of)) for leaf in leaves[0]]
            writer.reset(Reset(of, observations, np.full(len(of), 7), [NOTHING] * len(of), None, 50, 60))
        flags = random.random((2, lanes)) < rare
        ended = np.flatnonzero(flags.any(0))
        finals = (ended, [_batch(random, leaf, len(ended)) for leaf in leaves[0]]) if mode == SAME_STEP else None
        observations, actions = ([_batch(random, leaf, lanes) for leaf in some] for some in leaves)
        rewards = random.normal(size=lanes).astype(random.choice(["f8", "f8", "f8", "f4"]))
        extras = StepExtras(finals=finals, annotations={"n": rewards} if random.random() < 0.05 else {})
        writer.step(Step(1000 + 3 * time_, 5 * time_, observations, actions, rewards, *flags, extras))
    state = LaneState.initial(lanes)
    known = random.random(lanes) < random.choice([0.5, 1.0, 1.0])
    state.lanes["pending"] = known & (random.random(lanes) < 0.2) & (mode == NEXT_STEP or random.random() < 0.05)
    state.lanes["open"] = known & ~state.lanes["pending"]
    for name in ("episode", "steps", "utc", "monotonic", "seed"):
        state.lanes[name] = random.integers(0, 100, lanes)
    state = state._replace(
        episodes=100, recent=(Observed(np.arange(lanes), [_batch(random, x, lanes) for x in leaves[0]]),)
    )
    found = []
    for loops in (PYTHON_LOOPS, InnerLoops(core.lane_rows, core.lane_fragments)):
        segments, after = decoded(layout, LaneEvents(layout, 1, memory, loops=loops), state)
        found.append(([_told(segment()) for segment in segments], after.lanes.tobytes(), after.episodes))
    assert found[0] == found[1]


def _some(random: np.random.Generator, forms: list[Any]) -> list[Any]:
    return [forms[i] for i in random.integers(0, len(forms), random.integers(1, 3))]


def _batch(random: np.random.Generator, leaf: Leaf, count: int) -> np.ndarray:
    return random.integers(0, 100, (count, *leaf.shape)).astype(leaf.dtype)


def _told(segment: Segment) -> Any:
    columns = [
        (path, rows.dtype.str, rows.shape, rows.tobytes()) if isinstance(rows, np.ndarray) else (path, rows)
        for path, rows in segment.columns.items()
    ]
    return segment.fragments.tobytes(), columns, segment.size


@settings(max_examples=5 * settings().max_examples)
@given(st.integers(0, 2**32))
def test_slabs_are_decoded_as_in_pure_python(seed: int) -> None:
    odd_slab_run(seed)


def test_passes_over_arrays_that_do_not_match_raise() -> None:
    states, flags, clock = np.zeros(2, LANE), np.zeros((3, 2), bool), np.zeros(3, np.int64)
    column, excluded, out = np.zeros((2, 3, 4), "f4"), np.array([1, 5]), np.zeros((4, 4), "f4")
    assert core.lane_fragments(states, flags, flags, clock, clock, 0, 0) is None  # no lane has an episode
    assert core.lane_fragments(states, flags, flags, clock, clock, 3, 0) is None  # a mode that C does not know
    core.lane_rows(column, excluded, out)
    read_only = out.copy()
    read_only.flags.writeable = False
    wrong: list[tuple[Any, tuple[Any, ...]]] = [
        *(
            (core.lane_fragments, args)
            for args in [
                (np.zeros(2, "i8"), flags, flags, clock, clock, 0, 0),
                (states[:1], flags, flags, clock, clock, 0, 0),
                (states[:0], flags[:, :0], flags[:, :0], clock, clock, 0, 0),
                (states, flags[:2], flags, clock, clock, 0, 0),
                (states, np.zeros((2, 3), bool).T, flags, clock, clock, 0, 0),
                (states, flags, flags.astype("i4"), clock, clock, 0, 0),
                (states, flags, flags, clock, np.zeros(6, np.int64)[::2], 0, 0),
                (states, flags, flags, clock, clock, 0, -1),
                (states, flags, flags, clock, clock),
            ]
        ),
        *(
            (core.lane_rows, args)
            for args in [
                (column[0, 0], excluded, out),
                (column[..., ::2], excluded, out[:, :2].copy()),
                (column, excluded, out[:3]),
                (column, excluded, read_only),
                (column, excluded[::-1].copy(), out),
                (column, np.array([1, 6]), out),
                (column, np.array([-1, 5]), out),
                (column, excluded.astype("i4"), out),
                (column.astype(object), excluded, out),
                (column, excluded),
            ]
        ),
    ]
    for call, args in wrong:
        with pytest.raises(TypeError):
            call(*args)
