"""What checked runs came to over time: kept in one DuckDB file, told as trends with change points."""
