"""Autoreset modes: who resets an environment after an episode, and when.

The modes are those of Gymnasium's vector environments; single environments use the same terms:

NEXT_STEP: the step after the end is a reset. Its action is ignored; its reward and flags belong to no episode.
SAME_STEP: the step that ends an episode also resets. It returns the first observation and info of the next episode; its
    infos hold the last ones, see FINAL_OBSERVATION and FINAL_INFO in gym_trace.envs.autoreset.
DISABLED: only the caller resets. options={"reset_mask": lanes} resets some lanes of a vector environment.
"""

from __future__ import annotations

import numpy as np

from gym_trace.data.values import Array

NEXT_STEP, SAME_STEP, DISABLED = "NextStep", "SameStep", "Disabled"  # as Gymnasium spells them
MODES = (NEXT_STEP, SAME_STEP, DISABLED)  # the C core numbers them by their indices


def after_step(mode: str, open_: Array, pending: Array, ended: Array) -> tuple[Array, Array, Array, Array]:
    """Classify a step of each lane. All arrays are boolean, with one element per lane.

    The state of a lane may be unknown; it is known again after the next end of an episode.

    Args:
        open_: an episode is open before the step.
        pending: this step is a reset.
        ended: the step reports the end of an episode.

    Returns:
        known (the state of the lane is known), resets (the step is a reset), and open_ and pending after the step.
    """
    resets, open_ = pending, open_ | pending
    ends = ended & ~pending
    if mode == SAME_STEP:
        return open_ | ends, ends & ~open_, open_ | ends, np.zeros_like(ends)
    return open_, resets, open_ & ~ends, ends if mode == NEXT_STEP else np.zeros_like(ends)


def after_steps(mode: str, open_: Array, pending: Array, ended: Array) -> tuple[Array, Array, Array, Array]:
    """Apply after_step to consecutive steps. ended and the first two results are (time, lane)."""
    known, resets = np.ones(ended.shape, np.bool_), np.zeros(ended.shape, np.bool_)
    if mode == NEXT_STEP:
        resets[0], resets[1:] = pending, ended[:-1]
    if mode != DISABLED and (open_ | pending).all() and not (ended & resets).any():
        if mode == NEXT_STEP:
            open_, pending = ~ended[-1], ended[-1]
        return known, resets, open_, pending
    for t, now in enumerate(ended):  # rare: lanes in an unknown state, or ends in a reset
        known[t], resets[t], open_, pending = after_step(mode, open_, pending, now)
    return known, resets, open_, pending
