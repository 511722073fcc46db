"""Any value of an environment or agent is recorded, or its repr with one warning; none stops the run."""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import dataclasses
import decimal
import fractions
import json
import sys
import types
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces, vector
from hypothesis import given
from hypothesis import strategies as st
from runs import acted, warned
from scripted_env import Result, ScriptedEnv, bits, scripted, small_blocks, spoil
from vector_wrapper import TraceRecordingVectorWrapper

from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.data.packing import pack_lenient, unpack
from gym_trace.data.returns import number_of
from gym_trace.data.tensors import RawArray
from gym_trace.data.values import Unstored
from gym_trace.errors import UnstorableValue
from gym_trace.tools.statistics.summary import summarize


class Symbol:
    """A symbolic number without a value, as in sympy."""

    def __float__(self) -> float:
        raise TypeError("cannot convert expression to float")

    def __repr__(self) -> str:
        return "x"


_STEPS_TO_NUMPY = ("detach", "cpu", "resolve_conj", "resolve_neg")


class Tensor:
    """Like a PyTorch tensor: on a device, with gradients, lazily conjugate; methods must be called in order."""

    requires_grad = True
    is_quantized = is_sparse = False

    def __init__(self, data: Any, dtype: str = "torch.float32", undone: tuple[str, ...] = ()):
        self.data, self.dtype, self._undone = data, dtype, undone
        self.shape = data.shape

    def __getattr__(self, name: str) -> Any:
        if name not in _STEPS_TO_NUMPY:
            raise AttributeError(name)
        return lambda: Tensor(self.data, self.dtype, (*self._undone, name))

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def numpy(self) -> Any:
        if self._undone != _STEPS_TO_NUMPY:
            raise RuntimeError("use tensor.detach().cpu().resolve_conj().numpy()")
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.data

    def contiguous(self) -> Tensor:
        return self

    def reshape(self, size: int) -> Tensor:
        return Tensor(self.data.reshape(size), self.dtype, self._undone)

    def view(self, dtype: Any) -> Tensor:
        return Tensor(self.data.view(dtype), "torch.uint8", self._undone)

    def element_size(self) -> int:
        return int(self.data.itemsize)


REWARDS = [
    fractions.Fraction(1, 3), decimal.Decimal("0.1"), None, "text", object(), Symbol(), [1.0], {"a": 1}, 1j, 2**80,
    10**5000, np.zeros(2), np.ma.masked, np.zeros(1, [("a", "<i4")]), Tensor(np.array(1.0)), b"x", float("nan"), (),
]  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"record_infos": True}, {"reward_classes": [0.0, 1.0]}], ids=repr)
@pytest.mark.parametrize("reward", REWARDS, ids=lambda reward: type(reward).__name__)
def test_a_reward_of_any_kind_at_any_step_loses_nothing(tmp_path: Path, reward: Any, options: dict[str, Any]) -> None:
    steps = [Result(np.int64(i % 2), reward if i == 50 else 1.0) for i in range(90)]
    env = ScriptedEnv(spaces.Discrete(2), spaces.Discrete(2), [(np.int64(0), steps), (np.int64(0), steps[:3])])
    wrapped = TraceRecordingWrapper(env, tmp_path, flush_seconds=60, **options)

    def record() -> None:
        wrapped.reset(seed=0)
        assert [wrapped.step(1)[1] is not None for _ in range(90)].count(False) == (reward is None)
        acted(wrapped, "reset", 0, "close")

    assert len(warned(record)) <= 1
    trace = open_trace(tmp_path)
    kept = [reward for episode in trace for reward in episode.rewards]
    assert len(kept) == 91 or "reward_classes" in options
    assert len([reward for reward in kept if number_of(reward) != 1.0]) <= 1
    summary = summarize(trace, columns=True)
    assert summary["rewards"]["count"] + summary["rewards"]["misfits"] + summary["rewards"]["nan"] == len(kept)


def test_a_non_numeric_reward_makes_the_return_nan(tmp_path: Path) -> None:
    rewards = (1.0, fractions.Fraction(1, 2), 2.0)
    steps = [Result(np.int64(0), reward, terminated=reward == 2.0) for reward in rewards]
    env = ScriptedEnv(spaces.Discrete(2), spaces.Discrete(2), [(np.int64(0), steps), (np.int64(0), steps[:1])])
    wrapped = TraceRecordingWrapper(env, tmp_path)
    assert len(warned(lambda: acted(wrapped, "reset", 0, 0, 0, "reset", 0, "close"))) == 1
    trace = open_trace(tmp_path)
    assert np.isnan(trace[0].total_reward)
    assert np.isnan(trace[0][:2].total_reward)
    assert trace[0][2:].total_reward == 2.0
    assert trace[1].total_reward == 1.0
    assert summarize(trace)["return"]["nan"] == 1


MASKED = np.ma.MaskedArray([1.5, 2.5], [False, True], np.float32, fill_value=7)


def test_masked_arrays_round_trip_anywhere_in_a_value(tmp_path: Path) -> None:
    space = spaces.Dict(a=spaces.Box(0, 9, (2,)), b=spaces.Box(0, 9, (64, 64)))
    large = np.ma.MaskedArray(np.ones((64, 64), np.float32), np.eye(64, dtype=bool))
    seen = {"a": MASKED, "b": large}
    env = ScriptedEnv(space, space, [(seen, [Result(seen, info={"masked": [MASKED]}) for _ in range(2)])])
    wrapped = TraceRecordingWrapper(env, tmp_path, record_infos=True)

    def record() -> None:
        wrapped.reset(options={"masked": MASKED})
        for _ in range(2):
            wrapped.annotate(masked=MASKED)
            wrapped.step(seen)
        env.spoil()
        wrapped.close()

    assert len(warned(record)) == 4  # two leaves of observations, two of actions
    (episode,) = open_trace(tmp_path)
    for values in (episode.observations, episode.actions):
        assert {bits(value) for value in values["a"]} == {bits(MASKED)}
        assert {bits(value) for value in values["b"]} == {bits(large)}
    assert bits(episode.infos) == bits([{"masked": [MASKED]}] * 2)
    assert bits(episode.options) == bits({"masked": MASKED})
    assert {bits(note) for note in episode.annotations["masked"]} == {bits(MASKED)}


def test_masked_arrays_of_vector_environments_round_trip(tmp_path: Path) -> None:
    batch = np.ma.MaskedArray(np.ones((2, 2), np.float32), [[True, False], [False, False]])
    envs = TraceRecordingVectorWrapper(Lanes(batch), tmp_path, record_infos=True)

    def record() -> None:
        envs.reset(options={"masked": MASKED})
        envs.annotate(masked=batch)
        acted(envs, batch, "close")

    assert len(warned(record)) == 2
    first, second = open_trace(tmp_path)
    for episode, row in ((first, batch[0]), (second, batch[1])):
        assert [bits(value) for value in (*episode.observations, *episode.actions)] == [bits(row)] * 3
        assert bits(episode.annotations["masked"][0]) == bits(row)
        assert bits(episode.options) == bits({"masked": MASKED})


class Lanes(vector.VectorEnv):  # not generic before gymnasium 1.0
    """Two lanes with given observations."""

    def __init__(self, observations: Any, rewards: Any = None, info: Any = None):
        self.num_envs, self._observations, self._info = 2, observations, info
        self._rewards = np.zeros(2) if rewards is None else rewards
        self.single_observation_space = self.single_action_space = spaces.Box(-9, 9, (2,), np.float32)
        self.observation_space = self.action_space = spaces.Box(-9, 9, (2, 2), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._observations, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        info = {} if self._info is None else {"x": self._info}
        return self._observations, self._rewards, np.zeros(2, np.bool_), np.zeros(2, np.bool_), info


@dataclasses.dataclass
class Record:
    items: list[int]

    def clear(self) -> None:
        self.items.clear()


mutable = st.one_of(
    st.binary(max_size=9).map(bytearray),
    st.lists(st.integers(0, 99), max_size=3).map(lambda items: array.array("i", items)),
    st.lists(st.integers(0, 99), max_size=3).map(collections.deque),
    st.lists(st.integers(0, 99), max_size=3).map(Record),
    st.sets(st.integers(0, 7), max_size=3),  # no colliding hashes: a copy has the same order, so the same repr
    st.lists(st.integers(-9, 9), min_size=2, max_size=2).map(lambda items: np.array(items, np.int8)),
    st.lists(st.booleans(), min_size=2, max_size=2).map(lambda mask: np.ma.MaskedArray([1.0, 2.0], mask)),
    st.just(np.zeros(2, [("a", "<i4"), ("b", "<f8")])),
)
anything = st.recursive(
    mutable,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3), st.tuples(inner, inner)
    ),
    max_leaves=5,
)


def ruin(value: Any) -> None:
    if isinstance(value, (set, Record)):
        value.clear()
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            ruin(item)
        if not isinstance(value, tuple):
            value.clear()
    else:
        spoil(value)


class Handing(ScriptedEnv):
    """Return each value as observation, reward and info; overwrite it at the next call."""

    def __init__(self, space: Any, values: list[Any]):
        super().__init__(space, space, [])
        self._values = iter([copy.deepcopy(value) for value in (values[0], *values)])
        self.handed: list[Any] = []

    def _hand(self) -> tuple[Any, dict[str, Any]]:
        for value in self.handed:
            ruin(value)
        value = next(self._values, None)
        self.handed.append(value)
        return value, {"x": value}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._hand()

    def step(self, action: Any) -> Any:
        value, info = self._hand()
        return value, value, False, False, info


@given(st.lists(anything, min_size=3, max_size=3), st.sampled_from([spaces.Box(0, 9, (2,)), spaces.Text(4)]))
def test_changing_a_value_after_its_step_does_not_change_the_trace(
    tmp_path_factory: Any, values: list[Any], space: Any
) -> None:
    directory = tmp_path_factory.mktemp("trace")
    expected = [bits(unpack(pack_lenient(value)[0])) for value in values]
    with small_blocks():
        env = TraceRecordingWrapper(Handing(space, values), directory / "t", record_infos=True)

    def record() -> None:
        options = {"o": copy.deepcopy(values[0])}
        env.reset(options=options)
        ruin(options)
        for value in values:
            action, note = copy.deepcopy(value), copy.deepcopy(value)
            with contextlib.suppress(UnstorableValue):
                env.annotate(note=note)
            ruin(note)
            env.step(action)
            ruin(action)
        for value in env.unwrapped.handed:
            ruin(value)
        env.close()

    warned(record)
    (episode,) = open_trace(directory / "t")
    assert [bits(value) for value in episode.observations][1:] == expected
    assert [bits(value) for value in episode.actions] == expected
    assert [bits(value) for value in episode.rewards] == expected
    assert [bits(info["x"]) for info in episode.infos] == expected
    assert bits(episode.options["o"]) == expected[0]
    notes = episode.annotations.get("note", [None] * 3)
    assert all(note is None or bits(note) == value for note, value in zip(notes, expected))


@pytest.mark.parametrize("shape", [(2,), (64, 64)], ids=str)
def test_tensors_on_a_device_are_copied_with_one_warning_per_column(tmp_path: Path, shape: Any) -> None:
    data = np.full(shape, 1.5, np.float32)
    space = spaces.Box(-9, 9, shape, np.float32)
    steps = [Result(Tensor(data), Tensor(np.array(2.0)), info={"x": [Tensor(data)]}) for _ in range(5)]
    env = TraceRecordingWrapper(ScriptedEnv(space, space, [(data, steps)]), tmp_path, record_infos=True)
    said = warned(lambda: acted(env, "reset", *[{"logits": Tensor(data)}, Tensor(data)] * 5, "close"))
    assert sorted(text.partition(":")[0] for text in said) == ["actions", "infos", "observations", "rewards"]
    assert all("detached and copied" in text for text in said)
    (episode,) = open_trace(tmp_path)
    assert bits(episode.observations) == bits(np.stack([data] * 6))
    assert bits(episode.actions) == bits(np.stack([data] * 5))
    assert bits(episode.rewards) == bits(np.full(5, 2.0))
    assert bits(episode.infos[4]) == bits({"x": [data]})
    assert bits(episode.annotations["logits"]) == bits(np.stack([data] * 5))


def test_a_dtype_that_numpy_lacks_round_trips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(uint8=np.uint8))
    words = np.array([[0x3FC0, 0x7FC1, 0x8000]], np.uint16)
    tensor = Tensor(words, "torch.bfloat16")
    inner = scripted([Result(tensor, info={"x": tensor})], spaces.Box(0, 9, (1, 3)), tensor)
    env = TraceRecordingWrapper(inner, tmp_path, record_infos=True)
    assert len(warned(lambda: acted(env, "reset", 0, "close"))) == 1
    (episode,) = open_trace(tmp_path)
    expected = RawArray("bfloat16", words.view(np.uint8).reshape(1, 3, 2))
    assert [bits(value) for value in (*episode.observations, episode.infos[0]["x"])] == [bits(expected)] * 3
    assert episode.infos[0]["x"].data.view(np.uint16)[..., 0].tolist() == words.tolist()


@pytest.mark.parametrize("mode", ["observations", "rewards", "actions", "infos"])
@pytest.mark.parametrize("odd", [*REWARDS, Tensor(np.ones((2, 2), np.float32))], ids=lambda odd: type(odd).__name__)
def test_vectors_record_any_value_and_never_raise(tmp_path: Path, odd: Any, mode: str) -> None:
    batch = np.ones((2, 2), np.float32)
    lanes = Lanes(
        odd if mode == "observations" else batch,
        odd if mode == "rewards" else None,
        [odd, odd] if mode == "infos" else None,
    )
    env = TraceRecordingVectorWrapper(lanes, tmp_path, record_infos=True, reward_classes=[0.0])

    def record() -> None:
        env.reset(options={"odd": odd})
        for _ in range(3):
            env.step(odd if mode == "actions" else batch)
        env.close()

    warned(record)
    for episode in open_trace(tmp_path):  # steps that cannot be split by lane are skipped
        assert len(episode) in ((0, 3) if mode in ("observations", "actions", "rewards") else (3,))
        assert len(episode.observations) == len(episode) + 1
        assert len(episode.rewards) == len(episode.actions) == len(episode)
        assert set(episode.options) == {"odd"}


def test_a_batch_of_a_dtype_that_numpy_lacks_is_split_by_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(uint8=np.uint8))
    words = np.array([[1, 2], [3, 4]], np.uint16)
    tensor = Tensor(words, "torch.bfloat16")
    env = TraceRecordingVectorWrapper(Lanes(tensor, info=tensor), tmp_path, record_infos=True)
    warned(lambda: acted(env, "reset", {"note": tensor}, tensor, "close"))
    for episode, row in zip(open_trace(tmp_path), words):
        kept = [*episode.observations, *episode.actions, episode.infos[0]["x"], episode.annotations["note"][0]]
        assert [value.data.view(np.uint16)[..., 0].tolist() for value in kept] == [row.tolist()] * 5


def test_a_value_above_the_size_limit_becomes_its_repr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.recording.single.slabs.RowSlabs.largest_value", 1000)
    steps = [Result(np.int64(0), info={"x": bytes(size)}) for size in (10, 2000, 10)]
    env = TraceRecordingWrapper(scripted(steps), tmp_path, record_infos=True)
    (said,) = warned(lambda: acted(env, "reset", 0, 0, 0, "close"))
    assert "too large" in said
    (episode,) = open_trace(tmp_path)
    assert [type(info) for info in episode.infos] == [dict, Unstored, dict]


def test_infos_of_many_lanes_and_steps_stay_within_the_chunk_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_trace.recording.vector.slabs._LEAST_BYTES", 5000)
    monkeypatch.setattr("gym_trace.recording.vector.slabs._ROWS", 8)
    monkeypatch.setattr("gym_trace.format.wire.MAX_VALUES", 20_000)
    batch = np.ones((2, 2), np.float32)
    env = TraceRecordingVectorWrapper(Lanes(batch, info=["a" * 900] * 2), tmp_path, record_infos=True)
    acted(env, "reset", *[batch] * 100, "close")
    assert [len(episode.infos) for episode in open_trace(tmp_path)] == [100, 100]


def test_integers_of_any_number_of_digits_are_recorded(tmp_path: Path) -> None:
    huge = 10**5000
    values = {"n": huge, huge: [-huge, (huge,)], (1, huge): np.array([huge], object)}
    env = scripted([Result(values, huge, info=values)], spaces.Text(4), values)
    env.spec = gymnasium.envs.registration.EnvSpec("Huge-v0", entry_point="nowhere:Huge", kwargs={"n": huge})
    wrapped = TraceRecordingWrapper(env, tmp_path, record_infos=True, metadata=values)
    said = warned(lambda: (wrapped.reset(options=values), acted(wrapped, {"n": huge}, huge, "close")))
    assert len(said) == 1  # the action
    trace = open_trace(tmp_path)
    (episode,) = trace
    kept = [trace.metadata, *episode.observations, episode.infos[0], episode.options]
    assert [bits(value) for value in kept] == [bits(values)] * 5
    assert [episode.rewards[0], episode.actions[0], episode.annotations["n"][0]] == [huge] * 3
    assert episode.total_reward == float("inf")
    first = json.loads(next(tmp_path.glob("*.manifest.jsonl")).read_text().splitlines()[0])
    assert first["metadata"]["n"] == hex(huge)


def test_changing_metadata_later_does_not_change_the_trace(tmp_path: Path) -> None:
    metadata = {"a": bytearray(b"abc"), "b": [np.zeros(2)]}
    wrapped = TraceRecordingWrapper(scripted([]), tmp_path, metadata=metadata)
    metadata["a"][:] = b"xyz"
    metadata["b"].clear()
    acted(wrapped, "reset", "close")
    assert bits(open_trace(tmp_path).metadata) == bits({"a": b"abc", "b": [np.zeros(2)]})


@pytest.mark.parametrize("keys", [True, ["x"]], ids=repr)
@pytest.mark.parametrize("info", [7, [1], types.SimpleNamespace(x=1)], ids=repr)
def test_an_info_that_is_not_a_map_is_recorded(tmp_path: Path, info: Any, keys: Any) -> None:
    wrapped = TraceRecordingWrapper(scripted([Result(np.int64(1), info=info)] * 3), tmp_path, record_infos=keys)
    said = warned(lambda: acted(wrapped, "reset", 0, 0, 0, "close"))
    (episode,) = open_trace(tmp_path)
    assert len(episode) == 3
    is_stored = not isinstance(info, types.SimpleNamespace)
    kept = info if is_stored else "types.SimpleNamespace"
    assert [getattr(kept, "class_name", kept) for kept in episode.infos] == [kept] * 3
    assert len(said) == (not is_stored)


@pytest.mark.parametrize("where", ["observations", "rewards", "note"])
def test_an_oversized_array_does_not_end_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr("gym_trace.format.wire.MAX_VALUES", 50_000)
    large, usual = np.zeros(9000), np.zeros(2, np.float32)
    steps = [Result(usual, 1.0) for _ in range(5)]
    steps[2] = Result(large if where == "observations" else usual, large if where == "rewards" else 1.0)
    wrapped = TraceRecordingWrapper(scripted(steps, spaces.Box(-1, 1, (2,)), usual), tmp_path, flush_seconds=60)
    notes = [{"note": large if where == "note" and i == 2 else 1.0} for i in range(5)]
    said = warned(lambda: acted(wrapped, "reset", *(act for note in notes for act in (note, 0)), "close"))
    assert "too large" in said[-1]
    (episode,) = open_trace(tmp_path)
    kept = {"observations": episode.observations[1:], "rewards": episode.rewards, **episode.annotations}[where]
    assert [isinstance(value, Unstored) for value in kept] == [False, False, True, False, False]


def test_infos_that_cannot_be_split_by_lane_do_not_cut_episodes(tmp_path: Path) -> None:
    class NoRows:  # like sparse arrays of some formats
        shape = (2, 2)

    class Telling(Lanes):
        def step(self, actions: Any) -> Any:
            return *super().step(actions)[:4], {"x": 1, "_x": [[1], [1, 2]], "sparse": NoRows()}

    batch = np.ones((2, 2), np.float32)
    env = TraceRecordingVectorWrapper(Telling(batch), tmp_path, record_infos=True)
    assert len(warned(lambda: acted(env, "reset", batch, batch, batch, "close"))) == 1
    episodes = list(open_trace(tmp_path))
    assert [len(episode) for episode in episodes] == [3, 3]
    assert [episode.infos[0]["x"] for episode in episodes] == [1, 1]
    assert [episode.infos[2]["sparse"].class_name[-6:] for episode in episodes] == ["NoRows"] * 2


def test_values_at_the_nesting_limit_are_readable(tmp_path: Path) -> None:
    deep: Any = 1
    for level in range(490):
        deep = [deep] if level % 2 else {"x": deep}
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path)
    env.reset(seed=1, options={"deep": deep})
    env.close()
    (episode,) = trace = open_trace(tmp_path)
    assert pack_lenient(episode.options)[0] == pack_lenient({"deep": deep})[0]
    assert repr(trace).startswith(f"<Trace of 1 episode in {tmp_path}\n")
