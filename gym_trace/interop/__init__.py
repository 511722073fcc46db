"""Recordings of other packages: OpenAI's gym_recording, and the statistics and videos of OpenAI Gym's Monitor."""
