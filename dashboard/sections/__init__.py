"""Sections of pages: tabs, and parts that open on request."""
