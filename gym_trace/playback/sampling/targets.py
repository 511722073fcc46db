"""Value targets of batches of windows: returns to go, GAE, n-step returns, V-trace.

Arrays come from trace.windows(): rewards, terminations, truncations and mask (batch, steps); values of the
observations (batch, steps + 1). Results are 0 where mask is False. Values are bootstrapped at the end of a window and
after a truncation, but not after a termination. Sums are float64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Any2D = npt.ArrayLike


def returns_to_go(
    rewards: Any2D,
    terminations: Any2D,
    truncations: Any2D,
    gamma: float = 1.0,
    values: Any2D | None = None,
    mask: Any2D | None = None,
) -> Array:
    """Return (batch, steps): the discounted rewards from each step to the end of its episode or window.

    values: values to bootstrap from; None: zeros.

    Examples:
        >>> flags = np.array([[False, False, True]])
        >>> targets.returns_to_go(np.ones((1, 3)), flags, np.zeros((1, 3), bool), gamma=0.5)
        array([[1.75, 1.5 , 1.  ]])
    """
    rewards = np.asarray(rewards, np.float64)
    known = np.zeros((len(rewards), rewards.shape[1] + 1)) if values is None else np.asarray(values, np.float64)
    return gae(rewards, known, terminations, truncations, gamma, 1.0, mask)[1]


def gae(
    rewards: Any2D,
    values: Any2D,
    terminations: Any2D,
    truncations: Any2D,
    gamma: float = 0.99,
    lam: float = 0.95,
    mask: Any2D | None = None,
) -> tuple[Array, Array]:
    """Return generalized advantage estimates (Schulman et al., 2016): (advantages, returns), (batch, steps) each.

    returns: advantages + values, the targets of the values.

    Examples:
        >>> rewards, ends, never = np.ones((1, 3)), np.array([[False, False, True]]), np.zeros((1, 3), bool)
        >>> advantages, returns = targets.gae(rewards, np.zeros((1, 4)), ends, never, gamma=0.5, lam=1.0)
        >>> returns.tolist()
        [[1.75, 1.5, 1.0]]
    """
    ratios = np.zeros_like(np.asarray(rewards, np.float64))
    returns, advantages = vtrace(rewards, values, ratios, terminations, truncations, gamma, lam, mask=mask)
    return advantages, returns


def n_step_returns(
    rewards: Any2D,
    values: Any2D,
    terminations: Any2D,
    truncations: Any2D,
    n_steps: int,
    gamma: float = 0.99,
    mask: Any2D | None = None,
) -> Array:
    """Return (batch, steps): the discounted rewards of n steps, and the value after them; fewer at episode ends.

    Examples:
        >>> flags = np.zeros((1, 3), bool)
        >>> targets.n_step_returns(np.ones((1, 3)), np.zeros((1, 4)), flags, flags, 2, gamma=0.5)
        array([[1.5, 1.5, 1. ]])
    """
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    terminated, truncated = np.asarray(terminations, bool), np.asarray(truncations, bool)
    is_real = np.ones_like(terminated) if mask is None else np.asarray(mask, bool)
    steps = rewards.shape[1]
    found = np.zeros_like(rewards)
    weight, open_ = np.ones_like(rewards), is_real.copy()
    at = np.arange(steps)
    for k in range(n_steps):
        here = np.minimum(at + k, steps - 1)
        there = (at + k < steps) & is_real[:, here]
        # Where the steps of the window end before n there is the value behind the last of them.
        ended = open_ & ~there
        found += np.where(ended, weight * values[:, np.minimum(at + k, steps)], 0.0)
        open_ &= there
        found += np.where(open_, weight * rewards[:, here], 0.0)
        weight = weight * gamma
        ends = open_ & (terminated[:, here] | truncated[:, here])
        found += np.where(ends & ~terminated[:, here], weight * values[:, here + 1], 0.0)
        open_ &= ~ends
    found += np.where(open_, weight * values[:, np.minimum(at + n_steps, steps)], 0.0)
    return np.where(is_real, found, 0.0)


def vtrace(
    rewards: Any2D,
    values: Any2D,
    log_ratios: Any2D,
    terminations: Any2D,
    truncations: Any2D,
    gamma: float = 0.99,
    lam: float = 1.0,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
    mask: Any2D | None = None,
    next_values: Any2D | None = None,
) -> tuple[Array, Array]:
    """Return V-trace (Espeholt et al., 2018): (targets of the values, advantages of the policy), (batch, steps) each.

    With log_ratios of 0 it equals gae(), also for lam below 1, as in rlax.

    next_values: (batch, steps), values of the observations after each step, if rows contain several episodes: at the
    end of an episode, this is not the next element of values. None: values[:, 1:].
    log_ratios: (batch, steps), log of the probability of the action under the current policy, minus that under the
    recording policy, such as ``new_logprob - batch["annotations"]["logprob"]``.

    Examples:
        >>> flags = np.zeros((1, 2), bool)
        >>> rewards, values, log_ratios = np.ones((1, 2)), np.zeros((1, 3)), np.zeros((1, 2))
        >>> targets.vtrace(rewards, values, log_ratios, flags, flags, gamma=0.5)[0]
        array([[1.5, 1. ]])
    """
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    terminated, truncated = np.asarray(terminations, bool), np.asarray(truncations, bool)
    is_real = np.ones_like(terminated) if mask is None else np.asarray(mask, bool)
    ratios = np.exp(np.asarray(log_ratios, np.float64))
    rho, c = np.minimum(clip_rho, ratios), np.minimum(clip_c, ratios)
    behind = values[:, 1:] if next_values is None else np.asarray(next_values, np.float64)
    discounts = gamma * ~terminated
    deltas = rho * (rewards + discounts * behind - values[:, :-1])
    targets, next_targets = np.zeros_like(rewards), np.zeros_like(rewards)
    excess = np.zeros(len(rewards))  # target minus value of the following step
    for t in reversed(range(rewards.shape[1])):
        carried = np.where(truncated[:, t], 0.0, lam * excess)
        next_targets[:, t] = behind[:, t] + carried
        excess = np.where(is_real[:, t], deltas[:, t] + discounts[:, t] * c[:, t] * carried, 0.0)
        targets[:, t] = values[:, t] + excess
    advantages = rho * (rewards + discounts * next_targets - values[:, :-1])
    return np.where(is_real, targets, 0.0), np.where(is_real, advantages, 0.0)
