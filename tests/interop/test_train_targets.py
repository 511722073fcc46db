"""Targets of values and advantages are those of rlax and of TorchRL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gym_trace.playback.sampling.targets import gae, vtrace

GAMMA = 0.97


@pytest.fixture(params=range(4))
def batch(request: pytest.FixtureRequest) -> dict[str, Any]:
    random = np.random.default_rng(request.param)
    terminations = random.random((3, 20)) < 0.15
    return {
        "rewards": random.normal(size=(3, 20)),
        "values": random.normal(size=(3, 21)),
        "log_ratios": random.normal(scale=0.5, size=(3, 20)),
        "terminations": terminations,
        "truncations": ~terminations & (random.random((3, 20)) < 0.15),
    }


@pytest.mark.parametrize(("lam", "clip_rho"), [(1.0, 1.0), (0.95, 1.0), (0.8, 1.7)])
def test_v_trace_is_that_of_rlax(batch: dict[str, Any], lam: float, clip_rho: float) -> None:
    rlax, jax = pytest.importorskip("rlax"), pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    batch["truncations"][...] = False  # rlax does not know truncation
    targets, advantages = vtrace(**batch, gamma=GAMMA, lam=lam, clip_rho=clip_rho)
    for row in range(3):
        values, discounts = batch["values"][row], GAMMA * ~batch["terminations"][row]
        ratios = np.exp(batch["log_ratios"][row])
        theirs = rlax.vtrace_td_error_and_advantage(
            values[:-1], values[1:], batch["rewards"][row], discounts, ratios, lam, clip_rho, clip_rho
        )
        np.testing.assert_allclose(targets[row] - values[:-1], theirs.errors, rtol=0, atol=1e-9)
        np.testing.assert_allclose(advantages[row], theirs.pg_advantage, rtol=0, atol=1e-9)


def for_torchrl(batch: dict[str, Any]) -> dict[str, Any]:
    """Return its arguments: (batch, steps, 1), values after each step, and steps that end an episode."""
    torch = pytest.importorskip("torch")
    columns = {
        "state_value": batch["values"][:, :-1],
        "next_state_value": batch["values"][:, 1:],
        "reward": batch["rewards"],
        "done": batch["terminations"] | batch["truncations"],
        "terminated": batch["terminations"],
    }
    return {name: torch.from_numpy(np.ascontiguousarray(rows))[..., None] for name, rows in columns.items()}


def test_advantages_are_those_of_torchrl(batch: dict[str, Any]) -> None:
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    theirs = functional.generalized_advantage_estimate(GAMMA, 0.9, **for_torchrl(batch))
    del batch["log_ratios"]
    for mine, other in zip(gae(**batch, gamma=GAMMA, lam=0.9), theirs):
        np.testing.assert_allclose(mine, other[..., 0], rtol=0, atol=1e-5)


def test_v_trace_is_that_of_torchrl(batch: dict[str, Any]) -> None:
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    columns = for_torchrl(batch)
    log_pi = columns["reward"].new_tensor(batch["log_ratios"])[..., None]
    theirs = functional.vtrace_advantage_estimate(GAMMA, log_pi, log_pi.new_zeros(log_pi.shape), **columns)
    targets, advantages = vtrace(**batch, gamma=GAMMA, lam=1.0)
    # Where an episode was truncated it has the target of the next episode's first step in the advantage before it.
    ends = batch["truncations"]
    np.testing.assert_allclose(targets, theirs[1][..., 0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(advantages[~ends], theirs[0][..., 0].numpy()[~ends], rtol=0, atol=1e-5)
