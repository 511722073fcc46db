"""Traces as tables of Arrow that are read as they are asked for: batches, a dataset, partitions, and SQL."""
