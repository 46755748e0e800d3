"""How pytest-xdist's processes share the tests: a file at a time, but those that share a costly thing go together.

The browser's tests share one dashboard server, started once in a process that has any of them. They also wait much, so
that the other processes have the machine meanwhile: the more so the earlier they begin.
"""

import os

from xdist.scheduler import LoadFileScheduling

TOGETHER = ("tests/browser/",)
_MOST = 4


def count() -> int:
    """Return one more than there are cores: many tests wait, for ranks that meet, for a browser, for a command."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST, cores + 1)


class ByFile(LoadFileScheduling):
    """Gives each process one file after the other, of some folders all files at once."""

    def _split_scope(self, nodeid: str) -> str:
        return next((folder for folder in TOGETHER if nodeid.startswith(folder)), super()._split_scope(nodeid))
