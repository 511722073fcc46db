"""Traces of many agents in the commands and functions for traces."""

import json
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from runs import play
from shell import ok
from shell import run as command

pytest.importorskip("pettingzoo")

from agent_envs import Meadow, Passing
from agents_log import assert_played_back, check, chooser, play_aec, play_parallel

from gym_trace import (
    TraceRecordingWrapper,
    diff_traces,
    edit,
    env_at,
    export,
    import_trace,
    lint_trace,
    open_trace,
    summarize,
    verify_trace,
)
from gym_trace.errors import EnvironmentUnavailable, InvalidOption, ReplayDiverged
from gym_trace.pettingzoo import record, replay
from gym_trace.playback.episode_index import index_of
from gym_trace.viewer import save_page

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # PettingZoo's own, of its classic games
    import pettingzoo
    from pettingzoo.test import api_test, parallel_api_test


def made(directory: Path, kind: Any, episodes: int = 4, most: int = 100, **options: Any) -> list[Any]:
    play = play_aec if issubclass(kind, Passing) else play_parallel
    with closing(record(kind(), directory, record_infos=True, **options)) as env:
        return [play(env, seed, chooser(seed), most) for seed in range(episodes)]


@pytest.fixture(params=[Meadow, Passing])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_an_environment_of_ones_own_is_made_again_with_trust_only(tmp_path: Path, kind: Any) -> None:
    made(tmp_path, kind)
    with pytest.raises(EnvironmentUnavailable, match=f"import agent_envs and call its {kind.__name__}"):
        list(verify_trace(tmp_path))
    assert {verdict.verdict for verdict in verify_trace(tmp_path, trust=True)} == {"identical"}


def test_verify_takes_what_makes_the_environment(tmp_path: Path) -> None:
    made(tmp_path, Meadow)
    assert "4 identical, bit for bit" in ok("verify", tmp_path, "--make", "agent_envs:meadow").output
    differs = command("verify", tmp_path, "--make", "agent_envs:short_meadow")
    assert differs.exit_code == 3
    assert "observations/agents/place[0]" in differs.output


def test_an_environment_of_the_registry_of_pettingzoo_needs_no_trust(tmp_path: Path) -> None:
    if not hasattr(pettingzoo, "make"):
        pytest.skip("needs PettingZoo 1.27")
    pytest.importorskip("pygame")
    with closing(record(pettingzoo.make("aec", "classic/rps-v2", max_cycles=5), tmp_path)) as env:
        play_aec(env, 0, chooser(0), 100)
    trace = open_trace(tmp_path)
    assert index_of(trace).readers[0].about.environment["id"] == "classic/rps-v2"
    assert len(trace[0]) == 12
    assert [verdict.verdict for verdict in verify_trace(trace)] == ["identical"]
    assert trace.make_env().inner.unwrapped.max_cycles == 5


def test_the_command_that_records_one_agent_says_how_to_record_many(tmp_path: Path) -> None:
    result = command("record", "--make", "agent_envs:Meadow", "-o", tmp_path / "trace", "--episodes", "1")
    assert result.exit_code == 1
    assert "gym_trace.pettingzoo.record()" in result.output


def test_env_at_stands_at_a_turn(tmp_path: Path) -> None:
    kept = made(tmp_path, Passing, 1)[0]
    env = env_at(tmp_path, 0, 4, trust=True)
    inner = env.unwrapped.inner
    assert inner.agent_selection == kept.turns[4][0]
    assert inner.last()[1] == kept.turns[4][1][1]


@pytest.mark.filterwarnings("ignore::UserWarning")  # they warn of spaces that are rare, and of agents that come later
def test_a_replay_passes_pettingzoos_tests_of_environments(tmp_path: Path) -> None:
    for name, kind, most in (
        ("turns", Passing, 100),
        ("cut", Passing, 5),
        ("at once", Meadow, 100),
        ("short", Meadow, 3),
    ):
        made(tmp_path / name, kind, most=most)
        test = api_test if kind is Passing else parallel_api_test
        test(replay(tmp_path / name), num_cycles=40)


@pytest.mark.filterwarnings("ignore::UserWarning")  # and the recorder of an action that is an int32
def test_a_recorded_environment_passes_pettingzoos_tests_of_environments(tmp_path: Path) -> None:
    for name, kind, test in (("turns", Passing, api_test), ("at once", Meadow, parallel_api_test)):
        with closing(record(kind(), tmp_path / name)) as env:
            test(env, num_cycles=40)
        assert {verdict.verdict for verdict in verify_trace(tmp_path / name, make_env=kind)} == {"identical"}


def test_a_replay_gives_what_was_recorded(tmp_path: Path, kind: Any) -> None:
    kept = made(tmp_path, kind)
    env = replay(tmp_path, on_divergence="raise")
    play = play_aec if kind is Passing else play_parallel
    for seed, own in enumerate(kept):
        assert_played_back(play(env, seed, chooser(seed), 100), own)


def test_a_replay_says_where_an_action_differs(tmp_path: Path, kind: Any) -> None:
    made(tmp_path, kind, 1)
    env = replay(tmp_path, on_divergence="raise")
    env.reset(seed=0)
    other: Any = {"wolf": 3, "hare_0": np.full(2, 0.125, np.float32)}
    if kind is Passing:
        other = (int(open_trace(tmp_path)[0]["ann"].actions[0]) + 1) % 3
    with pytest.raises(ReplayDiverged, match="step 0"):
        env.step(other)


def test_a_replay_of_the_state_and_of_what_is_not_recorded(tmp_path: Path) -> None:
    made(tmp_path / "with", Meadow, 1, state=True)
    made(tmp_path / "without", Meadow, 1)
    env = replay(tmp_path / "with")
    env.reset()
    assert env.state().tolist() == [0, 2]
    env = replay(tmp_path / "without")
    env.reset()
    with pytest.raises(NotImplementedError, match="state=True"):
        env.state()


def test_a_trace_of_one_agent_is_not_replayed_as_one_of_many(tmp_path: Path) -> None:
    with TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path) as env:
        play(env, 1)
    with pytest.raises(InvalidOption, match="not a trace of many agents"):
        replay(tmp_path)


def test_edits_keep_all_agents(tmp_path: Path, kind: Any) -> None:
    kept = made(tmp_path / "trace", kind)
    edit.filter(tmp_path / "trace", tmp_path / "some", [1, 3])
    edit.merge([tmp_path / "some", tmp_path / "trace"], tmp_path / "both")
    edit.compact(tmp_path / "both", tmp_path / "compact")
    chosen = [kept[1], kept[3]]
    for episode, own in zip(open_trace(tmp_path / "some"), chosen, strict=True):
        check(episode, own)
    by_seed = {episode.seed: episode for episode in open_trace(tmp_path / "compact")}
    for seed, own in enumerate(kept):
        check(by_seed[seed], own)
    assert {verdict.verdict for verdict in verify_trace(tmp_path / "compact", trust=True)} == {"identical"}


def test_diff_finds_the_agent_that_differs(tmp_path: Path) -> None:
    class Other(Passing):
        def step(self, action: Any) -> None:
            super().step(action)
            if self.time == 3 and "cyd" in self.rewards:
                self.rewards["cyd"] += 0.125

    made(tmp_path / "a", Passing, 1)
    made(tmp_path / "b", Other, 1)
    found = [difference for difference in diff_traces(tmp_path / "a", tmp_path / "b") if difference.difference]
    assert "observations/agents/rewards[2]" in str(found[0].difference)


def test_exports_come_back_with_all_agents(tmp_path: Path, kind: Any) -> None:
    kept = made(tmp_path / "trace", kind)
    for form, name in (("jsonl", "x.jsonl"), ("parquet", "x")):
        export(tmp_path / "trace", tmp_path / name, form)
        import_trace(tmp_path / name, tmp_path / f"from {form}")
        for episode, own in zip(open_trace(tmp_path / f"from {form}"), kept, strict=True):
            check(episode, own)


def test_lint_finds_nothing_in_clean_recordings(tmp_path: Path, kind: Any) -> None:
    made(tmp_path, kind, 6)
    assert not list(lint_trace(tmp_path))


def test_commands_show_traces_of_agents(tmp_path: Path, kind: Any) -> None:
    made(tmp_path, kind)
    for words in ("ls", "info", "cat", "check", "stats"):
        assert ok(words, tmp_path).output
    lines = [json.loads(line) for line in ok("cat", tmp_path, "--format", "jsonl").output.splitlines()]
    steps = [line for line in lines if line["type"] == "step" and line["episode"] == 0]
    assert len(steps) == len(open_trace(tmp_path)[0])
    assert "agents" in steps[0]["observations"]


def test_an_environment_of_agents_is_filmed_again(tmp_path: Path) -> None:
    pytest.importorskip("av")
    made(tmp_path / "trace", Meadow, 1)
    ok("render", tmp_path / "trace", "--make", "agent_envs:Meadow", "-o", tmp_path / "film.mp4")
    assert (tmp_path / "film.mp4").stat().st_size


def test_the_viewer_saves_a_page_of_agents(tmp_path: Path, kind: Any) -> None:
    pytest.importorskip("starlette")
    made(tmp_path / "trace", kind, 1)
    save_page(tmp_path / "trace", target=tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 1000


def test_statistics_and_conditions_know_the_return_of_each_agent(tmp_path: Path, kind: Any) -> None:
    made(tmp_path, kind, 8)
    trace = open_trace(tmp_path)
    found = summarize(trace)["agents"]
    for name in trace[0]._joint.names:
        returns = [episode._joint.rewards[:, episode._joint.names.index(name)].sum() for episode in trace]
        assert found[name]["mean"] == pytest.approx(np.mean(returns))
        most = float(sorted(returns)[-3])
        chosen = trace.select(f'return["{name}"] >= {most!r}', sort=f'-return["{name}"]')
        assert sorted(chosen.indices.tolist()) == [i for i, value in enumerate(returns) if value >= most]
    assert f'return["{trace[0].agents[0]}"]' in ok("stats", tmp_path).output
    assert "no agent 'fox'" in command("ls", tmp_path, "--where", 'return["fox"] > 0').output


def test_an_agent_that_was_not_there_has_no_return(tmp_path: Path) -> None:
    made(tmp_path, Meadow, 2, most=1)  # cut before the second hare comes
    trace = open_trace(tmp_path)
    assert len(trace.select('return["hare_1"] is None')) == 2
    assert len(trace.select('return["hare_0"] == -0.25')) == 2


def test_agents_without_columns_of_their_own_have_returns_too(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pettingzoo.test.example_envs import generated_agents_parallel_v0

        with closing(record(generated_agents_parallel_v0.parallel_env(max_cycles=20), tmp_path)) as env:
            play_parallel(env, 0, chooser(0), 100)
    trace = open_trace(tmp_path)
    agents = summarize(trace, by="outcome")["groups"]["closed"]["agents"]
    assert len(agents) == len(trace[0].agents)
    for name, spread in agents.items():
        columns = trace[0]._joint
        assert spread["mean"] == columns.rewards[:, columns.names.index(name)].sum()
        assert len(trace.select(f'return["{name}"] == {spread["mean"]!r}')) == 1


def test_adapters_for_one_agent_say_what_takes_many(tmp_path: Path) -> None:
    from gym_trace.exchange.episodes import finished

    made(tmp_path, Meadow, 1)
    with pytest.raises(InvalidOption, match=r"holds many agents.*gym_trace\.exchange\.rllib"):
        finished(tmp_path)


def test_a_trace_that_lies_about_its_agents_is_read_all_the_same(tmp_path: Path) -> None:
    made(tmp_path / "trace", Passing, 2)
    trace = open_trace(tmp_path / "trace")
    told = index_of(trace).readers[0].about.environment["agents"]
    for lie in (
        {"names": ["a", "a", "a"]},
        {"names": ["a"]},
        {"names": [["a"]] * 3},
        {"names": "abc", "kind": [1]},
        {},
    ):
        told.clear()
        told |= {"kind": "aec", **lie}
        assert len(summarize(trace)["agents"]) in (0, 3)
    told |= {"kind": {}}
    with pytest.raises(InvalidOption, match="not a trace of many agents"):
        replay(trace)
