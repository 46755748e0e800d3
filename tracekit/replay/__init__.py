"""Replays of recorded work with something changed: steps on their dependency graph, and the allocator."""
