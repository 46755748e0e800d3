"""``tracekit cache``: where parsed traces are kept, how much they take, and how to be rid of them."""

from enum import StrEnum
from typing import Annotated

import typer

from tracekit.cli import output
from tracekit.errors import InputError


class What(StrEnum):
    """What to do with the cache."""

    SIZE = "size"
    PATH = "path"
    CLEAR = "clear"


def cache(what: Annotated[What, typer.Argument(help="Show its size or its path, or clear it.")] = What.SIZE) -> None:
    """Show how much the parsed traces take and where they lie, or remove them.

    TRACEKIT_CACHE_DIR names another folder, TRACEKIT_CACHE_MAX_BYTES another bound than 10 GiB (0: keep nothing). What
    the dashboard keeps lies beside them, and is removed with them: timelines, bound to as much again, and reports, to a
    tenth of it.
    """
    from tracekit.ingest.trace_cache import TraceCache
    from tracekit.model import units
    from tracekit.report import timeline
    from tracekit.rules.report_cache import store

    traces = TraceCache.of_user()
    if traces is None:
        raise InputError("there is no home directory to keep a cache in; name a folder by TRACEKIT_CACHE_DIR")
    caches = {"traces": traces.disk, "timelines": timeline.scene_cache(), "reports": store.report_cache()}
    if what is What.PATH:
        output.emit(f"{traces.disk.folder}\n")
    elif what is What.CLEAR:
        output.emit(f"freed {units.size(sum(cache.clear() for cache in caches.values() if cache))}\n")
    else:
        sizes = {name: units.size(cache.size_bytes()) for name, cache in caches.items() if cache}
        more = "".join(f"; {name} {size}" for name, size in sizes.items() if name != "traces")
        output.emit(f"{sizes['traces']} of {units.size(traces.disk.max_bytes)} in {traces.disk.folder}{more}\n")
