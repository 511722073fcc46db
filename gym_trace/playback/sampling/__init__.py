"""Batches for training: windows, transitions and whole episodes, sampled from decoded rows."""
