"""Cache of intermediate results that several facts of a trace, run or graph share."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

K = TypeVar("K")
T = TypeVar("T")


def memoize(measure: Callable[[K], T]) -> Callable[[K], T]:
    """Cache the result of a pure function of one object for as long as the object exists."""
    results: WeakKeyDictionary[K, T] = WeakKeyDictionary()

    @wraps(measure)
    def memoized(source: K) -> T:
        if source not in results:
            results[source] = measure(source)
        return results[source]

    return memoized
