"""Processes of a policy: learner, workers, server of actions."""
