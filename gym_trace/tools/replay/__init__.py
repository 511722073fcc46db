"""Replaying a trace: simulated again and verified, compared with another, or as an environment."""
