"""Live state of a training: reads its logs as they grow, and finds outlier steps."""
