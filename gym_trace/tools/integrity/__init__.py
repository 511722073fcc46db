"""Check a trace for damage, and save the readable data of a damaged one."""
