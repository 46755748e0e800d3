"""SQL over the tables of a run, in a sandboxed process."""
