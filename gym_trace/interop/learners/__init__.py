"""What offline reinforcement learning and imitation learning train from: d3rlpy, imitation, Stable-Baselines3."""
