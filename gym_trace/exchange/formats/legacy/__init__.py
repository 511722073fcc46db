"""Recordings of packages that are no longer developed."""
