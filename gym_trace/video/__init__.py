"""Pictures of episodes: videos, terminal recordings, windows."""
