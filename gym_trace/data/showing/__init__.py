"""Display of arrays and tables of a trace in a REPL, a notebook or pandas."""
