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
    def wrapper(source: K, /, *args: P.args, **kwargs: P.kwargs) -> T:
        cache = results.setdefault(source, {})
        key = (args, tuple(kwargs.items()))
        if key not in cache:
            cache[key] = measure(source, *args, **kwargs)
        return cache[key]

    return wrapper
