"""From rows to chunks: how steps are kept while they come, encoded, and written by a thread."""
