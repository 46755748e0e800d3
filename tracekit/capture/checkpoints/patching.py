"""Patch attributes of other objects temporarily, and restore them."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextlib.contextmanager
def patch_method(owner: Any, name: str, wrap: Wrap) -> Iterator[None]:
    """Wrap a method of one object, not of its class, for the block, if the object allows it."""
    original = getattr(owner, name, None)
    previous = getattr(owner, "__dict__", {}).get(name)
    wrapped = wrap(original) if callable(original) else None
    if wrapped is None or not _set(owner, name, wrapped):
        yield
        return
    try:
        yield
    finally:
        # It may have been replaced again meanwhile.
        if owner.__dict__.get(name) is wrapped:
            if previous is None:
                delattr(owner, name)
            else:
                setattr(owner, name, previous)


@contextlib.contextmanager
def patch_for_all(owner: Any, name: str, wrap: Wrap) -> Iterator[None]:
    """Wrap a function of a module or class while at least one thread is in such a block.

    `wrap` gets the original function; it must be the same for each block of an owner and name. A name that `owner`
    lacks is ignored.
    """
    if not callable(getattr(owner, name, None)):
        yield
        return
    with _lock:
        patch = _patches.setdefault((id(owner), name), _Patch(getattr(owner, name)))
        if patch.count == 0:
            patch.original = getattr(owner, name)
            patch.wrapped = functools.wraps(patch.original)(wrap(patch.original))
            setattr(owner, name, patch.wrapped)
        patch.count += 1
    try:
        yield
    finally:
        with _lock:
            patch.count -= 1
            if patch.count == 0 and getattr(owner, name) is patch.wrapped:
                setattr(owner, name, patch.original)


@dataclass
class _Patch:
    original: Any
    wrapped: Any = None
    count: int = 0


_patches: dict[tuple[int, str], _Patch] = {}
_lock = threading.Lock()


def _set(owner: Any, name: str, value: Any) -> bool:
    try:
        setattr(owner, name, value)
    except (AttributeError, TypeError):
        return False
    return getattr(owner, "__dict__", {}).get(name) is value
