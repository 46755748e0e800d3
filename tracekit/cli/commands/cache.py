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
    """Show the size and path of the cache of parsed traces, or clear it.

    TRACEKIT_CACHE_DIR sets another folder, TRACEKIT_CACHE_MAX_BYTES another limit than 10 GiB (0 disables the cache).
    The dashboard's caches are in the same folder and are cleared too: timelines, with the same limit, reports, with a
    tenth of it, tables of checked runs, with a fifth, and answers of commands, with a twentieth.
    """
    from tracekit.cli import answer_files
    from tracekit.ingest.trace_cache import TraceCache
    from tracekit.model import units
    from tracekit.report import timeline
    from tracekit.rules import report_cache
    from tracekit.rules.report_cache import measured_tables

    traces = TraceCache.of_user()
    if traces is None:
        raise InputError("there is no home directory for a cache; set TRACEKIT_CACHE_DIR to a folder")
    caches = {
        "traces": traces.disk,
        "timelines": timeline.scene_cache(),
        "reports": report_cache.user_cache(),
        "tables": measured_tables.user_cache(),
        "answers": answer_files.user_cache(),
    }
    if action is Action.PATH:
        output.emit(f"{traces.disk.folder}\n")
    elif action is Action.CLEAR:
        output.emit(f"freed {units.size(sum(cache.clear() for cache in caches.values() if cache))}\n")
        for cache in caches.values():
            if cache and cache.size_bytes() and not os.access(cache.folder, os.W_OK):
                raise InputError(f"{cache.folder}: its files cannot be removed; check permissions")
    else:
        sizes = {name: units.size(cache.size_bytes()) for name, cache in caches.items() if cache}
        rest = "".join(f"; {name} {size}" for name, size in sizes.items() if name != "traces")
        output.emit(f"{sizes['traces']} of {units.size(traces.disk.max_bytes)} in {traces.disk.folder}{rest}\n")
