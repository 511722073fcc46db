"""New traces made of recorded ones, with every episode as it was recorded; the public path is gym_trace.edit."""
