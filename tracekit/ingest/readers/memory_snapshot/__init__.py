"""CUDA memory snapshots: pickles of `torch.cuda.memory._dump_snapshot`."""
