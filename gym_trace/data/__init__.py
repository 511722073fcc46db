"""Vocabulary, schema, values, layouts, episodes and conditions of a trace. No I/O, no gymnasium."""
