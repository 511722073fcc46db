"""A log of updates, and what it proves; the public path is gym_trace.proof."""
