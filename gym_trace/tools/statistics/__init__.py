"""Statistics, descriptions and dataset cards of traces."""
