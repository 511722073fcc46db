"""Value targets are what their definitions say, written out step by step."""

from typing import Any

import numpy as np
import pytest

from gym_trace.playback.sampling import targets

GAMMA, LAM = 0.9, 0.7


@pytest.fixture(params=range(8))
def batch(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Windows with ends within them, and padding behind some."""
    random = np.random.default_rng(request.param)
    shape = 5, 9
    terminations, truncations = random.random(shape) < 0.12, random.random(shape) < 0.12
    counts = random.integers(1, 10, 5)
    return {
        "rewards": random.normal(size=shape).astype(np.float32),
        "values": random.normal(size=(5, 10)),
        "terminations": terminations,
        "truncations": truncations,
        "mask": np.arange(9) < counts[:, None],
    }


def ends(batch: dict[str, Any], i: int, t: int) -> bool:
    return bool(batch["terminations"][i, t] or batch["truncations"][i, t] or t + 1 == batch["mask"][i].sum())


def behind(batch: dict[str, Any], i: int, t: int) -> float:
    """The value of what step t led to."""
    return 0.0 if batch["terminations"][i, t] else float(batch["values"][i, t + 1])


def check(found: np.ndarray, batch: dict[str, Any], expected: Any) -> None:
    for i, t in np.ndindex(found.shape):
        wanted = expected(i, t) if batch["mask"][i, t] else 0.0
        assert found[i, t] == pytest.approx(wanted, abs=1e-9), (i, t)


def test_returns_to_go_add_up_what_comes(batch: dict[str, Any]) -> None:
    def expected(i: int, t: int) -> float:
        later = behind(batch, i, t) if ends(batch, i, t) else expected(i, t + 1)
        return float(batch["rewards"][i, t]) + GAMMA * later

    flags = batch["rewards"], batch["terminations"], batch["truncations"]
    check(targets.returns_to_go(*flags, GAMMA, batch["values"], batch["mask"]), batch, expected)
    plain = targets.returns_to_go(np.ones((1, 3)), np.zeros((1, 3)), np.zeros((1, 3)))
    assert plain.tolist() == [[3.0, 2.0, 1.0]]


def test_advantages_are_sums_of_errors(batch: dict[str, Any]) -> None:
    def advantage(i: int, t: int) -> float:
        error = float(batch["rewards"][i, t]) + GAMMA * behind(batch, i, t) - batch["values"][i, t]
        return float(error + (0.0 if ends(batch, i, t) else GAMMA * LAM * advantage(i, t + 1)))

    found, returns = targets.gae(**batch, gamma=GAMMA, lam=LAM)
    check(found, batch, advantage)
    check(returns, batch, lambda i, t: advantage(i, t) + batch["values"][i, t])


@pytest.mark.parametrize("n_steps", [1, 2, 5, 20])
def test_n_step_returns_end_where_episodes_do(batch: dict[str, Any], n_steps: int) -> None:
    def expected(i: int, t: int) -> float:
        total, weight = 0.0, 1.0
        for k in range(n_steps):
            total += weight * float(batch["rewards"][i, t + k])
            weight *= GAMMA
            if ends(batch, i, t + k) or k + 1 == n_steps:
                return total + weight * behind(batch, i, t + k)
        raise AssertionError

    check(targets.n_step_returns(**batch, n_steps=n_steps, gamma=GAMMA), batch, expected)


def test_v_trace_is_its_recursion_and_on_policy_that_of_gae(batch: dict[str, Any]) -> None:
    """tests/interop compares with rlax."""
    log_ratios = np.random.default_rng(0).normal(size=(5, 9))
    rho, c = np.minimum(1.5, np.exp(log_ratios)), np.minimum(1.2, np.exp(log_ratios))

    def target(i: int, t: int) -> float:
        value, after = float(batch["values"][i, t]), behind(batch, i, t)
        carried = 0.0 if ends(batch, i, t) else LAM * (target(i, t + 1) - after)
        error = rho[i, t] * (float(batch["rewards"][i, t]) + GAMMA * after - value)
        return float(value + error + GAMMA * c[i, t] * carried)

    def advantage(i: int, t: int) -> float:
        after = behind(batch, i, t)
        later = after if ends(batch, i, t) else after + LAM * (target(i, t + 1) - after)
        return float(rho[i, t] * (float(batch["rewards"][i, t]) + GAMMA * later - batch["values"][i, t]))

    options = {"gamma": GAMMA, "lam": LAM, "clip_rho": 1.5, "clip_c": 1.2}
    found, advantages = targets.vtrace(**batch, log_ratios=log_ratios, **options)
    check(found, batch, target)
    check(advantages, batch, advantage)
    on_policy = targets.vtrace(**batch, log_ratios=np.zeros((5, 9)), gamma=GAMMA, lam=LAM)
    for ours, theirs in zip(on_policy, targets.gae(**batch, gamma=GAMMA, lam=LAM)[::-1]):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)


def test_rows_that_go_on_with_the_next_episode_are_as_episodes_one_by_one() -> None:
    generator = np.random.default_rng(3)
    rewards, values, ratios = (generator.normal(size=(1, 12)) for _ in range(3))
    last, behind_all = generator.normal(size=2), generator.normal()
    truncations, terminations = np.zeros((1, 12), bool), np.zeros((1, 12), bool)
    truncations[0, 4], terminations[0, 8] = True, True
    next_values = np.append(values[:, 1:], behind_all)[None]
    next_values[0, [4, 8]] = last
    flags = terminations, truncations
    bootstrapped = np.append(values, behind_all)[None]
    whole = targets.vtrace(rewards, bootstrapped, ratios, *flags, GAMMA, LAM, next_values=next_values)
    for begin, end, after in ((0, 5, last[0]), (5, 9, last[1]), (9, 12, behind_all)):
        part = np.s_[:, begin:end]
        bootstrapped = np.append(values[part], after)[None]
        alone = targets.vtrace(rewards[part], bootstrapped, ratios[part], *(flag[part] for flag in flags), GAMMA, LAM)
        for ours, theirs in zip(whole, alone):
            np.testing.assert_array_equal(ours[part], theirs)
