"""gym-trace record: wrappers, metadata, limits, and options in a file."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from gym_trace_cli.main import cli
from gym_trace_cli.progress import ProgressLine
from gym_trace_cli.record_config import toml_of
from hypothesis import given
from hypothesis import strategies as st
from shell import ok, run

from gym_trace import open_trace

pytestmark = pytest.mark.usefixtures("forked_workers")

WRAPPERS = """
import gymnasium, numpy as np

def clock(**_):
    import clicks
    return clicks.Clock()

class Halved(gymnasium.ObservationWrapper, gymnasium.utils.RecordConstructorArgs):
    def __init__(self, env):
        gymnasium.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)
    def observation(self, observation):
        return observation / 2

class PlusOne(gymnasium.ObservationWrapper):
    def observation(self, observation):
        return observation + 1

def plus_one(env):
    return PlusOne(env)

def broken(env):
    raise ValueError("not around this")

nothing = lambda env: None
"""


@pytest.fixture(autouse=True)
def around(here: Path) -> Iterator[None]:
    (here / "around.py").write_text(WRAPPERS)
    yield
    sys.modules.pop("around", None)


needs_vectors = pytest.mark.skipif(not hasattr(gymnasium.vector, "AutoresetMode"), reason="needs gymnasium 1.1")
VECTOR = pytest.param(["--num-envs", 2], marks=needs_vectors)
WAYS = [[], ["-j", 1], VECTOR]


@pytest.mark.parametrize("more", WAYS)
@pytest.mark.parametrize("env", [["CliClock-v0", "--import", "clicks"], ["--make", "around:clock"]])
def test_wrappers_and_the_longest_episode_are_those_of_each_environment(env: list[object], more: list[object]) -> None:
    around = ["--wrapper", "around:plus_one", "--wrapper", "around:Halved", "--max-episode-steps", 3]
    ok("record", *env, *around, *more, "--episodes", 2, "-o", "t")
    episodes = [episode for episode in open_trace("t") if episode.outcome == "truncated"]
    assert len(episodes) >= 2
    for episode in episodes:
        assert episode.observations[:, 0].tolist() == [0.5, 1.0, 1.5, 2.0]


def test_a_trace_with_wrappers_of_ones_own_is_verified_on_trust() -> None:
    ok("record", "CliClock-v0", "--import", "clicks", "--wrapper", "around:Halved", "--episodes", 1, "-o", "t")
    assert "identical" in ok("verify", "t", "--import", "clicks", "--trust").output


@pytest.mark.parametrize(
    "mode", [[], VECTOR, pytest.param(["--num-envs", 2, "--vectorization-mode", "async"], marks=needs_vectors)]
)
def test_a_trace_with_wrappers_of_gymnasium_is_verified_as_any_other(mode: list[object]) -> None:
    around = ["--wrapper", "gymnasium.wrappers:FlattenObservation", "--max-episode-steps", 3]
    ok("record", "CartPole-v1", *around, *mode, "--episodes", 2, "-o", "t")
    assert "identical" in ok("verify", "t").output


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("around:broken", "--wrapper around:broken: ValueError: not around this"),
        ("around:nothing", "--wrapper around:nothing: TypeError: returned NoneType; return a gymnasium.Env"),
        ("around:missing", "'around:missing': module 'around' has no attribute 'missing'"),
        ("around", "'around' is not of the form MODULE:NAME, such as agents:greedy"),
        ("around.py:broken", "'around.py:broken' is not of the form MODULE:NAME, such as around:broken"),
        ("my/around.py", "'my/around.py' is not of the form MODULE:NAME, such as my.around:NAME"),
    ],
)
def test_an_invalid_wrapper_is_an_error_in_one_line_and_leaves_no_trace(here: Path, name: str, said: str) -> None:
    failed = run("record", "CartPole-v1", "--wrapper", name, "-o", "t")
    assert failed.exit_code in (1, 2)
    assert said in failed.output
    assert not (here / "t").exists()


@pytest.mark.parametrize("more", WAYS)
def test_metadata_is_beside_the_seed_and_facts_are_the_traces(more: list[object]) -> None:
    told = ["author=Ada", "license=mit", "description=two\nlines", 'tags=["a", "b"]']
    told = [word for fact in told for word in ("--fact", fact)]
    given = ["--metadata", "note=x", "--metadata", "rate=0.5", "--seed", 3]
    ok("record", "CartPole-v1", "--episodes", 1, *told, *given, *more, "-o", "t")
    trace = open_trace("t")
    assert {"note": "x", "rate": 0.5, "seed": 3}.items() <= trace.metadata.items()
    assert trace.facts == {"author": "Ada", "license": "mit", "description": "two\nlines", "tags": ["a", "b"]}
    ok("record", "CartPole-v1", "--episodes", 1, "--fact", "author=Bob", *more, "-o", "t", "--on-exist", "append")
    assert trace.facts["author"] == "Bob"
    assert trace.facts["license"] == "mit"


@pytest.mark.parametrize("more", [[], ["-j", 1]])
def test_vector_environments_of_an_old_gymnasium_are_refused_in_a_line(
    here: Path, monkeypatch: pytest.MonkeyPatch, more: list[object]
) -> None:
    monkeypatch.delattr(gymnasium.vector, "AutoresetMode", raising=False)
    refused = run("record", "CartPole-v1", "--num-envs", 2, *more, "-o", "t")
    assert refused.exit_code == 2
    assert "needs gymnasium 1.1 or newer: pip install -U gymnasium" in refused.output
    assert len(refused.output.splitlines()) == 1
    assert not (here / "t").exists()


def test_metadata_does_not_hide_the_seed() -> None:
    refused = run("record", "CartPole-v1", "--metadata", "seed=1")
    assert refused.exit_code == 2
    assert "--metadata seed=…: reserved" in refused.output


@pytest.mark.parametrize("more", [[], VECTOR])
def test_bytes_and_curves_need_no_workers(here: Path, more: list[object]) -> None:
    pytest.importorskip("tensorboardX")
    done = ok("record", "CartPole-v1", "--bytes", 1, "--tensorboard", "curves", *more, "-o", "t").output
    assert done.startswith("recorded ")
    (events,) = (here / "curves").iterdir()
    assert b"collect/return/mean" in events.read_bytes()


def test_episodes_are_filmed_while_they_are_recorded(here: Path) -> None:
    pytest.importorskip("av")
    pytest.importorskip("pygame")
    ok("record", "CartPole-v1", "--episodes", 3, "--max-episode-steps", 2, "--video", "every:2", "-o", "t")
    assert [path.name.split(".")[-2] for path in sorted((here / "t").glob("*.mp4"))] == ["000000", "000002"]
    for wrong, said in ((["--video", "every:0"], "invalid schedule"), (["--video", "cubic", "-j", 1], "omit -j")):
        refused = run("record", "CartPole-v1", *wrong)
        assert refused.exit_code == 2
        assert said in refused.output


# -- options in a file ------------------------------------------------------------------------------------------------

CONFIG = """
environment = "CliClock-v0"
import = ["clicks"]
output = "t"
episodes = 2
policy = "clicks:ones"
env-arg = {length = 4}
metadata = {note = "x"}
fact = {tags = ["one", "two"]}
infos = true
seconds = 60
"""


def test_options_of_a_file_count_less_than_those_of_the_command_line(here: Path) -> None:
    (here / "run.toml").write_text(CONFIG)
    ok("record", "--config", "run.toml")
    trace = open_trace("t")
    assert [len(episode) for episode in trace] == [4, 4]
    assert trace[0].actions.tolist() == [1] * 4
    assert trace[0].infos[0] == {"steps": 1}
    assert trace.facts == {"tags": ["one", "two"]}
    ok("record", "--make", "around:clock", "--config", "run.toml", "--episodes", 1, "-o", "u", "--env-arg", "more=1",
       "--fact", 'tags=["three"]')  # fmt: skip
    assert [len(episode) for episode in open_trace("u")] == [10]
    assert open_trace("u").facts == {"tags": ["three"]}


@pytest.mark.parametrize("more", [[], ["-j", 1]])
def test_a_written_file_repeats_the_run(here: Path, more: list[object]) -> None:
    text = 'a "quote", a \\, \t and\nmore \x7f é'
    given = ["--env-arg", "max_episode_steps=9", "--metadata", "none=null", "--metadata", f"text={text}"]
    ok("record", "CartPole-v1", "--episodes", 3, *given, "--fact", f"description={text}", "--policy",
       "clicks:Plain", *more, "-o", "t", "--write-config", "run.toml")  # fmt: skip
    ok("record", "--config", "run.toml", "-o", "u", "--write-config", "again.toml")
    assert "3 episodes, identical" in ok("diff", "t", "u").output
    assert open_trace("u").facts == open_trace("t").facts == {"description": text}
    assert {"none": None, "text": text}.items() <= open_trace("u").metadata.items()
    first, again = ((here / name).read_text().splitlines()[1:] for name in ("run.toml", "again.toml"))
    assert [line for line in first if "output" not in line] == [line for line in again if "output" not in line]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"episode = 5", "no option 'episode'; did you mean 'episodes'?"),
        (b"num_envs = 5", "no option 'num_envs'; did you mean 'num-envs'?"),
        (b'config = "x"', "no option 'config'"),
        (b"episodes = 0", "episodes: 0 is not in the range x>=1"),
        (b'episodes = "5"', 'episodes is "5": write a whole number'),
        (b"episodes = true", "episodes is true: write a whole number"),
        (b"episodes = 1.5", "episodes is 1.5: write a whole number"),
        (b'wrapper = "x"', 'wrapper is "x": write a list'),
        (b"policy = 3", "policy is 3: write text in quotes"),
        (b"infos = 1", "infos is 1: write true or false"),
        (b'vectorization-mode = "x"', "vectorization-mode: 'x' is not one of"),
        (b"[a]\nx = 2024-01-01", "no option 'a'"),
        (b"\nx\n", "(at line 2, column 2)"),
        (b"\xff", "codec can't decode"),
        (b"a = " + b"[" * 100_000, "run.toml: "),
        (b'"\\u001b[31m" = 1', r"no option '\x1b[31m'"),
    ],
)
def test_an_error_in_a_config_file_names_the_file(here: Path, content: bytes, said: str) -> None:
    (here / "run.toml").write_bytes(content)
    refused = run("record", "CartPole-v1", "--config", "run.toml", "-o", "t")
    assert refused.exit_code == 2, refused.output
    assert "run.toml: " in refused.output
    assert said in refused.output
    assert not (here / "t").exists()


def test_a_missing_or_unwritable_file_is_a_usage_error() -> None:
    for option in ("--config", "--write-config"):
        refused = run("record", "CartPole-v1", option, "missing/run.toml")
        assert refused.exit_code == 2
        assert "missing/run.toml: No such file or directory" in refused.output


@given(st.text(st.characters(codec="utf-8")), st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_any_text_in_a_config_file_round_trips(text: str, number: float) -> None:
    tomllib = pytest.importorskip("tomllib")
    for value in ([text, ""], number, True, 1 << 80):
        assert tomllib.loads(f"x = {toml_of(value)}")["x"] == value


# -- completion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "start", "expected"),
    [
        ([], "CartPole-v", ["CartPole-v0", "CartPole-v1"]),
        (["--config", "missing.toml"], "CartPole-v1", ["CartPole-v1"]),
        (["CartPole-v1", "--policy"], "ra", ["random"]),
        (["CartPole-v1", "--policy"], "around:p", ["around:plus_one"]),
    ],
)
def test_shells_complete_environments_and_policies(words: list[str], start: str, expected: list[str]) -> None:
    found = ShellComplete(cli, {}, "gym-trace", "_GYM_TRACE_COMPLETE").get_completions(["record", *words], start)
    assert [item.value for item in found] == expected


# -- progress ---------------------------------------------------------------------------------------------------------


def test_progress_tells_percent_and_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr("time.monotonic", lambda: now.seconds)
    monkeypatch.setattr("gym_trace_cli.progress._PLAIN_SECONDS", 5.0)

    @cli.command("slowly", hidden=True)
    def slowly() -> None:
        with ProgressLine() as line:
            for second in range(101):
                now.seconds = 1000 + 6.0 * second
                line.update("words", 0.2 + 0.8 * second / 100)

    lines = CliRunner().invoke(slowly).stderr.splitlines()
    assert lines[0] == " 20%  9 min 54 s left  words"
    assert lines[49] == " 60%  5 min left  words"
    assert lines[-2:] == [" 99%  6 s left  words", "100%  words"]
