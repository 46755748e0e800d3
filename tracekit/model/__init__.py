"""The data model: Trace, Run, MemorySnapshot, the table schema, and arithmetic on intervals."""
