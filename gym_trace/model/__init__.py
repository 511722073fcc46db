"""What a trace is made of: words, schema, values, layouts, episodes. No input or output, no gymnasium."""
