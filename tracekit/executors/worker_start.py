"""What a worker process does first, before it imports Polars. Imports the standard library only."""

import multiprocessing
import os
import signal
import threading


def prepare(threads: int) -> None:
    """Leave Ctrl-C to the process that started this one, and let Polars use `threads` threads if no limit is set.

    The worker ends when that process does, however it ends: it waits for tasks at a pipe which it holds open itself.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("POLARS_MAX_THREADS", str(threads))
    threading.Thread(target=_end_with_parent, name="tracekit-parent-watch", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
