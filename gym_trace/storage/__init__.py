"""Where the bytes of a trace lie."""
