"""Videos, terminal recordings and windows of episodes."""
