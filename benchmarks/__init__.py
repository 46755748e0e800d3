"""Benchmarks of tracekit; not part of the package."""
