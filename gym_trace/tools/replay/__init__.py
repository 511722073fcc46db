"""Replay a trace: simulate and verify it, compare it with another, or step it as an environment."""
