"""Goodput of the job whose attempts a run's folder has logged."""

from pathlib import Path

import polars as pl

from dashboard.run_store import OpenRun, refuse_links
from tracekit import conventions
from tracekit.analysis.checkpoint import goodput
from tracekit.analysis.checkpoint.goodput import Goodput
from tracekit.conventions import object_storage
from tracekit.model.run import Run

PARTS = 240
"""Of the job's time in the band: on a wide page each has a few pixels."""


def has_attempts(run: OpenRun) -> bool:
    """Whether the run's folder has an attempts log."""
    path = run.entry.path
    return not object_storage.is_url(path) and (Path(path) / conventions.ATTEMPTS_FILE).is_file()


def job(run: OpenRun) -> Goodput:
    """Account of the job's time. Raises InputError where the log has no attempt, or a file is a link elsewhere."""
    refuse_links(run.entry)
    return run.remember("goodput", _job)


def over_time(run: OpenRun) -> pl.DataFrame:
    """Time of each class in equal parts of the job's time. Raises InputError as `job` does."""
    return goodput.over_time(job(run), parts=PARTS)


def _job(run: Run) -> Goodput:
    return goodput.read_job([Path(run.path)])[0]
