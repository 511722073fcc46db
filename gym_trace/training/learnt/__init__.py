"""What a run has learnt: any version again, all of them compared, and as a policy."""
