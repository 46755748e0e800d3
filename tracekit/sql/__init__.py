"""SQL over the tables of a run, in a process that can do nothing else."""
