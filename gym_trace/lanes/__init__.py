"""The same for vector environments, whose steps come for all lanes at a time."""
