"""Methods of torch's classes wrapped so that their calls are observed."""

import functools
from collections.abc import Callable
from typing import Any


def wrap(
    owner: type,
    name: str,
    *,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
    result: Callable[..., None] | None = None,
    around: Callable[..., Any] | None = None,
) -> None:
    """Wrap a method of a class so that its calls are observed.

    `before` and `after` get the arguments, `result` the value and the arguments; `around` gets the method and the
    arguments, calls it and returns its value. Name, signature and documentation stay those of the method.
    """
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args)
        value = method(*args, **kwargs) if around is None else around(method, *args, **kwargs)
        if after is not None:
            after(*args)
        if result is not None:
            result(value, *args)
        return value

    setattr(owner, name, wrapped)
