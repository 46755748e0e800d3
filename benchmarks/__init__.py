"""Measurements side by side; not part of the package."""
