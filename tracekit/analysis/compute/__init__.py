"""Facts about compute: kernels, FLOPs, contention on the device, compute gaps, recomputation."""
