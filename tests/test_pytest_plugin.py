"""The fixture golden_trace, in projects of its own."""

import shutil
import sys
from pathlib import Path

import forked_python
import gymnasium
import pytest

from gym_trace import TraceRecordingWrapper, open_trace, record_episodes
from gym_trace.pytest_plugin import GoldenTrace

pytest_plugins = ["pytester"]

PENDULUM = """
import gymnasium, numpy
from gymnasium.envs.classic_control import PendulumEnv

class Heavier(PendulumEnv):
    metadata = PendulumEnv.metadata
    def __init__(self, gravity=10.0):
        super().__init__(g=gravity)

def make():
    return gymnasium.wrappers.TimeLimit(Heavier(GRAVITY), 20)

def with_more_actions():
    env = make()
    env.unwrapped.action_space = gymnasium.spaces.Box(-3.0, 3.0, (1,))
    return env

def policy(observation):
    return numpy.array([PUSH * observation[0]], numpy.float32)
"""
TESTS = """
import pytest
from pendulum import policy, with_more_actions, make

@pytest.mark.parametrize("seed", [0, 7])
def test_swings(golden_trace, seed):
    trace = golden_trace(f"swings-{seed}", make, policy, episodes=2, seed=seed)
    assert len(trace) == 2 and (trace.episodes["steps"] == 20).all()

def test_by_id(golden_trace):
    golden_trace("cartpole", "CartPole-v1", steps=40)
"""
# Python would load the compiled module of before if the source changes within a second and keeps its size.
PYTEST = "import sys; sys.dont_write_bytecode = True; import pytest; sys.exit(pytest.main())"


class Project:
    """A project with an environment, a policy and tests of them."""

    def __init__(self, pytester: pytest.Pytester):
        self._pytester = pytester
        pytester.makepyfile(test_golden=TESTS)
        self.golden: Path = pytester.path / "golden"
        self.write()

    def write(self, gravity: float = 10.0, push: float = 0.5) -> None:
        text = PENDULUM.replace("GRAVITY", str(gravity)).replace("PUSH", str(push))
        self._pytester.makepyfile(pendulum=text)

    def run(self, *arguments: str, **expected: int) -> str:
        # By name, without the plugins of other packages that happen to be installed.
        plugins = ["-p", "gym_trace.pytest_plugin", "-p", "no:cacheprovider"]
        command = [sys.executable, "-c", PYTEST, *plugins, "-q", *arguments]
        done = forked_python.run(command, cwd=self._pytester.path, capture_output=True, text=True)
        pytest.RunResult(done.returncode, done.stdout.splitlines(), [], 0.0).assert_outcomes(**expected)
        return str(done.stdout)


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # in workers, too
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return Project(pytester)


def test_a_changed_constant_is_found_at_its_first_step_and_updated(project: Project) -> None:
    told = project.run("-k", "by_id", failed=1)
    assert "no golden trace; record it with pytest --golden-update" in told
    project.run("--golden-update", passed=3)
    before = {path: path.read_bytes() for path in project.golden.rglob("*") if path.is_file()}
    assert sum(map(len, before.values())) < 60_000
    project.run(passed=3)
    assert before == {path: path.read_bytes() for path in project.golden.rglob("*") if path.is_file()}
    project.write(gravity=10.1)
    told = project.run(failed=2, passed=1)
    assert "2 of 2 episodes differ from the recording" in told
    assert "episode 0 at step 0, observations[" in told
    assert "] differs at 20 steps, from step 0 on, by up to" in told
    assert "rewards differs at 19 steps, from step 1 on" in told
    assert "pytest --golden-update" in told
    project.run("--golden-update", passed=3)
    assert {path.relative_to(project.golden) for path in project.golden.rglob("*")} == {
        Path(name) for name in ("swings-0", "swings-7", "cartpole")
    } | {path.relative_to(project.golden) for path in before}


def test_a_changed_policy_is_found_and_a_tolerance_accepts_drift(project: Project) -> None:
    project.run("--golden-update", passed=3)
    project.write(push=0.6)
    told = project.run(failed=2, passed=1)
    assert "the policy acts differently" in told
    assert "episode 0 at step 0, actions[0]: recorded" in told
    project.write(gravity=10.0 + 1e-7)
    project.run("-k", "swings", failed=2)
    (project.golden.parent / "test_golden.py").write_text(
        TESTS.replace("seed=seed)", "seed=seed, tolerances={'observations': 1e-4, 'rewards': 1e-3})").replace(
            "make, policy, ", "make, None, "
        )
    )
    project.run("-k", "swings", passed=2)


def test_a_golden_trace_of_something_else_fails(project: Project) -> None:
    project.run("--golden-update", "-k", "swings", passed=2)
    path = project.golden.parent / "test_golden.py"
    tests = path.read_text()
    for before, after, message in (
        ("episodes=2", "episodes=3", "episodes: recorded with 2, the test requests 3"),
        ("episodes=2", "steps=3", "steps: recorded with None, the test requests 3"),
        ("seed=seed", "seed=seed + 1", "seed: recorded with 0, the test requests 1"),
        ("seed=seed", "seed=seed, record_infos=True", "record_infos: recorded with False, the test requests True"),
        ("episodes=2", "episodes=0", "nothing to record; pass 1 episode or step, or more"),
        (
            "make, policy",
            "with_more_actions, policy",
            "action space: recorded Box(-2.0, 2.0, (1,), float32), is Box(-3.0,",
        ),
    ):
        path.write_text(tests.replace(before, after))
        assert message in project.run("-k", "swings", failed=2)


def test_a_golden_trace_without_episodes_fails(tmp_path: Path) -> None:
    golden = GoldenTrace(tmp_path, update=True)
    golden("empty", "CartPole-v1", episodes=1)
    asked = open_trace(tmp_path / "empty").metadata
    shutil.rmtree(tmp_path / "empty")
    TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / "empty", metadata=asked).close()
    with pytest.raises(pytest.fail.Exception, match="episodes: the trace has 0, the test requests 1"):
        GoldenTrace(tmp_path, update=False)("empty", "CartPole-v1", episodes=1)


def recorded_otherwise(golden: Path, seed: int = 0, **limits: int) -> None:
    """Record the trace with other limits or another seed, and let it say what the test requests."""
    asked = open_trace(golden / "cartpole").metadata
    shutil.rmtree(golden / "cartpole")
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), golden / "cartpole", metadata=asked)
    record_episodes(env, seed=seed, **limits)
    env.close()


@pytest.mark.parametrize(
    ("recorded", "told"),
    [
        ({"episodes": 1}, "episodes: the trace has 1, the test requests 3"),
        ({"episodes": 3, "seed": 5}, "seed: the recorded seeds do not follow from 0"),
        ({"steps": 1}, "episode 0: incomplete"),
    ],
)
def test_a_golden_trace_of_less_than_it_says_fails(recorded: dict[str, int], told: str, tmp_path: Path) -> None:
    GoldenTrace(tmp_path, update=True)("cartpole", "CartPole-v1")
    GoldenTrace(tmp_path, update=False)("cartpole", "CartPole-v1")
    recorded_otherwise(tmp_path, **recorded)
    with pytest.raises(pytest.fail.Exception, match=told):
        GoldenTrace(tmp_path, update=False)("cartpole", "CartPole-v1")


def test_a_golden_trace_of_fewer_steps_than_it_says_fails(tmp_path: Path) -> None:
    GoldenTrace(tmp_path, update=True)("cartpole", "CartPole-v1", steps=60)
    GoldenTrace(tmp_path, update=False)("cartpole", "CartPole-v1", steps=60)
    recorded_otherwise(tmp_path, steps=2)
    with pytest.raises(pytest.fail.Exception, match="steps: the trace has 2, the test requests 60"):
        GoldenTrace(tmp_path, update=False)("cartpole", "CartPole-v1", steps=60)


def test_parallel_runs_of_the_tests_share_the_traces(project: Project) -> None:
    pytest.importorskip("xdist")
    project.run("--golden-update", "-p", "xdist", "-n", "2", passed=3)
    project.run("-p", "xdist", "-n", "2", passed=3)
    assert len(open_trace(project.golden / "swings-7")) == 2


@pytest.mark.parametrize("name", ["", ".", "..", "../elsewhere", "a/b"])
def test_a_name_with_a_path_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(pytest.fail.Exception, match="not a directory name"):
        GoldenTrace(tmp_path / "golden", update=True)(name, "CartPole-v1")
    assert list(tmp_path.iterdir()) == []
