"""Recording with several processes: a queue of episodes, workers that record them, and who looks after these."""
