"""Judgements of the data itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import polars as pl

from tracekit.analysis.quality import trace_quality
from tracekit.model import units
from tracekit.model.run import RUN_DATA_QUALITY, Run
from tracekit.model.trace import Fact
from tracekit.replay.allocator.facts import run_snapshots
from tracekit.rules.rule import Finding, Rule, Severity
from tracekit.sync import alignment, collective_matching


class _Kind(NamedTuple):
    severity: Severity
    fix: str
    can_be_error: bool = False
    """Whether it becomes an error where more than `error_affected_ratio` is doubtful."""


_INFO, _WARNING, _ERROR = Severity.INFO, Severity.WARNING, Severity.ERROR
_RECORD_AGAIN = "Record that rank again, or copy its file again; "
_STEP = "Call profiler.step() once per training step, or record with tracekit.capture.Recorder."
_WARM_UP = (
    "Let the profiler pass the first steps: schedule(wait=…, warmup=2, …), or Recorder(warmup=2); until then read the "
    "other steps."
)
_KINDS = {
    # Files that tell less than they should, or nothing.
    "unreadable": _Kind(_WARNING, _RECORD_AGAIN + "the other ranks were judged without it.", can_be_error=True),
    "truncated": _Kind(_WARNING, _RECORD_AGAIN + "what precedes the cut was judged.", can_be_error=True),
    "bad_times": _Kind(
        _WARNING, "Record again with a newer PyTorch; the events named were left out.", can_be_error=True
    ),
    "damaged_events": _Kind(_WARNING, _RECORD_AGAIN + "the events around the damage were judged.", can_be_error=True),
    "repeated_events": _Kind(
        _WARNING, "Write each trace into a file of its own; the first was judged.", can_be_error=True
    ),
    "rankless_events": _Kind(
        _WARNING, "Merge the ranks' files again so that each event names its rank.", can_be_error=True
    ),
    "several_ranks": _Kind(_ERROR, "Give tracekit the traces of the ranks one by one, or all in one folder."),
    "unmatched_pairs": _Kind(_WARNING, "Stop the profiler after the work it watches has ended.", can_be_error=True),
    "unknown_kinds": _Kind(
        _WARNING, "Tell tracekit's authors, with the trace: this profiler is new to it.", can_be_error=True
    ),
    "damaged_header": _Kind(_WARNING, _RECORD_AGAIN + "the rank comes from the file's name, clocks from guesses."),
    "stray_bytes": _Kind(_INFO, "Nothing to change: only the marked letters of names are lost."),
    "bad_manifest": _Kind(_WARNING, "Write run.json again, or remove it: the traces alone are enough."),
    "bad_log": _Kind(_WARNING, "Look at the lines named; what they told of metrics or checkpoints is missing."),
    "not_a_trace": _Kind(_INFO, "Keep other JSON files out of the folder, or leave it: they were not read."),
    # Which ranks there are.
    "missing_ranks": _Kind(_WARNING, "Collect the traces of all ranks in one folder."),
    "duplicate_rank": _Kind(_WARNING, "Keep one trace per rank and window, or put windows into folders of their own."),
    "rank_guessed": _Kind(_INFO, "Record with torch.distributed initialized, so that the trace states its rank."),
    "mixed_jobs": _Kind(
        _ERROR,
        "Name the folder of one run, or of several: check RUNS/*. Where jobs share a folder, give each one its own.",
    ),
    "windows_assumed": _Kind(_INFO, "Nothing to change if these are windows of one job; else load each job by itself."),
    "mixed_versions": _Kind(_WARNING, "Run all ranks on the same software and device, or compare them with care."),
    # What the profiler did not record.
    "no_work": _Kind(_ERROR, "Record with ProfilerActivity.CPU, and ProfilerActivity.CUDA where there is a device."),
    "no_device_activity": _Kind(
        _ERROR,
        "Record with ProfilerActivity.CUDA (on AMD too), and see that no other profiler holds the device (CUPTI).",
    ),
    "no_steps": _Kind(_INFO, _STEP),
    "steps_from_optimizer": _Kind(_INFO, _STEP),
    "unlinked": _Kind(
        _WARNING,
        "Start the profiler a step early, warmup=1 or more: work queued before it has no launch.",
        can_be_error=True,
    ),
    "outside_steps": _Kind(_WARNING, "Start and stop the profiler at the edges of steps. " + _STEP, can_be_error=True),
    "dropped_events": _Kind(
        _WARNING,
        "Profile fewer steps or without stacks and shapes, and synchronize before stopping.",
        can_be_error=True,
    ),
    "warm_up_inside": _Kind(_WARNING, _WARM_UP),
    "unreadable_snapshot": _Kind(_WARNING, "Dump the snapshot again: torch.cuda.memory._dump_snapshot."),
    # Times that cannot be taken by the nanosecond.
    "clock_resolution": _Kind(
        _INFO, "Record with a newer PyTorch, which writes times relative to baseTimeNanoseconds."
    ),
    "clock_skew": _Kind(
        _INFO, "Read no differences between ranks below the residual named; keep clocks in step with PTP or chrony."
    ),
    "clock_unaligned": _Kind(
        _WARNING, "Profile the same steps on all ranks, with three or more collectives that they share."
    ),
    "overlapping_slices": _Kind(_WARNING, "Nothing to change: tracekit counts shared time once.", can_be_error=True),
}
_OTHER = _Kind(_WARNING, "Look at the evidence, and record again if it matters.", can_be_error=True)
_MEASURED = ("unlinked", "outside_steps", "dropped_events", "overlapping_slices")


@dataclass(frozen=True)
class DoubtfulTrace(Rule):
    """Traces that cannot be trusted whole.

    What it does: says which files could not be read or were cut, which ranks are missing, twice there or not of one
    kind with the others, what the profiler did not record (steps, device activity, launches, dropped events), where
    warm-up lies inside the window, and how far clocks can be trusted; each with the share of time or data it makes
    doubtful.

    Why it costs: a verdict on bad data sends people to fix the wrong thing.

    How it is measured: while reading and aligning, and by what the tables show: device work without a launch or
    launched outside steps, launches without device work, slices that share time on one stream, a first step that takes
    more than twice the median of the others, versions and devices that differ between ranks. Shares of less than
    `min_affected_ratio` are not reported. One finding per kind; what makes a share of the data unusable is an error
    where the share exceeds `error_affected_ratio`.

    How to fix: record again; each finding says how.

    Blind spots: a trace that is wrong in itself but well-formed looks sound.
    """

    code: ClassVar[str] = "DATA001"
    facts: ClassVar[tuple[Fact, ...]] = (trace_quality.data_quality, trace_quality.versions, collective_matching.calls)
    min_affected_ratio: float = 0.01
    error_affected_ratio: float = 0.5

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding per kind of doubt."""
        measured = RUN_DATA_QUALITY.conform(run.table(trace_quality.data_quality))
        versions = _mixed_versions(run.table(trace_quality.versions))
        every = pl.concat(
            [
                RUN_DATA_QUALITY.conform(run.data_quality),
                measured,
                versions,
                alignment.data_quality(run),
                run_snapshots.data_quality(run),
            ]
        )
        small = pl.col("kind").is_in(_MEASURED) & (pl.col("affected_ratio") < self.min_affected_ratio)
        for (kind,), rows in every.filter(~small).group_by("kind", maintain_order=True):
            yield self._finding(str(kind), rows.sort("affected_ratio", descending=True, nulls_last=True))

    def _finding(self, kind: str, rows: pl.DataFrame) -> Finding:
        known = _KINDS.get(kind, _OTHER)
        ratio = float(rows["affected_ratio"][0] or 0)
        more = f" And {rows.height - 1:,} more like it." if rows.height > 1 else ""
        doubtful = f" Doubtful: {units.share(ratio)}." if ratio else ""
        return Finding(
            self.code,
            _ERROR if known.can_be_error and ratio > self.error_affected_ratio else known.severity,
            str(rows["message"][0]) + doubtful + more,
            known.fix,
            ranks=tuple(rows["rank"].drop_nulls().unique().sort().to_list()),
            evidence=rows,
            subject=kind,
        )


def _mixed_versions(versions: pl.DataFrame) -> pl.DataFrame:
    """Return a doubt for each fact of the headers in which ranks differ: which ranks, and what share of them."""
    held = versions.group_by("name", "value").agg(pl.col("rank").unique().sort(), pl.col("rank").n_unique().alias("n"))
    rows = []
    for (name,), values in held.sort("n", "value", descending=[True, False]).group_by("name", maintain_order=True):
        if values.height == 1:
            continue
        told = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in values.select("value", "rank").rows())
        share = 1 - values["n"][0] / values["n"].sum()
        rows.append((None, None, "mixed_versions", f"Ranks differ in {name}: {told}.", share))
    return pl.DataFrame(rows, schema=RUN_DATA_QUALITY.schema, orient="row")


def _ranks(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {units.ranges(ranks)}"
