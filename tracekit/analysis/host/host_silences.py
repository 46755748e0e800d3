"""Host silences: times in which no slice begins or ends on any thread of a process, so that it may not be running."""

import numpy as np
import polars as pl

from tracekit.analysis.time import host_state, trace_columns
from tracekit.model import schema
from tracekit.model.fact import trace_fact
from tracekit.model.sweep_line import Ints, distinct
from tracekit.model.trace import Trace

COLUMNS = schema.columns("start_ns dur_ns name", name=pl.String)
_MIN_SILENCE_NS = 500_000
_MAX_SILENCES = 500
_COMPUTES = r"^aten::"


@trace_fact
def host_silences(trace: Trace) -> pl.DataFrame:
    """Return the longest times in which no slice begins or ends on any thread of the process.

    Columns COLUMNS: name (on a CPU run, of an op that computes all the time; null where there is none); one row per
    silence of 0.5 ms or more, by start. A process whose threads all wait is silent, too.
    """
    at_ns = _edges(trace)
    if len(at_ns) < 2:
        return schema.empty(COLUMNS)
    length_ns = np.diff(at_ns)
    longest = np.argsort(-length_ns, kind="stable")[:_MAX_SILENCES]
    silences = np.sort(longest[length_ns[longest] >= _MIN_SILENCE_NS])
    start, end = at_ns[silences], at_ns[silences + 1]
    return pl.DataFrame({"start_ns": start, "dur_ns": end - start}).with_columns(
        pl.Series("name", _computing_ops(trace, start, end), pl.String)
    ).pipe(schema.select, COLUMNS)  # fmt: skip


def _edges(trace: Trace) -> Ints:
    """Times at which slices of the host begin or end, sorted, each time once."""
    spans = [trace_columns.spans(trace)]
    if not trace.on_device:
        start = trace.activities["start_ns"].to_numpy()
        spans.append(np.stack((start, start + trace.activities["dur_ns"].to_numpy()), axis=1))
    return distinct(np.concatenate(spans))


def _computing_ops(trace: Trace, start_ns: Ints, end_ns: Ints) -> list[str | None]:
    """Return the innermost op that computes during each span; None where there is none, or the device computes."""
    if trace.on_device:
        return [None] * len(start_ns)
    ops = trace_columns.spans(trace)
    waits = trace_columns.is_named(trace, host_state.SYNCHRONIZING)
    computes = np.flatnonzero(trace_columns.is_named(trace, _COMPUTES) & ~waits)
    computes = computes[np.argsort(ops[computes, 1] - ops[computes, 0], kind="stable")]
    first, past = ops[computes, 0], ops[computes, 1]
    names: list[str | None] = []
    for start, end in zip(start_ns.tolist(), end_ns.tolist(), strict=True):
        around = np.flatnonzero((first <= start) & (past >= end))
        names.append(trace.ops["name"][int(computes[around[0]])] if len(around) else None)
    return names
