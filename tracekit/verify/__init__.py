"""Whether a checkpoint on disk is whole: told without torch, and without executing anything that it holds."""

from tracekit.verify.folders import verify
from tracekit.verify.found import DAMAGED, UNREADABLE, WHOLE, Problem, Verified

__all__ = ["DAMAGED", "UNREADABLE", "WHOLE", "Problem", "Verified", "verify"]
