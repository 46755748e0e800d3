"""Profiling and trace analysis for distributed PyTorch training.

The public names are resolved on first use, so that ``import tracekit`` costs nothing and the recorder
(`tracekit.capture`) runs where only torch is installed.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tracekit import conventions

if TYPE_CHECKING:
    from tracekit.library.answers import check
    from tracekit.library.run import Run, load
    from tracekit.model.trace import Trace
    from tracekit.rules.registry import RULES
    from tracekit.rules.rule import Finding, Rule
    from tracekit.sql.run_query import query

__version__ = conventions.VERSION
__all__ = ["RULES", "Finding", "Rule", "Run", "Trace", "check", "load", "query"]

_HOMES = {
    "load": "tracekit.library.run",
    "check": "tracekit.library.answers",
    "query": "tracekit.sql.run_query",
    "Run": "tracekit.library.run",
    "Trace": "tracekit.model.trace",
    "Finding": "tracekit.rules.rule",
    "Rule": "tracekit.rules.rule",
    "RULES": "tracekit.rules.registry",
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
