"""Display of traces and episodes in a REPL, a notebook or pandas. It knows arrays, not traces."""
