"""Recordings of abandoned packages: gym_recording, and Monitor of OpenAI Gym."""
