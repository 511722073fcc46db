"""Training with asynchronous PPO: what is learnt from is in the trace, so that it can be learnt again."""
