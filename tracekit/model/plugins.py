"""Plug-ins: what other distributions add by entry points. The installed distributions are read once for all groups."""

import functools
import sys
from collections.abc import Sequence
from importlib import metadata


def entry_points(group: str) -> Sequence[metadata.EntryPoint]:
    """Return the entry points of a group, such as ``tracekit.rules``, in the order of the installed distributions."""
    # The result depends on the import path, which notebooks and tests change.
    return tuple(_installed(tuple(sys.path)).select(group=group))


@functools.lru_cache(maxsize=1)
def _installed(_path: tuple[str, ...]) -> "metadata.SelectableGroups":
    return metadata.entry_points()
