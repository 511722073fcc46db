"""The file format of docs/FORMAT.md."""
