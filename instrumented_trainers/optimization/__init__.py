"""Optimizers and learning-rate schedules by name, and which parameters decay."""
