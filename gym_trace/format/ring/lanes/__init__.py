"""Slabs of vector environments: steps of all lanes, and their encoding as segments."""
