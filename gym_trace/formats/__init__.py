"""Recordings of other packages."""
