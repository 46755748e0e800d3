"""Facts about the host: ops, launch delay, Python stacks."""
