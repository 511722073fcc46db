"""How a trace lies on disk; docs/FORMAT.md is its specification."""
