"""Processes of training: workers, a learner, an optional server of actions, and their shared memory."""
