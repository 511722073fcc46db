"""The player that `gym-trace replay` is in a terminal."""
