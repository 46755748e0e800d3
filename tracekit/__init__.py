"""Profiling and trace analysis for distributed PyTorch training.

The public names are resolved on first use, so that ``import tracekit`` costs nothing and the recorder
(`tracekit.capture`) runs where only torch is installed.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracekit.checking import check
    from tracekit.loading import load
    from tracekit.querying import query
    from tracekit.rule import Finding, Rule
    from tracekit.rules import RULES
    from tracekit.trace import Run, Trace

__version__ = "0.1.0"
__all__ = ["RULES", "Finding", "Rule", "Run", "Trace", "check", "load", "query"]

_HOMES = {
    "load": "tracekit.loading",
    "check": "tracekit.checking",
    "query": "tracekit.querying",
    "Run": "tracekit.trace",
    "Trace": "tracekit.trace",
    "Finding": "tracekit.rule",
    "Rule": "tracekit.rule",
    "RULES": "tracekit.rules",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tracekit' has no attribute {name!r}")
    # No submodule may bear a public name: importing it would bind that name to the module and hide the function.
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
