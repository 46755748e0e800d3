"""Nsight Systems reports that were exported to SQLite."""
