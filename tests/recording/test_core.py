"""The C core returns the same results and writes the same bytes as the pure Python rows, for any input."""

import gc
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hostile_objects import Child, Flag, flag_for, reward_for, value_for
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_trace.data.deltas import changed_words
from gym_trace.data.layout import Layout, Leaf
from gym_trace.format.ring.log import FLAG, VALUE, LogFull
from gym_trace.format.ring.row_layout import RowLayout
from gym_trace.format.ring.row_slab import RowSlab

core = pytest.importorskip("gym_trace.recording._core", reason="the C core was not compiled")

INTEGERS = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "q", "Q", ">i2"]
DTYPES = ["?", *INTEGERS, "f2", "f4", "f8", "c8", "c16", "g", "G", ">f4", ">c16"]
SHAPES: list[tuple[int, ...]] = [(), (1,), (3,), (4,), (0,), (2, 3), (5, 1, 2), (3, 0), (1,) * 12, (40, 40)]
RAISED = (struct.error, ValueError, OverflowError, TypeError, LogFull, ZeroDivisionError)


def leaf(name: str, dtype: Any, shape: tuple[int, ...] = ()) -> Leaf:
    return Leaf((name,), None if dtype is None else np.dtype(dtype), shape)


def cartpole() -> RowLayout:
    return RowLayout(leaf("observations", "f4", (4,)), leaf("actions", "i8"))


def slab_of(kind: Any, layout: RowLayout, size: int = 4096, sequence: int = 7) -> Any:
    slab = kind(layout)
    slab.begin(memoryview(bytearray(size)), sequence)
    slab.enable_fast_path(1 << 62)
    return slab


class Both:
    """A slab in Python and one in C that get the same calls."""

    def __init__(self, layout: RowLayout, random: np.random.Generator, size: int, may: tuple[int, ...] = ()):
        self.layout, self._random, self._size = layout, random, size
        self.python, self.c = RowSlab(layout, *may), core.RowSlab(layout, *may)
        self._sequence = 0
        self._since = time.time_ns(), time.monotonic_ns()
        self.begin()

    def begin(self) -> None:
        """Begin a slab in used memory."""
        self._sequence += 1
        self._declined = False
        before = self._random.bytes(self._size)
        for slab in (self.python, self.c):
            slab.begin(memoryview(bytearray(before)), self._sequence)
            slab.enable_fast_path(1 << 62)
        self.compare()

    def move(self) -> None:
        """Move both slabs into larger memory, as a recorder does when a small slab is full."""
        rows = self.python.rows + (self.python.pending_action() is not None)
        cut = self._size - rows * self.layout.size
        self._size += 8 * int(self._random.integers(1000))
        for slab in (self.python, self.c):
            start, end = bytes(slab.memory[:cut]), bytes(slab.memory[cut:])
            slab.move(memoryview(bytearray(start + bytes(self._size - len(start) - len(end)) + end)))
        self._declined = False
        self.compare()

    def do(self, name: str, *args: Any, **named: Any) -> Any:
        """Call a method of both; both must return or raise the same."""
        results = [_outcome(getattr(slab, name), args, named) for slab in (self.python, self.c)]
        assert results[0] == results[1], f"{name}{args}: {results}"
        if name.startswith(("record_action", "record_result", "record_initial")):
            self._declined = name == "record_action" and not results[0]
        self.compare()
        return results[0]

    def compare(self) -> None:
        states = [
            (slab.rows, slab.logged, slab.initial, slab.ended, slab.sequence, slab.is_between_episodes())
            for slab in (self.python, self.c)
        ]
        assert states[0] == states[1]
        for slab in (self.python, self.c):
            self._clear_times(slab)
        assert self._image(self.python) == self._image(self.c)

    def _image(self, slab: Any) -> bytearray:
        """Return the bytes of a slab without those of a declined action, where a too large number may leave zeros."""
        image = bytearray(slab.memory)
        at = self._size - (slab.rows + 1) * self.layout.size
        if at >= 0 and self._declined:
            image[at : at + self.layout.reward] = bytes(self.layout.reward)
        return image

    def _clear_times(self, slab: Any) -> None:
        for entry in slab.entries():
            if entry.kind == FLAG and entry.c:
                assert self._since[0] <= entry.c <= time.time_ns()
                assert self._since[1] <= entry.d <= time.monotonic_ns()
                slab.memory[entry.at + 32 : entry.at + 48] = bytes(16)


def _outcome(method: Any, args: Any, named: Any) -> Any:
    try:
        return method(*args, **named)
    except RAISED as error:
        return "refused" if isinstance(error, (struct.error, OverflowError)) else type(error)


def leaf_for(random: np.random.Generator, name: str) -> Leaf:
    """A leaf of fixed size."""
    shape = () if random.random() < 0.4 else SHAPES[random.integers(len(SHAPES))]
    return leaf(name, DTYPES[random.integers(len(DTYPES))], shape)


def odd_step(both: Both, random: np.random.Generator) -> None:
    """Record a step of any values as a recorder does, with the fallback for declined values."""
    layout = both.layout
    action, observation = (
        value_for(random, tree) for tree in (layout.action, layout.observation) if isinstance(tree, Leaf)
    )
    if _swapped(layout.action, action) or _swapped(layout.observation, observation):
        return
    if not both.do("record_action", action):
        if not both.do("has_room"):
            return
        both.do("record_packed_action", random.bytes(layout.action_bytes))
    if random.random() < 0.1:
        return  # the environment raised
    flags = flag_for(random), flag_for(random)
    if not both.do("record_result", observation, reward_for(random), *flags):
        both.do("record_packed_result", random.bytes(layout.observation_bytes), float(random.normal()), *flags)


def _swapped(tree: Layout, value: Any) -> bool:
    """Return True if the leaf of a scalar has a foreign byte order, which the packer must swap."""
    foreign = isinstance(tree, Leaf) and tree.dtype is not None and not tree.dtype.isnative
    return foreign and isinstance(value, (np.generic, int))


def odd_operation(both: Both, random: np.random.Generator) -> None:
    """Do any other operation of a recorder on a slab."""
    room = both.do("has_room", 200)
    chosen = random.integers(9)
    if chosen == 0 and room:
        both.do("record_initial", random.bytes(int(random.integers(both.layout.observation_bytes + 1))))
    elif chosen == 1:
        both.do("append", VALUE, random.bytes(int(random.integers(120))), 3, column=2, a=-(2**63), d=2**63 - 1)
    elif chosen == 2:
        both.do(
            "append", int(random.integers(4, 11)), **{str(random.choice(["a", "b", "c", "d"])): int(random.integers(9))}
        )
    elif chosen == 3:
        both.do("disable_fast_path")
    elif chosen == 4:
        both.do("enable_fast_path", [1 << 62, 0, int(random.integers(both.python.rows + 3))][random.integers(3)])
    elif chosen == 5:
        both.do("only_floats", bool(random.integers(2)))
    elif chosen == 6 and isinstance(both.layout.observation, Leaf):
        observation = value_for(random, both.layout.observation)
        if not _swapped(both.layout.observation, observation):
            both.do("start", (1, 0, 2, random.bytes(int(random.integers(120))), 3, 4), observation)
    elif chosen == 7:
        both.do("drop", int(random.integers(len(both.python.entries()) + 1)))
    elif random.random() < 0.2:
        both.begin()
    else:
        both.move()
    both.do("pending_action")
    both.do("last_row")


def odd_run(seed: int) -> None:
    """Do random steps and operations on slabs with random layouts."""
    random = np.random.default_rng(seed)
    layout = RowLayout(leaf_for(random, "observations"), leaf_for(random, "actions"))
    may = bool(random.random() < 0.9), bool(random.random() < 0.9), int(random.choice([0, 0, 56, 1000]))
    both = Both(layout, random, 8 * int(random.integers(16, 2000)), may)
    for _ in range(int(random.integers(60))):
        (odd_step if random.random() < 0.7 else odd_operation)(both, random)


@settings(max_examples=5 * settings().max_examples)
@given(st.integers(0, 2**32))
def test_the_c_core_writes_the_bytes_of_pure_python(seed: int) -> None:
    odd_run(seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_of_each_dtype_and_shape_are_recorded(dtype: str, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(1)
    layout = RowLayout(leaf("observations", dtype, shape), leaf("actions", dtype, shape))
    both = Both(layout, random, 1 << 16)
    value = np.ones(shape, dtype)
    fits = both.layout.delta_leaves == []
    for slab in (both.python, both.c)[not fits :]:
        assert slab.record_action(value) is fits
        assert slab.record_result(value, 1.0, False, False) is fits
    if fits:
        both.compare()


def test_only_values_of_the_exact_type_are_accepted() -> None:
    slab = slab_of(core.RowSlab, cartpole())
    before = bytes(slab.memory)
    for action in (1.0, np.int32(1), np.array([1]), None, 2**63, True, "1"):
        assert slab.record_action(action) is False
    assert bytes(slab.memory) == before
    assert slab.record_action(np.int64(1))
    asked = bytes(slab.memory)
    for observation in (np.zeros(4), np.zeros((4, 1), "f4"), np.zeros(5, "f4"), [0.0] * 4, None):
        assert slab.record_result(observation, 1.0, True, False) is False
    for reward in (np.float32(1), True, None, 2**53 + 1, "1"):
        assert slab.record_result(np.zeros(4, "f4"), reward, True, False) is False
    assert (bytes(slab.memory), slab.rows, slab.ended) == (asked, 0, False)


def test_a_flag_that_raises_leaves_the_slab_as_it_was() -> None:
    slab = slab_of(core.RowSlab, cartpole())
    slab.record_action(1)
    asked = bytes(slab.memory)

    def refuse() -> bool:
        raise KeyboardInterrupt

    for flags in ((Flag(refuse), False), (False, Flag(refuse))):
        with pytest.raises(KeyboardInterrupt):
            slab.record_result(np.zeros(4, "f4"), 1.0, *flags)
    assert (bytes(slab.memory), slab.rows) == (asked, 0)


@pytest.mark.parametrize("method", ["record_result", "record_packed_result"])
def test_a_flag_that_replaces_the_slab_writes_to_the_new_one(method: str) -> None:
    """The old memory is released, and nothing is written to it afterwards."""
    slab = slab_of(core.RowSlab, cartpole(), 1 << 20)
    for _ in range(1000):
        assert slab.record_action(1)
        assert slab.record_result(np.zeros(4, "f4"), 1.0, False, False)
    slab.record_action(1)
    before = slab.memory

    def turn() -> bool:
        slab.begin(memoryview(bytearray(4096)), 8)
        slab.enable_fast_path(1)
        assert slab.record_action(2)
        return True

    kept = bytes(before)
    observation = np.ones(4, "f4") if method == "record_result" else b""
    getattr(slab, method)(observation, 1.0, Flag(turn), False)
    assert bytes(before) == kept
    assert (slab.sequence, slab.rows, slab.ended) == (8, 1, True)


def test_an_observation_replaced_by_its_flag_is_read_again() -> None:
    slab = slab_of(core.RowSlab, cartpole())
    slab.record_action(1)
    observation = np.zeros(4, "f4")

    def change() -> bool:
        observation.resize(400_000, refcheck=False)
        return False

    assert slab.record_result(observation, 1.0, Flag(change), False) is False
    assert slab.rows == 0


def test_held_memory_cannot_be_released() -> None:
    content = bytearray(4096)
    slab = core.RowSlab(cartpole())
    slab.begin(memoryview(content), 1)
    with pytest.raises(BufferError):
        content.clear()
    del slab
    content.clear()


def fill_log(slab: Any) -> None:
    while True:
        slab.append(VALUE, bytes(24))


def test_no_row_is_written_beyond_the_slab() -> None:
    layout = cartpole()
    for size in (*range(128, 128 + 5 * layout.size, 8), 1024):
        slab = slab_of(core.RowSlab, layout, size)
        rows = 0
        while slab.has_room():
            slab.record_initial(b"\xff" * 1000)
            rows += 1
        assert slab.record_action(1) is False
        for _ in range(rows, size // layout.size + 2):  # rows without a has_room() check
            try:
                slab.record_initial(b"\xff" * 1000)
            except ValueError:
                break
        else:
            pytest.fail("more rows than there is memory")
        assert slab.record_result(np.zeros(4, "f4"), 1.0, False, False) is False
        for put in (
            lambda slab: slab.record_packed_action(b""),
            lambda slab: slab.record_packed_result(b"", 0.0, False, False),
        ):
            with pytest.raises(ValueError, match="no room"):
                put(slab)
        with pytest.raises(LogFull):
            fill_log(slab)


def test_memory_of_an_invalid_size_raises() -> None:
    slab = core.RowSlab(cartpole())
    for length in (0, 8, 64, 120, 4097, 4100):
        with pytest.raises(ValueError, match="slab"):
            slab.begin(memoryview(bytearray(length)), 1)
        assert slab.record_action(1) is False


def test_invalid_memory_numbers_and_layouts_raise() -> None:
    slab = slab_of(core.RowSlab, cartpole())
    good = memoryview(bytearray(4096))
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        *((TypeError, "", partial(slab.begin, *args)) for args in ((bytearray(4096), 1), (None, 1), (good, "1"))),
        (BufferError, "", lambda: slab.begin(memoryview(bytes(4096)), 1)),
        (ValueError, "aligned", lambda: slab.begin(memoryview(bytearray(4104))[1:4097], 1)),
        (BufferError, "", lambda: slab.begin(memoryview(bytearray(8192))[::2], 1)),
        (OverflowError, "", lambda: slab.begin(good, 1 << 32)),
        (OverflowError, "", lambda: slab.append(1 << 16)),
        (OverflowError, "", lambda: slab.append(1, flags=-1)),
        (TypeError, "", lambda: slab.append(1, "text")),
        *((ValueError, "fewer entries", partial(slab.drop, count)) for count in (1, 1 << 40)),
        (AttributeError, "", lambda: core.RowSlab(None)),
        (AttributeError, "", lambda: setattr(slab, "rows", 10**6)),
    ]
    for error, match, call in wrong:
        with pytest.raises(error, match=match or None):
            call()
    assert slab.record_action(1)


@pytest.mark.parametrize("name", ["size", "asked", "reward", "done"])
@pytest.mark.parametrize("number", [-8, 0, 1, 7, 1 << 41, 1 << 63, "8"])
def test_an_invalid_layout_raises(name: str, number: Any) -> None:
    layout = cartpole()
    setattr(layout, name, number)
    with pytest.raises((ValueError, TypeError, OverflowError)):
        core.RowSlab(layout)


def test_leaves_larger_than_the_row_raise() -> None:
    layout = cartpole()
    layout.observation = leaf("observations", "f4", (5,))
    with pytest.raises(ValueError, match="layout"):
        core.RowSlab(layout)


def test_an_uninitialized_slab_writes_nothing() -> None:
    for slab in (core.RowSlab.__new__(core.RowSlab), core.RowSlab(cartpole())):
        assert slab.record_action(1) is False
        assert slab.record_result(np.zeros(4, "f4"), 1.0, True, False) is False
        assert slab.has_room() is False
        assert slab.pending_action() is None
        assert slab.entries() == []
        assert slab.last_row() == b""
        slab.disable_fast_path()
        for method, args in (
            ("record_initial", (b"",)),
            ("record_packed_action", (b"",)),
            ("enable_fast_path", (1,)),
            ("drop", (0,)),
        ):
            with pytest.raises(ValueError, match=r"no room|fewer entries"):
                getattr(slab, method)(*args)
        with pytest.raises(LogFull):
            slab.append(1)
    with pytest.raises(ValueError, match="no room"):
        core.RowSlab.__new__(core.RowSlab).begin(memoryview(bytearray(4096)), 1)
    with pytest.raises(TypeError, match="once"):
        slab.__init__(cartpole())


def test_the_c_core_leaks_no_references() -> None:
    layout = cartpole()
    observation, strided, odd = np.zeros(4, "f4"), np.zeros(8, "f4")[::2], Flag(lambda: True)
    action, payload = np.int64(1), bytes(100)
    content = bytearray(1 << 16)
    memory = memoryview(content)
    held = [layout, layout.action.dtype, observation, strided, odd, action, payload, memory, content, LogFull, Leaf]  # type: ignore[union-attr]

    def use() -> None:
        slab = core.RowSlab(layout)
        for sequence in (1, 2):
            slab.begin(memory, sequence)
            slab.enable_fast_path(1 << 62)
            for seen in (observation, strided, None):
                slab.record_action(action)
                slab.record_result(seen, 1.0, False, False)
            slab.append(VALUE, payload, a=1)
            slab.entries()
            slab.record_action(1)
            slab.record_result(observation, 1, odd, odd)
            with pytest.raises(LogFull):
                slab.append(VALUE, content * 2)

    use()
    # The minimum of three runs, because other code sometimes changes the counts of NumPy's dtypes.
    leaked = np.min([leaks(use, 300, held) for _ in range(3)], 0)
    assert leaked.max() < 150, leaked


def leaks(use: Callable[[], None], times: int, held: list[Any]) -> list[int]:
    """Return how much the reference count of each object changes."""
    counts = []
    for count in (0, times):
        for _ in range(count):
            use()
        gc.collect()
        counts.append([sys.getrefcount(thing) for thing in held])
    return [abs(after - before) for before, after in zip(*counts)]


@settings(max_examples=3 * settings().max_examples)
@given(st.integers(0, 2**32))
def test_changed_words_agree_with_pure_python(seed: int) -> None:
    odd_frames(seed)


def odd_frames(seed: int) -> None:
    """Compare a sequence of values of one size."""
    random = np.random.default_rng(seed)
    words = [0, 1, 3, 16, 127, 128, 129, 700, 3000][random.integers(9)]
    word = np.dtype(f"<u{[1, 2, 4, 8][random.integers(4)]}")
    befores = [np.frombuffer(bytearray(words * word.itemsize), word) for _ in range(2)]
    value = befores[0].copy()
    for _ in range(5):
        for _ in range(random.integers(4) if words else 0):
            at, length = random.integers(words), random.integers(1, 70)
            value[at : at + length] = random.integers(0, 3)
        most = int(random.integers(0, words + 2))
        shifted = np.frombuffer(b" " + value.tobytes(), np.uint8)[1:]  # like unaligned frames
        found = [find(before, shifted, most) for find, before in zip((changed_words, core.changed_words), befores)]
        assert found[0] == found[1]
        assert befores[0].tobytes() == befores[1].tobytes()
        assert found[0] is None or befores[1].tobytes() == value.tobytes()


def test_changed_words_of_incomparable_arrays_raise() -> None:
    before, value = np.zeros(8, "<u8"), np.zeros((4, 16), "u1")
    read_only = before.copy()
    read_only.flags.writeable = False
    wrong: list[Any] = [
        (read_only, value, 1),
        (before[::2], value[:2], 1),
        (before, value[:, ::2], 1),
        (before, value[:3], 1),
        (before, value.tobytes(), 1),
        (before, value, -1),
        (before, value),
        (before.view(Child), value, 1),
        (before, value.view(Child), 1),
        (np.zeros(8, object), value, 1),
        (before, np.zeros(8, object), 1),
        (np.zeros(4, "c16"), value, 1),
    ]
    for args in wrong:
        with pytest.raises(TypeError):
            core.changed_words(*args)
    with pytest.raises(TypeError):
        core.changed_words(before, value, "1")
    assert core.changed_words(before, value, 1 << 62) == b""


@pytest.mark.skipif("GYM_TRACE_STEPS" not in os.environ, reason="make flat: how many steps to watch the memory for")
def test_memory_does_not_grow_over_many_steps() -> None:
    layout = cartpole()
    slab, memory = core.RowSlab(layout), memoryview(bytearray(1 << 18))
    observations = [np.zeros(4, "f4"), np.zeros(8, "f4")[::2], np.zeros(3)]
    rewards, over = [1.0, np.float64(2.0), 3, None], [False] * 90 + [True, np.True_, Flag(lambda: True)]
    peaks = []
    for _ in range(10):
        for i in range(int(os.environ["GYM_TRACE_STEPS"]) // 10):
            if not slab.rows or not slab.record_action(i):
                slab.begin(memory, 1 + i % 1000)
                slab.enable_fast_path(1 << 62)
                slab.append(VALUE, bytes(i % 500), a=i)
                slab.record_action(i)
            slab.record_result(observations[i % 3], rewards[i % 4], over[i % len(over)], False)
        with open("/proc/self/statm", encoding="ascii") as file:
            peaks.append(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    print(f"resident after each tenth, MB: {[round(peak / 1e6, 2) for peak in peaks]}")
    assert peaks[-1] - peaks[1] < 1 << 20


def test_gym_trace_pure_disables_the_c_core() -> None:
    script = "from gym_trace.recording import core; print(core.CORE, core.RowSlab.__module__)"
    for pure, expected in (("1", "pure gym_trace.format.ring.row_slab"), ("0", "compiled gym_trace.recording._core")):
        environ = {**os.environ, "GYM_TRACE_PURE": pure}
        done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
