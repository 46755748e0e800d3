"""Calculators for what has not run yet: checkpoints and storage, memory per rank, pipelines. Pure functions."""
