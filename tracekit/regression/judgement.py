"""The former name of `tracekit.regression.gate`."""

from tracekit.regression.gate import judge

__all__ = ["judge"]
