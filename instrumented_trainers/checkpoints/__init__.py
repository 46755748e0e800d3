"""Checkpoints of a training run: saving, sealing, finding, resuming."""
