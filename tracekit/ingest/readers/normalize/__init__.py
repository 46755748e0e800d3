"""Events of a profiler, whatever the format of its file -> the tables of a trace."""
