"""Copying traces to object stores and back, and recording to them."""
