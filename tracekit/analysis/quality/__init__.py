"""Facts about the data itself: contents of each trace, missing data, data-quality issues."""
