"""What is wrong with recorded data: lint_trace and its rules."""
