"""Facts about memory: allocations, usage over time, owners, growth, steady-state allocator calls."""
