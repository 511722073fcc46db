"""The ring: every step as it happens, in memory that survives the process, until it is in a batch."""
