"""Checking a trace for damage, and saving what is readable of a damaged one."""
