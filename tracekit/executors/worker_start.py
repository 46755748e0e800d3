"""What a worker process does first, before it imports Polars. Imports the standard library only."""

import os
import signal


def prepare(threads: int) -> None:
    """Leave Ctrl-C to the process that started this one, and let Polars use `threads` threads if no limit is set."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("POLARS_MAX_THREADS", str(threads))
