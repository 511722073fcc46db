"""Formats of programs that show recordings along a time line."""
