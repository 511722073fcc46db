"""docs/FORMAT.md in code."""
