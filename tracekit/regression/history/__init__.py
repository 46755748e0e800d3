"""Results of checked runs over time: stored in one DuckDB file, shown as trends with change points."""
