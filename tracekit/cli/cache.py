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

    TRACEKIT_CACHE_DIR names another folder, TRACEKIT_CACHE_MAX_BYTES another bound than 10 GiB (0: keep nothing). The
    reports that the dashboard keeps lie beside them, bound to a tenth as much, and are removed with them.
    """
    from tracekit import units
    from tracekit.cache import Cache
    from tracekit.checked import store

    found = Cache.of_user()
    if found is None:
        raise InputError("there is no home directory to keep a cache in; name a folder by TRACEKIT_CACHE_DIR")
    if what is What.PATH:
        output.emit(f"{found.folder}\n")
    elif what is What.CLEAR:
        output.emit(f"freed {units.size(found.clear() + store.shelf().clear())}\n")
    else:
        output.emit(f"{units.size(found.size_bytes())} of {units.size(found.max_bytes)} in {found.folder}\n")
