"""Each setting does something: other weights come of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import pytest

pytest.importorskip("torch")

from gym_trace.training import Run, train, verify_run
from gym_trace.training.settings import Settings

SMALL: dict[str, Any] = {"num_envs": 4, "rollout": 16, "epochs": 2, "minibatches": 2, "hidden": (8,), "rnn_size": 4}
STEPS = 4 * 64
OF_A_MACHINE = {"workers", "splits", "device", "learner_threads", "inference"}
IN_OTHER_TESTS = {"model", "reward_shaping", "max_lag", "rnn_size", "batch"}
OTHERS: dict[str, Any] = {
    **{
        "num_envs": 2,
        "rollout": 8,
        "lag": 0,
        "stagger": True,
        "learning_rate": 2e-3,
        "learning_rate_schedule": "linear",
    },
    **{"adam_beta1": 0.5, "adam_beta2": 0.9, "adam_eps": 1e-2, "gamma": 0.9, "lam": 0.5, "off_policy": "none"},
    **{"rho": 0.5, "c": 0.5, "clip": 0.001, "value_clip": 0.001, "value_coefficient": 0.1},
    **{"exploration": "symmetric_kl", "exploration_schedule": "cosine"},
    **{"exploration_coefficient": 0.1, "epochs": 1, "minibatches": 1, "max_grad_norm": 0.01, "target_kl": 1e-9},
    **{"adaptive_kl": 1.0, "reward_scale": 0.1, "reward_clip": 0.5, "normalize_advantages": False},
    **{"normalize_returns": False, "normalize_observations": False, "hidden": (4,), "activation": "relu"},
    **{"initialization": "xavier", "initial_gain": 0.5, "share": True, "rnn": "gru"},
    **{"initial_std": 0.5, "adaptive_std": True},
}
OF_RETURNS = {"reward_scale": {"normalize_returns": False}} | {name: {"learning_rate": 0.05} for name in ("c", "rho")}


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the digest of the last version of a run with these settings, in an environment."""
    known: dict[str, str] = {}

    def digest(env_id: str, **given: Any) -> str:
        key = repr((env_id, given))
        if key not in known:
            run = tmp_path_factory.mktemp("runs") / "run"
            options = {**SMALL, **given}
            train(partial(gymnasium.make, env_id), run, steps=STEPS, seed=1, workers=0, save_best=False, **options)
            known[key] = list(Run(run).updates())[-1].digest
            assert not verify_run(run).differs
        return known[key]

    return digest


@pytest.mark.parametrize("name", OTHERS)
def test_another_value_gives_other_weights(name: str, digests: Any) -> None:
    env_id = "Pendulum-v1" if name.endswith("_std") else "CartPole-v1"
    beside = OF_RETURNS.get(name, {})
    assert digests(env_id, **beside) != digests(env_id, **{**beside, name: OTHERS[name]})


def test_each_setting_is_tried() -> None:
    assert set(Settings().plain()) == set(OTHERS) | OF_A_MACHINE | IN_OTHER_TESTS
