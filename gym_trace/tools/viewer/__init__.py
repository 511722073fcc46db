"""The viewer in a browser; the public path is gym_trace.viewer."""
