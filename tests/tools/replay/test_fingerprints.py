"""Traces whose episodes come in another order are paired by hashes, and compared column by column."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numbered_env
import numpy as np
import pytest
from damage import flip
from gymnasium import spaces

from gym_trace import TraceRecordingWrapper, diff_traces, open_trace
from gym_trace.errors import CorruptTrace
from gym_trace.playback.episode_index import index_of
from gym_trace.tools.replay import diff

Change = Callable[[str, int, int, Any], Any]  # changes the value of a column in an episode and a step


class Numbered(gymnasium.Env[Any, Any]):
    """Episodes of one to three steps whose values follow from their number, which is an option of the reset."""

    observation_space = spaces.Dict(
        {"at": spaces.Box(-np.inf, np.inf, (2,), np.float32), "rest": spaces.Tuple((spaces.Text(4), spaces.Tuple(())))}
    )
    action_space = spaces.Discrete(9)

    def __init__(self, change: Change):
        self.change = change
        self.episode = self.t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        assert options is not None
        self.episode, self.t = options["number"], 0
        return self.seen(), self.value("infos", {"reset": self.episode})

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.t += 1
        over = self.t == 1 + self.episode % 3
        reward = self.value("rewards", float(self.episode // 2))
        ends = self.value("terminations", over), self.value("truncations", False)
        return self.seen(), reward, *ends, self.value("infos", {"t": self.t, "list": [1, (2.0, None)]})

    def seen(self) -> Any:
        at = np.array([self.episode // 2, self.t], np.float32)
        return {"at": self.value("observations", at), "rest": ("ab"[self.episode % 2], ())}

    def value(self, column: str, value: Any) -> Any:
        return self.change(column, self.episode, self.t, value)


def record(directory: Path, numbers: Sequence[int], change: Change = lambda *given: given[-1], flush: int = 0) -> Path:
    env = TraceRecordingWrapper(Numbered(change), directory, record_infos=True, flush_seconds=1000.0)
    done = 0
    for number in numbers:
        env.reset(seed=change("seed", number, 0, None), options={"number": change("options", number, 0, number)})
        for t in range(1 + number % 3):
            env.annotate(note=change("annotations", number, t, np.float32(number)))
            env.step(change("actions", number, t, number % 9))
            done += 1
            if flush and done % flush == 0:
                env.flush()
    env.close()
    return directory


def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the episodes that are compared value by value."""
    places: list[int] = []
    compare = diff._compared

    def compared(trace: Any, one: Any, *more: Any) -> Any:
        places.append(one.index)
        return compare(trace, one, *more)

    monkeypatch.setattr(diff, "_compared", compared)
    return places


ORDER = [11, 3, 0, 7, 8, 1, 10, 2, 9, 5, 4, 6]


@pytest.mark.parametrize("flush", [1, 2, 5])
def test_equal_episodes_have_equal_fingerprints_however_chunks_divide_them(
    tmp_path: Path, flush: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = record(tmp_path / "a", range(12)), record(tmp_path / "b", ORDER, flush=flush)
    places = looked_at(monkeypatch)
    found = list(diff_traces(a, b))
    assert [(it.index, it.steps, it.difference) for it in found] == [(n, 1 + n % 3, None) for n in range(12)]
    assert places == []


def test_fingerprints_compare_a_view_in_another_order_with_its_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = open_trace(record(tmp_path, range(12), flush=4))
    places = looked_at(monkeypatch)
    found = list(diff_traces(trace[ORDER], trace))
    assert [(it.index, it.difference) for it in found] == [(place, None) for place in range(12)]
    again = list(diff_traces(trace[[3, 3, 1, 3]], trace[[1, 3, 3]]))
    assert [(it.index, it.difference) for it in again] == [(place, None) for place in range(3)]
    assert places == []


def rearranged(value: Any) -> Any:
    return {key: value[key] for key in reversed(value)}


FORMS: dict[str, Callable[[Any], Any]] = {
    "observations": lambda value: value + np.float32(1),
    "actions": lambda value: (value + 1) % 9,
    "rewards": lambda value: float(np.nextafter(value, 99)),
    "terminations": lambda value: False,
    "truncations": lambda value: True,
    "infos": lambda value: {**value, "list": [1, [2.0, None]]},
    "annotations": np.float64,
    "seed": lambda value: 5,
}


@pytest.mark.parametrize("column", FORMS)
def test_a_change_of_any_column_is_found_unless_it_is_ignored(
    tmp_path: Path, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(name: str, number: int, t: int, value: Any) -> Any:
        return FORMS[column](value) if (name, number, t) == (column, 4, at) else value

    at = {"seed": 0, "terminations": 2, "truncations": 2}.get(column, 1)
    a, b = record(tmp_path / "a", range(12)), record(tmp_path / "b", ORDER, change)
    places = looked_at(monkeypatch)
    found = [(it.index, it.difference.column) for it in diff_traces(a, b) if it.difference is not None]
    shown = "outcome" if column == "terminations" else column
    assert [(place, name.split("/")[0]) for place, name in found] == [(4, shown)]
    assert places == [4]
    assert [it.difference for it in diff_traces(a, b, ignore=[column, shown])] == [None] * 12
    assert places == [4]


@pytest.mark.filterwarnings("ignore:observations/at")
@pytest.mark.parametrize(
    ("episode", "form"),
    [
        (5, lambda nan: np.full(2, 0x7FC00001, np.uint32).view(np.float32)),  # NaNs of other bits
        (0, lambda at: at.astype(np.float64)),
        (0, lambda at: at.reshape(1, 2)),
        (0, lambda at: np.float32([-0.0, at[1]])),
    ],
)
def test_bits_dtypes_and_shapes_count(tmp_path: Path, episode: int, form: Any) -> None:
    def nan(name: str, number: int, t: int, value: Any) -> Any:
        return value * np.float32(np.nan) if (name, number) == ("observations", 5) else value

    def change(name: str, number: int, t: int, value: Any) -> Any:
        value = nan(name, number, t, value)
        return form(value) if (name, number, t) == ("observations", episode, 1) else value

    a, b = record(tmp_path / "a", range(12), nan), record(tmp_path / "b", ORDER, change)
    assert [it.index for it in diff_traces(a, b) if it.difference is not None] == [episode]
    assert [it.difference for it in diff_traces(a, b, ignore=["observations"])] == [None] * 12


def test_tolerance_needs_a_closer_look_but_not_the_order_of_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(name: str, number: int, t: int, value: Any) -> Any:
        if (name, number) == ("infos", 2):
            return rearranged(value)
        return value + 1e-9 if (name, number) == ("rewards", 8) else value

    a, b = record(tmp_path / "a", range(12)), record(tmp_path / "b", ORDER, change)
    places = looked_at(monkeypatch)
    assert [it.difference for it in diff_traces(a, b, atol=1e-6)] == [None] * 12
    assert places == [8]
    assert [it.index for it in diff_traces(a, b) if it.difference is not None] == [8]


def test_pairs_before_damage_are_compared_and_then_it_is_an_error(tmp_path: Path) -> None:
    batch = numbered_env.record(tmp_path, record_infos=True)
    reader, number = index_of(open_trace(tmp_path)).readers[0].chunk_positions[-2]  # the last episode's
    offset, length = (int(reader.chunks[name][number]) for name in ("offset", "length"))
    flip(batch, *range(offset + length - 120, offset + length, 4))
    trace = open_trace(tmp_path)
    found = diff_traces(trace, trace[::-1])
    assert [next(found).difference for _ in trace.episodes[:-1]] == [None] * (len(trace) - 1)
    with pytest.raises(CorruptTrace):
        next(found)
