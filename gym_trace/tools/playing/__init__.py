"""A person plays an environment and is recorded."""
