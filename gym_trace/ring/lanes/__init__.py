"""Slabs of vector environments: the steps of all lanes at a time, and what is made of them."""
