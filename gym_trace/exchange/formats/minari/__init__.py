"""Minari's datasets: written and read without Minari, each of its kinds of storage."""
