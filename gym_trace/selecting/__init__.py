"""Which rows of a table are meant: the language of --where and --sort. It knows columns, not traces."""
