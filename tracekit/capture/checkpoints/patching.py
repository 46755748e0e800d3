"""Attributes of others replaced for a time, and given back as they were."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextlib.contextmanager
def replaced(owner: Any, name: str, wrap: Wrap) -> Iterator[None]:
    """Give one object, not its class, a wrapped method for the time of the block, if it lets us."""
    original = getattr(owner, name, None)
    own = getattr(owner, "__dict__", {}).get(name)
    wrapped = wrap(original) if callable(original) else None
    if wrapped is None or not _set(owner, name, wrapped):
        yield
        return
    try:
        yield
    finally:
        # Somebody else may have put theirs there meanwhile.
        if owner.__dict__.get(name) is wrapped:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


@contextlib.contextmanager
def replaced_for_all(owner: Any, name: str, wrap: Wrap) -> Iterator[None]:
    """Give a module or class a wrapped function as long as any such block is entered, on whatever thread.

    `wrap` gets the function as it was; it must be the same for each block of an owner and name. What `owner` lacks is
    left alone.
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
