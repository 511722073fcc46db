"""The C core records dicts and tuples of numbers and texts like the packers in Python, or declines them."""

from typing import Any

import numpy as np
import pytest
from hostile_objects import Flag, Key, flag_for, reward_for, tree_value_for
from hypothesis import given, settings
from hypothesis import strategies as st
from test_core import Both, leaf, leaf_for, leaks, slab_of

from gym_trace.data.layout import Branch, Layout
from gym_trace.data.packing import pack_lenient
from gym_trace.format.ring.log import CHANGES, VALUE, WHOLE, LogFull, size_of
from gym_trace.format.ring.row_layout import RowLayout
from gym_trace.recording.single.packing import RowPackers

core = pytest.importorskip("gym_trace.recording._core", reason="the C core was not compiled")

PLAIN_FLAGS = (bool, np.bool_)
RESERVE, FLAGS, LEAD = 4 * size_of(0), 2 * size_of(0), 4096


class Refused(Exception):
    """The C core recorded a value that it should have declined."""


class Packing:
    """Packs values for rows in Python, as a recorder does, with a slab's log."""

    def __init__(self, layout: RowLayout, slab: Any):
        self._slab = slab
        self.packers = RowPackers(layout, self, self)

    def packed(self, column: str, value: Any) -> bytes:
        packed, remarks = pack_lenient(value)
        if remarks:
            raise Refused(remarks)
        return packed

    def plain(self, column: str, value: Any) -> Any:
        return value

    def snapshot(self, column: str, value: Any) -> Any:
        raise Refused(column, value)

    def log_value(self, column: int, packed: bytes) -> None:
        self._slab.append(VALUE, packed, 0, column)

    def log_whole(self, column: int, value: bytes) -> None:
        self._slab.append(WHOLE, value, 0, column)

    def log_changes(self, column: int, count: int, changes: bytes) -> bool:
        if not self._slab.has_room(size_of(len(changes))):
            return False
        self._slab.append(CHANGES, changes, 0, column, count)
        return True

    def follow(self) -> None:
        """Make the slab follow large values, where it can."""
        for column, packer in self.packers.deltas.items():
            self._slab.follow(column, packer.before, packer.ready, packer.limit)


class BothTrees(Both):
    """A slab in C, and one in Python that gets all values the one in C accepts."""

    def __init__(self, layout: RowLayout, random: np.random.Generator, size: int):
        super().__init__(layout, random, size)
        self._packing = Packing(layout, self.python)

    def record_action(self, action: Any) -> bool:
        before = bytes(self.c.memory)
        if not self.c.record_action(action):
            assert bytes(self.c.memory) == before
            return False
        self.python.record_packed_action(self._packing.packers.action(action))
        self.compare()
        return True

    def record_result(self, observation: Any, reward: Any, terminated: Any, truncated: Any) -> bool:
        before = bytes(self.c.memory)
        if not self.c.record_result(observation, reward, terminated, truncated):
            assert bytes(self.c.memory) == before
            return False
        assert self.python.has_room()
        self.python.record_packed_result(
            self._packing.packers.observation(observation), float(reward), terminated, truncated
        )
        self.compare()
        self.compare_texts()
        return True

    def start(self, kept: bytes, observation: Any) -> bool:
        if not self.c.start((1, 0, 2, kept, 3, 4), observation):
            return False
        packed = self._packing.packers.observation(observation)
        self.python.initial = self.python.rows
        self.python.append(1, kept, 1, 0, 1, 2, 3, 4)
        self.python.record_initial(packed)
        self.compare()
        self.compare_texts()
        return True

    def compare_texts(self) -> None:
        last = [entry for entry in self.python.entries() if entry.kind == VALUE and entry.row == self.python.rows - 1]
        columns = range(len(self.layout.observation_leaves))
        assert self.c.last_texts() == {e.column: bytes(e.payload) for e in last if e.column in columns}


def tree_for(random: np.random.Generator, name: str, depth: int = 0) -> Layout:
    """A layout of any leaves."""
    if random.random() < 0.25 + 0.25 * depth:
        return leaf(name, None) if random.random() < 0.4 else leaf_for(random, name)
    count = int(random.integers(4))
    keys: list[str | int] | None = [f"k{i}" if random.random() < 0.7 else i for i in range(count)]
    return Branch(keys if random.random() < 0.6 else None, [tree_for(random, name, depth + 1) for _ in range(count)])


def odd_tree_run(seed: int) -> None:
    """Do random steps on slabs with random layouts."""
    random = np.random.default_rng(seed)
    layout = RowLayout(tree_for(random, "observations"), tree_for(random, "actions"))
    both = BothTrees(layout, random, 8 * int(random.integers(100, 4000)))
    for _ in range(int(random.integers(30))):
        if not both.python.has_room():
            both.begin()
            both._packing = Packing(layout, both.python)
        if random.random() < 0.1:
            both.start(random.bytes(int(random.integers(99))), tree_value_for(random, layout.observation))
            continue
        if not both.record_action(tree_value_for(random, layout.action)) and both.do("has_room"):
            both.do("record_packed_action", random.bytes(layout.action_bytes))
        both.record_result(tree_value_for(random, layout.observation), reward_for(random), *_plain_flags(random))


def _plain_flags(random: np.random.Generator) -> list[Any]:
    flags = [flag_for(random), flag_for(random)]
    return flags if all(isinstance(flag, PLAIN_FLAGS) for flag in flags) else [False, False]


@settings(max_examples=5 * settings().max_examples)
@given(st.integers(0, 2**32))
def test_recorded_values_have_the_bytes_of_the_python_packers(seed: int) -> None:
    odd_tree_run(seed)


def odd_large_run(seed: int) -> None:
    """Do steps with large values: little changed, much changed, or invalid."""
    random = np.random.default_rng(seed)
    forms: list[Any] = [("u1", (70, 60)), ("u1", (4097,)), ("i2", (41, 50)), (">f4", (1030,))]
    large = leaf("o", *forms[random.integers(4)])
    tree: Layout = Branch(["a", "b", "c"], [leaf("o", None), large, large]) if random.random() < 0.5 else large
    both = Both(RowLayout(tree, leaf("actions", "i8")), random, 8 * int(random.integers(1000, 20_000)))
    packings = [Packing(both.layout, slab) for slab in (both.python, both.c)]
    packings[1].follow()
    frames = [np.zeros(large.shape, large.dtype) for _ in range(2)]
    for _ in range(int(random.integers(30))):
        frames = [changed(random, frame) for frame in frames]
        value = {"b": frames[0], "a": "text", "c": frames[1]} if isinstance(tree, Branch) else frames[0]
        over = bool(random.random() < 0.1)
        if not both.do("record_action", 1):
            return
        try:
            if not both.c.record_result(value, 1.0, over, False):
                packed = packings[1].packers.observation(value)
                if both.c.has_room(FLAGS):
                    both.c.record_packed_result(packed, 1.0, over, False)
            packed = packings[0].packers.observation(value)
        except (LogFull, Refused):
            return
        if not both.python.has_room(FLAGS):
            return
        both.python.record_packed_result(packed, 1.0, over, False)
        both.compare()
        for one, other in zip(*(packing.packers.deltas.values() for packing in packings)):
            assert (one.last(), one.ready.tolist()) == (other.last(), other.ready.tolist())


def changed(random: np.random.Generator, frame: np.ndarray) -> np.ndarray:
    """Return the next frame."""
    if random.random() < 0.1:
        return np.frombuffer(random.bytes(frame.nbytes), frame.dtype).reshape(frame.shape)
    if random.random() < 0.1:
        return np.asfortranarray(frame)
    flat = frame.flatten()
    for _ in range(int(random.integers(4))):
        at, length = random.integers(flat.size), random.integers(1, 99)
        flat[at : at + length] = random.integers(9)
    return flat.reshape(frame.shape)


@settings(max_examples=3 * settings().max_examples)
@given(st.integers(0, 2**32))
def test_changes_of_large_values_agree_with_the_python_packers(seed: int) -> None:
    odd_large_run(seed)


def test_the_first_frame_is_declined_and_an_equal_one_accepted() -> None:
    layout = RowLayout(leaf("observations", "u1", (70, 60)), leaf("actions", "i8"))
    slab = both_of(layout).c
    packing = Packing(layout, slab)
    frame = np.zeros((70, 60), "u1")
    for follows in (False, True):
        if follows:
            packing.follow()
            packing.packers.forget()
        slab.record_action(1)
        assert slab.record_result(frame, 1.0, False, False) is False
        slab.record_packed_result(packing.packers.observation(frame), 1.0, False, False)
    frame[3, 4] = 9
    for value, taken in ((frame, True), (frame, True), (frame + np.uint8(1), False), (frame.T.copy().T, False)):
        slab.record_action(1)
        assert slab.record_result(value, 1.0, False, False) is taken
    assert packing.packers.deltas[0].last() == frame.tobytes()
    packing.packers.forget()
    assert slab.record_result(frame, 1.0, False, False) is False


def test_follow_raises_for_arrays_that_do_not_match_the_leaf() -> None:
    slab = both_of(RowLayout(leaf("observations", "u1", (70, 60)), leaf("actions", "i8"))).c
    before, ready = np.zeros(525, "u8"), np.zeros(1, "?")
    read_only = before.copy()
    read_only.flags.writeable = False
    befores = [before[1:], read_only, np.zeros(4200, "S1"), np.zeros(525, object), np.zeros(1050, "u8")[::2]]
    wrong: list[Any] = [(0, other, ready, 1) for other in befores]
    wrong += [(0, before, ready, 526), (0, before, ready, -1), (1, before, ready, 1)]
    wrong += [(0, before, np.zeros(2, "?"), 1), (0, before, np.zeros(1, "u1"), 1)]
    for args in wrong:
        with pytest.raises(ValueError, match="large"):
            slab.follow(*args)
    for args in ((0, None, ready, 1), (0, before, ready), ("0", before, ready, 1)):
        with pytest.raises(TypeError):
            slab.follow(*args)
    slab.follow(7, before, ready, 1)  # an unknown leaf
    slab.follow(0, before, ready, 0)
    ready[0] = True
    slab.record_action(1)
    assert slab.record_result(np.ones((70, 60), "u1"), 1.0, False, False) is False
    assert slab.record_result(np.zeros((70, 60), "u1"), 1.0, False, False) is True


def minigrid() -> RowLayout:
    keys: list[str | int] = ["direction", "image", "mission"]
    leaves: list[Layout] = [leaf("d", "i8"), leaf("i", "u1", (7, 7, 3)), leaf("m", None)]
    return RowLayout(Branch(keys, leaves), leaf("actions", "i8"))


def seen(**other: Any) -> dict[str, Any]:
    return {"image": np.zeros((7, 7, 3), "u1"), "direction": 3, "mission": "get to the green goal square", **other}


def both_of(layout: RowLayout, size: int = 1 << 16) -> BothTrees:
    return BothTrees(layout, np.random.default_rng(0), size)


def test_a_dict_of_an_image_a_number_and_a_text_is_recorded() -> None:
    both = both_of(minigrid())
    assert both.start(b"kept", seen())
    assert both.record_action(2)
    assert both.record_result(seen(direction=np.int64(1), mission="é" * 200), 1.0, False, False)
    assert both.record_action(np.int64(2))
    assert both.record_result(seen(), 0, np.True_, False)
    assert both.c.ended


def test_values_outside_the_space_are_declined_without_side_effects() -> None:
    both = both_of(minigrid())
    both.record_action(1)
    before = bytes(both.c.memory)
    keyed = {Key(key): value for key, value in seen().items()}
    odd: list[Any] = [seen(direction=2**63), seen(direction=1.0), seen(mission="\ud800"), seen(mission=b""), keyed]
    odd += [seen(mission="x" * 4097), seen(image=np.zeros((7, 7, 2), "u1")), seen(more=1), list(seen()), None]
    for observation in odd:
        assert both.c.record_result(observation, 1.0, True, False) is False
    assert bytes(both.c.memory) == before


def test_a_flag_that_replaces_the_slab_writes_texts_to_the_new_one() -> None:
    both = both_of(minigrid())
    both.record_action(1)
    before, slab = both.c.memory, both.c
    kept = bytes(before)

    def turn() -> bool:
        slab.begin(memoryview(bytearray(4096)), 8)
        slab.enable_fast_path(1)
        assert slab.record_action(2)
        return True

    assert slab.record_result(seen(), 1.0, Flag(turn), False)
    assert bytes(before) == kept
    assert (slab.rows, slab.ended, list(slab.last_texts())) == (1, True, [2])


@pytest.mark.parametrize("size", range(2048, 2048 + 600, 8))
def test_texts_are_accepted_as_long_as_they_fit_in_the_slab(size: int) -> None:
    both = both_of(minigrid(), size)
    text = size_of(1 + len(seen()["mission"]))
    while both.record_action(1):
        fits = both.python.has_room(text + FLAGS)
        assert both.record_result(seen(), 1.0, False, False) is fits
        if not fits:
            break


def test_last_texts_returns_the_texts_of_the_last_row() -> None:
    both = both_of(minigrid())
    assert both.c.last_texts() == {}
    both.start(b"", seen(mission="go"))
    assert both.c.last_texts() == {2: b"\xa2go"}
    both.c.append(VALUE, b"\xc0", 0, 2)
    assert both.c.last_texts() == {2: b"\xa2go"}
    both.c.record_initial(b"")
    assert both.c.last_texts() == {}
    both.c.record_action(1)
    both.c.record_result(seen(mission=""), 1.0, False, False)
    assert both.c.last_texts() == {2: b"\xa0"}
    both.c.drop(0)
    assert both.c.last_texts() == {}


def test_unsupported_or_too_large_trees_are_declined() -> None:
    many = Branch(None, [leaf("o", "i8") for _ in range(64)])
    known = Branch(None, [leaf("o", "i8") for _ in range(63)])
    keyed = Branch([("a", "key")], [leaf("o", "i8")])  # type: ignore[list-item]
    frames = Branch(None, [leaf("o", "u1", (100, 100, 3)), leaf("o", "i8")])
    for tree, value in ((many, (1,) * 64), (keyed, {("a", "key"): 1}), (frames, (np.zeros((100, 100, 3), "u1"), 1))):
        slab = both_of(RowLayout(tree, leaf("actions", "i8"))).c
        assert slab.record_action(1)
        assert slab.record_result(value, 1.0, False, False) is False
    assert both_of(RowLayout(leaf("observations", "f4"), known)).record_action([1] * 63)


def test_a_layout_without_children_raises() -> None:
    layout = minigrid()
    layout.observation = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        core.RowSlab(layout)


def test_trees_leak_no_references() -> None:
    layout = minigrid()
    observation, strided = seen(), seen(image=np.zeros((7, 7, 6), "u1")[..., ::2])
    odd = seen(image=strided["image"], mission=None)
    large = RowLayout(leaf("observations", "u1", (70, 60)), leaf("actions", "i8"))
    frame, before_it, ready = np.zeros((70, 60), "u1"), np.zeros(525, "u8"), np.ones(1, "?")
    held = [large, frame, before_it, ready, layout, layout.observation, layout.leaves[1].dtype]
    held += [*observation.values(), *strided.values(), odd, "mission"]

    def use() -> None:
        slab = slab_of(core.RowSlab, layout, 1 << 14)
        slab.start((1, 0, 2, b"", 3, 4), observation)
        for value in (observation, strided, odd):
            slab.record_action(1)
            slab.record_result(value, 1.0, False, False)
            slab.last_texts()
        slab = slab_of(core.RowSlab, large, 1 << 14)
        for _ in range(2):
            slab.follow(0, before_it, ready, 9)
            slab.record_action(1)
            assert slab.record_result(frame, 1.0, False, False)

    use()
    assert not any(leaks(use, 50, held))
