"""Minari's data sets: written and read without Minari, each of its kinds of storage."""
