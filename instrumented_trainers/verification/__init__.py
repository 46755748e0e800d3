"""Verify that a user's training computes over ranks what it computes in one process.

`user_training` loads what the user's function returns, `rank` trains it on one rank and compares with one process,
`processes` starts the ranks, and `run` collects what they found. `tracekit verify-training` reports it.
"""
