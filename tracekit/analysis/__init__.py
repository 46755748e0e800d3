"""Facts: what is measured of a trace. One noun per module; nothing here judges."""
