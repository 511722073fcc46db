"""Columns are dropped from a trace; facts are set and unset."""

import json
from pathlib import Path
from typing import Any

import pytest
from echo_env import EchoEnv
from runs import record_lengths, record_nested
from scripted_env import CountingEnv
from shell import ok, run
from trace_contents import check_clean, contents

from gym_trace import TraceRecordingWrapper, edit, open_trace, verify_trace
from gym_trace.errors import InvalidOption, TraceError, TraceNotFound
from gym_trace.playback.episode_index import index_of


class Informing(EchoEnv):
    """An environment with an info at resets."""

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        observation, _ = super().reset(**options)
        return observation, {"level": 3}


def record_annotated(directory: Path, writers: int = 2) -> None:
    for number in range(writers):
        env = TraceRecordingWrapper(Informing(length=6), directory, on_exist="append", record_infos=True)
        for _ in range(2):
            env.reset(seed=number, options={"a": (1, "b")})
            for step in range(5):
                env.annotate(**{"value": float(step), "log.prob": 0.5})
                env.step(0)
        env.close()


@pytest.mark.parametrize("compacted", [False, True])
def test_columns_that_are_dropped_are_gone_and_all_else_is_as_it_was(tmp_path: Path, compacted: bool) -> None:
    record_annotated(tmp_path / "t")
    source = tmp_path / "t"
    if compacted:
        edit.compact(tmp_path / "t", tmp_path / "c")
        source = tmp_path / "c"
    edit.drop(source, ["infos", "annotations.log.prob"], tmp_path / "d")
    check_clean(tmp_path / "d", 4)
    old, new = open_trace(source), open_trace(tmp_path / "d")
    assert sum(reader.size for reader in index_of(new).readers) < sum(reader.size for reader in index_of(old).readers)
    assert new.writers == old.writers
    assert old[0].reset_info == {"level": 3}
    for a, b in zip(old, new, strict=True):
        with pytest.raises(TraceError, match="infos: not recorded"):
            _ = b.infos
        assert not b.reset_info
        assert list(b.annotations) == ["value"]
        assert a.options == b.options
        assert str(a.rng_state) == str(b.rng_state)
        for name in ("observations", "actions", "rewards"):
            assert getattr(a, name).tobytes() == getattr(b, name).tobytes()
    assert [reader.about.recorder["record_infos"] for reader in index_of(new).readers] == [False, False]
    assert len(list((tmp_path / "d").glob("*.gtb"))) == (1 if compacted else 2)
    edit.drop(tmp_path / "d", "annotations", in_place=True)
    assert [episode.annotations for episode in open_trace(tmp_path / "d")] == [{}] * 4


def test_dropping_decodes_nothing_and_keeps_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_nested(tmp_path / "t")
    old = index_of(open_trace(tmp_path / "t")).readers[0]
    monkeypatch.setattr("gym_trace.format.batch_reader.Chunk.array", None)
    monkeypatch.setattr("gym_trace.format.batch_reader.Chunk.packed", None)
    edit.drop(tmp_path / "t", "annotations", tmp_path / "d")
    monkeypatch.undo()
    new = index_of(open_trace(tmp_path / "d")).readers[0]
    assert new.chunk_bounds.tolist() == old.chunk_bounds.tolist()
    expected = contents(tmp_path / "t")
    for key, episode in contents(tmp_path / "d").items():
        columns = {k: v for k, v in expected[key]["columns"].items() if not k.startswith("annotations")}
        assert episode == {**expected[key], "columns": columns}


def test_a_trace_without_infos_still_verifies(tmp_path: Path) -> None:
    import gymnasium

    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / "t", record_infos=True)
    env.reset(seed=4)
    for _ in range(5):
        env.step(0)
    env.close()
    edit.drop(tmp_path / "t", "infos", tmp_path / "d")
    assert [verdict.verdict for verdict in verify_trace(tmp_path / "d")] == ["identical"]


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (
            "observations",
            "every trace has them; columns that can be dropped: infos, annotations, annotations.log.prob",
        ),
        ("rewards", "every trace has them"),
        ("annotations.valu", r"no 'annotations.valu'; columns that can be dropped: .*annotations.value"),
        ("infos.lives", "no 'infos.lives'"),
        ("videos", "no 'videos'"),
        ("", "no ''"),
    ],
)
def test_dropping_a_required_or_unknown_column_raises_and_lists_the_others(
    tmp_path: Path, column: str, said: str
) -> None:
    record_annotated(tmp_path / "t", writers=1)
    with pytest.raises(InvalidOption, match=said):
        edit.drop(tmp_path / "t", [column], tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_a_trace_that_has_nothing_to_drop_says_so(tmp_path: Path) -> None:
    record_lengths(tmp_path / "t", [3])
    with pytest.raises(InvalidOption, match="can be dropped: none"):
        edit.drop(tmp_path / "t", "infos", tmp_path / "d")


def test_facts_are_set_and_unset_while_a_trace_is_recorded(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(), tmp_path / "t")
    env.reset()
    assert edit.annotate(tmp_path / "t", {"author": "Ada", "mine": [1, None]}) == {"author": "Ada", "mine": [1, None]}
    assert edit.annotate(tmp_path / "t", {"tags": ["a"]}, unset="mine") == {"author": "Ada", "tags": ["a"]}
    env.close()
    assert open_trace(tmp_path / "t").facts == {"author": "Ada", "tags": ["a"]}
    with pytest.raises(InvalidOption, match="no fact 'mine' in this trace; it has 'author', 'tags'"):
        edit.annotate(tmp_path / "t", unset=["mine"])
    with pytest.raises(InvalidOption, match="tags="):
        edit.annotate(tmp_path / "t", {"tags": "a"})
    with pytest.raises(TraceNotFound):
        edit.annotate(tmp_path, {"author": "Ada"})
    for new, make in (("c", edit.compact), ("f", edit.filter)):
        make(tmp_path / "t", tmp_path / new)
        assert open_trace(tmp_path / new).facts == {"author": "Ada", "tags": ["a"]}


def test_the_commands_compact_drop_and_annotate_say_what_they_did(tmp_path: Path) -> None:
    record_annotated(tmp_path / "t")
    done = ok("edit", "compact", tmp_path / "t", "-o", tmp_path / "c")
    assert "4 episodes, 20 steps of 2 writers" in done.output
    assert "before" in done.output
    done = ok("edit", "drop", tmp_path / "c", "--columns", "infos, annotations", "--in-place", "--json")
    assert json.loads(done.output)["episodes"] == 4
    facts = [part for fact in ("author=Ada", "description=2024", 'tags=["x"]') for part in ("--fact", fact)]
    done = ok("edit", "annotate", tmp_path / "c", *facts)
    assert done.output == 'author: Ada\ndescription: 2024\ntags: ["x"]\n'
    assert json.loads(ok("edit", "annotate", tmp_path / "c", "--json").output)["description"] == "2024"
    assert "no facts" in ok("edit", "annotate", tmp_path / "t").output
    for wrong in (
        ("compact", tmp_path / "t"),
        ("compact", tmp_path / "t", "-o", tmp_path / "n", "--in-place"),
        ("annotate", tmp_path / "t", "--fact", "author"),
    ):
        assert run("edit", *wrong).exit_code == 2


def test_names_of_several_columns_come_together_in_one_fact(tmp_path: Path) -> None:
    record_lengths(tmp_path / "t", [1])
    ok("edit", "annotate", tmp_path / "t", "--names", "observations=x, v", "--names", "actions=left,right")
    ok("edit", "annotate", tmp_path / "t", "--names", "actions=off,on")
    assert open_trace(tmp_path / "t").facts["names"] == {"observations": ["x", "v"], "actions": ["off", "on"]}
