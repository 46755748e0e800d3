"""The recorder. Needs torch, tracekit.conventions and the standard library; nothing else.

It runs wherever torch runs (Python 3.10 and later), also where the analysis is not installed. The public names are
resolved on first use: what starts trainings does without torch itself.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracekit.capture.checkpoints.dcp import record_load, record_save
    from tracekit.capture.manifest import redact
    from tracekit.capture.recorder import Recorder

__all__ = ["Recorder", "record_load", "record_save", "redact"]

_HOMES = {
    "Recorder": "tracekit.capture.recorder",
    "record_load": "tracekit.capture.checkpoints.dcp",
    "record_save": "tracekit.capture.checkpoints.dcp",
    "redact": "tracekit.capture.manifest",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tracekit.capture' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
