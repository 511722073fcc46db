"""Recorded steps in formats of others: JSON lines, CSV, npz. In windows, so that memory does not grow with episodes."""
