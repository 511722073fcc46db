"""The data model of a trace: vocabulary, schema, values, layouts, episodes. No I/O, no gymnasium."""
