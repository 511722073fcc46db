"""Traces as Parquet: a table of steps and a table of episodes."""
