"""Describe and rebuild environments: the part of the library that needs gymnasium."""
