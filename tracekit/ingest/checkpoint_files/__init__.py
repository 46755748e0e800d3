"""Verify checkpoints on disk, without torch and without executing anything in them."""

from tracekit.ingest.checkpoint_files.formats import DAMAGED, UNREADABLE, WHOLE, Problem, VerifiedCheckpoint
from tracekit.ingest.checkpoint_files.verification import verify

__all__ = ["DAMAGED", "UNREADABLE", "WHOLE", "Problem", "VerifiedCheckpoint", "verify"]
