"""Cache of intermediate results that several facts of a trace, run or graph share."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

K = TypeVar("K")
T = TypeVar("T")
P = ParamSpec("P")


def memoize(measure: Callable[Concatenate[K, P], T]) -> Callable[Concatenate[K, P], T]:
    """Cache the results of a pure function of an object for as long as it exists, by any further hashable arguments."""
    results: WeakKeyDictionary[K, dict[object, T]] = WeakKeyDictionary()

    @wraps(measure)
    def memoized(source: K, /, *others: P.args, **named: P.kwargs) -> T:
        known = results.setdefault(source, {})
        key = (others, tuple(named.items()))
        if key not in known:
            known[key] = measure(source, *others, **named)
        return known[key]

    return memoized
