"""Work on a trace: verify, compare, check, repair, edit, lint, describe, view, render, play."""
