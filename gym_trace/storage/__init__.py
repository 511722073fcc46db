"""Storage of traces: directories, memory, and the interfaces for others."""
