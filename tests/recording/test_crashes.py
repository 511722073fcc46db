"""Recordings that are killed or crash in every way: no answered step is lost or wrong.

GYM_TRACE_LONG=1 python -m pytest -n 2 tests/recording/test_crashes.py makes a thousand crashes
and prints what became of them.
"""

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from long_tests import LONG

pytest.importorskip("resource")

import crash_report
import crash_victims
import shell
from crash_report import StepCounts
from crash_runs import FAILED, HELPERS, Crash, CrashServer, small_memory
from gymnasium import vector

from gym_trace import Trace, TraceRecordingVectorWrapper, TraceRecordingWrapper, open_trace
from gym_trace.playback.episode_index import index_of

ROUNDS = 5 if LONG else 1

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a ring, fork and signals")


def ways(chance: random.Random, lanes: bool) -> dict[str, dict[str, Any]]:
    """Ways for a recording to end, by name."""
    most = 0.3 if LONG else 0.02 if lanes else 0.08  # seconds, whose steps all are judged
    at, rows = chance.randrange(1, 30 if lanes and not LONG else 300), chance.randrange(1, 6)
    found: dict[str, dict[str, Any]] = {
        "killed": {"seconds": chance.uniform(0, most)},
        "killed-while-turning": {"near": True, "line": chance.randrange(1, 1500), "rows": rows},
        "killed-anywhere": {"line": chance.randrange(1, 12000), "rows": rows},
        "killed-in-small-slabs": {"seconds": chance.uniform(0, most), "rows": rows},
        "segfault-in-step": {"death": "segfault", "where": "step", "at": at},
        "exit": {"death": "exit", "where": "step", "at": at},
        "memory": {"death": "memory", "where": "step", "at": at},
        "short-of-files": {"seconds": chance.uniform(0, most), "is_short": True},
    }
    if not lanes:
        found |= {
            "segfault-in-reset": {"death": "segfault", "where": "reset", "at": chance.randrange(1, 4)},
            "segfault-in-render": {"death": "segfault", "where": "render", "at": chance.randrange(1, 40)},
            "abort-after-step": {"death": "abort", "where": "late step", "at": at},
            "forked": {"seconds": chance.uniform(0, 0.1), "fork": chance.randrange(1, 12)},
            "forked-while-turning": {"line": chance.randrange(1, 6000), "fork": chance.randrange(1, 9), "rows": rows},
            "alarmed": {"seconds": chance.uniform(0.05, 0.3), "alarms": chance.choice([0.001, 0.01]), "rows": rows},
            "full-disk": {"most_bytes": chance.randrange(150_000, 1_500_000)},
        }
    return found


SINGLE, LANES = list(ways(random.Random(), False)), list(ways(random.Random(), True))
PLAN = [
    (kind, way) for kind in crash_victims.KINDS for way in SINGLE if way != "full-disk" or kind in ("frames", "noise")
]
if hasattr(vector, "AutoresetMode"):
    PLAN += [(f"lanes-{mode}", way) for mode in crash_victims.MODES for way in LANES]
SOME = {"compiled": PLAN if LONG else [*PLAN[::13], ("noise", "full-disk")], "pure": PLAN if LONG else PLAN[1::23]}


@pytest.fixture(scope="module")
def crash_servers() -> Iterator[Callable[[str], CrashServer]]:
    """Start each server once; pytest would end a module's fixture with parameters before each test."""
    servers: dict[str, CrashServer] = {}

    def of_core(core: str) -> CrashServer:
        if core not in servers:
            servers[core] = CrashServer(core == "pure")
        return servers[core]

    yield of_core
    for server in servers.values():
        server.close()


@pytest.fixture(params=["compiled", "pure"])
def crash_server(request: pytest.FixtureRequest, crash_servers: Callable[[str], CrashServer]) -> CrashServer:
    """A process that makes crashes, with the C core and without."""
    found = crash_servers(request.param)
    if found.core != request.param:
        pytest.skip("the C core is not compiled")
    return found


@pytest.fixture(scope="module")
def cgroup() -> Iterator[str | None]:
    with small_memory(96) as place:
        yield place


@pytest.fixture
def tell(request: pytest.FixtureRequest, crash_server: CrashServer) -> Callable[[str, StepCounts], None]:
    """Report a verdict; it must show no loss."""

    def told(way: str, verdict: StepCounts) -> None:
        request.node.user_properties.append(("crash", (crash_server.core, way, *vars(verdict).values())))
        assert verdict.is_clean, verdict

    return told


@pytest.mark.parametrize("number", range(ROUNDS))
@pytest.mark.parametrize(
    ("crash_server", "kind", "way"),
    [(core, *case) for core, cases in SOME.items() for case in cases],
    indirect=["crash_server"],
)
def test_no_way_of_dying_loses_a_step(
    crash_server: CrashServer,
    tell: Callable[[str, StepCounts], None],
    cgroup: str | None,
    kind: str,
    way: str,
    number: int,
    tmp_path: Path,
) -> None:
    chance = random.Random(f"{kind} {way} {number} {crash_server.core}")
    lanes = kind.startswith("lanes-")
    if kind == "cheetah":
        pytest.importorskip("mujoco")
    fields = ways(chance, lanes)[way]
    crash = Crash(
        kind,
        str(tmp_path / "t"),
        str(tmp_path / "diary"),
        seed=chance.randrange(1000),
        options={"uid": "w"},
        cgroup=cgroup if way == "memory" else None,
        **fields,
    )
    (status,) = crash_server(crash)
    assert status != FAILED
    assert os.WIFSIGNALED(status) or way == "exit"
    diaries = {"w": tmp_path / "diary"} | ({"child": tmp_path / "diary.child"} if "fork" in fields else {})
    tell(way, crash_report.examine_crash(tmp_path / "t", diaries, kind, tmp_path / "r"))
    if number % 3 == 0:
        for name in ("t", "r") if (tmp_path / "r").exists() else ("t",):  # repair keeps no trace without episodes
            go_on(tmp_path / name, kind)
            assert crash_report.compare_trace(open_trace(tmp_path / name), diaries, kind).is_clean


def go_on(directory: Path, kind: str) -> None:
    """Append an episode to a trace."""
    before = sum(map(len, open_trace(directory)))
    options: dict[str, Any] = {"uid": crash_report.UNLOGGED_WRITER, "on_exist": "append"}
    if kind.startswith("lanes-"):
        makers: Any = [lambda lane=lane: crash_victims.LaneEnv(lane) for lane in range(crash_victims.LANES)]
        mode = vector.AutoresetMode(kind.removeprefix("lanes-"))
        env: Any = TraceRecordingVectorWrapper(vector.SyncVectorEnv(makers, autoreset_mode=mode), directory, **options)
    else:
        env = TraceRecordingWrapper(crash_victims.make_env(kind), directory, record_infos=kind == "things", **options)
    env.action_space.seed(1)
    env.reset(seed=1)
    env.step(env.action_space.sample())
    env.close()
    steps = crash_victims.LANES if kind.startswith("lanes-") else 1
    assert sum(map(len, open_trace(directory))) == before + steps


@pytest.mark.parametrize("number", range(20 if LONG else 1))
def test_four_writers_in_one_directory_lose_nothing(
    crash_server: CrashServer, tell: Callable[[str, StepCounts], None], number: int, tmp_path: Path
) -> None:
    chance = random.Random(f"four {number}")
    crashes = []
    for writer in range(4):
        options = {"uid": f"w{writer}", "on_exist": "append"}
        way = chance.choice([{"seconds": chance.uniform(0, 0.1)}, {"line": chance.randrange(1, 9000), "rows": 3}])
        place = str(tmp_path / "t"), str(tmp_path / f"diary{writer}")
        crashes.append(Crash("things", *place, seed=writer, options=options, **way))
    (tmp_path / "t").mkdir()
    assert all(map(os.WIFSIGNALED, crash_server(*crashes)))
    diaries = {f"w{writer}": tmp_path / f"diary{writer}" for writer in range(4)}
    tell("four writers", crash_report.examine_crash(tmp_path / "t", diaries, "things", tmp_path / "r"))


@pytest.mark.parametrize("number", range(10 if LONG else 1))
def test_workers_that_are_killed_lose_nothing_and_the_run_can_be_resumed(
    crash_server: CrashServer, tell: Callable[[str, StepCounts], None], number: int, tmp_path: Path
) -> None:
    if crash_server.core == "pure" and not LONG:
        pytest.skip("GYM_TRACE_LONG=1 does it without the C core, too")
    diaries = tmp_path / "diaries"
    diaries.mkdir()
    path = os.pathsep.join([HELPERS, *filter(None, [os.environ.get("PYTHONPATH")])])
    pure = str(int(crash_server.core == "pure"))
    variables = {**os.environ, "GYM_TRACE_DIARIES": str(diaries), "PYTHONPATH": path, "GYM_TRACE_PURE": pure}
    command = ["record", "--make", "crash_victims:LoggedEnv", "-o", tmp_path / "t", "--episodes", 40, "--seed", 3]
    command += ["-j", 2, "--quiet"]
    chance = random.Random(f"workers {number}")
    run = shell.process(*command, env=variables)
    try:
        shell.wait_for(lambda: len(list(diaries.iterdir())) == 2)
        time.sleep(chance.uniform(0.1, 0.5))
        (worker, _) = sorted(int(diary.name) for diary in diaries.iterdir())
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
        shell.wait_for(lambda: len(list(diaries.iterdir())) == 3 or run.poll() is not None)
        time.sleep(chance.uniform(0, 0.3))
    finally:
        run.kill()
        run.communicate()
    for diary in diaries.iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(diary.name), signal.SIGKILL)
    time.sleep(0.1)
    tell("workers", _of_workers(tmp_path / "t", diaries))
    done = shell.process(*command, "--resume", env=variables)
    said = done.communicate(timeout=100)
    assert done.returncode == 0, said
    # A worker may have had the time to close its trace.
    outcomes = [part.outcome for part in open_trace(tmp_path / "t")]
    assert outcomes.count("terminated") + outcomes.count("truncated") == 40


def _of_workers(directory: Path, diaries: Path) -> StepCounts:
    """The episodes of a worker are found in its diary, which is called as the process was, by what they began with."""
    trace = open_trace(directory)
    parts = {(_pid(trace, i), crash_victims.canonical(part.observations[0])): part for i, part in enumerate(trace)}
    verdict = StepCounts()
    for diary in diaries.iterdir():
        lives = [life for life in crash_report.logged_episodes(diary) if life.observations]
        for life in lives:
            if life is lives[-1] and len(life.steps) == len(life.actions) and life.steps:
                life.steps.pop()  # the recorder may have died before it
                life.observations.pop()
            part = parts.get((diary.name, life.observations[0]))
            if part is None:
                verdict.lost += len(life.steps) + (life is not lives[-1])
            else:
                verdict += crash_report.compare_episode(trace, part, life, life is lives[-1])
    return verdict


def _pid(trace: Trace, index: int) -> str:
    return str(index_of(trace).locate(index)[0].schema["pid"])


def test_the_crash_report_detects_lost_and_wrong_steps(crash_server: CrashServer, tmp_path: Path) -> None:
    crash = Crash("cartpole", str(tmp_path / "t"), str(tmp_path / "diary"), "kill", "step", 40)
    crash_server(crash)
    told = crash_report.logged_episodes(tmp_path / "diary")
    trace = open_trace(tmp_path / "t")
    assert crash_report.compare_episodes(trace, trace, told) == StepCounts(recovered=39, pending=1)
    assert crash_report.compare_episodes(trace, list(trace)[:-1], told).lost > 0
    told[0].observations[3] = told[0].observations[4]
    told[-1].actions[-1] = crash_victims.canonical(7)
    assert crash_report.compare_episodes(trace, trace, told) == StepCounts(recovered=39, wrong=1, unknown=1)
