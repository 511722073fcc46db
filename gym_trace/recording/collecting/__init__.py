"""Recording with many processes at a time."""
