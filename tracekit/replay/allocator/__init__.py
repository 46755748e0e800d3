"""A model of PyTorch's CUDA caching allocator, block for block; what it replays, and facts of memory snapshots."""
