"""Facts about time: step breakdown, gaps, launches, dependencies, backward passes."""
