"""From chunks to episodes: one writer as it lies on disk, and how its columns become the arrays of episodes."""
