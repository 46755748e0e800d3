"""Ranks onto one clock: collectives matched across ranks, clock offsets, alignment."""
