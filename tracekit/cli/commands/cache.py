"""``tracekit cache``: the size and path of the disk cache, and how to clear it."""

import os
from enum import StrEnum
from typing import Annotated

import typer

from tracekit.cli import output
from tracekit.errors import InputError


class Action(StrEnum):
    """What to do with the cache."""

    SIZE = "size"
    PATH = "path"
    CLEAR = "clear"


def cache(
    action: Annotated[Action, typer.Argument(metavar="ACTION", help="size, path or clear.")] = Action.SIZE,
) -> None:
    """Show the size and path of the cache, or clear it: parsed traces, reports, timelines, and what commands printed.

    TRACEKIT_CACHE_DIR sets another folder, TRACEKIT_CACHE_MAX_BYTES another limit than 10 GiB (0 disables the cache).
    Beyond the limit, what was not used for longest is removed.
    """
    from tracekit.ingest.disk_cache import KINDS, NOWHERE, DiskCache
    from tracekit.model import units

    caches = {kind: DiskCache.of_user(kind) for kind in KINDS}
    sizes = {kind: disk_cache.size_bytes() for kind, disk_cache in caches.items()}
    store = caches["traces"]
    if store.folder == NOWHERE:
        raise InputError("there is no home directory for a cache; set TRACEKIT_CACHE_DIR to a folder")
    if action is Action.PATH:
        output.emit(f"{store.folder}\n")
    elif action is Action.CLEAR:
        output.emit(f"freed {units.size(sum(disk_cache.clear() for disk_cache in caches.values()))}\n")
        if any(sizes.values()) and not os.access(store.folder, os.W_OK):
            raise InputError(f"{store.folder}: its files cannot be removed; check permissions")
    else:
        parts = ", ".join(f"{kind} {units.size(size)}" for kind, size in sizes.items() if size)
        total = f"{units.size(sum(sizes.values()))} of {units.size(store.max_bytes)} in {store.folder}"
        output.emit(f"{total}{f': {parts}' if parts else ''}\n")
