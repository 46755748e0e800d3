"""Databases of Ascend PyTorch Profiler and msprof."""
