"""Facts that tests let workers measure: workers import them by name. Not a test."""

import os
import signal
from pathlib import Path

import polars as pl

from tests.support import drawn_traces
from tracekit.model.trace import Trace

KILLS = "TRACEKIT_TEST_KILLS"
"""The variable with a folder: the worker of rank 1 is killed for each file in it, which is removed first."""


def drawn(rank: int) -> Trace:
    """Return a trace of one kernel."""
    return drawn_traces.trace("compute aa.b", rank=rank)


def killing(trace: Trace) -> pl.DataFrame:
    """Return the rank, unless the worker is to be killed at this rank."""
    victims = sorted(Path(os.environ[KILLS]).iterdir()) if trace.rank == 1 else []
    if victims:
        victims[0].unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return pl.DataFrame({"seen": [trace.rank]})


def process(trace: Trace) -> pl.DataFrame:
    """Return the process that measures the trace."""
    return pl.DataFrame({"pid": [os.getpid()]})


def broken(trace: Trace) -> pl.DataFrame:
    """Fail as a fact with a bug does."""
    raise ZeroDivisionError(f"rank {trace.rank}")
