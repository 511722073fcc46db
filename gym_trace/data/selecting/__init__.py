"""Selecting rows of a table: the language of --where and --sort. It knows columns, not traces."""
