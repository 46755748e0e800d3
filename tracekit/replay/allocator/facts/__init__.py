"""Facts that need the allocator model: memory snapshots of a run, and what double buffering would save."""
