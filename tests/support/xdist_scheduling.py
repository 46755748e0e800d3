"""Distribution of tests over pytest-xdist's workers: file by file, with the browser tests together in one worker.

Browser tests share one dashboard server, which each worker that runs any of them would have to start. They mostly wait,
so other workers have the machine meanwhile.
"""

import os

from xdist.scheduler import LoadFileScheduling

ONE_WORKER_FOLDERS = ("tests/browser/",)
_MAX_WORKERS = 4


def worker_count() -> int:
    """Return the number of cores plus one: many tests wait for ranks, a browser or a command."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MAX_WORKERS, cores + 1)


class ScheduleByFile(LoadFileScheduling):
    """Assigns test files to workers one at a time, and the files of some folders all to the same worker."""

    def _split_scope(self, nodeid: str) -> str:
        return next(
            (folder for folder in ONE_WORKER_FOLDERS if nodeid.startswith(folder)), super()._split_scope(nodeid)
        )
