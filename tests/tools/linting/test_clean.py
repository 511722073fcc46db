"""Clean recordings have no findings: those of Gymnasium's environments, and the sample traces."""

from pathlib import Path
from typing import Any

import gymnasium
import pytest

from gym_trace import TraceRecordingWrapper, lint_trace, open_trace, record_episodes

SAMPLES = Path(__file__).parents[3] / "sample_traces"
# Samples with real defects: damage, values that misfit, a cut episode, and episodes recorded twice.
EXPECTED = {
    "agents": {"T106", "T402"},  # an agent of an unknown name is outside the space
    "damaged": {"T001"},
    "mismatch": {"T104", "T106"},
    "outcomes": {"T402"},
    "two-writers": {"T602"},
    "values": {"T101"},
    "compacted": {"T601", "T602"},
}
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"episodes": 100},
    "Pendulum-v1": {"episodes": 4},
    "MountainCar-v0": {"episodes": 3},
    "MountainCarContinuous-v0": {"steps": 1500},
    "Acrobot-v1": {"episodes": 2},
    "FrozenLake-v1": {"episodes": 400},
    "FrozenLake8x8-v1": {"episodes": 60},
    "Taxi": {"episodes": 6},
    "Blackjack-v1": {"episodes": 500},
    "CliffWalking": {"steps": 2000},
    "HalfCheetah-v5": {"steps": 1200},
    "Hopper-v5": {"episodes": 30},
    "Humanoid-v5": {"episodes": 8},
    "Reacher-v5": {"episodes": 10},
    "InvertedPendulum-v5": {"episodes": 60},
    "ALE/Pong-v5": {"steps": 400},
    "ALE/Breakout-v5": {"steps": 600},
    "MiniGrid-Empty-5x5-v0": {"episodes": 12},
    "MiniGrid-DoorKey-5x5-v0": {"episodes": 6},
}


def made(name: str, **options: Any) -> Any:
    """Make an environment; of a name without version, the newest registered one. Skips those not installed."""
    if name.startswith("ALE/"):
        gymnasium.register_envs(pytest.importorskip("ale_py"))
    if name.startswith("MiniGrid"):
        gymnasium.register_envs(pytest.importorskip("minigrid"))
    if "-v" not in name:
        name = max(known for known in gymnasium.registry if known.startswith(f"{name}-v"))
    try:
        return gymnasium.make_vec(name, **options) if "num_envs" in options else gymnasium.make(name, **options)
    except (gymnasium.error.DependencyNotInstalled, gymnasium.error.UnregisteredEnv) as error:
        pytest.skip(str(error))


def codes(directory: Path) -> dict[str, str]:
    return {finding.code: f"{finding.column}: {finding.message}" for finding in lint_trace(directory)}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_clean_recording_has_no_findings(name: str, tmp_path: Path) -> None:
    with TraceRecordingWrapper(made(name), tmp_path, record_infos=True) as env:
        record_episodes(env, seed=7, **ENVIRONMENTS[name])
    assert codes(tmp_path) == {}
    assert not list(lint_trace(tmp_path, select=["T405", "T406", "T407", "T408"]))


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1"])
@pytest.mark.parametrize("mode", ["sync", "vector_entry_point"])
def test_clean_lanes_have_no_findings(name: str, mode: str, tmp_path: Path) -> None:
    from vector_wrapper import TraceRecordingVectorWrapper

    if mode == "vector_entry_point" and name != "CartPole-v1":
        mode = "async"
    envs = TraceRecordingVectorWrapper(made(name, num_envs=8, vectorization_mode=mode), tmp_path)
    record_episodes(envs, seed=3, steps=2000)
    envs.close()
    assert codes(tmp_path) == {}


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("format-*/*")), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_samples_have_only_the_defects_that_they_show(path: Path) -> None:
    assert set(codes(path)) == EXPECTED.get(path.name, set())


def test_unseeded_episodes_are_verifiable_by_generator_state(tmp_path: Path) -> None:
    with TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path) as env:
        for number in range(5):
            env.reset(seed=1 if number == 0 else None)
            while not any(env.step(env.action_space.sample())[2:4]):
                pass
    assert open_trace(tmp_path).episodes["seed"].tolist() == [1, -1, -1, -1, -1]
    assert codes(tmp_path) == {}
