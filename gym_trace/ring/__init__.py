"""What is recorded, from the moment it happens until it is in a batch, in memory that outlives the process."""
