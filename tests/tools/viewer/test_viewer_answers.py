"""The answers of the viewer to its page."""

import io
import shutil
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from damage import flip, strip_parity
from PIL import Image
from runs import chunks_of, record_nested, recorder_of
from scripted_env import Result, ScriptedEnv, scripted
from viewer_requests import arrays_of, asked, cartpoles, flagged, viewed

import gym_trace
from gym_trace import TraceRecordingWrapper, edit, open_trace
from gym_trace.tools.viewer.answers import Answers, Refused
from gym_trace.tools.viewer.bins import binned, heat
from gym_trace.tools.viewer.learning import _few
from gym_trace.tools.viewer.trace import Edited


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cartpoles(tmp_path_factory.mktemp("viewer") / "cartpole")


def record(env: Any, directory: Path, steps: int, **options: Any) -> Path:
    with TraceRecordingWrapper(env, directory, **options) as recorder:
        recorder.reset(seed=0)
        for _ in range(steps):
            recorder.step(0)
    return directory


# -- the list ---------------------------------------------------------------------------------------------------------


def test_the_list_has_every_episode_with_its_length_return_and_outcome(cartpole: Path) -> None:
    trace, answers = open_trace(cartpole), viewed(cartpole)
    head, arrays = asked(answers, "/api/episodes?trace=0")
    assert (head["total"], head["matched"]) == (12, 12)
    assert arrays["episode"].tolist() == list(range(12))
    assert arrays["length"].tolist() == trace.episodes["steps"].tolist()
    assert arrays["return"].tolist() == trace.episodes["return"].tolist()
    outcome = head["texts"]["outcome"]
    assert {outcome["words"][code] for code in arrays[outcome["codes"]]} == {"terminated"}


def test_where_and_sort_are_those_of_the_command_line(cartpole: Path) -> None:
    trace, answers = open_trace(cartpole), viewed(cartpole)
    _, arrays = asked(answers, "/api/episodes?trace=0&where=steps > 15&sort=-return&limit=5".replace(" ", "%20"))
    assert arrays["episode"].tolist() == trace.select("steps > 15", sort="-return", limit=5).indices.tolist()


def test_a_page_of_the_list_begins_at_its_offset(cartpole: Path) -> None:
    assert arrays_of(viewed(cartpole), "/api/episodes?offset=4&limit=3")["episode"].tolist() == [4, 5, 6]


@pytest.mark.parametrize(("text", "found"), [("7", [7]), ("TERMIN", list(range(12))), ("nothing", [])])
def test_a_search_finds_numbers_and_texts(cartpole: Path, text: str, found: list[int]) -> None:
    assert arrays_of(viewed(cartpole), f"/api/episodes?search={text}")["episode"].tolist() == found


def test_a_wrong_condition_is_refused_with_its_position(cartpole: Path) -> None:
    with pytest.raises(Refused, match=r"no column 'retrun'; did you mean 'return'\?\n  retrun > 1\n  \^+") as refused:
        asked(viewed(cartpole), "/api/episodes?where=retrun%20>%201")
    assert refused.value.status == 400


def test_histograms_of_a_selection_have_the_edges_of_the_whole_trace(cartpole: Path) -> None:
    answers, table = viewed(cartpole), open_trace(cartpole).episodes
    whole, some = asked(answers, "/api/histograms"), asked(answers, "/api/histograms?where=steps%20>%2020")
    for name in ("return", "length"):
        assert whole[name]["edges"] == some[name]["edges"]
        assert sum(whole[name]["counts"]) == 12
        assert sum(some[name]["counts"]) == (table["steps"] > 20).sum() == some["matched"]
    assert whole["outcome"] == {"names": ["terminated"], "counts": [12]}
    assert whole["terms"]["length"] == "steps"


def test_a_trace_without_episodes_has_an_empty_list(tmp_path: Path) -> None:
    TraceRecordingWrapper(scripted([]), tmp_path).close()
    answers = viewed(tmp_path)
    assert asked(answers, "/api/traces")[0]["episodes"] == 0
    assert asked(answers, "/api/episodes")[0]["matched"] == 0
    assert asked(answers, "/api/histograms")["return"]["counts"] == []


def episodes_of(observations: list[int], count: int) -> ScriptedEnv:
    steps = [Result(np.int64(one)) for one in observations]
    steps[-1] = steps[-1]._replace(terminated=True)
    return ScriptedEnv(gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(2), [(np.int64(0), steps)] * count)


# -- the learning curve ----------------------------------------------------------------------------------------------


def test_the_curve_has_complete_episodes_at_the_step_of_their_end(cartpole: Path) -> None:
    table = open_trace(cartpole).episodes
    head, arrays = asked(viewed(cartpole), "/api/learning?where=steps%20>%2020")
    assert head["axes"] == ["steps", "episodes", "time"]
    assert arrays["steps"].tolist() == np.cumsum(table["steps"]).tolist()
    assert arrays["return"].tolist() == arrays["mean"].tolist() == table["return"].tolist()
    assert arrays["selected"].tolist() == (table["steps"] > 20).tolist()
    assert (head["term"], arrays["at"].tolist()) == ("index", list(range(12)))


def test_an_episode_has_the_policy_version_of_its_last_step(tmp_path: Path) -> None:
    with TraceRecordingWrapper(episodes_of([0, 0], 3), tmp_path) as env:
        for step in range(6):
            if step % 2 == 0:
                env.reset()
            env.annotate(version=step)
            env.step(0)
    head, arrays = asked(viewed(tmp_path), "/api/learning?x=version")
    assert head["axes"][-1] == "version"
    assert arrays["version"].tolist() == [1, 3, 5]


def test_episodes_of_two_writers_come_by_time_and_are_selected_by_it(tmp_path: Path) -> None:
    writers = [TraceRecordingWrapper(episodes_of([0], 2), tmp_path) for _ in range(2)]
    for writer in writers * 2:
        writer.reset()
        writer.step(0)
    for writer in writers:
        writer.close()
    head, arrays = asked(viewed(tmp_path), "/api/learning")
    assert head["term"] == "end_time"
    assert (
        arrays["episode"].tolist() == arrays_of(viewed(tmp_path), "/api/episodes")["episode"].tolist() == [0, 2, 1, 3]
    )
    assert (np.diff(arrays["at"]) > 0).all()


def test_a_curve_of_many_episodes_keeps_its_extremes() -> None:
    returns = np.zeros(100_000)
    returns[[34_567, 34_568]] = 9, -9
    kept = _few(np.arange(len(returns)), returns)
    assert {34_567, 34_568} <= set(kept.tolist())
    assert len(kept) <= 1500


def test_traces_are_compared_as_by_compare(cartpole: Path, tmp_path: Path) -> None:
    other = cartpoles(tmp_path, 3)
    runs = asked(viewed(cartpole, other), "/api/runs?x=episodes")
    first, second = gym_trace.compare([cartpole, other], x="episodes").groups
    assert [run["traces"] for run in runs["groups"]] == [[0], [1]]
    assert [run["steps"] for run in runs["groups"]] == [int(first.steps[0]), int(second.steps[0])]
    assert tuple(runs["groups"][1]["iqm"].values()) == second.iqm


def test_traces_of_one_setting_are_its_seeds(cartpole: Path, tmp_path: Path) -> None:
    other = cartpoles(tmp_path, 3)
    answers = Answers([open_trace(one) for one in (cartpole, other, cartpole)], settings=["a", "b", "a"])
    groups = asked(answers, "/api/runs")["groups"]
    expected = gym_trace.compare({"a": [cartpole, cartpole], "b": [other]}).to_json()["groups"]
    assert [(one["name"], one["traces"]) for one in groups] == [("a", [0, 2]), ("b", [1])]
    assert [(one["mean"], one["low"]) for one in groups] == [(one["mean"], one["low"]) for one in expected]
    assert [one["setting"] for one in asked(answers, "/api/traces")] == [0, 1, 0]


def test_a_heat_map_counts_every_pair_of_a_selection(cartpole: Path) -> None:
    answers = viewed(cartpole)
    found = asked(answers, "/api/heat?x=observation[2]&y=action&where=index < 3")
    episodes = list(open_trace(cartpole)[:3])
    x = np.concatenate([episode.observations[:-1, 2] for episode in episodes])
    y = np.concatenate([episode.actions for episode in episodes])
    expected, _, _ = np.histogram2d(y, x, bins=(found["y"], found["x"]))
    assert found["y"] == [0, 1, 2]
    assert (found["steps"], found["episodes"], found["of"]) == (len(x), 3, 3)
    assert np.abs(np.array(found["counts"]) - expected).sum() <= 2  # rounded edges
    with pytest.raises(Refused, match="4 values per row"):
        asked(answers, "/api/heat?x=observation&y=action")


def test_a_heat_map_of_many_steps_counts_every_nth_and_no_nan() -> None:
    steps = np.arange(10.0)
    found = heat([[steps, steps], [steps + 10, np.where(steps == 2, np.nan, 1.0)]], 3)
    assert (found["steps"], found["missing"]) == (6, 1)  # 0, 3, 6, 9; 15, 18
    assert heat([], 1)["counts"] == []


# -- plots ------------------------------------------------------------------------------------------------------------


def test_a_short_plot_has_every_value(cartpole: Path) -> None:
    episode = open_trace(cartpole)[3]
    head, arrays = asked(viewed(cartpole), "/api/plot?episode=3&column=observations")
    assert not head["decimated"]
    assert arrays["y"].dtype == np.float32
    np.testing.assert_array_equal(arrays["y"], episode.observations.T)
    np.testing.assert_array_equal(arrays["x"], np.arange(len(episode) + 1))


def test_the_return_is_the_running_sum_of_the_rewards(cartpole: Path) -> None:
    episode = open_trace(cartpole)[3]
    np.testing.assert_array_equal(
        arrays_of(viewed(cartpole), "/api/plot?episode=3&column=return&from=5")["y"][0], np.cumsum(episode.rewards)[5:]
    )


def spiky(directory: Path, steps: int) -> tuple[Path, np.ndarray]:
    """Record an episode whose observations are zero but for single spikes, a NaN and an infinity."""
    values = np.zeros((steps + 1, 3), np.float32)
    values[7, 0], values[steps // 2, 1], values[steps - 1, 2] = 100, -100, 55
    values[9, 0], values[11, 1] = np.nan, np.inf
    space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    env = ScriptedEnv(space, gymnasium.spaces.Discrete(2), [(values[0], [Result(row) for row in values[1:]])])
    return record(env, directory, steps), values


def test_a_decimated_plot_keeps_every_spike(tmp_path: Path) -> None:
    directory, values = spiky(tmp_path, 5000)
    head, arrays = asked(viewed(directory), "/api/plot?episode=0&column=observations&pixels=50")
    assert head["decimated"]
    assert head["bin"] == 64
    assert (head["nan"], head["infinite"]) == (1, 1)
    known = np.where(np.isfinite(values), values, 0)
    bins = [known[at : at + 64] for at in range(0, 5001, 64)]
    np.testing.assert_array_equal(arrays["low"], np.array([part.min(axis=0) for part in bins]).T)
    np.testing.assert_array_equal(arrays["high"], np.array([part.max(axis=0) for part in bins]).T)
    np.testing.assert_array_equal(np.flatnonzero(arrays["odd"]), [0])
    assert len(arrays["x"]) <= 100


def test_bins_begin_at_the_same_rows_wherever_the_plot_begins(tmp_path: Path) -> None:
    answers = viewed(spiky(tmp_path, 5000)[0])
    whole = arrays_of(answers, "/api/plot?episode=0&column=observations&from=0&to=4000&pixels=50")
    moved = arrays_of(answers, "/api/plot?episode=0&column=observations&from=77&to=4077&pixels=50")
    both = np.intersect1d(whole["x"], moved["x"])
    assert len(both) > 50
    for name in ("low", "high"):
        kept = [arrays[name][:, np.isin(arrays["x"], both[:-1])] for arrays in (whole, moved)]
        np.testing.assert_array_equal(*kept)


def test_kept_bins_of_a_long_column_equal_those_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, values = spiky(tmp_path, 3000)
    monkeypatch.setattr("gym_trace.tools.viewer.episode.LONG", 1000)
    answers = viewed(directory)
    for url in ("from=0&to=3001&pixels=20", "from=600&to=2900&pixels=9", "from=64&to=3000&pixels=30"):
        arrays = arrays_of(answers, f"/api/plot?episode=0&column=observations&{url}")
        width = int(arrays["x"][1] - arrays["x"][0])
        known = np.where(np.isfinite(values), values, np.nan)
        low = [np.nanmin(known[at : at + width], axis=0) for at in arrays["x"]]
        np.testing.assert_array_equal(arrays["low"], np.array(low).T)


def test_items_choose_some_numbers_of_a_row(cartpole: Path) -> None:
    arrays = arrays_of(viewed(cartpole), "/api/plot?episode=0&column=observations&items=1:3")
    np.testing.assert_array_equal(arrays["y"], open_trace(cartpole)[0].observations[:, 1:3].T)


def test_a_bin_without_finite_values_is_empty() -> None:
    bins = binned(np.array([[np.nan], [np.inf], [1.0], [2.0], [3.0]]), None, 2)
    np.testing.assert_array_equal(bins.low, [[np.nan], [1.0], [3.0]])
    np.testing.assert_array_equal(bins.high, [[np.nan], [2.0], [3.0]])
    assert (bins.nan.ravel().tolist(), bins.infinite.ravel().tolist()) == ([1, 0, 0], [1, 0, 0])
    lost = binned(np.array([[np.nan], [np.nan], [1.0]]), np.array([[True], [False], [False]]), 2)
    assert (lost.nan.ravel().tolist(), lost.missing.ravel().tolist()) == ([1, 0], [1, 0])


def test_an_annotation_that_some_steps_lack_is_a_gap(tmp_path: Path) -> None:
    with TraceRecordingWrapper(scripted([Result(0)] * 4), tmp_path) as env:
        env.reset()
        for step in range(4):
            env.step(0)
            if step % 2:
                env.annotate(value=step)
    y = arrays_of(viewed(tmp_path), "/api/plot?episode=0&column=annotations.value")["y"]
    np.testing.assert_array_equal(y, [[np.nan, np.nan, 1, np.nan]])  # notes are of the next step


@pytest.mark.parametrize(
    "query", ["column=nothing", "column=observations&items=0:65", "column=observations&pixels=0", "column="]
)
def test_an_invalid_plot_is_refused(cartpole: Path, query: str) -> None:
    with pytest.raises(Refused) as refused:
        asked(viewed(cartpole), f"/api/plot?episode=0&{query}")
    assert refused.value.status in (400, 404)


# -- an episode -------------------------------------------------------------------------------------------------------


def test_an_episode_lists_its_columns(tmp_path: Path) -> None:
    record_nested(tmp_path)
    facts = asked(viewed(tmp_path), "/api/episode?episode=0")
    kinds = {column["name"]: (column["group"], column["kind"]) for column in facts["columns"]}
    assert kinds["observations.image"] == ("observations", "frames")
    assert kinds["observations.pair[0]"] == ("observations", "numeric")
    assert kinds["observations.pair[1]"] == ("observations", "text")
    assert kinds["rewards"] == ("rewards", "numeric")
    assert kinds["return"] == ("return", "numeric")
    assert facts["frames"] == ["observations.image"]


def test_numbers_in_infos_are_columns(tmp_path: Path) -> None:
    steps = [Result(0, info={"lives": 3 - i, "name": "x", "deep": {"x": 1}}) for i in range(3)]
    directory = record(scripted(steps), tmp_path, 3, record_infos=True)
    answers = viewed(directory)
    names = [column["name"] for column in asked(answers, "/api/episode?episode=0")["columns"]]
    assert "infos.lives" in names
    assert not {"infos.name", "infos.deep"} & {*names}
    assert arrays_of(answers, "/api/plot?episode=0&column=infos.lives")["y"].tolist() == [[3, 2, 1]]


def test_steps_have_what_was_seen_done_and_answered(cartpole: Path) -> None:
    episode = open_trace(cartpole)[2]
    steps = asked(viewed(cartpole), f"/api/steps?episode=2&from=0&count={len(episode) + 5}")["steps"]
    assert [one["step"] for one in steps] == list(range(len(episode) + 1))
    assert [one["action"] for one in steps[:-1]] == episode.actions.tolist()
    assert steps[-2]["terminated"]
    assert steps[-1].keys() == {"step", "observation"}
    assert steps[3]["annotations"] == {"value": 2.0} or steps[3]["annotations"] == {"value": 3.0}
    np.testing.assert_array_equal(np.float32([one["observation"] for one in steps]), episode.observations)


def test_steps_of_nested_spaces_have_their_structure(tmp_path: Path) -> None:
    record_nested(tmp_path)
    observation = asked(viewed(tmp_path), "/api/steps?episode=0&from=1&count=1")["steps"][0]["observation"]
    assert isinstance(observation["pair"], list)
    assert isinstance(observation["pair"][1], str)


def test_values_that_json_lacks_are_text(tmp_path: Path) -> None:
    told = [Result(0, reward=np.nan, info={"inf": -np.inf, "large": 2**70, "array": np.zeros((9, 9))})]
    directory = record(scripted(told), tmp_path, 1, record_infos=True)
    (first, _) = asked(viewed(directory), "/api/steps?episode=0")["steps"]
    assert first["reward"] == "NaN"
    assert first["infos"] == {"inf": "-Infinity", "large": str(2**70), "array": "float64 array (9, 9)"}


def test_numbers_in_infos_of_a_long_episode_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [Result(0, info={"a": i % 7, "b": -i}) for i in range(900)]
    answers = viewed(record(scripted(steps), tmp_path, 900, record_infos=True))
    monkeypatch.setattr("gym_trace.tools.viewer.episode.LONG", 500)
    found = {name: arrays_of(answers, f"/api/plot?episode=0&column=infos.{name}&pixels=7") for name in ("a", "b")}
    assert found["b"]["low"][0].tolist() == [-min(at + 127, 899) for at in found["b"]["x"].tolist()]
    assert found["a"]["high"][0].tolist() == [6] * 7 + [3]


# -- pictures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(40, 30), (40, 30, 1), (40, 30, 3), (3, 40, 30), (4, 40, 30), (2, 40, 30, 3)])
def test_pictures_come_without_loss(tmp_path: Path, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    rows = random.integers(0, 256, (20, *shape), np.uint8)
    space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
    env = ScriptedEnv(space, gymnasium.spaces.Discrete(2), [(rows[0], [Result(row) for row in rows[1:]])])
    answers = viewed(record(env, tmp_path, 19))
    head, arrays = asked(answers, "/api/frames?episode=0&column=observations&from=16&count=16")
    assert list(arrays) == ["16", "17", "18", "19"]
    assert head["mime"] == "image/png"
    picture = np.asarray(Image.open(io.BytesIO(arrays["17"].tobytes())))
    wanted = {2: rows[17], 4: rows[17][-1]}.get(len(shape), rows[17])
    if shape == (3, 40, 30):
        wanted = rows[17].transpose(1, 2, 0)  # channels first
    if shape == (4, 40, 30):
        wanted = rows[17][-1]  # a stack, the newest last
    np.testing.assert_array_equal(picture, wanted[..., 0] if shape == (40, 30, 1) else wanted)
    (column,) = (one for one in asked(answers, "/api/episode?episode=0")["columns"] if one["kind"] == "frames")
    assert column["frame_shape"] == [40, 30]


# -- odd traces -------------------------------------------------------------------------------------------------------


def test_lanes_of_vector_environments_are_episodes(tmp_path: Path) -> None:
    env, _ = recorder_of(lambda: gymnasium.make("CartPole-v1"), tmp_path, 3)
    env.reset(seed=0)
    for _ in range(60):
        env.step(env.action_space.sample())
    env.close()
    answers, trace = viewed(tmp_path), open_trace(tmp_path)
    assert asked(answers, "/api/traces")[0]["lanes"] == 3
    for index in range(len(trace)):
        y = arrays_of(answers, f"/api/plot?episode={index}&column=observations")["y"]
        np.testing.assert_array_equal(y, trace[index].observations.T)
        assert asked(answers, f"/api/episode?episode={index}")["lane"] == trace[index].lane


def test_a_compacted_trace_shows_the_same(tmp_path: Path) -> None:
    cartpoles(tmp_path / "plain", 4)
    edit.compact(tmp_path / "plain", tmp_path / "compact")
    answers = viewed(tmp_path / "plain", tmp_path / "compact")
    for episode in range(4):
        one, other = (
            arrays_of(answers, f"/api/plot?trace={trace}&episode={episode}&column=observations") for trace in (0, 1)
        )
        np.testing.assert_array_equal(one["y"], other["y"])
        assert asked(answers, f"/api/compare?a=0:{episode}&b=1:{episode}")["same"]


def test_an_episode_plays_at_the_recorded_render_fps(tmp_path: Path) -> None:
    answers = viewed(cartpoles(tmp_path / "t", 1))
    assert asked(answers, "/api/episode?episode=0")["fps"] == gymnasium.make("CartPole-v1").metadata["render_fps"]


def test_histograms_end_at_the_smallest_and_largest_value(tmp_path: Path) -> None:
    answers = viewed(cartpoles(tmp_path / "t", 9))
    steps = answers.traces[0].trace.episodes["steps"]
    assert asked(answers, "/api/histograms")["length"]["ends"] == [steps.min(), steps.max()]


def test_damage_is_a_gap_with_a_note(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((8001, 64))
    space = gymnasium.spaces.Box(-np.inf, np.inf, (64,), np.float64)
    env = ScriptedEnv(space, gymnasium.spaces.Discrete(2), [(rows[0], [Result(row) for row in rows[1:]])])
    (batch,) = record(env, tmp_path, 8000).glob("*.gtb")
    strip_parity(batch)
    chunks = chunks_of(batch)
    assert len(chunks) > 2
    begin, length = chunks[1]
    flip(batch, *range(begin + length // 2, begin + length // 2 + 4000, 97))  # in the middle of the observations
    answers = viewed(tmp_path)
    arrays = arrays_of(answers, "/api/plot?episode=0&column=observations&items=0:1&pixels=8192")
    lost = np.isnan(arrays["y"][0])
    assert 0 < lost.sum() < 6000
    head, _ = asked(answers, "/api/plot?episode=0&column=observations&items=0:1&pixels=8192")
    assert (head["nan"], head["missing"]) == (0, lost.sum())
    assert not arrays["odd"].any()
    head, _ = asked(answers, "/api/plot?episode=0&column=observations&items=0:1&pixels=60")
    assert (head["nan"], head["missing"]) == (0, lost.sum())
    assert asked(answers, "/api/episodes")[0]["texts"]["damage"]["codes"] == "damage"
    assert arrays_of(answers, "/api/episodes")["damage"].tolist() == [0]
    answers.look_closely()
    assert arrays_of(answers, "/api/episodes")["damage"].tolist() == [1]
    assert "checksum mismatch" in asked(answers, "/api/traces")[0]["damage_notes"][0]
    np.testing.assert_array_equal(arrays["y"][0][~lost], rows[~lost, 0])
    first = int(np.flatnonzero(lost)[0])
    assert "unreadable" in asked(answers, f"/api/steps?episode=0&from={first}&count=1")["steps"][0]["observation"]


def test_copies_of_a_trace_have_curves_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.tools.viewer.episode.LONG", 1000)
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    space = gymnasium.spaces.Box(-np.inf, np.inf, (64,), np.float64)
    rows = np.random.default_rng(0).standard_normal((8001, 64))
    env = ScriptedEnv(space, gymnasium.spaces.Discrete(2), [(rows[0], [Result(row) for row in rows[1:]])])
    record(env, whole, 8000)
    shutil.copytree(whole, torn)
    (batch,) = torn.glob("*.gtb")
    strip_parity(batch)
    begin, length = chunks_of(batch)[1]
    flip(batch, *range(begin + length // 2, begin + length // 2 + 4000, 97))
    answers = viewed(torn, whole)
    url = "/api/plot?trace={}&episode=0&column=observations&items=0:1&pixels=60"
    lost, there = (np.isnan(arrays_of(answers, url.format(trace))["low"]).sum() for trace in (0, 1))
    assert lost
    assert not there


def test_an_edit_in_place_is_seen(tmp_path: Path) -> None:
    answers = viewed(cartpoles(tmp_path / "t", 4))
    (trace,) = answers.traces
    assert not trace.refresh()
    before = answers.version
    edit.filter(tmp_path / "t", episodes=[1, 3], in_place=True)
    assert trace.refresh()
    assert answers.version > before
    assert asked(answers, "/api/traces")[0]["damage"] == 0
    assert [asked(answers, f"/api/episode?episode={number}")["seed"] for number in (0, 1)] == [1, 3]
    np.testing.assert_array_equal(
        arrays_of(answers, "/api/plot?episode=1&column=observations")["y"].T, open_trace(tmp_path / "t")[1].observations
    )


def test_a_live_trace_grows_and_says_so(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(scripted([Result(0)] * 50), tmp_path)
    env.reset()
    env.step(0)
    answers = viewed(tmp_path)
    (trace,) = answers.traces
    assert trace.is_live
    assert asked(answers, "/api/episode?episode=0")["length"] == 1
    before = answers.version
    for _ in range(9):
        env.step(0)
    assert trace.refresh()
    assert answers.version > before
    assert asked(answers, "/api/episode?episode=0")["length"] == 10
    assert len(arrays_of(answers, "/api/plot?episode=0&column=rewards")["x"]) == 10
    env.close()
    assert trace.refresh()
    assert not trace.is_live
    assert not trace.refresh()


def test_an_episode_of_a_million_steps_is_plotted_from_kept_bins(tmp_path: Path) -> None:
    rewards = np.zeros(70_000)
    rewards[12345] = 9
    env = scripted([Result(0, reward=reward) for reward in rewards])
    answers = viewed(record(env, tmp_path, len(rewards)))
    arrays = arrays_of(answers, "/api/plot?episode=0&column=rewards&pixels=100")
    assert arrays["high"].max() == 9
    assert arrays["x"][np.argmax(arrays["high"][0])] <= 12345 < arrays["x"][np.argmax(arrays["high"][0]) + 1]


# -- comparing --------------------------------------------------------------------------------------------------------


def test_the_first_difference_of_two_episodes_is_found(tmp_path: Path) -> None:
    first = [Result(0, reward=1.0)] * 2000
    second = [*first[:1500], Result(0, reward=2.0), *first[1501:]]
    record(scripted(first), tmp_path / "a", 2000)
    record(scripted(second), tmp_path / "b", 2000)
    answers = viewed(tmp_path / "a", tmp_path / "b")
    found = asked(answers, "/api/compare?a=0:0&b=1:0")
    assert (found["same"], found["step"], found["column"]) == (False, 1500, "rewards")
    assert (found["a"], found["b"]) == ("1.0", "2.0")
    assert asked(answers, "/api/compare?a=0:0&b=0:0")["same"]


def test_a_shorter_episode_differs_where_it_ends(tmp_path: Path) -> None:
    record(scripted([Result(0)] * 9), tmp_path / "a", 9)
    record(scripted([Result(0)] * 9), tmp_path / "b", 7)
    found = asked(viewed(tmp_path / "a", tmp_path / "b"), "/api/compare?a=0:0&b=1:0")
    assert (found["step"], found["column"]) == (7, "steps")


def test_a_plot_of_a_difference_ends_with_the_shorter_episode(cartpole: Path) -> None:
    answers, (one, other) = viewed(cartpole), open_trace(cartpole)[:2]
    rows = min(len(one), len(other))
    arrays = arrays_of(answers, "/api/plot?episode=0&column=observations&minus=0:1")
    minus = one.observations[: rows + 1].astype(float) - other.observations[: rows + 1]
    np.testing.assert_array_equal(arrays["y"], minus.T)
    same = arrays_of(answers, "/api/plot?episode=0&column=annotations.value&pixels=4&minus=0:1")
    assert not same["low"].any()


def test_a_difference_of_other_shapes_is_refused(cartpole: Path, tmp_path: Path) -> None:
    record(scripted([Result(0)] * 3), tmp_path, 3)
    with pytest.raises(Refused, match="observations: has shape"):
        asked(viewed(cartpole, tmp_path), "/api/plot?episode=0&column=observations&minus=1:0")


# -- flags ------------------------------------------------------------------------------------------------------------


def test_a_flag_is_kept_in_the_facts_and_is_a_column(tmp_path: Path) -> None:
    cartpoles(tmp_path / "t", 5)
    answers = viewed(tmp_path / "t")
    assert flagged(answers, 2, "bad") == {"good": 0, "bad": 1, "look": 0}
    flagged(answers, 4, "good")
    assert flagged(answers, 1, "look") == {"good": 1, "bad": 1, "look": 1}
    flagged(answers, 1, None)
    assert asked(answers, "/api/episode?episode=2")["flag"] == "bad"
    trace = open_trace(tmp_path / "t")
    assert trace.select('flag == "bad"').indices.tolist() == [2]
    assert trace.select("flag is None").indices.tolist() == [0, 1, 3]
    assert arrays_of(answers, "/api/episodes?where=flag%20!=%20%22bad%22")["episode"].tolist() == [0, 1, 3, 4]
    flags = asked(answers, "/api/histograms")["flag"]
    assert dict(zip(flags["names"], flags["counts"])) == {"none": 3, "good": 1, "bad": 1, "look": 0}
    assert not list(trace.directory.glob("*.part"))


def test_flags_stay_with_their_episodes_through_edits(tmp_path: Path) -> None:
    cartpoles(tmp_path / "t", 5)
    cartpoles(tmp_path / "u", 3)
    for name, index, flag in (("t", 2, "bad"), ("t", 3, "good"), ("u", 0, "look")):
        flagged(viewed(tmp_path / name), index, flag)
    edit.filter(open_trace(tmp_path / "t").select('flag != "bad"'), tmp_path / "kept")
    kept = open_trace(tmp_path / "kept")
    assert len(kept) == 4
    assert kept.select('flag == "good"').episodes["seed"].tolist() == [3]
    edit.merge([tmp_path / "t", tmp_path / "u"], tmp_path / "both")
    assert len(open_trace(tmp_path / "both").select("flag is not None")) == 3


def test_a_flag_meant_for_an_episode_before_an_edit_in_place_is_refused(tmp_path: Path) -> None:
    answers = viewed(cartpoles(tmp_path / "t", 4))
    listed = [asked(answers, f"/api/episode?episode={number}")["identity"] for number in range(4)]
    edit.filter(tmp_path / "t", episodes=[0, 2, 3], in_place=True)
    (trace,) = answers.traces
    with pytest.raises(Edited, match="episode 1 is another one now"):
        trace.set_flag(1, listed[1], "bad")
    with pytest.raises(Edited, match="no episode 3 now"):
        trace.set_flag(3, listed[3], "bad")
    assert trace.set_flag(0, listed[0], "good") == {"good": 1, "bad": 0, "look": 0}
    assert open_trace(tmp_path / "t").select("flag is not None").episodes["seed"].tolist() == [0]


def test_an_episode_that_grows_keeps_its_identity(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(scripted([Result(0)] * 50), tmp_path)
    env.reset()
    env.step(0)
    answers = viewed(tmp_path)
    listed = asked(answers, "/api/episode?episode=0")["identity"]
    env.step(0)
    assert answers.traces[0].set_flag(0, listed, "look")["look"] == 1
    env.close()


def test_the_lines_that_keep_a_selection_work(tmp_path: Path) -> None:
    import shlex

    from shell import run

    directory = cartpoles(tmp_path / "it's", 4)
    answers = viewed(directory)
    flagged(answers, 1, "bad")
    (found,) = asked(answers, "/api/filter")["lines"]
    program, *words = shlex.split(found["line"])
    assert program == "gym-trace"
    done = run(*words)
    assert done.exit_code == 0, done.output
    assert len(open_trace(f"{directory}-kept")) == 3


def test_malformed_flags_in_facts_count_as_none(tmp_path: Path) -> None:
    cartpoles(tmp_path, 2)
    for flags in ('{"w": 3}', '{"w": {"bad": ["x"]}}', '{"w": {"evil": [1]}}', "[]", '{"w": {"bad": [1e400]}}'):
        (tmp_path / "facts.json").write_text(f'{{"flags": {flags}}}')
        if "1e400" in flags:
            continue
        assert len(open_trace(tmp_path).select("flag is None")) == 2
        assert asked(viewed(tmp_path), "/api/episode?episode=0")["flag"] is None


# -- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("/api/episode?episode=12", 404),
        ("/api/episode?episode=-1", 404),
        ("/api/episode?episode=x", 400),
        ("/api/episode", 400),
        ("/api/episode?trace=1&episode=0", 404),
        ("/api/episode?trace=-1&episode=0", 404),
        ("/api/plot?episode=0&column=observations&items=5", 400),
        ("/api/frames?episode=0&column=observations", 404),
        ("/api/frames?episode=0&column=observations&scale=0", 400),
        ("/api/compare?a=0&b=1", 400),
        ("/api/compare?a=0:0&b=0:99", 404),
        ("/api/steps?episode=0&from=99999999999999999999", 400),
        ("/api/nothing", 404),
        ("/api/episodes?where=" + "(" * 2000, 400),
        ("/api/episodes?sort=nothing", 400),
    ],
)
def test_an_invalid_request_is_refused(cartpole: Path, url: str, status: int) -> None:
    with pytest.raises(Refused) as refused:
        asked(viewed(cartpole), url)
    assert refused.value.status == status
    assert refused.value.error


def test_returns_of_agents_are_columns_that_sort() -> None:
    answers = viewed(Path(__file__).parents[3] / "sample_traces" / "format-1.1" / "agents")
    answers.look_closely()
    head, arrays = asked(answers, "/api/episodes?sort=-return[%22bob%22]")
    titles = {column["name"]: column["title"] for column in head["columns"]}
    assert titles['return["bob"]'] == "bob"
    returns = arrays['return["bob"]']
    assert returns[~np.isnan(returns)].tolist() == [7.0, 5.5, 3.5]


def test_steps_after_the_end_are_an_empty_list(cartpole: Path) -> None:
    assert asked(viewed(cartpole), "/api/steps?episode=0&from=5000&count=5") == {"steps": []}


def test_two_traces_of_one_name_have_their_paths(tmp_path: Path) -> None:
    cartpoles(tmp_path / "a" / "t", 1)
    cartpoles(tmp_path / "b" / "t", 1)
    answers: Answers = viewed(tmp_path / "a" / "t", tmp_path / "b" / "t")
    assert len({one["name"] for one in asked(answers, "/api/traces")}) == 2


def test_the_trace_of_the_caller_is_not_refreshed(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(scripted([Result(0)] * 5), tmp_path)
    env.reset()
    env.step(0)
    mine = open_trace(tmp_path)
    answers = Answers([mine])
    env.step(0)
    assert answers.traces[0].refresh()
    assert asked(answers, "/api/episode?episode=0")["length"] == 2
    assert len(mine[0]) == 1
    env.close()
