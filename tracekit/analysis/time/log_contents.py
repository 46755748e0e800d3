"""What the traces of a run are of, where they are logs of a part of the work: collectives, or spans of a trainer."""

import polars as pl

from tracekit.model import schema
from tracekit.model.fact import trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace


@trace_fact
def reading_issues(trace: Trace) -> pl.DataFrame:
    """Kinds of the data-quality issues that reading a trace raised. Column kind; one row per issue."""
    return trace.data_quality.select("kind")


def has_collectives_only(run: Run) -> bool:
    """Return whether all traces of a run are of logs of collectives, so that compute is not known."""
    return _all_have(run, schema.COLLECTIVES_ONLY)


def has_spans_only(run: Run) -> bool:
    """Return whether all traces of a run are of logs of a trainer, so that operators and the device are not known."""
    return _all_have(run, schema.SPANS_ONLY)


def _all_have(run: Run, kind: str) -> bool:
    issues = run.table(reading_issues).filter(pl.col("kind") == kind)
    return bool(run.sources) and issues.unique(["window", "rank"]).height == len(run.sources)
