"""Hostile and broken inputs of every kind, made from seeds, and what tracekit does with each.

`python -m tests.fuzz --seconds 600` (or `make fuzz SECONDS=600`) draws fresh inputs and states how
many of each kind were not handled. A failure is repeated by its kind and seed: `--kind KIND --seed SEED --inputs 1`.
"""
