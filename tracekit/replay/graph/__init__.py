"""What-if analysis: recorded steps replayed on their dependency graph without one cause of lost time."""
