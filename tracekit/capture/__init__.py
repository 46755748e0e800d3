"""The recorder. Needs torch, tracekit.conventions and the standard library; nothing else."""
