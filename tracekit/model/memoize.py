"""Measurements of a trace that several facts build on: made once for each trace, gone with it."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

from tracekit.model.trace import Trace

T = TypeVar("T")


def memoize(measure: Callable[[Trace], T]) -> Callable[[Trace], T]:
    """Return `measure`, a pure function of a trace, with its result kept as long as the trace lives."""
    known: WeakKeyDictionary[Trace, T] = WeakKeyDictionary()

    @wraps(measure)
    def kept(trace: Trace) -> T:
        if trace not in known:
            known[trace] = measure(trace)
        return known[trace]

    return kept
