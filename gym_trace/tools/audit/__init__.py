"""Audit an environment: which promises it keeps, by playing the same episodes in different arrangements."""
