"""Kineto (torch.profiler) trace files."""
