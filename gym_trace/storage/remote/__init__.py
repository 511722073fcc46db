"""Traces at URLs: object stores behind one narrow seam, and a cache of their blocks."""
