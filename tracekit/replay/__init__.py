"""Recorded work played again with something changed: steps on their dependency graph, and the allocator."""
