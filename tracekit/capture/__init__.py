"""The recorder. Needs torch, tracekit.conventions and the standard library; nothing else.

It runs wherever torch runs (Python 3.10 and later), also where the analysis is not installed.
"""

from tracekit.capture.checkpoint import record_load, record_save
from tracekit.capture.recorder import Recorder
from tracekit.capture.redaction import redact

__all__ = ["Recorder", "record_load", "record_save", "redact"]
