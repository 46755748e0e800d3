"""What file systems have to do with a finding: the sentence on the calls of an I/O log during some time of a rank."""

from collections.abc import Collection

import polars as pl

from tracekit.analysis.host import host_stalls
from tracekit.model import escaping, intervals, units
from tracekit.model.run import Run

_MAX_PATH = 80


def sentence(run: Run, rank: int, spans: intervals.Spans, span_name: str, kinds: Collection[str] = ()) -> str:
    """Return a sentence on the file system calls of a rank during the spans, shape (n, 2) in ns.

    It names the function and file with most of that time; `span_name` is the name of that time, such as "the save".
    `kinds` limits it to calls of these kinds, if there are any. Empty where no I/O log has a call in the spans.
    """
    rank_calls = run.table(host_stalls.io_calls_of_run).filter(pl.col("rank") == rank)
    if rank_calls.is_empty():
        return ""
    overlapping = host_stalls.io_during(rank_calls, spans)
    of_kinds = overlapping.filter(pl.col("kind").is_in(list(kinds)))
    overlapping = overlapping if of_kinds.is_empty() else of_kinds
    if overlapping.is_empty():
        return ""
    longest = (
        overlapping.group_by("name", "file", maintain_order=True)
        .agg(pl.len().alias("calls"), pl.col("overlap_ns", "dur_ns", "bytes").sum())
        .sort("overlap_ns", descending=True, maintain_order=True)
        .row(0, named=True)
    )
    took = units.duration(host_stalls.io_covered_ns(overlapping, spans))
    what = f"{' and '.join(sorted(kinds))} calls" if not of_kinds.is_empty() else "calls"
    return f" File system {what} take {took} of {span_name}, most of that {_of_file(longest)}."


def _of_file(longest: dict[str, object]) -> str:
    count, moved, dur_ns = (int(str(longest[name])) for name in ("calls", "bytes", "dur_ns"))
    calls = units.count(count, f"{longest['name']} call")
    path = "an unknown file" if longest["file"] is None else escaping.inert(str(longest["file"]), _MAX_PATH)
    rate = f", {units.size(moved)} at {units.rate(moved * 1e9 / dur_ns)}" if moved and dur_ns else ""
    return f"in {calls} of {path} ({units.duration(dur_ns)}{rate})"
