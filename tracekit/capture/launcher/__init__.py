"""``tracekit record``: a command started so that its Pythons record themselves. Needs the standard library only."""
