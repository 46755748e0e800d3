"""Dumps of a hang: flight recorders and stacks of ranks -> plain values."""
