"""Traces as Arrow tables that are read on demand: batches, a dataset, partitions, and SQL."""
