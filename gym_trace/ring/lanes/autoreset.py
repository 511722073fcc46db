"""Who resets an environment when an episode has ended: the modes, and what each means for a step.

The modes are those of Gymnasium's vector environments, and single environments are told in the same words:

NEXT_STEP: the step after the end is a reset. Its action is ignored; its reward and flags belong to no episode.
SAME_STEP: the step that ends an episode resets, too. It returns the first observation and info of the next episode; the
    last ones are among its infos, see FINAL_OBSERVATION and FINAL_INFO in gym_trace.envs.autoreset.
DISABLED: nobody but the caller, who passes options={"reset_mask": lanes} to reset some lanes of a vector environment.
"""

from __future__ import annotations

import numpy as np

from gym_trace.model.values import Array

NEXT_STEP, SAME_STEP, DISABLED = "NextStep", "SameStep", "Disabled"  # as Gymnasium spells them


def after_step(mode: str, open_: Array, pending: Array, ended: Array) -> tuple[Array, Array, Array, Array]:
    """What a step is for each lane, given whether it says that an episode ended. All are boolean arrays, one a lane.

    A lane of whose episode nothing is known has one again after the next end.

    Args:
        open_, pending: before the step, whether an episode is open, and whether this step is a reset.

    Returns:
        Whether it is anything that is known of, whether that is a reset and not a step; and after it, whether an
        episode is open, and whether the next step is a reset.
    """
    resets, open_ = pending, open_ | pending
    over = ended & ~pending
    if mode == SAME_STEP:
        return open_ | over, over & ~open_, open_ | over, np.zeros_like(over)
    return open_, resets, open_ & ~over, over if mode == NEXT_STEP else np.zeros_like(over)


def after_steps(mode: str, open_: Array, pending: Array, ended: Array) -> tuple[Array, Array, Array, Array]:
    """The same for consecutive steps: ended and the first two results are of each (time, lane)."""
    known, resets = np.ones(ended.shape, np.bool_), np.zeros(ended.shape, np.bool_)
    if mode == NEXT_STEP:
        resets[0], resets[1:] = pending, ended[:-1]
    if mode != DISABLED and (open_ | pending).all() and not (ended & resets).any():
        if mode == NEXT_STEP:
            open_, pending = ~ended[-1], ended[-1]
        return known, resets, open_, pending
    for t, now in enumerate(ended):  # lanes without an episode, ends in a reset: seldom
        known[t], resets[t], open_, pending = after_step(mode, open_, pending, now)
    return known, resets, open_, pending
