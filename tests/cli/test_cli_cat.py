"""gym-trace cat: the steps of episodes as a table, JSON lines, CSV and npz."""

import base64
import csv
import io
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from damage import flip
from gym_trace_cli import show
from gymnasium import spaces
from gymnasium.spaces import GraphInstance
from hostile_objects import array_for, reward_for, value_for
from runs import place_of, record_lengths, record_nested, recorded
from scripted_env import CountingEnv, Result, ScriptedEnv, bits, small_windows
from shell import ok, process, run, strict_json

from gym_trace import Episode, TraceRecordingWrapper, TraceWriter, export, open_trace
from gym_trace.data.layout import Leaf
from gym_trace.data.tensors import RawArray
from gym_trace.data.values import ABSENT, EnumMember, Unstored
from gym_trace.exchange.formats.steps.windows import step_windows
from gym_trace.playback.column_selection import select_columns
from gym_trace.playback.episode_index import index_of

SAMPLES = Path(__file__).parents[2] / "sample_traces" / "format-1.1"
NAMES = sorted(path.name for path in SAMPLES.iterdir() if path.name != "damaged")


# -- a reader written from docs/reference/steps.md alone ---------------------------------------------------------------

NUMBERS = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")


def number(said: Any, dtype: np.dtype[Any]) -> Any:
    if not isinstance(said, str):
        return np.array(said, dtype)[()]
    if said.startswith("NaN:"):
        return np.frombuffer(bytes.fromhex(said[4:]), dtype.newbyteorder(">")).astype(dtype.newbyteorder("="))[0]
    return dtype.type(said)


def array(text: str, shape: list[int], said: Any) -> np.ndarray:
    dtype, size = np.dtype(text), int(np.prod(shape, dtype=int))
    if text[1:] not in NUMBERS or size > 4096:
        raw = base64.b64decode(said)
        return np.frombuffer(raw, dtype).reshape(shape) if dtype.itemsize else np.empty(shape, dtype)
    flat = np.empty(size, dtype)
    for i, item in enumerate(np.array(said, object).reshape(-1)):
        flat[i] = number(item, dtype)
    return flat.reshape(shape)


def value(said: Any) -> Any:
    if isinstance(said, list):
        return [value(item) for item in said]
    if not isinstance(said, dict):
        return said
    tag = next(iter(said), "")
    if not tag.startswith("$"):
        return {key: value(item) for key, item in said.items()}
    (of,) = said.values()
    readers = {
        "$scalar": lambda: array(of[0], [], of[1])[()],
        "$array": lambda: array(*of),
        "$objects": lambda: objects(*of),
        "$masked": lambda: masked(*map(value, of)),
        "$raw": lambda: RawArray(of[0], value(of[1])),
        "$tuple": lambda: tuple(map(value, of)),
        "$graph": lambda: GraphInstance(*map(value, of)),
        "$map": lambda: {value(key): value(item) for key, item in of},
        "$bytes": lambda: base64.b64decode(of),
        "$int": lambda: int(of, 16),
        "$float": lambda: float(number(of, np.dtype(float))),
        "$complex": lambda: complex(*map(value, of)),
        "$value": lambda: value(of),
        "$enum": lambda: EnumMember(*of[:2], value(of[2])),
        "$unstored": lambda: Unstored(*of),
        "$absent": lambda: ABSENT,
        "$extension": lambda: msgpack.ExtType(of[0], base64.b64decode(of[1])),
    }
    return readers[tag]()


def objects(shape: list[int], items: list[Any]) -> np.ndarray:
    flat = np.empty(len(items), object)
    for i, item in enumerate(items):
        flat[i] = value(item)
    return flat.reshape(shape)


def masked(data: np.ndarray, mask: Any, fill_value: Any) -> Any:
    found = np.ma.MaskedArray(data, np.ma.nomask if mask is None else mask)
    if fill_value is not None:
        found.fill_value = fill_value
    return found


def row(said: Any, declared: dict[str, Any]) -> Any:
    if isinstance(said, dict) and list(said) == ["$value"]:
        return value(said)
    if "dict" in declared:
        return {key: row(said[key], inner) for key, inner in declared["dict"].items()}
    if "tuple" in declared:
        return tuple(row(item, inner) for item, inner in zip(said, declared["tuple"]))
    if declared["dtype"] is None:
        return value(said)
    return array(declared["dtype"], declared["shape"], said)[()]


def read_back(text: str) -> list[dict[str, Any]]:
    """Return episodes as their metadata and one list of rows per column."""
    declared: dict[str, Any] = {}
    episodes: list[dict[str, Any]] = []
    for said in map(strict_json, text.splitlines()):
        kind = said.pop("type")
        if kind == "columns":
            declared |= said
        elif kind == "episode":
            episodes.append({**said, "columns": {}})
        else:
            columns = episodes[-1]["columns"]
            assert said["episode"] == episodes[-1]["episode"]
            for name, item in said.items():
                if name in ("episode", "step"):
                    continue
                if name == "annotations":
                    found = {key: row(inner, declared[name][key]) for key, inner in item.items()}
                else:
                    found = row(item, declared[name])
                columns.setdefault(name if (kind, name) != ("start", "infos") else "reset_info", []).append(found)
    return episodes


# -- JSON lines -------------------------------------------------------------------------------------------------------


def rows_of(column: Any, count: int) -> list[Any]:
    """Return the rows of a column of an Episode."""
    if isinstance(column, dict):
        parts = {key: rows_of(inner, count) for key, inner in column.items()}
        return [{key: rows[i] for key, rows in parts.items()} for i in range(count)]
    if isinstance(column, tuple):
        return [tuple(items) for items in zip(*(rows_of(inner, count) for inner in column))]
    return list(column)


def assert_same(found: dict[str, Any], episode: Episode) -> None:
    count, columns = len(episode), found["columns"]
    for name in ("observations", "actions", "rewards", "terminations", "truncations", "infos"):
        rows = count + (name == "observations")
        try:
            expected = rows_of(getattr(episode, name), rows)
        except Exception:  # infos that were not recorded
            assert name == "infos"
            assert name not in columns
            continue
        assert [bits(item) for item in columns.get(name, [])] == [bits(item) for item in expected], name
    expected = rows_of(episode.annotations, count)
    assert [bits(item) for item in columns.get("annotations", expected)] == [bits(item) for item in expected]
    assert bits(value(found["options"])) == bits(episode.options)
    assert bits(value(found["rng_state"])) == bits(episode.rng_state)
    assert value(found["seed"]) == episode.seed
    assert (found["episode_id"], found["writer"], found["steps"]) == (episode.episode_id, episode.writer, count)


@pytest.mark.parametrize("name", NAMES)
def test_json_lines_give_back_every_value_bit_for_bit(name: str) -> None:
    trace = open_trace(SAMPLES / name)
    found = read_back(ok("cat", SAMPLES / name, "--json").stdout)
    assert len(found) == len(trace)
    for one, episode in zip(found, trace):
        assert_same(one, episode)


SPACE = spaces.Dict(
    {
        "half": spaces.Box(-1, 1, (2, 2), np.float16),
        "single": spaces.Box(-1, 1, (3,), np.float32),
        "double": spaces.Box(-1, 1, (), np.float64),
        "pair": spaces.Tuple([spaces.Discrete(5), spaces.MultiBinary(3)]),
        "large": spaces.Box(0, 255, (70, 60), np.uint8),
    }
)


def odd_observation(random: np.random.Generator) -> Any:
    parts = {
        "half": value_for(random, Leaf(("half",), np.dtype("f2"), (2, 2))),
        "single": value_for(random, Leaf(("single",), np.dtype("f4"), (3,))),
        "double": value_for(random, Leaf(("double",), np.dtype("f8"), ())),
        "pair": (np.int64(random.integers(5)), array_for(random, np.dtype("i1"), (3,))),
        "large": array_for(random, np.dtype("u1"), (70, 60)),
    }
    return parts if random.random() < 0.9 else [parts, {"$value": 1, 2: b"\x00"}, float("-inf")][random.integers(3)]


@pytest.mark.parametrize("seed", range(6))
def test_json_lines_give_back_what_no_environment_should_say(seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    infos = [
        {"big": 10**30, "nan": float("nan"), "inf": -np.inf, "z": 1j, "$": 1},
        {"text": "\x00\x1b\x7f\ud800é", "bytes": b"\xff", "deep": [(1, [{}])], 3: None, ("a", 1): True},
        {
            "c": np.array([1j]),
            "s": np.array(["a", "bc"]),
            "t": np.datetime64(5, "s"),
            "e": np.empty((2, 0)),
            "o": object(),
        },
        {"f": np.float16("nan"), "l": np.longdouble(1) / 3, "m": np.ma.masked_array([1.5, np.nan], [True, False])},
        {"o": object(), "absent": None, "list": [], "map": {}},
    ]
    episodes = []
    for _ in range(5):
        told = [
            Result(odd_observation(random), reward_for(random), info=infos[random.integers(5)])
            for _ in range(int(random.integers(12)))
        ]
        episodes.append((odd_observation(random), told))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = TraceRecordingWrapper(ScriptedEnv(SPACE, spaces.Discrete(3), episodes), tmp_path, record_infos=True)
        for _, told in episodes:
            env.reset(options={"odd": infos[1]} if random.random() < 0.5 else None)
            for _ in told:
                env.annotate(value=float(random.normal()) if random.random() < 0.9 else None)
                env.step(value_for(random, Leaf(("a",), np.dtype("i8"), ())))
        env.close()
    trace = open_trace(tmp_path)
    found = read_back(ok("cat", tmp_path, "--json").stdout)
    for one, episode in zip(found, trace, strict=True):
        assert_same(one, episode)


def test_the_dtype_is_said_once() -> None:
    text = ok("cat", SAMPLES / "cartpole", "--format", "jsonl").stdout
    assert text.count("dtype") == 5
    assert text.splitlines()[0].startswith('{"type": "columns"')


@pytest.mark.parametrize("name", ["cartpole", "minigrid", "filtered", "values", "batches"])
def test_windows_are_not_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [ok("cat", SAMPLES / name, "--format", form).stdout for form in ("jsonl", "csv", "table")]
    small_windows(monkeypatch, 3)
    in_parts = [ok("cat", SAMPLES / name, "--format", form).stdout for form in ("jsonl", "csv", "table")]
    if name == "filtered":  # notes are texts in one window, and absent in another
        whole, in_parts = whole[1:], in_parts[1:]
    assert in_parts == whole


def test_no_window_has_more_steps_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_windows(monkeypatch, 7)
    record_lengths(tmp_path, [40, 3, 0], flush_after=9)
    trace = open_trace(tmp_path)
    found = list(step_windows(trace, select_columns(trace, None)))
    assert [window.start for window in found[:6]] == [0, 7, 14, 21, 28, 35]
    assert [window.steps for window in found] == [7, 7, 7, 7, 7, 5, 3, 0]
    assert [len(window.columns[("observations",)]) for window in found] == [8, 8, 8, 8, 8, 6, 4, 1]


# -- selection --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("10:20", slice(10, 20)),
        ("3", slice(3, 4)),
        ("-1", slice(-1, None)),
        ("-3:", slice(-3, None)),
        (":2", slice(2)),
        ("900:", slice(900, None)),
        ("5:2", slice(5, 2)),
    ],
)
def test_steps_are_chosen_as_in_python(text: str, steps: slice) -> None:
    episode = open_trace(SAMPLES / "cartpole")[5]
    part = episode[steps]
    (found,) = read_back(ok("cat", SAMPLES / "cartpole", "--episodes", 5, "--steps", text, "--json").stdout)
    assert [bits(row) for row in found["columns"]["observations"]] == [bits(row) for row in part.observations]
    assert [bits(row) for row in found["columns"].get("actions", [])] == [bits(row) for row in part.actions]


@pytest.mark.parametrize("text", ["", "a", "1:2:3", "1,2", "1.5"])
def test_a_senseless_choice_of_steps_is_a_usage_error(text: str) -> None:
    assert run("cat", SAMPLES / "cartpole", "--steps", text).exit_code == 2


def test_columns_are_chosen_with_their_leaves() -> None:
    names = "rewards,observations/direction,observations.mission"
    (found, *_) = read_back(ok("cat", SAMPLES / "minigrid", "--columns", names, "--json").stdout)
    assert sorted(found["columns"]) == ["observations", "rewards"]
    assert {tuple(sorted(row)) for row in found["columns"]["observations"]} == {("direction", "mission")}
    result = run("cat", SAMPLES / "minigrid", "--columns", "reward")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: no column 'reward'; choose from observations, actions, rewards, ")


def test_elements_of_a_tuple_keep_their_places() -> None:
    words = ("--columns", "observations/1", "--steps", "0:0", "--limit", 1, "--json")
    declared, _, start = map(strict_json, ok("cat", SAMPLES / "blackjack", *words).stdout.splitlines())
    assert declared["observations"] == {"tuple": [None, {"dtype": "<i8", "shape": []}, None]}
    assert start["observations"] == [None, open_trace(SAMPLES / "blackjack")[0].observations[1][0], None]


def test_a_selection_keeps_its_order() -> None:
    found = read_back(ok("cat", SAMPLES / "cartpole", "--sort", "-return", "--limit", 2, "--json").stdout)
    assert [one["episode"] for one in found] == [5, 34]


# -- CSV and npz ------------------------------------------------------------------------------------------------------


def test_csv_has_a_column_for_each_number() -> None:
    rows = list(csv.DictReader(io.StringIO(ok("cat", SAMPLES / "cartpole", "--format", "csv").stdout)))
    trace = open_trace(SAMPLES / "cartpole")
    assert len(rows) == sum(len(episode) + 1 for episode in trace)
    for i in range(4):
        column = np.concatenate([episode.observations[:, i] for episode in trace])
        assert np.array([row[f"observations[{i}]"] for row in rows], np.float32).tobytes() == column.tobytes()
    steps = [row for row in rows if row["actions"]]
    assert [int(row["actions"]) for row in steps] == np.concatenate([episode.actions for episode in trace]).tolist()
    assert [row["step"] for row in rows if not row["actions"]] == ["-1"] * len(trace)
    assert {row["terminations"] for row in steps} == {"true", "false"}


def test_csv_has_one_heading_and_says_if_it_does_not_fit(tmp_path: Path) -> None:
    recorded(tmp_path, uid="a")
    record_nested(tmp_path / "nested")
    for path in (tmp_path / "nested").iterdir():
        shutil.move(path, tmp_path)
    result = run("cat", tmp_path, "--format", "csv")
    assert result.exit_code == 2
    assert "CSV has one heading" in result.stderr
    assert ok("cat", tmp_path, "--format", "csv", "--columns", "rewards").exit_code == 0
    assert len(read_back(ok("cat", tmp_path, "--json").stdout)) == len(open_trace(tmp_path))
    assert "\n\nepisode" in ok("cat", tmp_path).stdout  # a second table


def test_a_csv_does_not_steer_the_terminal(tmp_path: Path) -> None:
    env = ScriptedEnv(spaces.Text(9), spaces.Discrete(2), [("\x1b[31mred\n", [Result("\x9b", info={"\x1b": "\x7f"})])])
    with TraceRecordingWrapper(env, tmp_path, record_infos=True) as recording:
        recording.reset()
        recording.step(0)
    for form in ("csv", "table", "jsonl"):
        output = ok("cat", tmp_path, "--format", form).output
        assert all(character.isprintable() or character == "\n" for character in output)
        assert len(output.splitlines()) == (3 if form != "jsonl" else 4)


def test_csv_for_a_spreadsheet_has_no_formulas(tmp_path: Path) -> None:
    env = ScriptedEnv(spaces.Text(9), spaces.Box(-9, 9, (), np.float64), [("=1+2", [Result("@SUM(A1)")])])
    with TraceRecordingWrapper(env, tmp_path / "t") as recording:
        recording.reset()
        recording.annotate(note="-2+3", plain="a=b", number=-2.5)
        recording.step(np.array(-1.5))
    for spreadsheet, texts in ((False, ["=1+2", "@SUM(A1)", "-2+3"]), (True, ["'=1+2", "'@SUM(A1)", "'-2+3"])):
        out = tmp_path / f"{spreadsheet}.csv"
        export(tmp_path / "t", out, "csv", spreadsheet=spreadsheet)
        first, second = csv.DictReader(out.read_text(encoding="utf-8").splitlines())
        assert [first["observations"], second["observations"], second["annotations/note"]] == texts
        others = [second[name] for name in ("actions", "annotations/number", "annotations/plain")]
        assert others == ["-1.5", "-2.5", "a=b"]


def loaded(path: Path) -> dict[str, Any]:
    with np.load(path) as found:
        return dict(found)


@pytest.mark.parametrize("name", ["cartpole", "minigrid", "pong", "filtered"])
def test_npz_has_an_array_a_column(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_windows(monkeypatch, 7)
    ok("cat", SAMPLES / name, "-o", tmp_path / "s.npz")
    trace, found = open_trace(SAMPLES / name), loaded(tmp_path / "s.npz")
    assert found["episodes"].tobytes() == trace.episodes.tobytes()
    assert [path.name for path in tmp_path.iterdir()] == ["s.npz"]
    for column in ("actions", "rewards", "terminations", "truncations"):
        expected = np.concatenate([getattr(episode, column) for episode in trace])
        assert bits(found[column]) == bits(expected)
    pieces = [episode.observations for episode in trace]
    if name == "minigrid":
        assert bits(found["observations/image"]) == bits(np.concatenate([piece["image"] for piece in pieces]))
        missions = [text for piece in pieces for text in piece["mission"]]
        assert list(map(strict_json, found["observations/mission.jsonl"].splitlines())) == missions
    else:
        assert bits(found["observations"]) == bits(np.concatenate(pieces))
    if name == "filtered":
        assert len(found["infos.jsonl"].splitlines()) == len(found["rewards"])
        assert found["annotations/logits"].dtype == np.float32


def test_npz_of_some_steps_says_which(tmp_path: Path) -> None:
    ok("cat", SAMPLES / "cartpole", "--steps", "-5:", "--where", "steps > 40", "-o", tmp_path / "s.npz")
    found = loaded(tmp_path / "s.npz")
    trace = open_trace(SAMPLES / "cartpole").select("steps > 40")
    assert found["episodes"]["steps"].tolist() == [5] * len(trace)
    assert found["episodes"]["first_step"].tolist() == [len(episode) - 5 for episode in trace]
    parts = np.split(found["observations"], np.cumsum(found["episodes"]["steps"] + 1)[:-1])
    assert [bits(part) for part in parts] == [bits(episode[-5:].observations) for episode in trace]


def test_npz_that_cannot_be_leaves_no_file(tmp_path: Path) -> None:
    target = tmp_path / "s.npz"
    target.write_bytes(b"before")
    result = run("cat", SAMPLES / "damaged", "-o", target)
    assert result.exit_code == 5
    assert [path.name for path in tmp_path.iterdir()] == ["s.npz"]
    assert target.read_bytes() == b"before"


def test_npz_can_be_piped(tmp_path: Path) -> None:
    words = ("cat", SAMPLES / "taxi", "--format", "npz")
    with open(tmp_path / "s.npz", "wb") as file, process(*words, stdout=file) as cat:
        assert cat.wait() == 0
    assert len(loaded(tmp_path / "s.npz")["rewards"]) == 484


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-o", "steps"], "pass --format"),
        (["-o", "x", "--format", "table"], "not for files"),
        (["--json", "--format", "csv"], "excludes --format csv"),
        (["--format", "xml"], "xml"),
    ],
    ids=str,
)
def test_conflicting_options_are_a_usage_error(args: list[str], said: str, tmp_path: Path) -> None:
    result = run("cat", SAMPLES / "cartpole", *args)
    assert result.exit_code == 2
    assert said in result.stderr


def test_an_ending_that_contradicts_the_format_is_noted(tmp_path: Path) -> None:
    result = ok("cat", SAMPLES / "cartpole", "--format", "npz", "-o", tmp_path / "x.csv")
    assert "x.csv: written as npz" in result.stderr
    assert len(loaded(tmp_path / "x.csv")["rewards"])


# -- odd traces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["table", "csv", "jsonl"])
def test_damaged_parts_are_skipped_and_reported(form: str) -> None:
    result = run("cat", SAMPLES / "damaged", "--format", form)
    assert result.exit_code == 5
    assert result.stderr.count("skipped: ") == 1
    assert "checksum mismatch in column" in result.stderr
    assert "truncated" in result.stdout or form == "csv"


def test_cat_of_a_damaged_trace_prints_what_a_scan_yields(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = list(open_trace(SAMPLES / "damaged").scan(on_damage="skip"))
    expected = [(part.episode_id, part.first_step + i) for part in parts for i in range(len(part))]
    lines = map(strict_json, run("cat", SAMPLES / "damaged", "--json").stdout.splitlines())
    assert [(line["episode"], line["step"]) for line in lines if line["type"] == "step"] == sorted(expected)


def test_a_damaged_chunk_costs_only_itself_and_the_step_after_it(tmp_path: Path) -> None:
    record_lengths(tmp_path, [40], flush_after=10, uid="w")
    trace = open_trace(tmp_path)
    batch, i = index_of(trace).readers[0].chunk_positions[1]
    offset, length = (int(batch.chunks[name][i]) for name in ("offset", "length"))
    flip(batch.path, offset + length - 8)
    result = run("cat", tmp_path, "--json")
    steps = [line["step"] for line in map(strict_json, result.stdout.splitlines()) if line["type"] == "step"]
    assert (result.exit_code, steps) == (5, [*range(10), *range(21, 40)])
    assert [line["step"] for line in map(strict_json, result.stdout.splitlines()) if line["type"] == "start"] == [0, 21]


def test_an_episode_whose_reset_info_is_damaged_keeps_its_steps(tmp_path: Path) -> None:
    record_lengths(tmp_path, [4, 5, 6], flush_after=4, uid="w", record_infos=True)
    flip(tmp_path / "w.000000.gtb", place_of(tmp_path / "w.000000.gtb", 1, "starts"))
    result = run("cat", tmp_path, "--json")
    steps = [line["episode"] for line in map(strict_json, result.stdout.splitlines()) if line["type"] == "step"]
    assert (result.exit_code, steps) == (5, [0] * 4 + [1] * 5 + [2] * 6)
    assert "column starts" in result.stderr


def test_a_trace_that_is_being_recorded_has_its_steps_so_far(tmp_path: Path) -> None:
    with TraceRecordingWrapper(CountingEnv(length=10**6), tmp_path) as env:
        env.reset(seed=0)
        for _ in range(25):
            env.step(1)
        (found,) = read_back(ok("cat", tmp_path, "--json").stdout)
        assert (found["outcome"], len(found["columns"]["actions"])) == ("running", 25)


def test_a_trace_without_episodes_is_a_heading() -> None:
    assert ok("cat", SAMPLES / "empty").stdout == "episode  step\n"
    assert ok("cat", SAMPLES / "empty", "--format", "csv").stdout == "episode,step\n"
    assert ok("cat", SAMPLES / "empty", "--json").stdout == ""


@pytest.mark.parametrize("form", ["table", "jsonl", "csv", "npz"])
def test_a_reader_that_leaves_ends_it_without_a_word(form: str) -> None:
    read, write = os.pipe()
    os.close(read)
    with process("cat", SAMPLES / "cartpole", "--format", form, stdout=write) as running:
        os.close(write)
        assert running.stderr is not None
        assert running.stderr.read() == ""
    assert running.returncode == 141


def test_a_table_shows_short_arrays_and_names_long_ones() -> None:
    head = ok("cat", SAMPLES / "pong", "--steps", ":1").stdout.splitlines()
    assert head[0].split() == ["episode", "step", "actions", "rewards", "end", "observations"]
    assert head[1].split() == ["0", "-", "210×160×3", "uint8,", "0", "to", "228"]
    assert ok("cat", SAMPLES / "cartpole", "--steps", "-1:", "--limit", 1).stdout.splitlines()[2] == (
        "      0    17        1        1  terminated  [0.06749, 1.17, -0.2305, -2.352]"
    )


def test_a_table_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, ok("cat", SAMPLES / "minigrid").stdout.splitlines()[1:])) <= 80


def test_steps_of_many_columns_are_blocks_on_a_narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TraceWriter(tmp_path / "t") as writer:
        observation = {f"camera_number_{number}": np.full(7, 1 / 3) for number in range(6)}
        writer.begin(observation)
        writer.step(np.zeros(2), observation, 0.5, True, False)
    arguments = ("cat", tmp_path / "t")
    piped = ok(*arguments).stdout.splitlines()
    monkeypatch.setattr(show, "is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "80")
    blocks = [block.splitlines() for block in ok(*arguments).stdout.strip().split("\n\n")]
    value = "[0.3333, 0.3333, 0.3333, 0.3333, 0.3333, 0.3333, 0.3333]"
    observed = [f"observations/camera_number_{number}" for number in range(6)]
    (first, *before), (second, *after) = blocks
    assert (first, second) == ("episode 0  step -", "episode 0  step 0")
    assert [line.split(None, 1)[0] for line in before if line[0] != " "] == observed
    assert [line.split(None, 1)[0] for line in after if line[0] != " "] == ["actions", "rewards", "end", *observed]
    assert " ".join(" ".join(before[:2]).split()[1:]) == value
    assert max(map(len, [*before, *after])) <= 80
    monkeypatch.setenv("COLUMNS", "999")
    assert ok(*arguments).stdout.splitlines() == piped


@pytest.mark.parametrize("form", ["jsonl", "csv", "table", "npz"])
def test_episodes_without_steps_are_their_first_observation(form: str, tmp_path: Path) -> None:
    record_lengths(tmp_path / "t", [0, 3, 0], flush_after=2)
    output = tmp_path / "out"
    if form == "npz":
        ok("cat", tmp_path / "t", "--format", form, "-o", output)
        assert loaded(output)["episodes"]["steps"].tolist() == [0, 3, 0]
        assert loaded(output)["observations"][:, 0].tolist() == [0, 0, 1, 2, 3, 0]
    else:
        text = ok("cat", tmp_path / "t", "--format", form).stdout
        assert len(text.splitlines()) == {"csv": 7, "table": 7, "jsonl": 11}[form]


def test_the_return_of_several_objectives_is_that_of_a_listing() -> None:
    sample = Path(__file__).parents[2] / "sample_traces/format-1.1/mismatch"
    told = ok("cat", sample, "--json", "--limit", 1).stdout.splitlines()
    (episode,) = (line for line in told if '"episode_id"' in line)
    (listed,) = ok("ls", sample, "--json", "--limit", 1).stdout.splitlines()
    assert json.loads(episode)["return"] == json.loads(listed)["return"] == [21.0, -6.0]


@pytest.mark.parametrize("planted", ["link", "pipe"])
def test_a_file_planted_beside_the_output_is_left_alone(tmp_path: Path, planted: str) -> None:
    precious, beside = tmp_path / "precious", tmp_path / "steps.csv.part"
    precious.write_text("mine")
    beside.symlink_to(precious) if planted == "link" else os.mkfifo(beside)
    ok("cat", SAMPLES / "cartpole", "--episodes", "0", "-o", tmp_path / "steps.csv")
    assert precious.read_text() == "mine"
    assert not (tmp_path / "steps.csv").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["precious", "steps.csv", "steps.csv.part"]


def test_an_irregular_output_file_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "steps.csv")
    assert "not a regular file" in run("cat", SAMPLES / "cartpole", "-o", tmp_path / "steps.csv").stderr
    assert (tmp_path / "steps.csv").is_fifo()
