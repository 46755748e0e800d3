"""Judgements of the data itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from tracekit.analysis import doubts
from tracekit.rule import Finding, Rule, Severity
from tracekit.trace import RUN_DOUBTS, Fact, Run

_FIXES = {
    "unreadable": "Record that rank again, or copy its file again.",
    "truncated": "Let the profiler finish writing before the job ends, or copy the file again.",
    "missing_ranks": "Collect the traces of all ranks in one folder.",
    "duplicate_rank": "Keep one job's traces in a folder of their own.",
    "no_steps": "Call profiler.step() once per training step, or record with tracekit.capture.Recorder.",
    "steps_from_optimizer": "Call profiler.step() once per training step, or record with tracekit.capture.Recorder.",
    "no_work": "Profile ProfilerActivity.CPU and the device's, and steps in which the model runs.",
    "clock_resolution": "Record with a newer PyTorch, which writes times relative to baseTimeNanoseconds.",
    "rank_guessed": "Record with torch.distributed initialized, so that the trace states its rank.",
    "outside_steps": "Record at least one warm-up step before the first active one.",
    "bad_times": "Record again with a newer PyTorch; the profiler wrote events without a usable time.",
    "bad_manifest": "Write run.json again, or remove it.",
    "not_a_trace": "Keep other JSON files out of the run's folder.",
}
_INFO_KINDS = ("clock_resolution", "rank_guessed", "not_a_trace", "no_steps", "steps_from_optimizer", "bad_manifest")


@dataclass(frozen=True)
class DoubtfulTrace(Rule):
    """Traces that cannot be trusted whole.

    What it does: says which files could not be read, which ranks are missing, what was guessed and what is uncertain.

    Why it costs: a verdict on bad data sends people to fix the wrong thing.

    How it is measured: while reading: each doubt with the share of the data it concerns.

    How to fix: record again; each finding says how.

    Blind spots: a trace that is wrong in itself but well-formed looks sound.
    """

    code: ClassVar[str] = "DATA001"
    facts: ClassVar[tuple[Fact, ...]] = (doubts.doubts,)
    error_doubtful_ratio: float = 0.5

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding per kind of doubt."""
        measured = run.table(doubts.doubts).with_columns(pl.lit(None, pl.String).alias("path"))
        every = pl.concat([RUN_DOUBTS.conform(run.doubts), RUN_DOUBTS.conform(measured)])
        for (kind,), rows in every.group_by("kind", maintain_order=True):
            ratio = float(rows["doubtful_ratio"].fill_null(0).max() or 0)  # type: ignore[arg-type]
            message = str(rows["message"][0])
            more = rows.height - 1
            yield Finding(
                self.code,
                self._severity(str(kind), ratio),
                message + (f" And {more} more like it." if more else ""),
                _FIXES.get(str(kind), "Look at the evidence, and record again if it matters."),
                ranks=tuple(rows["rank"].drop_nulls().unique().sort().to_list()),
                evidence=rows,
                subject=str(kind),
            )

    def _severity(self, kind: str, ratio: float) -> Severity:
        if ratio > self.error_doubtful_ratio:
            return Severity.ERROR
        return Severity.INFO if kind in _INFO_KINDS else Severity.WARNING
