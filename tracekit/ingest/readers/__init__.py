"""Bytes to tables: one module per kind of file."""
