"""gym-trace train: what it is told, how it tells how far it is."""
