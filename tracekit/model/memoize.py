"""Cache of intermediate results that several facts of a trace share."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

from tracekit.model.trace import Trace

T = TypeVar("T")


def memoize(measure: Callable[[Trace], T]) -> Callable[[Trace], T]:
    """Cache the result of a pure function of a trace for as long as the trace exists."""
    results: WeakKeyDictionary[Trace, T] = WeakKeyDictionary()

    @wraps(measure)
    def memoized(trace: Trace) -> T:
        if trace not in results:
            results[trace] = measure(trace)
        return results[trace]

    return memoized
