"""Rebuilding the environment of a trace: what is refused, and what is allowed with trust."""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.wrappers import NormalizeObservation, TimeLimit
from runs import record_lengths
from scripted_env import CountingEnv
from shell import run

import gym_trace
import gym_trace.replay_env
from gym_trace import TraceRecordingWrapper, open_trace, verify_trace
from gym_trace.envs import consent, identity, seeding
from gym_trace.envs.consent import asked_of_argument
from gym_trace.envs.make import completed, make_environment
from gym_trace.errors import EnvironmentUnavailable
from gym_trace.tools.video.simulate import play_for_humans

CARTPOLE = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
CARTPOLE_MADE: dict[str, Any] = {"id": "CartPole-v1", "entry_point": None, "kwargs": {}, "wrappers": []}
Forge = Callable[..., Path]


def value(**arguments: Any) -> dict[str, Any]:
    return {name: ["value", argument] for name, argument in arguments.items()}


@pytest.fixture(params=["made", "spec"])
def forge(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Forge]:
    """Write a trace with a hostile environment, as a recipe or as an EnvSpec."""
    describe = identity.describe_environment

    def forged(*wrappers: tuple[str, Any], id: str = "CartPole-v1", entry_point: Any = CARTPOLE, **kwargs: Any) -> Path:
        made: Any = {"id": id, "entry_point": entry_point, "kwargs": value(**kwargs), "class": None}
        made["wrappers"] = [[name, arguments and value(**arguments)] for name, arguments in wrappers]
        named = [{"name": "W", "entry_point": name, "kwargs": arguments} for name, arguments in wrappers]
        spec = json.dumps({"id": id, "entry_point": entry_point, "kwargs": kwargs, "additional_wrappers": named})
        hostile = {"made": made} if request.param == "made" else {"spec": spec, "made": None}
        monkeypatch.setattr(identity, "describe_environment", lambda env: {**describe(env), **hostile})
        env = TraceRecordingWrapper(gymnasium.make("CartPole-v1", render_mode="rgb_array"), tmp_path / "forged")
        env.reset(seed=1)
        env.step(0)
        env.close()
        monkeypatch.undo()
        return tmp_path / "forged"

    yield forged
    for name in ("someone_elses", "passes_on"):
        sys.modules.pop(name, None)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in sorted(directory.rglob("*"))}


def every_way(trace: Path, trust: bool = False) -> list[str]:
    """Build the environment of a trace in every way; return the messages."""
    from gym_trace.tools.video.render import render

    out = trace.parent / "out" / "film.gif"
    ways: list[Callable[[], Any]] = [
        lambda: open_trace(trace).make_env(trust=trust).close(),
        lambda: list(verify_trace(trace, trust=trust)),
        lambda: list(play_for_humans(open_trace(trace), [0], trust=trust)),
    ]
    if importlib.util.find_spec("PIL"):
        ways.append(lambda: list(render(open_trace(trace), out, [0], trust=trust)))
    said = []
    for way in ways:
        try:
            way()
            said.append("")
        except gym_trace.errors.TraceError as error:
            said.append(str(error))
    word = ["--trust"] if trust else []
    said.append(run("verify", trace, *word).output)
    if importlib.util.find_spec("PIL"):
        said.append(run("render", "-o", out, trace, *word).output)
    for path in sorted(trace.parent.glob("out/**/*"), reverse=True):
        path.unlink()
    return said


RECORDERS = [
    "gym_trace:TraceRecordingWrapper",
    "gym_trace.wrappers:TraceRecordingWrapper",
    "gym_trace.recording.single.wrapper:TraceRecordingWrapper",
    "passes_on:Recorder",
]


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("name", RECORDERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_recorder_that_a_trace_names_records_nothing_and_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forge: Forge, name: str, trust: bool
) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    module = tmp_path / "modules"
    module.mkdir()
    (module / "passes_on.py").write_text("from gym_trace import TraceRecordingWrapper as Recorder\n")
    record_lengths(tmp_path / "victim", [3, 2])
    trace = forge((name, {"directory": str(tmp_path / "victim"), "on_exist": "replace"}))
    monkeypatch.syspath_prepend(str(module))
    before = contents(tmp_path / "victim")
    said = every_way(trace, trust)
    assert contents(tmp_path / "victim") == before
    if name.startswith("passes_on") and not trust:
        assert all("passes_on:Recorder(directory=" in words and "--trust" in words for words in said)
        assert "passes_on" not in sys.modules


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_videos_that_a_trace_would_have_recorded_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forge: Forge, trust: bool
) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    folder = tmp_path / "videos"
    names = ["gymnasium.wrappers:RecordVideo", "gymnasium.wrappers.rendering:RecordVideo"]
    every_way(forge(*((name, {"video_folder": str(folder)}) for name in names)), trust)
    assert not folder.exists()
    with pytest.warns(UserWarning, match="RecordVideo"):
        open_trace(tmp_path / "forged").make_env()


@pytest.mark.parametrize(
    "name",
    [
        *("builtins:dict", "os:system", "subprocess:Popen", "gymnasium:make", "gymnasium:wrappers.RecordVideo"),
        *("gymnasium.wrappers:TransformObservation", "gymnasium.wrappers.vector:FlattenObservation"),
        *("someone:W", "someone:TimeLimit", "nothing", "os:nothing"),
    ],
)
def test_a_wrapper_that_is_not_known_to_be_harmless_is_asked_for(forge: Forge, name: str) -> None:
    trace = open_trace(forge((name, {"command": "touch x"})))
    with pytest.raises(EnvironmentUnavailable, match="trust=True") as caught:
        trace.make_env()
    assert "command='touch x'" in str(caught.value)
    assert name in str(caught.value)
    with pytest.raises(EnvironmentUnavailable):
        trace.make_env(trust=True)


@pytest.mark.parametrize(
    "arguments",
    [{"steps": 3}, {"env": 1, "max_episode_steps": 3}, {}, {"max_episode_steps": 3, "more": 1}, None],
    ids=str,
)
def test_a_harmless_wrapper_is_not_made_with_what_it_does_not_take(forge: Forge, arguments: Any) -> None:
    trace = open_trace(forge(("gymnasium.wrappers:TimeLimit", arguments)))
    for trust in (False, True):
        with pytest.raises(EnvironmentUnavailable):
            trace.make_env(trust=trust)


def test_an_id_of_another_trace_is_asked_for(tmp_path: Path, forge: Forge) -> None:
    record_lengths(tmp_path / "other", [3])
    trace = open_trace(forge(id="Replay-v0", entry_point=None, directory=str(tmp_path / "other")))
    with pytest.raises(EnvironmentUnavailable, match=r"directory=.*may name a file"):
        trace.make_env()
    assert trace.make_env(trust=True).unwrapped.trace.writers


@pytest.mark.parametrize("id", ["someone_elses:CartPole-v1", "someone_elses:Unheard-v0", "Unheard-v0"])
def test_no_module_is_imported_for_an_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forge: Forge, id: str
) -> None:
    (tmp_path / "someone_elses.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    trace = forge(id=id, entry_point="someone_elses:Env")
    monkeypatch.syspath_prepend(str(tmp_path))
    said = every_way(trace)
    assert all("import someone_elses and call someone_elses:Env" in words for words in said)
    assert not (tmp_path / "mark").exists()


def test_a_registered_id_ignores_the_recorded_entry_point(forge: Forge) -> None:
    trace = open_trace(forge(entry_point="os:system"))
    assert type(trace.make_env().unwrapped).__name__ == "CartPoleEnv"


@pytest.mark.parametrize(
    "arguments",
    [
        *({"name": name} for name in ("../x", "os:system", "evil.py", "~root", "exec(input)", "someone_elses.made")),
        *({"xml_file": "ant"}, {"xmlFile": "ant"}, {"paths": {"model": "ant"}}, {"names": ["a", "/etc/passwd"]}),
        *({"config": {"import_module": "os"}}, {"config": {"a": [{"log": "runs"}]}}),
        *({"host": "10.0.0.1"}, {"directory": ""}),
    ],
    ids=str,
)
def test_arguments_that_may_name_a_file_or_module_are_asked_for(forge: Forge, arguments: Any) -> None:
    with pytest.raises(EnvironmentUnavailable, match=r"may name a file or a module.*--trust"):
        open_trace(forge(**arguments)).make_env()


@pytest.mark.parametrize("desc", ["S" * 70_000, ["SF" * 500] * 70, [[b"S"] * 300] * 300, [[]] * 70_000, [{}] * 70_000])
def test_arguments_of_very_many_letters_or_items_are_asked_for(desc: Any) -> None:
    assert asked_of_argument("desc", desc) == "may take much memory or time"
    assert asked_of_argument("desc", desc[:60]) == ""
    assert asked_of_argument("desc", desc, desc) == ""


def test_options_of_a_reset_that_may_name_a_module_are_asked_for(tmp_path: Path, forge: Forge) -> None:
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / "options")
    env.reset(seed=1, options={"config": {"vehicle": "someone_elses.a_function_of_long_name"}})
    env.step(0)
    env.reset(seed=2, options={"low": -0.1, "high": 0.1})
    env.step(0)
    env.close()
    making: list[dict[str, Any]] = [{}, {"make_env": make_cartpole}]
    for more in making:
        verdicts = list(verify_trace(tmp_path / "options", **more))
        assert [verdict.verdict for verdict in verdicts] == ["unverifiable", "identical"]
        assert "someone_elses.a_function_of_long_name" in verdicts[0].reason
        assert "--trust" in verdicts[0].reason
        verdicts = list(verify_trace(tmp_path / "options", trust=True, **more))
        assert [verdict.verdict for verdict in verdicts] == ["identical", "identical"]


def test_deeply_nested_options_do_not_break_a_verification(tmp_path: Path) -> None:
    deep: Any = []
    for _ in range(450):
        deep = [deep]
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path)
    env.reset(seed=1, options={"deep": deep})
    env.close()
    (verdict,) = verify_trace(tmp_path)
    assert verdict.verdict in ("unverifiable", "identical")  # as deep as this version of Python goes


def make_cartpole() -> Any:
    return gymnasium.make("CartPole-v1")


@pytest.mark.parametrize(
    "wrappers",
    [
        [("FrameStackObservation", {"stack_size": 10**8})],
        [("FrameStackObservation", {"stack_size": 300})] * 2,
        [("ResizeObservation", {"shape": [10**6, 10**6]})],
        [("DiscretizeObservation", {"bins": [2, 10**9]})],
        [("RepeatAction", {"num_repeats": 10**9})],
        [("RepeatAction", {"num_repeats": 4096}), ("MaxAndSkipObservation", {"skip": 4096})],
    ],
    ids=str,
)
def test_a_harmless_wrapper_that_takes_much_memory_or_time_is_asked_for(forge: Forge, wrappers: Any) -> None:
    trace = open_trace(forge(*((f"gymnasium.wrappers:{name}", arguments) for name, arguments in wrappers)))
    with pytest.raises(EnvironmentUnavailable, match=r"much memory or time.*--trust"):
        trace.make_env()


@pytest.mark.skipif(not hasattr(gymnasium.wrappers, "AddRenderObservation"), reason="needs gymnasium 1.0")
@pytest.mark.parametrize(
    "wrappers",
    [
        [("DiscretizeObservation", {"bins": 1000, "multidiscrete": False}), ("FlattenObservation", {})],
        [("AddRenderObservation", {}), ("FrameStackObservation", {"stack_size": 4096})],
    ],
    ids=str,
)
def test_observations_that_harmless_wrappers_make_very_large_are_asked_for(wrappers: Any) -> None:
    pytest.importorskip("pygame")
    named = [[f"gymnasium.wrappers:{name}", value(**arguments)] for name, arguments in wrappers]
    kwargs = value(render_mode="rgb_array")
    made = {"id": "Pendulum-v1", "entry_point": "own:Env", "kwargs": kwargs, "class": None, "wrappers": named}
    with pytest.raises(EnvironmentUnavailable, match=r"numbers per observation, which takes much memory.*--trust"):
        make_environment({"made": made})
    with gymnasium.make("Pendulum-v1", render_mode="rgb_array") as env:
        assert completed(env.unwrapped, {"made": made}) is env.unwrapped


@pytest.mark.parametrize("module", ["__main__", "antigravity", "os.path", "numpy.__main__"])
def test_modules_of_python_and_scripts_are_never_imported_for_an_id(module: str) -> None:
    made = {"id": "Own-v0", "entry_point": None, "kwargs": {}, "class": None, "wrappers": []}
    for trust in (False, True):
        with pytest.raises(EnvironmentUnavailable, match="not described in the trace") as caught:
            make_environment({"made": made, "imports": [module]}, trust)
        assert not caught.value.imports


def test_confusable_and_bidirectional_letters_are_escaped() -> None:
    made = {
        "id": "Own-v0",
        "entry_point": "gymnas\u0456um:Env",
        "wrappers": [],
        "kwargs": value(**{"n\u3164": "\u05d0 (1)"}),
    }
    with pytest.raises(EnvironmentUnavailable) as caught:
        make_environment({"made": made})
    assert str(caught.value).isascii()
    for text in (r"'gymnas\u0456um:Env'", r"'n\u3164'='\u05d0 (1)'"):
        assert text in str(caught.value)


def test_a_window_that_a_trace_asks_for_is_not_opened_to_verify_it(
    forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, rendered = forge(render_mode="human"), []
    monkeypatch.setattr(CartPoleEnv, "render", lambda env: rendered.append(env.render_mode))
    assert [verdict.verdict for verdict in verify_trace(trace)] == ["identical"]
    assert not rendered


@pytest.mark.parametrize(
    "change",
    [
        {"uinteger": 1 << 70},
        {"has_uint32": 10**30},
        {"state": {"state": 1 << 200, "inc": 1}},
        {"state": {"state": -1, "inc": 0}},
        {"state": []},
        {"bit_generator": 10**5000},
        {"bit_generator": "MT19937", "state": {"key": list(range(624)), "pos": 1 << 30}},
        {"bit_generator": "MT19937", "state": {"key": [], "pos": 0}},
    ],
    ids=lambda change: "-".join(change),
)
def test_no_state_of_a_generator_does_more_than_be_refused(change: Any) -> None:
    env: Any = gymnasium.make("CartPole-v1").unwrapped
    state = {**env.np_random.bit_generator.state, **change}
    if state["bit_generator"] == "MT19937":
        env._np_random = np.random.Generator(np.random.MT19937(0))
    for hostile in (state, [state], None):
        with pytest.raises(EnvironmentUnavailable, match="cannot be set"):
            seeding.restore_generator(env, hostile)


def test_versions_of_packages_of_any_name_are_not_installed() -> None:
    names = ["", "../..", "a\0b", "\ud800", "x" * 5000, "\x1b[2J\n"]
    assert identity.installed_versions({name: ["1.0"] for name in names}) == dict.fromkeys(names)


def test_registered_arguments_need_no_trust(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = gymnasium.envs.registration.EnvSpec("Filed-v0", entry_point=CARTPOLE, kwargs={"render_mode": "a/b"})
    monkeypatch.setitem(gymnasium.registry, "Filed-v0", spec)
    trace = open_trace(forge(id="Filed-v0", render_mode="a/b"))
    monkeypatch.setitem(gymnasium.registry, "Filed-v0", spec)
    with pytest.warns(UserWarning, match="render_mode"):  # Gymnasium's
        assert trace.make_env()


def test_an_environment_argument_named_trust_gives_no_trust(forge: Forge) -> None:
    trace = forge(id="Replay-v0", entry_point=None, directory="x", trust=True, allow_import=True)
    for options in ({}, {"env_kwargs": {"trust": True}}):
        with pytest.raises(EnvironmentUnavailable, match="may name a file"):
            open_trace(trace).make_env(**options)
        with pytest.raises(EnvironmentUnavailable, match="may name a file"):
            list(verify_trace(trace, **options))
    assert "may name a file" in run("verify", trace, "--env-arg", "trust=true").output


def test_questions_are_one_printable_line(forge: Forge) -> None:
    trace = open_trace(forge(("a:\x1b[2J\n", {"x\x07": "y" * 10_000}), path="\x1b]0;owned\x07\n"))
    with pytest.raises(EnvironmentUnavailable) as caught:
        trace.make_env()
    assert str(caught.value).isprintable()
    assert "y" * 10_000 in str(caught.value)


def test_every_argument_of_a_call_is_shown(forge: Forge) -> None:
    trace = open_trace(forge(id="Own-v0", entry_point="subprocess:call", args=["sh", "-c", "echo"], shell=True, n=3))
    call = r"import subprocess and call subprocess:call\(args=\['sh', '-c', 'echo'\], shell=True, n=3\)"
    with pytest.raises(EnvironmentUnavailable, match=call):
        trace.make_env()


def test_everything_that_is_asked_is_shown_whole(forge: Forge) -> None:
    long = "long." * 60 + "module:Wrapper"
    names = [*(f"module_{number}:Wrapper" for number in range(30)), long]
    trace = open_trace(forge(*((name, {"text": "x" * 300 + "THE END"}) for name in names)))
    with pytest.raises(EnvironmentUnavailable) as caught:
        trace.make_env()
    assert all(name in str(caught.value) for name in names)
    assert str(caught.value).count("THE END") == len(names)


def test_arrays_are_shown_whole() -> None:
    weights = np.full(1500, 1, np.uint8)
    weights[700] = 77
    made = {"id": "Own-v0", "entry_point": "own:Env", "kwargs": {"x": ["value", [weights]]}, "wrappers": []}
    with pytest.raises(EnvironmentUnavailable, match=r"own:Env.*77"):
        make_environment({"made": made})


@pytest.mark.parametrize("trust", [False, True])
def test_more_than_anybody_reads_is_not_done(forge: Forge, trust: bool) -> None:
    names = [(f"module_{number}:Wrapper", {"text": "x" * 1000}) for number in range(30)]
    with pytest.raises(EnvironmentUnavailable, match="characters, more than") as caught:
        open_trace(forge(*names)).make_env(trust=trust)
    assert len(str(caught.value)) < 500


def test_text_that_does_not_look_like_a_name_is_quoted(forge: Forge) -> None:
    trace = open_trace(forge(("os:system(); it is harmless", None), id="Own; v0", entry_point="own:Env and more"))
    with pytest.raises(EnvironmentUnavailable) as caught:
        trace.make_env()
    for text in ("'os:system(); it is harmless'", "'Own; v0'", "'own:Env and more'"):
        assert text in str(caught.value)


LARGE = [
    {"size": 20_000},
    {"size": -20_000},
    {"frame_skip": 2**30},
    {"skip": 1e9},
    {"duration": float("inf")},
    {"dt": 1e-300},
    {"shape": [4096, 4096, 4096]},
    {"config": {"lanes": [1, {"vehicles": 10**6}]}},
    {"config": {"20": {10**7: 1}}},
]


@pytest.mark.parametrize("arguments", LARGE, ids=str)
def test_a_large_number_among_the_arguments_is_asked_for(arguments: Any) -> None:
    made = {**CARTPOLE_MADE, "kwargs": value(**arguments)}
    with pytest.raises(EnvironmentUnavailable, match=r"may take much memory or time.*--trust"):
        make_environment({"made": made})
    with pytest.raises(EnvironmentUnavailable, match="unexpected keyword"):
        make_environment({"made": made}, trust=True)


def test_an_option_of_a_reset_that_is_a_large_number_is_asked_for(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path)
    env.reset(seed=1, options={"size": 10**6})
    env.close()
    assert "size" in next(verify_trace(tmp_path)).reason
    assert next(verify_trace(tmp_path, trust=True)).verdict == "identical"


ORDINARY = [
    {"render_mode": "rgb_array", "continuous": True, "map_name": "8x8", "lap_complete_percent": 0.95, "size": 8},
    {"gravity": -11.99, "wind_power": 20.0, "enable_wind": True, "domain_randomize": False, "obs_type": "rgb"},
    {"width": 1920, "height": 1080, "frame_skip": 5, "healthy_z_range": (0.7, 100.0), "contact_cost_weight": 5e-7},
    {"desc": ["SFFF", "FHFH"], "goal": np.arange(600.0).reshape(2, 300), "seed": 2**63, "env_seed": 123456789},
    {"config": {"duration": 40, "screen_width": 600, "screen_height": 150, "offset": [5.0, 5.0], "seed": 10**9}},
    {"nothing": None, "nan": float("nan"), "flags": np.ones((40, 40), bool), "kind": np.uint8, "empty": []},
]


@pytest.mark.parametrize("arguments", ORDINARY, ids=lambda arguments: next(iter(arguments)))
def test_ordinary_arguments_need_no_trust(arguments: Any) -> None:
    assert not [name for name, argument in arguments.items() if consent.asked_of_argument(name, argument)]


def test_a_number_may_be_as_large_as_the_registered_one() -> None:
    assert not consent.asked_of_argument("max_frames", 108_000, 108_000)
    assert not consent.asked_of_argument("max_frames", 50_000, 108_000)
    assert consent.asked_of_argument("max_frames", 200_000, 108_000)
    assert not consent.asked_of_argument("config", {"frames": 50_000, "lanes": 3}, {"frames": 108_000, "lanes": 2})
    assert consent.asked_of_argument("config", {"frames": 5, "lanes": 50_000}, {"frames": 108_000, "lanes": 2})


@pytest.mark.parametrize(
    "made",
    [
        *(1, [], {"id": 3}, {"id": "CartPole-v1"}, {**CARTPOLE_MADE, "entry_point": 1}),
        {**CARTPOLE_MADE, "kwargs": [], "wrappers": 1},
        *({**CARTPOLE_MADE, "kwargs": {"x": value}} for value in (1, [], ["y"], ["dtype", "O"])),
        *({**CARTPOLE_MADE, "wrappers": [wrapper]} for wrapper in (["gymnasium.wrappers:TimeLimit", [1]], [1, {}])),
    ],
    ids=str,
)
def test_a_malformed_description_is_refused(made: Any) -> None:
    with pytest.raises(gym_trace.errors.TraceError):
        make_environment({"made": made})


def test_deep_or_endless_descriptions_raise_a_short_error() -> None:
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    for hostile in (
        {"kwargs": {"x": ["value", deep]}},
        {"wrappers": [["a:B", {}]] * 99},
        {"wrappers": [["gymnasium.wrappers:OrderEnforcing", {}]] * 5_000},
        {"kwargs": {"x": ["value", ["a/b", 10**5000]]}},
    ):
        with pytest.raises(EnvironmentUnavailable) as caught:
            make_environment({"made": {**CARTPOLE_MADE, **hostile}})
        assert len(str(caught.value)) < 4000


def test_harmless_wrappers_are_made_again_as_they_were(tmp_path: Path) -> None:
    env = TimeLimit(NormalizeObservation(gymnasium.make("CartPole-v1"), epsilon=1e-3), 7)
    TraceRecordingWrapper(env, tmp_path).close()
    again = open_trace(tmp_path).make_env()
    assert str(again) == str(env)
    assert again.env.epsilon == 1e-3


def make_counting(length: int = 4) -> Any:
    return CountingEnv(length=length)


def test_a_function_that_made_the_environment_is_called_again_with_trust(tmp_path: Path) -> None:
    makers = {"plain": make_counting, "partial": partial(make_counting, length=3)}
    for name, make in makers.items():
        gym_trace.collect(make, directory=tmp_path / name, episodes=2, workers=0, seed=1)
        with pytest.raises(EnvironmentUnavailable, match=r"import test_trust and call test_trust:make_counting\("):
            list(verify_trace(tmp_path / name))
        assert {verdict.verdict for verdict in verify_trace(tmp_path / name, trust=True)} == {"identical"}
    assert len(open_trace(tmp_path / "partial")[0]) == 3
    gym_trace.collect(lambda: make_counting(), directory=tmp_path / "nameless", episodes=1, workers=0, seed=1)
    with pytest.raises(EnvironmentUnavailable, match="does not describe how to make its environment"):
        list(verify_trace(tmp_path / "nameless", trust=True))


@pytest.mark.parametrize("factory", [5, {}, {"id": "a:b", "entry_point": 3, "kwargs": {}, "wrappers": []}])
def test_a_malformed_factory_is_rejected(factory: Any) -> None:
    with pytest.raises(EnvironmentUnavailable, match="the recorded environment is malformed"):
        make_environment({"factory": factory}, trust=True)
