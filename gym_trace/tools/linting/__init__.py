"""Linting of recorded data: lint_trace and its rules."""
