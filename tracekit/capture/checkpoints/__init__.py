"""Record checkpoint saves and loads stage by stage, in the log and in the trace, without changing them."""
