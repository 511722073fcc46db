"""Edits: new traces with the episodes of recorded ones; the public path is gym_trace.edit."""
