"""Facts of a trace: stored in one file, replaced atomically, and untrusted."""

import json
import os
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import gym_trace
import gym_trace.edit
from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.format.facts import MOST_BYTES, agreed, checked, known, read_facts, write_facts
from gym_trace.storage.local import LocalStorage
from gym_trace.storage.memory import MemoryStorage

FACTS = {"author": "Ada", "tags": ["new", "néw"], "reference_scores": {"random": 22.0, "expert": 500}, "mine": [1, {}]}
BROKEN = [
    b"",
    b"{",
    b"[1]",
    b'{"author": NaN}',
    b"[" * 100_000,
    b'{"a": ' + b"1" * 5000 + b"}",
    b"\xff",
    b" " * (MOST_BYTES + 1),
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    env = gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / "t")
    gym_trace.record_episodes(env, episodes=1, seed=0)
    env.close()
    return tmp_path / "t"


@pytest.mark.parametrize("storage", [None, MemoryStorage("here")])
def test_facts_round_trip(trace: Path, storage: Any) -> None:
    storage = LocalStorage(trace) if storage is None else storage
    before = set(storage.names())
    assert read_facts(storage) == {}
    for facts in (FACTS, {"author": "\ud800"}, {}):
        write_facts(storage, checked(facts))
        assert read_facts(storage) == facts
    assert set(storage.names()) == before | {"facts.json"}


def test_a_trace_and_its_views_have_the_same_facts(trace: Path) -> None:
    opened = gym_trace.open_trace(trace)
    assert opened.facts == {}
    write_facts(LocalStorage(trace), FACTS)
    assert opened.facts == opened[:0].facts == FACTS


@pytest.mark.parametrize("content", BROKEN, ids=range(len(BROKEN)))
def test_invalid_facts_are_damage_and_episodes_stay_readable(trace: Path, tmp_path: Path, content: bytes) -> None:
    (trace / "facts.json").write_bytes(content)
    with pytest.raises(CorruptTrace, match=r"facts\.json"):
        read_facts(LocalStorage(trace))
    opened = gym_trace.open_trace(trace)
    with pytest.warns(UserWarning, match=r"facts\.json: skipped all of it"):
        assert opened.facts == {}
    assert len(opened) == len(list(opened.scan())) == 1
    assert [Path(damage.path).name for damage in gym_trace.check_trace(trace).damages] == ["facts.json"]
    gym_trace.repair_trace(trace, tmp_path / "clean")
    assert not gym_trace.check_trace(tmp_path / "clean").damages


def test_facts_behind_a_symbolic_link_are_not_read(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("{}")
    (trace / "facts.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptTrace, match="regular file"):
        read_facts(LocalStorage(trace))


@pytest.mark.parametrize(
    "facts",
    [
        {"author": 3},
        {"tags": "one"},
        {"tags": [1]},
        {"reference_scores": {"random": "much"}},
        {"reference_scores": {"random": True}},
        {"reference_scores": {"random": []}},
        {"reference_scores": [1, 2]},
        {"more": float("nan")},
        {"more": {1, 2}},
        {"": "nameless"},
        {"more": "x" * MOST_BYTES},
    ],
)
def test_facts_of_the_wrong_form_raise(facts: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        checked(facts)


def test_untrusted_facts_of_the_wrong_form_are_ignored() -> None:
    assert known({"author": ["x"], "license": "MIT", "tags": [], "reference_scores": {"a": [1, 2.5]}, "more": 1}) == {
        "license": "MIT",
        "reference_scores": {"a": [1, 2.5]},
    }


def test_only_facts_shared_by_all_traces_are_kept() -> None:
    assert agreed([{"author": "a", "license": "MIT", "x": 1}, {"author": "b", "license": "MIT"}]) == {"license": "MIT"}
    assert agreed([FACTS]) == FACTS


def test_a_repaired_trace_keeps_its_facts_and_a_replaced_one_does_not(trace: Path, tmp_path: Path) -> None:
    strange = {"author": 3}
    write_facts(LocalStorage(trace), strange)
    gym_trace.repair_trace(trace, tmp_path / "clean")
    assert gym_trace.open_trace(tmp_path / "clean").facts == strange
    env = gymnasium.make("CartPole-v1")
    gym_trace.TraceRecordingWrapper(env, trace, on_exist="append").close()
    assert (trace / "facts.json").exists()
    gym_trace.TraceRecordingWrapper(env, trace, on_exist="replace").close()
    assert not (trace / "facts.json").exists()


def test_a_failed_write_keeps_the_previous_facts(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_facts(LocalStorage(trace), FACTS)
    names = sorted(os.listdir(trace))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_facts(LocalStorage(trace), {"author": "B"})
    assert json.loads((trace / "facts.json").read_bytes()) == FACTS
    assert sorted(os.listdir(trace)) == names


def test_licence_and_license_are_one_fact(trace: Path) -> None:
    assert gym_trace.edit.annotate(trace, {"licence": "mit"}) == {"license": "mit"}
    assert gym_trace.edit.annotate(trace, unset="licence") == {}
