"""What a step would take without one cause of lost time: recorded steps replayed on their dependency graph."""
