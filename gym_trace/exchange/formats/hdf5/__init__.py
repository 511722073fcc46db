"""HDF5 files: written fast, read with suspicion; and the layout of D4RL."""
