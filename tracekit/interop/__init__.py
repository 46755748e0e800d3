"""Loaded runs for other tools: no file is parsed twice."""
