"""Edits write new traces from recorded ones; the public path is gym_trace.edit."""
