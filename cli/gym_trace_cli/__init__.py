"""The gym-trace command line."""
