"""Many processes that record one trace: how they start, report, die and end."""
