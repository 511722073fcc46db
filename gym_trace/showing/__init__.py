"""How traces and episodes show themselves: in a REPL, in a notebook, in pandas. It knows arrays, not traces."""
