"""What is in a trace, in numbers."""
