"""Batches for training: windows, transitions and whole episodes, drawn from decoded rows."""
